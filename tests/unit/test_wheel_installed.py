"""The wheel in a fresh environment: ``RANKCALL=1`` attaches, and uninstalling leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch, torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
import rankcall
print(rankcall.__file__, "rankcall.capture.session" in sys.modules)
"""


class Environment:
    """A fresh virtual environment with the wheel, beside the packages of this one."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=240
        )
        self.site = Path(self._say("import sysconfig; print(sysconfig.get_path('purelib'))"))
        self.before = self.files()
        self._pip("install", "--no-deps", "--no-index", str(wheel))

    def files(self) -> set[str]:
        """Return all files of the environment."""
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}

    def uninstall(self) -> None:
        """Uninstall rankcall, as a user does."""
        self._pip("uninstall", "--yes", "rankcall")

    def share_packages(self) -> None:
        """Make torch and the other packages of this environment importable, below the wheel's."""
        shared = [path for path in sys.path if path.endswith("site-packages")]
        (self.site / "zz_shared.pth").write_text("\n".join([*shared, ""]))

    def run(self, *args: str, cwd: Path, env: Mapping[str, str]) -> tuple[str, str]:
        """Run a program; return stdout and stderr."""
        return run_bare([str(self.python), *args], cwd=cwd, env=env)

    def _say(self, code: str) -> str:
        done = subprocess.run(
            [str(self.python), "-c", code], check=True, capture_output=True, text=True, timeout=240
        )
        return done.stdout.strip()

    def _pip(self, *args: str) -> None:
        _pip("--python", str(self.python), *args)


def run_bare(command: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[str, str]:
    """Run a program with little of this environment; return stdout and stderr."""
    bare = {name: os.environ[name] for name in ("PATH", "HOME", "RANKCALL_SHM")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**bare, "RANKCALL_CAPTURE": "python", "GLOO_SOCKET_IFNAME": "lo", **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def _pip(*args: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", *args],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel, fetching nothing."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=240,
        capture_output=True,
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Install the wheel into a fresh environment."""
    made = Environment(tmp_path_factory.mktemp("venv") / "venv", wheel)
    made.share_packages()
    return made


def test_what_is_installed(environment: Environment) -> None:
    """The line that Python reads, the entry point for later Pythons, and the hook are there."""
    names = {path.name for path in environment.site.iterdir()}
    assert {"rankcall.pth", "rankcall.start", "_rankcall_hook.py", "rankcall"} <= names
    (entry,) = [
        line
        for line in (environment.site / "rankcall.start").read_text().splitlines()
        if not line.startswith("#")
    ]
    module, _, function = entry.partition(":")
    out, _ = environment.run(
        "-c", f"import {module}; print({module}.{function}())", cwd=ROOT, env={"RANKCALL": "0"}
    )
    assert out == "None\n"  # Python 3.15 calls it without arguments


def test_the_variable_records(environment: Environment, tmp_path: Path) -> None:
    """``RANKCALL=1`` and nothing else: the program is recorded by the installed package."""
    (tmp_path / "train.py").write_text(PROGRAM)
    out, err = environment.run("train.py", cwd=tmp_path, env={"RANKCALL": "1"})
    assert out.split()[0].startswith(str(environment.folder))
    assert out.split()[1] == "True"
    (run,) = [path for path in (tmp_path / "rankcall-runs").iterdir() if not path.is_symlink()]
    assert run.name.endswith("-train")
    assert [path.name[:10] for path in (run / "rings").iterdir()] == ["rank-00000"]
    assert f"rankcall: recording in {run}" in err


def test_the_variable_below_torchrun(environment: Environment, tmp_path: Path) -> None:
    """Both workers are in one run; the agent, which creates no group, is not."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(4))\n"
        "dist.destroy_process_group()\n"
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {"RANKCALL": "1", "OMP_NUM_THREADS": "1"}
    environment.run(*torchrun, "train.py", cwd=tmp_path, env=env)
    (run,) = [path for path in (tmp_path / "rankcall-runs").iterdir() if not path.is_symlink()]
    rings = sorted(path.name[:20] for path in (run / "rings").iterdir())
    assert rings == ["rank-00000.attempt-0", "rank-00001.attempt-0"]


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_nothing_happens(
    environment: Environment, tmp_path: Path, value: str | None
) -> None:
    """Without it, or with 0, no module of rankcall's is loaded and nothing is written."""
    (tmp_path / "train.py").write_text(PROGRAM)
    env = {} if value is None else {"RANKCALL": value}
    out, err = environment.run("train.py", cwd=tmp_path, env=env)
    assert out.split()[1] == "False"
    assert err == ""
    assert not (tmp_path / "rankcall-runs").exists()


@pytest.mark.parametrize("option", ["-I", pytest.param("-E", marks=pytest.mark.slow)])
def test_isolated_pythons(environment: Environment, tmp_path: Path, option: str) -> None:
    """``-I`` and ``-E`` ignore PYTHON* variables only, so the variable still works."""
    (tmp_path / "train.py").write_text(PROGRAM)
    out, _ = environment.run(option, "train.py", cwd=tmp_path, env={"RANKCALL": "1"})
    assert out.split()[1] == "True"


@pytest.mark.parametrize("as_zip", [False, True])
def test_the_variable_where_no_pth_is_read(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, as_zip: bool
) -> None:
    """Installed with ``--target``, or as a zip file on PYTHONPATH: the variable alone records."""
    place = wheel
    if not as_zip:
        place = tmp_path_factory.mktemp("target")
        _pip("install", "--no-deps", "--no-index", "--target", str(place), str(wheel))
    # The program takes the function from a module that torch has imported before the hook runs.
    program = PROGRAM.replace("dist.init_process_group", "device_mesh.init_process_group")
    program = "from torch.distributed import device_mesh\n" + program
    (tmp_path / "train.py").write_text(program)
    packages = [path for path in sys.path if path.endswith("site-packages")]
    path = os.pathsep.join([str(place), *packages])
    for value, records in (("0", "False"), ("1", "True")):
        env = {"PYTHONPATH": path, "RANKCALL": value}
        # -S: no site-packages and no .pth file of this environment.
        out, _ = run_bare([sys.executable, "-S", "train.py"], cwd=tmp_path, env=env)
        assert out.split()[0].startswith(str(place))
        assert out.split()[1] == records
        assert (tmp_path / "rankcall-runs").exists() == (records == "True")


def test_uninstalling_leaves_nothing(environment: Environment) -> None:
    """After the tests above have run Python with it, every file of the wheel goes."""
    environment.uninstall()
    (environment.site / "zz_shared.pth").unlink()
    left = environment.files() - environment.before
    assert left == set()
    assert sysconfig.get_path("purelib") != str(environment.site)

"""The hook that attaches to a process, and the two ways in which Python loads it at start-up.

A stand-in torch and a stand-in rankcall are put on the path, so that a case takes milliseconds;
tests/multiproc/test_attach.py and test_launcher.py do the same with the real ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rankcall
from rankcall.cli import environment

BOOT = Path(rankcall.__file__).parent / "_boot"

TORCH = {
    # As in torch: distributed_c10d is complete long before torch is, and other modules import the
    # function from it while torch is imported.
    "torch/__init__.py": "import torch.distributed\ncomplete = True\n",
    "torch/distributed/__init__.py": (
        "from torch.distributed.distributed_c10d import *\n"
        "from torch.distributed import device_mesh, distributed_c10d\n"
    ),
    "torch/distributed/device_mesh.py": (
        "from torch.distributed.distributed_c10d import init_process_group\n"
    ),
    "torch/distributed/distributed_c10d.py": (
        "def init_process_group(backend=None, rank=-1, world_size=-1, fails=False):\n"
        "    'The docstring.'\n"
        "    if fails:\n        raise ValueError('not so')\n"
        "    return 42\n"
    ),
    "torch/distributed/rpc/__init__.py": (
        "def init_rpc(name, backend=None, rank=-1, world_size=None):\n    return name\n"
    ),
}
RANKCALL = {
    "rankcall/__init__.py": "",
    "rankcall/watch.py": (
        "import os, sys\n"
        "def arm(rank, world_size):\n"
        "    torch = sys.modules['torch']\n"
        "    print('armed', os.getpid(), torch.complete, rank, world_size, flush=True)\n"
    ),
}
INIT = "import torch.distributed as dist\ndist.init_process_group()\n"
ARMED = "armed me True -1 -1"


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files below a folder and return it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class Python:
    """Starts Pythons as they are started below ``rankcall run`` and ``rankcall exec``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = [BOOT, write(folder / "stand-ins", {**TORCH, **RANKCALL})]
        self.env = {"RANKCALL": "1", "PATH": os.environ["PATH"]}

    def run(self, *args: str | Path, program: str = sys.executable) -> tuple[list[str], str]:
        """Return stdout's lines, with the program's own pid as ``me``, and stderr."""
        joined = os.pathsep.join(map(str, self.path))
        process = subprocess.Popen(
            [program, *map(str, args)],
            env={**self.env, "PYTHONPATH": joined},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=240)
        finally:
            process.kill()
            process.wait()
        return [line.replace(str(process.pid), "me") for line in out.splitlines()], err

    def code(self, text: str) -> tuple[list[str], str]:
        """Run a script with this text."""
        (self.folder / "script.py").write_text(text)
        return self.run("script.py")


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """Give a Python with stand-ins on its path."""
    return Python(tmp_path)


def test_arms_at_the_first_group(python: Python) -> None:
    """Importing torch changes nothing yet; the first group arms, with its rank."""
    out, err = python.code(
        "import torch, torch.distributed as dist\n"
        "print('imported')\n"
        "print(dist.init_process_group('gloo', 3, world_size=8))\n"
        "print(dist.init_process_group())\n"
    )
    assert (out, err) == (["imported", "armed me True 3 8", "42", "42"], "")


def test_every_name_of_the_function_arms(python: Python) -> None:
    """A module that imported the function by name while torch was imported has the hook's, too."""
    out, err = python.code(
        "from torch.distributed import device_mesh, distributed_c10d, init_process_group\n"
        "assert init_process_group is distributed_c10d.init_process_group\n"
        "import pickle\n"
        "assert pickle.loads(pickle.dumps(init_process_group)) is init_process_group\n"
        "print(init_process_group.__doc__, init_process_group.__module__)\n"
        "device_mesh.init_process_group()\n"
    )
    assert (out, err) == (["The docstring. torch.distributed.distributed_c10d", ARMED], "")


def test_an_rpc_agent_arms(python: Python) -> None:
    """A worker of torch.distributed.rpc has no process group, and is a rank all the same."""
    out, err = python.code(
        "import torch\nfrom torch.distributed import rpc\n"
        "print(rpc.init_rpc('a', rank=1, world_size=2))\n"
    )
    assert (out, err) == (["armed me True 1 2", "a"], "")


def test_does_nothing_without_a_group(python: Python) -> None:
    """A process that creates no group imports nothing of ours but the hook."""
    listing = "import sys; print([m for m in sys.modules if m.startswith(('rankcall', 'numpy'))])"
    assert python.code(listing) == (["[]"], "")
    assert python.code(f"import torch, torch.distributed\n{listing}") == (["[]"], "")


@pytest.mark.parametrize("value", [None, "", "0"])
def test_does_nothing_unasked(python: Python, value: str | None) -> None:
    """Without RANKCALL, or if it is 0, the folder on the path changes nothing."""
    del python.env["RANKCALL"]
    if value is not None:
        python.env["RANKCALL"] = value
    out, err = python.code(f"{INIT}print(dist.init_process_group.__code__.co_filename)")
    assert (out, err) == ([str(python.path[-1] / "torch/distributed/distributed_c10d.py")], "")


def test_switched_off_in_the_program(python: Python) -> None:
    """A program that sets RANKCALL to 0 before its first group is not armed."""
    out, err = python.code(f"import os; os.environ['RANKCALL'] = '0'\n{INIT}print('ran')")
    assert (out, err) == (["ran"], "")


def test_leaves_no_trace_on_the_path(python: Python) -> None:
    """Ours leave sys.path; once its work is done, the finder leaves sys.meta_path; loaders stay."""
    out, err = python.code(
        "import sys, torch, torch.distributed.rpc\n"
        "print([p for p in sys.path if p.endswith('_boot')])\n"
        "print([f for f in sys.meta_path if '_Finder' in repr(f)])\n"
        "loader = torch.distributed.distributed_c10d.__spec__.loader\n"
        "print('exec_module' in vars(loader), torch.__loader__.name)\n"
    )
    assert (out, err) == (["[]", "[]", "False torch"], "")


def test_an_error_of_torch_has_the_same_traceback(python: Python) -> None:
    """The user sees torch's exception without a frame of rankcall's."""
    text = f"{INIT}dist.init_process_group(fails=True)\n"
    out, with_hook = python.code(text)
    assert out == [ARMED]
    python.env["RANKCALL"] = "0"
    assert with_hook == python.code(text)[1]
    assert "ValueError: not so" in with_hook


def test_a_wrong_call_fails_as_without(python: Python) -> None:
    """Arguments that torch does not take are torch's error."""
    out, err = python.code(
        "import torch.distributed as dist\n"
        "try: dist.init_process_group(nonsense=1)\n"
        "except TypeError as error: print(error)\n"
    )
    assert out == ["init_process_group() got an unexpected keyword argument 'nonsense'"]
    assert err == ""


def test_module_and_safe_path(python: Python) -> None:
    """python -m works, under PYTHONSAFEPATH too, and so does a program on stdin."""
    write(python.folder / "stand-ins", {"job.py": f"{INIT}print(__name__)"})
    python.env["PYTHONSAFEPATH"] = "1"
    assert python.run("-m", "job") == ([ARMED, "__main__"], "")
    (python.folder / "stdin.py").write_text(INIT)
    out, err = python.run("-c", f"{sys.executable} < stdin.py", program="bash")
    assert [line.split()[0] for line in out] == ["armed"]
    assert err == ""


def test_chains_to_another_sitecustomize(python: Python) -> None:
    """The sitecustomize that ours hides runs, under its own name and with its own file."""
    other = write(python.folder / "other", {"sitecustomize.py": "print('other', __name__)\n"})
    python.path.append(other)
    out, err = python.code(f"import sys; print(sys.modules['sitecustomize'].__file__)\n{INIT}")
    assert out == ["other sitecustomize", str(other / "sitecustomize.py"), ARMED]
    assert err == ""


def test_another_sitecustomize_that_imports_torch(python: Python) -> None:
    """The hook works also if the hidden sitecustomize imports torch."""
    python.path.append(write(python.folder / "other", {"sitecustomize.py": "import torch\n"}))
    assert python.code(INIT) == ([ARMED], "")


def test_torch_that_is_there_already(python: Python) -> None:
    """If torch was imported before the hook is loaded, torch's function is replaced at once."""
    out, err = python.code(
        "import torch, sys, os\n"
        f"sys.path.append({str(BOOT.parents[1])!r})\n"
        "del sys.modules['_rankcall_hook']\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if '_Finder' not in repr(f)]\n"
        "dist = torch.distributed\n"
        "dist.distributed_c10d.init_process_group = dist.init_process_group.__wrapped__\n"
        "import _rankcall_hook; _rankcall_hook.install()\n"
        "dist.distributed_c10d.init_process_group()\n"
    )
    assert (out, err) == ([ARMED], "")


def test_another_sitecustomize_that_is_broken(python: Python) -> None:
    """A broken one is reported by Python as without us, and the script runs, recorded."""
    python.path.append(write(python.folder / "other", {"sitecustomize.py": "import not_there\n"}))
    out, err = python.code(f"{INIT}print('ran')")
    assert out == [ARMED, "ran"]
    assert "not_there" in err


def test_a_child_that_creates_a_group_records(python: Python) -> None:
    """Forked, spawned, fork-served and started children arm by themselves; those without do not."""
    out, err = python.code(
        "import multiprocessing as mp, subprocess, sys, os\n"
        "import torch, torch.distributed as dist\n"
        "def child(): dist.init_process_group(); print(os.getpid(), flush=True)\n"
        "def idle(): pass\n"
        "if __name__ == '__main__':\n"
        "    for how in ('fork', 'spawn', 'forkserver'):\n"
        "        for target in (child, idle):\n"
        "            process = mp.get_context(how).Process(target=target)\n"
        "            process.start(); process.join()\n"
        "            print(how, process.exitcode, flush=True)\n"
        "    dist.init_process_group()\n"
        "    mp.get_context('fork').Process(target=child).start()\n"
    )
    armed = [line.split()[1] for line in out if line.startswith("armed")]
    assert len(set(armed)) == 5
    assert [pid for pid in out if pid.isdigit()] == [pid for pid in armed if pid != "me"]
    assert sum(line.endswith(" 0") for line in out) == 6
    assert err == ""


def test_reexec_attaches_again(python: Python) -> None:
    """A process that replaces itself is attached in its new life as well."""
    out, err = python.code(
        "import os, sys\n"
        f"{INIT}"
        "if 'again' not in sys.argv:\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'again'])\n"
    )
    assert (out, err) == ([ARMED, ARMED], "")


@pytest.mark.parametrize(
    ("session", "message"),
    [
        ("def arm(*args): raise OSError('no room\\nat all')", "OSError: no room at all"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (None, "ModuleNotFoundError: No module named 'rankcall"),
    ],
)
def test_a_failure_is_one_line(python: Python, session: str | None, message: str) -> None:
    """Every error while arming is one line on stderr, and the script runs."""
    file = python.folder / "stand-ins/rankcall/watch.py"
    if session is None:
        file.unlink()
    else:
        file.write_text(session)
    out, err = python.code(f"{INIT}print('ran')")
    assert out == ["ran"]
    assert err.startswith(f"rankcall: not recording: {message}")
    assert err.count("\n") == 1


def test_a_torch_that_fails_once(python: Python) -> None:
    """An import that fails and is tried again is hooked at the second try."""
    write(
        python.folder / "stand-ins",
        {"torch/__init__.py": "import torch.distributed, sys\nsys.flag\ncomplete = True\n"},
    )
    out, err = python.code(
        "import sys\n"
        "try:\n    import torch\nexcept AttributeError: print('failed')\n"
        "sys.flag = 1\n"
        f"{INIT}"
    )
    assert (out, err) == (["failed", ARMED], "")


# --- Pythons of any age, closed streams, and broken installations ---

PYTHONS = [
    Path(sys.executable),
    *sorted((Path.home() / ".pyenv/versions").glob("*/bin/python")),
]
every_python = pytest.mark.parametrize("program", PYTHONS, ids=lambda path: path.parents[1].name)
# What a damaged hook may hold; None: the file is missing.
DAMAGES = [None, "def install(:\n", "1 / 0\n", "import not_there\n", ""]


def version_of(program: Path) -> tuple[int, ...]:
    """Return a Python's version."""
    asked = "import sys; print('.'.join(map(str, sys.version_info[:3])))"
    done = subprocess.run(
        [program, "-c", asked], capture_output=True, text=True, timeout=240, check=True
    )
    return tuple(map(int, done.stdout.split(".")))


def ended(
    program: Path, path: list[Path], script: Path, closed: bool, *options: str
) -> tuple[int, str, str]:
    """Run a script; return the exit status, stdout and stderr, which may be closed."""
    done = subprocess.run(
        [
            "bash",
            "-c",
            'exec "$@" 2>&-' if closed else 'exec "$@"',
            "-",
            program,
            "-B",
            *options,
            script,
        ],
        env={
            "PATH": os.environ["PATH"],
            "RANKCALL": "1",
            "PYTHONPATH": os.pathsep.join(map(str, path)),
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


def hidden_sitecustomize(folder: Path) -> tuple[Path, Path]:
    """Write a user's sitecustomize and a script; return the folder of one, and the other."""
    user = write(
        folder / "user", {"sitecustomize.py": "import os\nos.environ['CHAINED'] = 'yes'\n"}
    )
    script = write(folder, {"job.py": "import os\nprint(os.environ['CHAINED'])\n"}) / "job.py"
    return user, script


@every_python
@pytest.mark.parametrize("closed", [False, True], ids=["stderr", "closed"])
def test_every_python_starts_as_without(tmp_path: Path, program: Path, closed: bool) -> None:
    """A Python of any age starts below a job, says nothing, and runs the user's sitecustomize."""
    user, script = hidden_sitecustomize(tmp_path)
    assert ended(program, [BOOT, user], script, closed) == (0, "yes\n", "")


@every_python
@pytest.mark.parametrize("damage", DAMAGES, ids=["missing", "syntax", "error", "import", "empty"])
@pytest.mark.parametrize("closed", [False, True], ids=["stderr", "closed"])
def test_a_broken_installation_disturbs_no_process(
    tmp_path: Path, program: Path, damage: str | None, closed: bool
) -> None:
    """Processes below the job start as without rankcall, whatever is left of the hook."""
    boot = tmp_path / "installed/rankcall/_boot"
    shutil.copytree(BOOT, boot, ignore=shutil.ignore_patterns("__pycache__"))
    if damage is not None:
        write(tmp_path / "installed", {"_rankcall_hook.py": damage})
    user, script = hidden_sitecustomize(tmp_path)
    assert ended(program, [boot, user], script, closed) == (0, "yes\n", "")


@pytest.mark.parametrize("damage", DAMAGES, ids=["missing", "syntax", "error", "import", "empty"])
@pytest.mark.parametrize("closed", [False, True], ids=["stderr", "closed"])
def test_the_line_that_python_reads_lets_no_error_out(
    tmp_path: Path, damage: str | None, closed: bool
) -> None:
    """With ``RANKCALL=1`` and a broken hook, ``rankcall.pth`` neither prints nor ends a process."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(Path(rankcall.__file__).parents[1] / "rankcall.pth", site)
    if damage is not None:
        write(site, {"_rankcall_hook.py": damage})
    text = f"import site\nsite.addsitedir({str(site)!r})\n"
    script = write(tmp_path, {"job.py": text}) / "job.py"
    # Without -S, the line of this environment's own rankcall has loaded a sound hook already.
    assert ended(Path(sys.executable), [], script, closed, "-S") == (0, "", "")


def test_the_line_that_python_reads_installs_the_hook(tmp_path: Path) -> None:
    """With a sound hook, the same line does its work, and only if ``RANKCALL`` is set."""
    site = write(tmp_path / "site", {"_rankcall_hook.py": "def install(): print('installed')\n"})
    shutil.copy(Path(rankcall.__file__).parents[1] / "rankcall.pth", site)
    for asked, out in (("import os", "installed\n"), ("import os; del os.environ['RANKCALL']", "")):
        text = f"{asked}\nimport site\nsite.addsitedir({str(site)!r})\n"
        script = write(tmp_path, {"job.py": text}) / "job.py"
        assert ended(Path(sys.executable), [], script, False, "-S") == (0, out, "")


@every_python
@pytest.mark.parametrize("closed", [False, True], ids=["stderr", "closed"])
def test_a_rank_of_a_python_that_is_too_old(tmp_path: Path, program: Path, closed: bool) -> None:
    """It runs, and if it creates a group, one line names the version. Python 2 has no finders."""
    stand_ins = write(tmp_path / "stand-ins", {**TORCH, **RANKCALL})
    script = write(tmp_path, {"job.py": f"{INIT}print('ran')\n"}) / "job.py"
    version = version_of(program)
    status, out, err = ended(program, [BOOT, stand_ins], script, closed)
    assert (status, out.splitlines()[-1]) == (0, "ran")
    assert ("armed" in out) == (version >= (3, 10))
    is_told = (3, 4) <= version < (3, 10) and not closed
    named = "3.10 or newer; this is Python " + ".".join(map(str, version))
    said = f"rankcall: not recording: RuntimeError: rankcall needs Python {named}\n"
    assert err == (said if is_told else "")


@pytest.mark.parametrize("damage", DAMAGES[:-1], ids=["missing", "syntax", "error", "import"])
def test_the_command_says_that_the_installation_is_broken(
    tmp_path: Path,
    damage: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``run`` and ``exec`` say it once, before the job, because no process below says it."""
    hook = tmp_path / "_rankcall_hook.py"
    if damage is not None:
        hook.write_text(damage)
    monkeypatch.setattr(environment, "_HOOK", hook)
    environment.hooking()
    err = capsys.readouterr().err
    assert err.startswith(f"rankcall: not recording: {hook} cannot be loaded")
    assert len(err.splitlines()) == 1

"""Odd surroundings: two versions, other users and directories, no environment, read-only places."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import Ended, Launch, launch
from launchers import both, digests, run_of
from ports import free_port

import rankcall
from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]
PACKAGE = Path(rankcall.__file__).parent
HOOK = PACKAGE.parent / "_rankcall_hook.py"
NOBODY = 65534
TRAIN = """
import os, subprocess, sys, time
import torch
import torch.distributed as dist

{before}
dist.init_process_group("gloo")
{after}
total = torch.ones(4) * (dist.get_rank() + 1)
for _ in range(3):
    dist.all_reduce(total)
os.write(1, f"rank {{dist.get_rank()}} {{total.tolist()}}\\n".encode())
dist.destroy_process_group()
sys.exit(3)
"""
# 1 + 2 is 3 on both ranks, and each further sum of two equal values doubles it.
RESULT = [f"rank {rank} {[12.0] * 4}" for rank in (0, 1)]


def job(folder: Path, before: str = "", after: str = "") -> tuple[tuple[str, ...], dict[str, str]]:
    """Write a script; return a command that starts two ranks of it, and their environment."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN.format(before=before, after=after))
    env = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # one node: no rank sends records to another
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return both(f"{sys.executable} {folder / 'train.py'}"), env


def recorded(folder: Path, before: str = "", after: str = "", *options: str) -> Ended:
    """Run two ranks below ``rankcall exec``, and check that the job is the same as without."""
    command, env = job(folder, before, after)
    exec_ = ("exec", "--capture=python", *options, "--", *command)
    return unchanged(launch(*exec_, cwd=folder, env=env, timeout=200))


def unchanged(ended: Ended) -> Ended:
    """Check that the job has its results and its exit status, and that no Python code raised."""
    assert digests(ended) == RESULT, ended.err
    assert ended.status == 3, ended.err
    assert "Traceback" not in ended.err, ended.err
    return ended


def rank_counts(run: Path) -> list[tuple[int, int]]:
    """Return the rank and the number of records of each ring of a run."""
    return [(ring.header.rank, len(ring.records)) for ring in load(run).rings]


# --- two versions in one job ---

IN_ANOTHER_VERSION = """
if os.environ["RANK"] == "{rank}":
    sys.path.insert(0, "other")
    import rankcall
    assert rankcall.__version__ == "99.0"
"""


def other_version(folder: Path, *changes: tuple[str, str, str]) -> None:
    """Put a copy of rankcall into a folder, with another version, and with changes to its files."""
    shutil.copytree(PACKAGE, folder / "other/rankcall")
    version = ("_version.py", f'"{rankcall.__version__}"', '"99.0"')
    for name, old, new in (version, *changes):
        file = folder / "other/rankcall" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_two_versions(tmp_path: Path, rank: int) -> None:
    """If both write the same kind of ring, all ranks are in one run, whichever chose it."""
    other_version(tmp_path)
    run = run_of(recorded(tmp_path, IN_ANOTHER_VERSION.format(rank=rank)))
    assert rank_counts(run) == [(0, 3), (1, 3)]


@pytest.mark.slow
def test_two_versions_with_different_rings(tmp_path: Path) -> None:
    """The report covers the rings of its own version, and says which one needs another."""
    other_version(tmp_path, ("ring/layout.py", "\nSCHEMA = 1\n", "\nSCHEMA = 2\n"))
    run = run_of(recorded(tmp_path, IN_ANOTHER_VERSION.format(rank=1)))
    assert rank_counts(run) == [(0, 3)]
    shown = launch("report", run, cwd=tmp_path)
    (other_schema, missing) = shown.ours
    assert re.search(
        r"rank-00001\S+: ring schema 2; .*with the rankcall version that wrote", other_schema
    )
    assert "no ring for rank 1 of 2: the results cover the other ranks only" in missing


@pytest.mark.slow
def test_two_versions_that_do_not_agree(tmp_path: Path) -> None:
    """A rank that cannot read rank 0's choice records into a run of its own, which exec names."""
    other_version(
        tmp_path,
        ("job/attach.py", '{"run_dir": str(', '{"directory": str('),
        ("job/attach.py", 'fields["run_dir"]', 'fields["directory"]'),
    )
    ended = recorded(tmp_path, IN_ANOTHER_VERSION.format(rank=0))
    places = re.findall(r"recorded ranks? \S+ in (\S+); read it with", ended.err)
    assert sorted(rank_counts(Path(place)) for place in places) == [[(0, 3)], [(1, 3)]]


# --- processes that change directory or user ---


def test_ranks_that_change_directory(tmp_path: Path) -> None:
    """Rank 0's directory when it creates the group has the run; later changes move nothing."""
    (tmp_path / "start/0/later").mkdir(parents=True)
    (tmp_path / "start/1/later").mkdir(parents=True)
    before = f"os.chdir({str(tmp_path / 'start')!r} + '/' + os.environ['RANK'])"
    run = run_of(recorded(tmp_path, before, "os.chdir('later')"))
    assert run.parent == tmp_path / "start/0/rankcall-runs"
    assert rank_counts(run) == [(0, 3), (1, 3)]
    runs = [path.parent for path in tmp_path.rglob("run.json")]
    assert runs == [run]


UNTIL_THE_WATCHER_KNOWS = """
from rankcall import errors
deadline = time.monotonic() + 100
while not any("no longer watching" in each for each in errors._warnings):
    assert time.monotonic() < deadline
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_ranks_that_change_user(tmp_path: Path) -> None:
    """A rank that gives up its rights records on; one line says that it is no longer watched."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    ended = recorded(tmp_path, "", f"os.setuid({NOBODY})\n{UNTIL_THE_WATCHER_KNOWS}")
    assert rank_counts(run_of(ended)) == [(0, 3), (1, 3)]
    announced, *watching, closing = ended.ours
    assert announced.startswith("rankcall: recording in ")
    assert closing.startswith("rankcall: recorded ranks 0-1 in ")
    assert len(watching) == 2  # one line for each process: without a launcher, each is the first
    for line in watching:
        assert f"no longer watching for hangs: this process now runs as user {NOBODY}" in line


# --- no environment ---


def test_an_empty_environment(tmp_path: Path) -> None:
    """``env -i`` takes away what attaches: the job runs, and exec says that nothing is recorded."""
    _, env = job(tmp_path)
    # The last one lets the test find the ranks if they do not end.
    kept_variables = " ".join(f'{name}="${name}"' for name in (*env, "RANKCALL_TEST_PROCESS"))
    command = both(f"env -i RANK=$rank {kept_variables} {sys.executable} train.py")
    ended = launch("exec", "--capture=python", "--", *command, cwd=tmp_path, env=env, timeout=200)
    (warning,) = unchanged(ended).ours
    assert warning.startswith("rankcall: nothing was recorded")
    assert warning.endswith("or without this environment")
    assert not (tmp_path / "rankcall-runs").exists()


# --- read-only places ---


@pytest.fixture
def read_only() -> Iterator[Callable[[Path], None]]:
    """Return a function that makes a folder read-only, for root as well."""
    mounted: list[Path] = []

    def mount(*options: str | Path) -> None:
        command = shutil.which("mount")
        done = command and subprocess.run([command, *options], capture_output=True, check=False)
        if not done or done.returncode:
            pytest.skip("a folder cannot be mounted here")

    def protect(folder: Path) -> None:
        mount("--bind", folder, folder)
        mounted.append(folder)
        mount("-o", "remount,bind,ro", folder)

    yield protect
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_a_read_only_installation(tmp_path: Path, read_only: Callable[[Path], None]) -> None:
    """With read-only site-packages and home, everything is recorded, by the recorder in Python."""
    site = tmp_path / "site"
    shutil.copytree(PACKAGE, site / "rankcall", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HOOK, site)
    (site / "home").mkdir()
    read_only(site)
    command, env = job(tmp_path / "job", "import rankcall; assert '/site/' in rankcall.__file__")
    env |= {"PYTHONPATH": str(site), "HOME": str(site / "home"), "XDG_CACHE_HOME": ""}
    program = (sys.executable, "-m", "rankcall", "exec", "--", *command)
    ended = unchanged(
        Launch(*program, cwd=tmp_path / "job", env=env, program=()).finish(timeout=300)
    )
    assert rank_counts(run_of(ended)) == [(0, 3), (1, 3)]
    (reason,) = [line for line in ended.ours if "cannot be written" in line]
    assert reason.startswith(f"rankcall: the cache {site / 'home'}")
    assert reason.endswith("recording with the slower Python capture")
    assert not list(site.rglob("__pycache__"))


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--run-dir=mine",)], ids=["default", "named"])
def test_a_read_only_directory(
    tmp_path: Path, read_only: Callable[[Path], None], options: tuple[str, ...]
) -> None:
    """If the run directory cannot be made, the records stay in memory, and each line says where."""
    place = tmp_path / "place"
    job(place)
    read_only(place)
    command, env = job(tmp_path / "job")
    exec_ = ("exec", "--capture=python", *options, "--", *command)
    ended = unchanged(launch(*exec_, cwd=place, env=env, timeout=200))
    where = run_of(ended)
    try:
        assert where.is_relative_to(os.environ["RANKCALL_SHM"])
        assert rank_counts(where) == [(0, 3), (1, 3)]
        *reasons, closing = ended.ours
        assert closing.startswith("rankcall: recorded ranks 0-1 in ")
        assert len(reasons) == 2  # one for each process: without a launcher, each is the first
        for line in reasons:
            assert line.startswith(f"rankcall: the run directory {place}/")
            assert line.endswith(f"(Read-only file system): records stay in {where}")
        named = reasons[0].split()[4]
        shown = launch("report", "--json", named, cwd=tmp_path)
        assert (shown.status, shown.ours) == (0, [])
    finally:
        shutil.rmtree(where.parent)


# --- many processes below a rank ---

CHILDREN = """
code = "import sys; print([each for each in sys.modules if each.startswith('rankcall')])"
for _ in range(10 if dist.get_rank() == 0 else 0):
    batch = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(10)
    ]
    for child in batch:
        print("child", child.communicate()[0].strip(), child.returncode, flush=True)
"""


@pytest.mark.slow
def test_a_hundred_children_of_a_rank(tmp_path: Path) -> None:
    """A process that creates no group loads nothing of rankcall, and is no rank."""
    ended = recorded(tmp_path, "", CHILDREN)
    children = [line for line in ended.out.splitlines() if line.startswith("child")]
    assert children == ["child [] 0"] * 100
    run = run_of(ended)
    assert rank_counts(run) == [(0, 3), (1, 3)]
    assert [path.parent for path in tmp_path.rglob("run.json")] == [run]

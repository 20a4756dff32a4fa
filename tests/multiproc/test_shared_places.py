"""Where rings live: in folders that other users cannot reach, and safe from other containers."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import Result, run_ranks, try_ranks
from world import wait_until

from rankcall import load

pytestmark = pytest.mark.multiproc
CAPTURES = ("native", "python")


@pytest.fixture(params=CAPTURES)
def env(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str | None]:
    """Run on both captures, with live rings below tmp_path."""
    (tmp_path / "shm").mkdir()
    return {"RANKCALL_CAPTURE": request.param, "RANKCALL_SHM": str(tmp_path / "shm")}


def _record(rank: int, world_size: int, run_dir: str, count: int = 5) -> Any:
    """Record some ops and return where the ring was."""
    import torch
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir)
    for _ in range(count):
        dist.all_reduce(torch.ones(2))
    where = str(recording.path)
    rankcall.disable()
    return where


def _one(results: list[Result]) -> tuple[Any, list[str]]:
    """Return what the one rank returned, and what rankcall said on it."""
    (result,) = results
    assert result.ok, result.error
    messages = [line for line in result.stderr.splitlines() if line.startswith("rankcall: ")]
    return result.value, messages


def _records(run_dir: Path) -> int:
    return int(load(run_dir).records.height)


# --- folders ---


def _modes(rank: int, world_size: int, run_dir: str, mask: int) -> Any:
    import rankcall

    os.umask(mask)
    recording = rankcall.enable(run_dir)
    ring = recording.path
    assert ring is not None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (ring.parent.parent, ring.parent, ring)]
    rankcall.disable()
    return modes


@pytest.mark.parametrize("mask", [0, 0o022])
def test_what_we_make_is_private(tmp_path: Path, env: dict[str, str | None], mask: int) -> None:
    """Folders and rings are this user's alone, whatever the umask."""
    (modes,) = run_ranks(_modes, 1, str(tmp_path / "run"), mask, env=env)
    assert modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("how", ["writable", "link", "another user's"])
def test_a_folder_that_was_planted(tmp_path: Path, env: dict[str, str | None], how: str) -> None:
    """Another user can be first in /dev/shm: the ring then goes to the run directory."""
    ours = tmp_path / "shm" / f"rankcall-{os.geteuid()}"
    if how == "link":
        (tmp_path / "trap").mkdir()
        ours.symlink_to(tmp_path / "trap")
    else:
        ours.mkdir(mode=0o700)
    if how == "writable":
        ours.chmod(0o777)
    if how == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(ours, 54321, 54321)
    where, messages = _one(try_ranks(_record, 1, str(tmp_path / "run"), env=env))
    assert Path(where).parent == tmp_path / "run" / "rings"
    assert len(messages) == 1
    assert messages[0].startswith(f"rankcall: {ours} ")
    assert messages[0].endswith(f": the ring is kept in {tmp_path / 'run' / 'rings'}")
    assert _records(tmp_path / "run") == 5
    assert list(ours.iterdir()) == []


def _record_on_nfs(rank: int, world_size: int, run_dir: str, disable: bool) -> Any:
    """Record as if every file system were a server's."""
    import threading

    import torch
    import torch.distributed as dist

    import rankcall
    from rankcall import file_systems

    file_systems.file_system = lambda path, mountinfo=None: "nfs4"  # type: ignore[assignment]
    recording = rankcall.enable(run_dir)
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    where = str(recording.path)
    if disable:
        rankcall.disable()
        assert "rankcall-keep" not in {thread.name for thread in threading.enumerate()}
    return where


@pytest.mark.parametrize("disable", [True, False], ids=["disabled", "at exit"])
def test_a_network_file_system(tmp_path: Path, env: dict[str, str | None], disable: bool) -> None:
    """A page of such a file can block its writer: recording stays in memory until the end."""
    where, messages = _one(try_ranks(_record_on_nfs, 1, str(tmp_path / "run"), disable, env=env))
    assert where == "None"
    assert len(messages) == 1
    assert "is on a file system that is not local (nfs4)" in messages[0]
    assert "recording goes on in memory only" in messages[0]
    assert _records(tmp_path / "run") == 5


def _clean_at_start(rank: int, world_size: int, folder: str) -> Any:
    """Start to record beside a ring that a killed job left two days ago."""
    import time

    import rankcall
    from rankcall.ring.layout import Geometry
    from rankcall.ring.writer import Identity, create_locked, put
    from rankcall.run.paths import create_run, make_live_dir

    old = create_run(Path(folder) / "old", {})
    live = make_live_dir(old)
    ring, lock = create_locked(live / "x.ring", Identity(rank=0, host="h"), Geometry(64), old)
    two_days_ago = time.time() - 2 * 86_400
    put(ring, "pid_namespace", 1)
    put(ring, "anchor_epoch_ns", int(two_days_ago * 1e9))
    lock.release()
    os.utime(live, (two_days_ago, two_days_ago))
    rankcall.enable(f"{folder}/new")
    wait_until(lambda: not live.exists())
    rankcall.disable()
    return sorted(path.name for path in (old / "rings").iterdir())


def test_a_recording_frees_what_killed_jobs_left(
    tmp_path: Path, env: dict[str, str | None]
) -> None:
    """Jobs that are killed with their launchers must not fill the memory."""
    assert run_ranks(_clean_at_start, 1, str(tmp_path), env=env) == [["x.ring"]]


def _name_a_ring(rank: int, world_size: int, run_dir: str) -> Any:
    """Begin with hooks alone, so that the ring has no name yet, and then name a run directory."""
    import rankcall
    from rankcall import hooks
    from rankcall.ring.lock import try_lock

    with hooks.register_collective_end_hook(lambda status: None):
        recording = rankcall.enable(run_dir)
        assert recording.path is not None
        with recording.path.open("rb") as ring:
            locked = not try_lock(ring.fileno())
        named = [head.header.run_dir for head in rankcall.load(run_dir).heads]
        rankcall.disable()
    return locked, named


def test_a_ring_that_gets_a_name_later(tmp_path: Path, env: dict[str, str | None]) -> None:
    """It is locked by the time that others can see it, and knows its run directory."""
    run_dir = str(tmp_path / "run")
    assert run_ranks(_name_a_ring, 1, run_dir, env=env) == [[True, [run_dir]]]


def _record_twice(rank: int, world_size: int, run_dir: str, nfs: bool) -> Any:
    from rankcall import file_systems

    if nfs:
        file_systems.file_system = lambda path, mountinfo=None: "nfs4"  # type: ignore[assignment]
    for count in (3, 5):
        _record(rank, world_size, run_dir, count)


@pytest.mark.parametrize("nfs", [False, True], ids=["tmpfs", "memory"])
def test_recording_twice(tmp_path: Path, env: dict[str, str | None], nfs: bool) -> None:
    """Recording that is switched off and on again keeps the records of both times."""
    run_ranks(_record_twice, 1, str(tmp_path / "run"), nfs, env=env)
    assert _records(tmp_path / "run") == 8


# --- pid namespaces ---


def _in_another_namespace(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a new pid namespace, so that this process's id is unknown to it."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    return subprocess.run(
        [unshare, "--pid", "--fork", "--mount-proc", "--kill-child", *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture
def namespaces() -> None:
    """Skip the test if this process may not make a pid namespace."""
    if shutil.which("unshare") is None or _in_another_namespace("true").returncode != 0:
        pytest.skip("a pid namespace cannot be made here")


def _read_from_another_container(rank: int, world_size: int, run_dir: str) -> Any:
    """Have another container diagnose and clean the run while it records."""
    import torch
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir)
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    rankcall_command = str(Path(sys.executable).with_name("rankcall"))
    seen = _in_another_namespace(rankcall_command, "diagnose", "--json", run_dir)
    _in_another_namespace(rankcall_command, "clean", "--all")
    there = recording.path is not None and recording.path.exists()
    for _ in range(4):
        dist.all_reduce(torch.ones(2))
    rankcall.disable()
    return there, seen.stdout


def test_a_rank_of_another_pid_namespace(
    tmp_path: Path, env: dict[str, str | None], namespaces: None
) -> None:
    """Containers that share /dev/shm leave each other's live rings, and report no rank as dead."""
    run_dir = tmp_path / "run"
    ((there, seen),) = run_ranks(
        _read_from_another_container, 1, str(run_dir), env=env, timeout=240
    )
    assert there
    assert '"state": "unknown"' in seen
    assert '"verdict": "dead"' not in seen
    assert _records(run_dir) == 7

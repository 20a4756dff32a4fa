"""A worker's folder: the user's own, cleared of what the killed left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.rpc.backends.zmq.worker_dir import WorkerDir
from rankcall.run.worker_dirs import remove_unheld


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the folders below a scratch folder."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path))
    return tmp_path / f"rankcall-{os.getuid()}" / "rpc"


def test_a_folder_goes_with_its_worker(base: Path) -> None:
    """Made for this user alone, and removed with all that is in it, once."""
    worker_dir = WorkerDir(7)
    assert worker_dir.path == base / f"{7:016x}"
    assert worker_dir.path.stat().st_mode & 0o777 == 0o700
    (worker_dir.path / "1").write_bytes(b"block")
    worker_dir.close()
    worker_dir.close()
    assert not base.parent.exists()


def test_what_the_killed_left_is_removed(base: Path) -> None:
    """The next worker removes the folders that no process holds, and no other."""
    alive = WorkerDir(1)
    left = base / "left"
    left.mkdir()
    (left / "lock").touch()
    (left / "1").write_bytes(b"block")
    second = WorkerDir(2)
    assert not left.exists()
    assert alive.path.exists()
    alive.close()
    second.close()


@pytest.mark.parametrize("option", [[], ["--all"]])
def test_clean_frees_what_the_killed_left(
    base: Path, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """``rankcall clean`` frees the blocks of killed workers, says so, and leaves the living."""
    alive = WorkerDir(1)
    for name in ("a", "b"):
        (base / name).mkdir()
        (base / name / "lock").touch()
        (base / name / "1").write_bytes(bytes(1 << 20))
    new, old = base / "new", base / "old"  # killed before they had a lock, or about to get it
    new.mkdir()
    old.mkdir()
    os.utime(old, (1e9, 1e9))
    assert main(["clean", *option]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"removed what 3 killed RPC workers left in {base} (2.1 MB of memory freed)" in said
    assert sorted(base.iterdir()) == sorted([alive.path, new])
    new.rmdir()
    alive.close()
    assert main(["clean", *option]) == 0
    assert "there is nothing to clean up" in capsys.readouterr().err


def test_clean_removes_the_folder_itself(base: Path) -> None:
    """If no worker lives, nothing is left in shared memory."""
    (base / "a").mkdir(parents=True, mode=0o700)
    base.chmod(0o700)
    (base / "a/lock").touch()
    base.parent.chmod(0o700)
    assert main(["clean", "--all"]) == 0
    assert not base.parent.exists()


def test_a_folder_that_others_may_read_is_refused(base: Path) -> None:
    """Memory that others could read or write is not used."""
    base.mkdir(parents=True)
    base.chmod(0o755)
    with pytest.raises(PermissionError, match="others can write or read it"):
        WorkerDir(1)


def test_a_directory_that_is_swept_before_it_is_locked(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees that its lock is of a file that is gone, and makes the directory again."""
    from rankcall.rpc.backends.zmq import worker_dir

    flock, sweeps = worker_dir.fcntl.flock, []

    def sweep_first(fd: int, how: int) -> None:
        if how == worker_dir.fcntl.LOCK_EX and len(sweeps) < 2:
            sweeps.append(fd)
            remove_unheld(base)
        flock(fd, how)

    monkeypatch.setattr(worker_dir.fcntl, "flock", sweep_first)
    mine = WorkerDir(5)
    assert len(sweeps) == 2
    remove_unheld(base)
    assert (mine.path / "lock").exists()
    mine.close()
    assert not base.exists()

"""A ring is moved or removed only if its writer has ended, in whatever namespace that runs."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in, whole_verdict
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.cli import main
from rankcall.job.keep import text_of
from rankcall.problems import Problem, texts
from rankcall.process import Process
from rankcall.ring.layout import Geometry
from rankcall.ring.lock import WriterLock, try_lock
from rankcall.ring.writer import Identity, create_locked, put
from rankcall.run.clean_up import clean_up
from rankcall.run.load import load
from rankcall.run.paths import create_run, live_dir, make_live_dir, ring_paths
from rankcall.run.settle import save_ring, settle, settle_ring
from rankcall.run.tails import keep_tail, keep_tails

DAY_NS = 86_400 * 10**9


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty run whose live rings are kept below tmp_path too."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    return create_run(tmp_path / "run", {})


def write_ring(
    run_dir: Path, name: str = "x.ring", *, elsewhere: bool = True, quiet_s: float = 0.0
) -> tuple[mmap.mmap, WriterLock]:
    """Make a live ring that this process writes.

    ``elsewhere``: as it looks from another pid namespace. ``quiet_s``: so long ago its writer was
    last heard of.
    """
    folder = make_live_dir(run_dir)
    identity = Identity(rank=0, world_size=1, host="h")
    ring, lock = create_locked(folder / name, identity, Geometry(64), run_dir)
    if elsewhere:
        put(ring, "pid_namespace", 1)
    if quiet_s:
        put(ring, "anchor_epoch_ns", time.time_ns() - int(quiet_s * 1e9))
    return ring, lock


def names(folder: Path) -> list[str]:
    """Return the names in a folder; none if the folder is gone."""
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- settle ---


def test_a_writer_of_another_pid_namespace(run_dir: Path) -> None:
    """The ring of an invisible process moves only after the process has dropped its lock."""
    _, lock = write_ring(run_dir)
    assert settle(run_dir) == []
    assert names(live_dir(run_dir)) == ["x.ring"]
    lock.release()
    assert settle(run_dir) == [run_dir / "rings" / "x.ring"]
    assert not live_dir(run_dir).exists()


def test_a_writer_that_lives_here(run_dir: Path) -> None:
    """The ring of a process that is known to be alive stays, even without a lock."""
    _, lock = write_ring(run_dir, elsewhere=False)
    lock.release()
    assert settle(run_dir) == []
    (live_dir(run_dir) / "x.ring").unlink()


def test_a_closed_ring(run_dir: Path) -> None:
    """A closed ring is moved."""
    ring, lock = write_ring(run_dir)
    put(ring, "closed_ns", time.monotonic_ns())
    lock.release()
    assert len(settle(run_dir)) == 1


def test_a_ring_of_an_old_rankcall(run_dir: Path) -> None:
    """A ring without lock and namespace is moved a minute after its last sign of life."""
    ring, lock = write_ring(run_dir)
    lock.release()
    for field in ("pid_namespace", "locked", "process_start"):
        put(ring, field, 0)
    assert settle(run_dir) == []
    put(ring, "anchor_epoch_ns", time.time_ns() - 120 * 10**9)
    (moved,) = settle(run_dir)
    assert load(moved).heads[0].header.rank == 0


_WRITER = """
import sys
from pathlib import Path
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create_locked
kept = create_locked(Path(sys.argv[1]), Identity(rank=0, host="h"), Geometry(64))
print("ready", flush=True)
input()
"""


def test_a_killed_writer(run_dir: Path) -> None:
    """The kernel drops the lock of a process that is killed; its ring is moved."""
    folder = make_live_dir(run_dir)
    command = [sys.executable, "-c", _WRITER, str(folder / "x.ring")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            assert settle(run_dir) == []
        finally:
            writer.kill()
    assert len(settle(run_dir)) == 1


def test_a_forked_child_neither_keeps_nor_drops_the_lock(run_dir: Path) -> None:
    """A forked child does not keep its parent's lock after the parent has released it."""
    _, lock = write_ring(run_dir)
    out_end, in_end = os.pipe()
    ready_out, ready_in = os.pipe()
    child = os.fork()
    if child == 0:  # a data loader's worker, which waits until its parent has done all below
        os.close(in_end)
        os.write(ready_in, b"x")
        os.read(out_end, 1)
        os._exit(0)
    try:
        assert os.read(ready_out, 1) == b"x"
        assert settle(run_dir) == []
        lock.release()
        with (live_dir(run_dir) / "x.ring").open("rb") as ring:
            assert try_lock(ring.fileno())
        assert len(settle(run_dir)) == 1
    finally:
        for end in (in_end, out_end, ready_in, ready_out):
            os.close(end)
        os.waitpid(child, 0)


def test_a_child_that_ends_leaves_the_lock(run_dir: Path) -> None:
    """The end of a forked child does not release its parent's lock."""
    _, lock = write_ring(run_dir)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert settle(run_dir) == []
    lock.release()
    settle(run_dir)


def test_a_descriptor_that_was_closed_under_us(run_dir: Path) -> None:
    """If a program has reused the lock's descriptor for a file of its own, that file stays open."""
    _, lock = write_ring(run_dir)
    number = lock._fd
    own = os.open(os.devnull, os.O_RDONLY)
    os.dup2(own, number)
    lock.release()
    os.fstat(number)
    os.close(number)
    os.close(own)
    settle(run_dir)


def test_two_movers(run_dir: Path) -> None:
    """settle waits for a ring that another process moves, but only until its deadline."""
    _, lock = write_ring(run_dir, elsewhere=False)
    path = live_dir(run_dir) / "x.ring"
    lock.release()
    with path.open("r+b") as mover, path.open("r+b") as file:
        file.seek(64)  # process_start: the writer is dead
        file.write((1).to_bytes(8, "little"))
        file.flush()
        assert try_lock(mover.fileno())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rankcall.run.settle._MOVER_SECONDS", 0.05)
            assert settle(run_dir) == []
    assert len(settle(run_dir)) == 1


def test_a_ring_from_memory(run_dir: Path) -> None:
    """A ring in memory is saved with all records and without its unused end."""
    ring, lock = write_ring(run_dir)
    saved = save_ring(ring, run_dir, "saved.ring")
    assert load(saved).heads[0].header.rank == 0
    assert saved.stat().st_size <= len(ring)
    assert names(run_dir / "rings") == ["saved.ring"]
    lock.release()
    settle(run_dir)


# --- whose files are believed ---


def test_a_live_folder_that_others_can_write(run_dir: Path) -> None:
    """Rings and verdicts in a folder that others can write are ignored; ``problems`` says so."""
    _, lock = write_ring(run_dir)
    lock.release()
    folder = live_dir(run_dir)
    hang = folder / "hangs" / "0001"
    hang.mkdir(parents=True)
    owned = Finding("dead", (1,), summary="\x1b]0;owned\x07 forged")
    (hang / "verdict.json").write_bytes(encode(Verdict("run", [owned])))
    (kept,) = kept_in(run_dir)
    assert text_of(whole_verdict(kept)) == "dead: \ufffd]0;owned\ufffd forged\n"
    folder.chmod(0o777)
    problems: list[Problem] = []
    assert ring_paths(run_dir, problems) == []
    assert kept_in(run_dir) == []
    assert settle(run_dir) == []
    assert names(folder) == ["hangs", "x.ring"]
    assert [str(folder) in problem.text for problem in problems] == [True]
    assert "can be written by other users" in problems[0].text


def test_a_live_folder_that_is_a_link(run_dir: Path, tmp_path: Path) -> None:
    """A link that another user planted in place of the folder is not followed."""
    _, lock = write_ring(run_dir)
    lock.release()
    base = live_dir(run_dir).parent
    base.rename(tmp_path / "trap")
    base.symlink_to(tmp_path / "trap")
    problems: list[Problem] = []
    assert ring_paths(run_dir, problems) == []
    assert "symbolic link" in problems[0].text
    assert settle(run_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_ring_of_another_user(run_dir: Path) -> None:
    """A ring of neither the reader nor the run directory's owner is ignored, also by root."""
    _, lock = write_ring(run_dir)
    lock.release()
    ring = live_dir(run_dir) / "x.ring"
    os.chown(ring, 54321, 54321)
    problems: list[Problem] = []
    assert ring_paths(run_dir, problems) == []
    assert texts(problems) == [f"{ring} belongs to user 54321, not to user 0: it is ignored"]
    assert settle(run_dir) == []
    os.chown(run_dir, 54321, 54321)  # the owner of the run: root reads it, and leaves it there
    assert ring_paths(run_dir) == [ring]
    assert settle(run_dir) == []


# --- the run directory ---


def test_a_run_directory_keeps_its_mode(tmp_path: Path) -> None:
    """A shared folder keeps its mode if a run is created in it."""
    shared = tmp_path / "team"
    shared.mkdir()
    shared.chmod(0o2775)
    create_run(shared, {})
    assert shared.stat().st_mode & 0o7777 == 0o2775
    assert (shared / "rings").stat().st_mode & 0o777 == 0o700


# --- clean ---


def test_rings_of_a_killed_job_are_kept_for_a_day(run_dir: Path) -> None:
    """Rings of a killed job stay for a day, and then move to the run directory."""
    ring, lock = write_ring(run_dir)
    lock.release()
    assert clean_up() == []
    put(ring, "anchor_epoch_ns", time.time_ns() - DAY_NS - 10**9)
    (message,) = clean_up()
    assert message.startswith(f"moved 1 ring of a killed job to {run_dir} (")
    assert names(run_dir / "rings") == ["x.ring"]
    assert not live_dir(run_dir).parent.exists()


def test_rings_without_a_run_directory_are_removed(run_dir: Path) -> None:
    """Old rings without a run directory are removed, except those whose lock is held."""
    _, lock = write_ring(run_dir, quiet_s=2 * 86_400)
    _, held = write_ring(run_dir, "y.ring", quiet_s=2 * 86_400)
    lock.release()
    folder = live_dir(run_dir)
    shutil.rmtree(run_dir)
    (message,) = clean_up()
    assert message.startswith(f"removed 1 ring of a killed job from {folder}")
    assert names(folder) == ["y.ring"]
    held.release()
    assert len(clean_up()) == 1
    assert not folder.exists()


def test_rings_that_may_be_written_are_never_cleaned(run_dir: Path) -> None:
    """Rings of a living process, or with a held lock, stay, however old they look."""
    _, elsewhere = write_ring(run_dir, quiet_s=9 * 86_400)
    _, here = write_ring(run_dir, "y.ring", elsewhere=False, quiet_s=9 * 86_400)
    here.release()
    assert clean_up(everything=True) == []
    assert names(live_dir(run_dir)) == ["x.ring", "y.ring"]
    elsewhere.release()


def test_the_command(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rankcall clean`` waits for a day, ``--all`` does not; both say what they did."""
    _, lock = write_ring(run_dir)
    lock.release()
    assert main(["clean"]) == 0
    assert capsys.readouterr().err == "rankcall: there is nothing to clean up\n"
    assert main(["clean", "--all"]) == 0
    assert f"moved 1 ring of a killed job to {run_dir}" in capsys.readouterr().err


def test_any_command_cleans_up(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that reads one run also frees rings that another job left a day ago."""
    _, lock = write_ring(run_dir, quiet_s=2 * 86_400)
    lock.release()
    assert main(["report", str(run_dir / "nothing")]) == 2
    assert "moved 1 ring of a killed job" in capsys.readouterr().err
    assert names(run_dir / "rings") == ["x.ring"]


def test_what_is_no_ring_is_kept_for_a_day(run_dir: Path) -> None:
    """An incomplete file is removed by the age of the file."""
    folder = make_live_dir(run_dir)
    junk = folder / "junk.ring"
    junk.write_bytes(b"junk")
    assert clean_up() == []
    old = time.time() - 2 * 86_400
    os.utime(junk, (old, old))
    assert len(clean_up()) == 1
    assert not folder.exists()


# --- tails ---


def test_a_tail_counts_until_the_whole_ring_is_there(run_dir: Path, tmp_path: Path) -> None:
    """A live ring's tail in the run is evidence in a copy of it, and is removed by the move."""
    ring, lock = write_ring(run_dir)
    keep_tails(run_dir)
    assert names(run_dir / "rings") == ["x.tail.ring"]
    assert [path.name for path in ring_paths(run_dir)] == ["x.ring"]
    copied = shutil.copytree(run_dir, tmp_path / "copied")
    assert [path.name for path in ring_paths(copied)] == ["x.tail.ring"]
    assert load(copied).heads[0].header.rank == 0
    put(ring, "closed_ns", time.monotonic_ns())
    lock.release()
    assert len(settle(run_dir)) == 1
    assert names(run_dir / "rings") == ["x.ring"]


def test_a_late_tail_hides_no_ring(run_dir: Path) -> None:
    """If a ring moves while its tail is written, the whole ring counts."""
    _, lock = write_ring(run_dir)
    lock.release()
    settle(run_dir)
    keep_tail(run_dir, "x.ring", b"a tail")
    assert [path.name for path in ring_paths(run_dir)] == ["x.ring"]


def test_a_rank_that_ends_moves_those_of_the_killed(run_dir: Path) -> None:
    """The last rank of a node to end leaves no ring of a killed one in memory."""
    _, killed = write_ring(run_dir, "killed.ring")
    killed.release()
    _, living = write_ring(run_dir, "living.ring")
    ring, lock = write_ring(run_dir, "mine.ring")
    put(ring, "closed_ns", time.monotonic_ns())
    lock.release()
    settle_ring(live_dir(run_dir) / "mine.ring", run_dir)
    assert names(run_dir / "rings") == ["killed.ring", "mine.ring"]
    assert names(live_dir(run_dir)) == ["living.ring"]
    living.release()


def test_rings_of_a_job_that_is_over_are_moved_soon(run_dir: Path) -> None:
    """A minute after the last process of a job ended here, its rings move; others wait a day."""
    for name in ("x.ring", "y.ring"):
        ring, lock = write_ring(run_dir, name, elsewhere=False, quiet_s=120)
        put(ring, "process_start", 1)  # another process had this id
        lock.release()
    put(ring, "process_start", Process.current().start)
    assert clean_up() == []
    put(ring, "process_start", 1)
    (message,) = clean_up()
    assert message.startswith(f"moved 2 rings of a killed job to {run_dir}")
    assert names(run_dir / "rings") == ["x.ring", "y.ring"]

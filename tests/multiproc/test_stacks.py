"""Python stacks of another process are read without harm to it, in any kind of wait."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from world import wait_until

from rankcall.analysis.looks import diagnose_asking
from rankcall.analysis.snapshot import telling_threads
from rankcall.report.stack_lines import stack_lines
from rankcall.ring.layout import HEADER_BYTES, Header, parse_header, read_header
from rankcall.run.frames import code_place
from rankcall.run.load import load
from rankcall.run.own_stacks import register_stack_dump, request_stacks
from rankcall.run.paths import ring_paths
from rankcall.run.stacks import stacks_of
from rankcall.testing import FaultPlan, Ranks, start_ranks

pytestmark = pytest.mark.multiproc


def _one_by_one(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(3):
        dist.all_reduce(torch.ones(1))


def _registered(rank: int, world_size: int, folder: str, register: bool) -> None:
    from rankcall.ring.layout import Geometry
    from rankcall.ring.writer import Identity, create

    ring = create(Path(folder) / "it.ring", Identity(rank=3), Geometry(64))
    if register:
        register_stack_dump(ring)
    (Path(folder) / "ready").touch()
    _wait_here()


def _wait_here() -> None:
    time.sleep(3600)


def _train_in_a_thread(rank: int, world_size: int, hold_gil: bool) -> None:
    """Train in a thread, as Ray Train does; rank 1 hangs there."""
    import threading

    thread = threading.Thread(target=_train, args=(rank, hold_gil))
    thread.start()
    thread.join()


def _train(rank: int, hold_gil: bool) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    if rank == 1:
        _hang_here(hold_gil)
    dist.all_reduce(torch.ones(1))


def _hang_here(hold_gil: bool) -> None:
    if hold_gil:
        time.sleep(1.5)  # the heartbeat tells others the thread twice a second
        ctypes.PyDLL(None).sleep(3600)
    time.sleep(3600)


def _save_in_a_thread(rank: int, world_size: int) -> None:
    """Train, and save in a thread with a group of its own; rank 1 hangs there."""
    import threading

    import torch
    import torch.distributed as dist

    saving = threading.Thread(target=_save, args=(rank, dist.new_group()))
    saving.start()
    for _ in range(100):
        dist.all_reduce(torch.ones(1))
    saving.join()


def _save(rank: int, group: object) -> None:
    import torch
    import torch.distributed as dist

    for number in range(3):
        if rank == 1 and number == 2:
            _hang_here(hold_gil=False)
        dist.all_reduce(torch.ones(1), group=group)


def _header(path: Path) -> Header:
    return parse_header(path.read_bytes()[:HEADER_BYTES], str(path))


def _started(tmp_path: Path, register: bool) -> Ranks:
    ranks = start_ranks(_registered, 1, str(tmp_path), register, init=False)
    wait_until((tmp_path / "ready").exists)
    return ranks


def test_asked_again_and_again(tmp_path: Path) -> None:
    """Each answer is whole, of its own time; the process goes on."""
    with _started(tmp_path, register=True) as ranks:
        header = _header(tmp_path / "it.ring")
        wait_until(lambda: "in _wait_here" in request_stacks([header]).get(3, ""))
        for _ in range(5):
            answer = request_stacks([header])
            assert answer.keys() == {3}
            assert answer[3].count("in _wait_here") == 1
        assert Path(f"/proc/{ranks.pids[0]}").exists()


def test_not_registered(tmp_path: Path) -> None:
    """A process without a handler gets no signal, even if its ring claims one: it would die."""
    with _started(tmp_path, register=False) as ranks:
        header = replace(_header(tmp_path / "it.ring"), stack_fd=1)
        assert request_stacks([header]) == {}
        assert Path(f"/proc/{ranks.pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_rings_that_lie(tmp_path: Path) -> None:
    """If the file, the process or the boot differs, no process gets a signal."""
    with _started(tmp_path, register=True):
        good = _header(tmp_path / "it.ring")
        for bad in (
            replace(good, stack_fd=2),
            replace(good, stack_fd=9999),
            replace(good, process_start=good.process_start + 1),
            replace(good, boot_id="another"),
            replace(good, pid=os.getpid()),
        ):
            assert request_stacks([bad]) == {}


def test_who_holds_the_gil_answers_and_who_is_stopped_does_not(tmp_path: Path) -> None:
    """The stack of the former ends in what holds it; all others are there too."""
    plan = FaultPlan().hang(rank=1, seq=2, hold_gil=True).stop(rank=2, seq=2)
    run = tmp_path / "run"
    with start_ranks(_one_by_one, 4, faults=plan, run_dir=run, watch={"hang_after": 60}) as ranks:

        def state(rank: int) -> str:
            return Path(f"/proc/{ranks.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]

        wait_until(lambda: state(2) == "T")
        headers = [_header(path) for path in ring_paths(run)]
        assert len(headers) == 4
        wait_until(lambda: "in _carry_out" in request_stacks(headers).get(1, ""))
        answer = request_stacks(headers)
    assert sorted(answer) == [0, 1, 3]
    assert "test_stacks.py" in answer[0]


def test_another_thread_than_the_one_that_trains_has_not_come(tmp_path: Path) -> None:
    """The line of a missing rank is that of the thread for whose call the others wait."""
    run = tmp_path / "run"
    with start_ranks(_save_in_a_thread, 3, run_dir=run, watch={"hang_after": 60}):
        wait_until(lambda: _with_headers(run) == 3)

        def place() -> str:
            findings = diagnose_asking(load(run), 0.5).findings
            return findings[0].summary if findings else ""

        wait_until(lambda: "in _hang_here" in place())
        diagnosis = diagnose_asking(load(run), 0.5)
        stacks = stacks_of(load(run), [1], telling_threads(diagnosis.snapshot))
    causes = [(finding.kind, finding.ranks) for finding in diagnosis.findings]
    assert causes == [("missing", (1,))]
    before, _, saves = "\n".join(stack_lines(stacks)).partition("another thread there, which made")
    assert "_save_in_a_thread  test_stacks.py" in before  # it trains, and waits there for the other
    assert "_hang_here  test_stacks.py" in saves


@pytest.mark.parametrize("hold_gil", [False, True])
def test_a_rank_that_trains_in_a_thread(tmp_path: Path, hold_gil: bool) -> None:
    """The stack of the training thread comes first, and the place is the line in that thread."""
    run = tmp_path / "run"
    with start_ranks(
        _train_in_a_thread, 2, hold_gil, run_dir=run, watch={"hang_after": 60}
    ) as ranks:
        stacks: dict[int, str] = {}

        def both_stand() -> bool:
            headers = filter(None, map(read_header, ring_paths(run)))
            stacks.update(request_stacks(headers))
            places = [code_place(stacks.get(rank, "")) for rank in (0, 1)]
            return [place.function for place in places] == ["_train", "_hang_here"]

        wait_until(lambda: both_stand() and code_place(stacks[0]).inside == "all_reduce")
        for rank, text in stacks.items():
            first, second = text.split("\n\n")
            assert "(trains, most recent call first)" in first.splitlines()[0]
            assert first.splitlines()[0].split()[1] != str(ranks.pids[rank])
            assert "in _train_in_a_thread" in second
        for rank in (0, 1):
            assert Path(f"/proc/{ranks.pids[rank]}").exists()


def test_rings_that_name_a_wrong_thread(tmp_path: Path) -> None:
    """A thread of another process, or one that has ended, gets no signal; the main thread does."""
    with _started(tmp_path, register=True):
        good = _header(tmp_path / "it.ring")
        for thread in (os.getpid(), 1, (1 << 32) - 1, good.pid):
            answer = request_stacks([replace(good, train_thread=thread)])
            assert answer[3].startswith("Stack (most recent call first):")


def test_py_spy(tmp_path: Path) -> None:
    """py-spy reads native frames of a rank that runs, and Python frames of a stopped one."""
    from rankcall.run.stacks import py_spy, stacks_of

    if py_spy() is None:
        pytest.skip("py-spy is not installed (rankcall[stacks])")
    plan = FaultPlan().hang(rank=1, seq=2, hold_gil=True).stop(rank=2, seq=2)
    run = tmp_path / "run"
    # No watcher runs, so no stacks are dumped from inside.
    with start_ranks(_one_by_one, 3, faults=plan, run_dir=run) as ranks:
        wait_until(lambda: _state(ranks, 2) == "T")
        wait_until(lambda: _with_headers(run) == 3)
        if not _may_look_into(ranks.pids[0]):
            pytest.skip("py-spy may not look into other processes here")
        stacks: dict[int, str] = {}

        def looked() -> bool:
            stacks.update(stacks_of(load(run), [0, 1, 2]))
            return "_carry_out" in stacks.get(1, "") and "all_reduce" in stacks.get(0, "")

        wait_until(looked)
        assert _state(ranks, 2) == "T"
    assert sorted(stacks) == [0, 1, 2]
    assert "pthread_mutex_lock" in stacks[1]  # native, with the GIL held
    assert "c10d" in stacks[0]
    assert "_carry_out" in stacks[2]
    for text in stacks.values():
        assert text.startswith("Thread ")
        assert '"MainThread"' in text.splitlines()[0]
        assert "rankcall-heart" not in text


def _with_headers(run: Path) -> int:
    """Count the rings that can be read: a rank makes the file first, then writes the header."""
    return sum(read_header(path) is not None for path in ring_paths(run))


def _state(ranks: Ranks, rank: int) -> str:
    return Path(f"/proc/{ranks.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]


def _may_look_into(pid: int) -> bool:
    """Return whether this user and kernel allow py-spy, by its error message."""
    from rankcall.run.stacks import py_spy

    command = [str(py_spy()), "dump", "--nonblocking", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    return not any(word in done.stderr for word in ("Permission", "not permitted"))

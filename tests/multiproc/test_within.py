"""``within`` on real ranks: torch ends the call in time, and the error names who has not come."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import rankcall
from rankcall.errors import CallTimeout
from rankcall.process import host_name

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]  # for a busy machine
SHORT_S = 0.5  # the others never come, so that this always expires


def timeout_of(group: Any = None) -> timedelta:
    """Return the timeout that calls of a group get."""
    backend: Any = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))
    found: timedelta = backend.options._timeout
    return found


def wait_for_all(name: str, ranks: int) -> None:
    """Keep this rank until so many have come, outside any collective."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{name}/{dist.get_rank()}", "here")
    store.wait([f"{name}/{rank}" for rank in range(ranks)], timedelta(seconds=200))


def error_of(rank: int, absent: int, call: Any) -> dict[str, Any]:
    """Make a call that one rank does not come to; return the error and the ranks that it names."""
    outcome: dict[str, Any] = {}
    if rank != absent:
        try:
            with rankcall.within(SHORT_S):
                call()
        except CallTimeout as error:
            outcome = {"text": str(error), "missing": list(error.missing_ranks)}
            outcome["torch"] = type(error.__cause__).__name__
    wait_for_all("called", dist.get_world_size())
    return outcome


def all_reduce_without_rank_2(rank: int, world_size: int, run_dir: str) -> dict[str, Any]:
    """Two of three ranks call; the third has issued another collective before."""
    rankcall.enable(run_dir)
    dist.barrier()
    return error_of(rank, 2, lambda: dist.all_reduce(torch.ones(4)))


def unrecorded(rank: int, world_size: int) -> list[str]:
    """Two of three ranks call, in a job without records."""
    caught: BaseException | None = None
    try:
        if rank != 2:
            with rankcall.within(SHORT_S):
                dist.all_reduce(torch.ones(4))
    except RuntimeError as error:
        caught = error
    wait_for_all("called", world_size)
    return [type(caught).__name__, str(caught)] if caught else ["", ""]


def backward_without_rank_1(rank: int, world_size: int, run_dir: str) -> dict[str, Any]:
    """DDP's reducer issues the call, on a thread of autograd's."""
    torch.set_num_threads(1)
    rankcall.enable(run_dir)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    return error_of(rank, 1, lambda: model(torch.ones(1, 2)).sum().backward())


def in_time(rank: int, world_size: int) -> dict[str, Any]:
    """Calls in time, errors of the user's, and blocks in each other and in two threads."""
    group = dist.new_group()
    usual, seen = (timeout_of(), timeout_of(group)), []
    with rankcall.within(100):
        with rankcall.within(timedelta(seconds=50)):
            seen.append((timeout_of(), timeout_of(group)))
            dist.barrier()
        seen.append((timeout_of(), timeout_of(group)))
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with rankcall.within(20):
            entered.set()
            leave.wait(100)

    thread = threading.Thread(target=other)
    with rankcall.within(10):  # is left first, and was entered first
        thread.start()
        assert entered.wait(100)
    seen.append((timeout_of(), timeout_of(group)))
    leave.set()
    thread.join(100)
    with pytest.raises(KeyError), rankcall.within(30):
        raise KeyError("the user's")
    with pytest.raises(RuntimeError, match="connection was closed by peer"), rankcall.within(30):
        raise RuntimeError("the user's connection was closed by peer")
    seconds = [[each.total_seconds() for each in both] for both in seen]
    return {"seen": seconds, "restored": (timeout_of(), timeout_of(group)) == usual}


def test_the_absent_rank_is_named(tmp_path: Path) -> None:
    """The ranks that wait raise, with the call, its line and what the third rank does instead."""
    first, second, third = run_ranks(all_reduce_without_rank_2, 3, str(tmp_path / "run"))
    assert third == {}
    for outcome in (first, second):
        assert outcome["missing"] == [2]
        assert outcome["torch"] == "RuntimeError"
        text = outcome["text"]
        assert text.startswith("all_reduce #2 of group 0 at "), text
        assert "test_within.py" in text
        assert f"did not end within {SHORT_S} s: 2 of 3 ranks came; missing rank 2" in text
        assert f"({host_name()}, pid " in text
        assert "\n  rank 2: last in barrier #1 of group 0 at " in text


def test_the_reducers_calls_are_covered(tmp_path: Path) -> None:
    """A backward pass ends, too."""
    first, second = run_ranks(backward_without_rank_1, 2, str(tmp_path / "run"))
    assert second == {}
    assert first["missing"] == [1]
    assert first["text"].startswith("all_reduce #")


def test_without_records_nobody_is_named() -> None:
    """The rank whose deadline expires first says why it names no rank."""
    first, second, third = run_ranks(unrecorded, 3)
    assert third == ["", ""]
    late = [text for kind, text in (first, second) if kind == "CallTimeout"]
    assert late
    for text in late:
        assert text.startswith(f"a collective did not end within {SHORT_S} s; which ranks are")
        assert "this job is not recorded" in text


def test_calls_in_time_and_errors_of_the_user() -> None:
    """The shortest of the blocks that run counts; afterwards every group has its own timeout."""
    for outcome in run_ranks(in_time, 2):
        assert outcome == {"seen": [[50, 50], [100, 100], [20, 20]], "restored": True}

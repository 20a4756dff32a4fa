"""Stores with real processes: ranks that are late, dead, stopped, doubled or forked.

A rank's error depends on which ranks have arrived by then. The tests do not depend on speed: an
arrival outlasts its call, so ranks that have arrived note it elsewhere before the next call.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hosting import LONG, all_at, attempt, await_ranks, connect, dead, hosted
from ranks import run_ranks, try_ranks

pytestmark = pytest.mark.multiproc


def _late(rank: int, world_size: int, port: int, folder: str) -> list[Any]:
    from rankcall import store

    client = connect(port)
    outcomes = []
    if rank == 0:  # late: comes when the others have given up
        await_ranks(folder, "given up", world_size - 1)
        outcomes.append(attempt(lambda: store.barrier(client, world_size, "late", LONG, rank)))
    else:
        attempt(lambda: store.barrier(client, world_size, "late", 0.2, rank))
        all_at(folder, "arrived", rank, world_size - 1)
        outcomes.append(attempt(lambda: store.barrier(client, world_size, "late", 0.5, rank)))
        all_at(folder, "given up", rank, world_size - 1)
        outcomes.append(attempt(lambda: store.barrier(client, world_size, "late", LONG, rank)))
    outcomes.append(attempt(lambda: store.barrier(client, world_size, "late", LONG, rank)))
    return outcomes


def test_a_late_rank_lets_all_pass_when_they_retry(tmp_path: Path) -> None:
    """Rank 0 comes after the others timed out: it passes at once, they pass when they retry."""
    with hosted() as (port, _):
        zero, *others = run_ranks(_late, 3, port, str(tmp_path), init=False)
    assert [name for name, _, _ in zero] == ["", ""]
    for outcomes in others:
        assert [name for name, _, _ in outcomes] == ["BarrierTimeout", "", ""]
        assert "2 of 3 ranks arrived; missing 0 (host unknown)" in outcomes[0][1]
        assert outcomes[0][2] < 1.5


def _killed_when_it_waits(client: Any) -> None:
    """Let this process die when it has arrived and waits for the others."""
    from rankcall.c10d.connection import Connection

    arrive = Connection.arrive

    def die(connection: Connection, request: Any, seconds: float) -> bool:
        threading.Thread(target=arrive, args=(connection, request, seconds), daemon=True).start()
        while not client.check([request.key]):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
        return False

    Connection.arrive = die  # type: ignore[method-assign]


def _dies(rank: int, world_size: int, port: int, folder: str, when: str) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, world_size, "p", LONG, rank)
    if rank == 1 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    outcomes = []
    if rank == 1:
        client.set("pid", str(os.getpid()))
        _killed_when_it_waits(client)
    elif when == "between":
        client.wait(["pid"])
        while not dead(int(client.get("pid"))):
            time.sleep(0.005)
    if when == "between":
        outcomes.append(attempt(lambda: store.barrier(client, world_size, "p", LONG, rank)))
    attempt(lambda: store.barrier(client, world_size, "p", 0.2, rank))
    all_at(folder, "arrived", rank, world_size - 1)
    return [*outcomes, attempt(lambda: store.barrier(client, world_size, "p", 0.5, rank))]


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_is_killed(when: str, tmp_path: Path) -> None:
    """A rank killed before it arrives is missing; killed later, it does not hold others up."""
    with hosted() as (port, _):
        zero, killed, two = try_ranks(_dies, 3, port, str(tmp_path), when, init=False)
    assert killed.exitcode == -signal.SIGKILL
    for result in (zero, two):
        assert result.ok, result
        *before, (name, text, took) = result.value
        assert [outcome[0] for outcome in before] == [""] * (when == "between")
        assert name == "BarrierTimeout"
        assert re.search(r"missing 1 \(\S+\)", text)
        assert "host unknown" not in text, "it was here before"
        assert took < 1.5


def _stopped_rank(rank: int, world_size: int, port: int, folder: str) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, world_size, "p", LONG, rank)
    if rank == 1:
        client.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return attempt(lambda: store.barrier(client, world_size, "p", LONG, rank))
    attempt(lambda: store.barrier(client, world_size, "p", 0.2, rank))
    all_at(folder, "arrived", rank, world_size - 1)
    outcome = attempt(lambda: store.barrier(client, world_size, "p", 0.5, rank))
    all_at(folder, "told", rank, world_size - 1)
    if rank == 0:
        os.kill(int(client.get("pid")), signal.SIGCONT)
    return outcome, attempt(lambda: store.barrier(client, world_size, "p", LONG, rank))


def test_a_stopped_rank(tmp_path: Path) -> None:
    """While it is stopped it is missing; when it goes on, all pass."""
    with hosted() as (port, _):
        zero, stopped, two = run_ranks(_stopped_rank, 3, port, str(tmp_path), init=False)
    assert stopped[0] == ""
    for first, second in (zero, two):
        assert first[0] == "BarrierTimeout"
        assert "2 of 3 ranks arrived; missing 1" in first[1]
        assert second[0] == ""


def _until_told(call: Any, folder: str, rank: int, others: int) -> tuple[str, str, float]:
    """Return the outcome of a call, or that it still waits when so many other calls have ended."""
    outcomes: list[tuple[str, str, float]] = []
    thread = threading.Thread(target=lambda: outcomes.append(attempt(call)), daemon=True)
    thread.start()
    while not outcomes and len(list(Path(folder).glob("told.*"))) < others:
        time.sleep(0.005)
    if outcomes:
        (Path(folder) / f"told.{rank}").touch()
    return outcomes[0] if outcomes else ("waits", "", 0.0)


def _doubled(rank: int, world_size: int, port: int, folder: str) -> Any:
    from rankcall import store

    client = connect(port)
    mine = min(rank, 1)  # ranks 1 and 2 both believe to be rank 1
    if rank == 0:
        await_ranks(folder, "came", 2)
        return os.getpid(), attempt(lambda: store.barrier(client, world_size, "p", 0.5, 0))
    outcome = _until_told(
        lambda: store.barrier(client, world_size, "p", LONG, mine, what="step 7"), folder, rank, 1
    )
    all_at(folder, "came", rank, 2)
    return os.getpid(), outcome


def test_two_processes_that_are_one_rank(tmp_path: Path) -> None:
    """The second process's error names the first; the errors of the other ranks name both."""
    with hosted() as (port, _):
        results = run_ranks(_doubled, 3, port, str(tmp_path), init=False)
    pids = [pid for pid, _ in results]
    (zero, *doubled) = [outcome for _, outcome in results]
    assert sorted(name for name, _, _ in doubled) == ["WorldMismatchError", "waits"]
    refused = next(outcome for outcome in doubled if outcome[0] == "WorldMismatchError")
    assert f"pid {pids[1]} on" in refused[1]
    assert f"pid {pids[2]} on" in refused[1]
    assert "(step 7)" in refused[1]
    assert "rank 1 was claimed a second time by pid" in zero[1]
    assert "missing 2" in zero[1]


def _all_zero(rank: int, world_size: int, port: int, folder: str) -> Any:
    from rankcall import store

    client = connect(port)
    return _until_told(
        lambda: store.barrier(client, world_size, "p", 20, 0), folder, rank, world_size - 1
    )


def test_all_processes_claim_rank_0(tmp_path: Path) -> None:
    """If all processes claim rank 0, none passes, and all but one raise at once."""
    with hosted() as (port, _):
        results = run_ranks(_all_zero, 6, port, str(tmp_path), init=False)
    assert sorted(name for name, _, _ in results) == ["WorldMismatchError"] * 5 + ["waits"]


def _sizes(rank: int, world_size: int, port: int, folder: str, how: str) -> Any:
    from rankcall import store

    client = connect(port)

    def call(size: int, timeout: float) -> Any:
        if how == "synchronize":
            return store.synchronize(client, b"", rank, size, "p", timeout, what="a check")
        if how == "without ranks":
            return store.barrier(client, size, "p", timeout, what="a check")
        return store.barrier(client, size, "p", timeout, rank, what="a check")

    mine = world_size if rank else world_size + 2
    attempt(lambda: call(mine, 0.1))  # then all have arrived
    all_at(folder, "arrived", rank, world_size)
    outcome = attempt(lambda: call(mine, 0.5))
    all_at(folder, "told", rank, world_size)
    return outcome, attempt(lambda: call(world_size, LONG))


@pytest.mark.parametrize("how", ["barrier", "synchronize", "without ranks"])
def test_world_sizes_that_differ(how: str, tmp_path: Path) -> None:
    """At its deadline, each rank raises which ranks expect which size; once mended, all pass."""
    with hosted() as (port, _):
        results = run_ranks(_sizes, 3, port, str(tmp_path), how, init=False, timeout=240)
    for (name, text, took), again in results:
        assert name == "WorldMismatchError", text
        assert "(a check)" in text
        assert took < 1.5
        if how == "without ranks":
            assert "1 process without a rank expects 5 ranks" in text
        else:
            assert re.search(r"rank 0 \(\S+\) expects 5 ranks", text)
            assert re.search(r"ranks 1-2 \(\S+\) expect 3 ranks", text)
        assert again[:2] == ["", ""] or again[:2] == ("", ""), again


def _forked(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, 2, "p", LONG, rank)
    child = os.fork()
    if child == 0:
        name, text, _ = attempt(lambda: store.barrier(client.clone(), 2, "p", LONG, rank))
        os._exit(0 if name == "WorldMismatchError" and "claimed by 2 processes" in text else 1)
    _, status = os.waitpid(child, 0)
    store.barrier(client, 2, "p", LONG, rank)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_another_process() -> None:
    """A child does not speak for its parent, nor on its connection."""
    with hosted() as (port, _):
        assert run_ranks(_forked, 2, port, init=False) == [0, 0]

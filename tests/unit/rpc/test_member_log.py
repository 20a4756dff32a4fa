"""The log of a dynamic group's members, against a model of it, over a store in memory."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict
from itertools import combinations
from typing import Any

import pytest
from torch.distributed import HashStore

from rankcall.process import Process
from rankcall.rpc.backends.zmq import member_log
from rankcall.rpc.backends.zmq.member_log import MemberLog, is_dead
from rankcall.testing.simulated_store import Mark, Simulation, Steps, World
from rankcall.testing.simulated_store import Process as Simulated


def card(session: int) -> dict[str, Any]:
    """Return what the log needs to know of a worker."""
    return {"node": {"name": f"w{session}"}, "rank": session, "session": session}


def soon() -> float:
    """Return a deadline that is not met."""
    return time.monotonic() + 20


@pytest.fixture
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a log after eight lines."""
    monkeypatch.setattr(member_log, "_LINES", 8)


@pytest.mark.usefixtures("short_logs")
def test_who_is_there_whoever_asks() -> None:
    """Members come and go many times; each log object, old or new, knows who is there."""
    store, choose = HashStore(), random.Random(4)
    logs = [MemberLog(store) for _ in range(3)]
    present: list[int] = []
    for session in range(150):
        if present and choose.random() < 0.5:
            gone = present.pop(choose.randrange(len(present)))
            choose.choice(logs).leave(gone)
        before = choose.choice(logs).enter(card(session), soon())
        assert [member["session"] for member in before] == present
        present.append(session)
        if session % 50 == 0:
            for log in (*logs, MemberLog(store)):
                assert [member["session"] for member in log.members(soon())] == present


@pytest.mark.usefixtures("short_logs")
def test_the_store_does_not_fill_up() -> None:
    """Many visits leave behind a line for each log that was closed."""
    store = HashStore()
    log = MemberLog(store)
    for session in range(150):
        assert log.enter(card(session), soon()) == []
        log.leave(session)
    sizes = [len(store.get(key)) for key in store.list_keys()]
    assert sum(size > 20 for size in sizes) <= 1
    assert sum(sizes) < 20 * 150


@pytest.mark.usefixtures("short_logs")
def test_nobody_is_lost_between_two_logs() -> None:
    """Of any two who enter at once, one sees the other; all are there in the end."""
    store = HashStore()
    seen: dict[int, set[int]] = {}

    def visit(first: int) -> None:
        log = MemberLog(store)
        for session in range(first, first + 20):
            seen[session] = {member["session"] for member in log.enter(card(session), soon())}
            if session % 4:
                log.leave(session)

    visitors = [threading.Thread(target=visit, args=(1000 * number,)) for number in range(1, 5)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    staying = {session for session in seen if session % 4 == 0}
    assert {member["session"] for member in MemberLog(store).members(soon())} == staying
    for session in staying:
        assert all(
            session in seen[other_session] or other_session in seen[session]
            for other_session in staying - {session}
        )


def simulated(sessions: int, visits: int, **faults: int) -> Simulation:
    """Return a simulation of workers that enter and leave, and stay after their last visit."""

    def worker(number: int) -> Simulated:
        def start() -> Steps[None]:
            log = MemberLog(None)  # type: ignore[arg-type]
            for visit in range(visits):
                session = 10 * number + visit
                seen = yield from log.entering(card(session))
                yield Mark("entered", (session, frozenset(member["session"] for member in seen)))
                if visit < visits - 1:
                    yield Mark("leaves", session)
                    yield from log.leaving(session)

        return Simulated(f"worker-{number}", start)

    def check_end(world: World) -> None:
        marks = [mark for number in range(sessions) for mark in world.marks(f"worker-{number}")]
        left = {mark.value for mark in marks if mark.name == "leaves"}
        seen = dict(mark.value for mark in marks if mark.name == "entered")
        staying = seen.keys() - left
        for first, second in combinations(sorted(staying), 2):
            assert first in seen[second] or second in seen[first], f"{first} and {second} missed"
        long_keys = [key for key in world.store if len(world.store[key]) > 20]
        assert len(long_keys) <= 2, "closed logs keep their lines"

    return Simulation(list(map(worker, range(sessions))), at_end=check_end, **faults)


def test_every_order_of_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every order of requests, of two workers that stay one sees the other."""
    monkeypatch.setattr(member_log, "_LINES", 2)
    assert simulated(2, 2, deaths=1).explore().ends


def test_random_orders_of_four_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for more workers and visits, which close several logs."""
    monkeypatch.setattr(member_log, "_LINES", 2)
    simulated(4, 3, deaths=1).search(500, seed=5)


def test_a_lost_worker_takes_no_others_off_the_log() -> None:
    """A worker that was stopped for long takes all others for lost; they have struck it off."""
    log = MemberLog(HashStore())
    for session in (1, 2, 3):
        log.enter(card(session), soon())
    log.leave(2, by=1)
    log.leave(1, by=2)
    log.leave(3, by=2)
    assert [member["session"] for member in log.members(soon())] == [1, 3]
    log.leave(3)
    assert [member["session"] for member in log.members(soon())] == [1]


def test_a_process_that_cannot_be_seen_is_not_dead() -> None:
    """A pid of another namespace or another host says nothing here; an own one that ended does."""
    own = asdict(Process.current())
    ended = {**own, "start": own["start"] + 1}
    assert is_dead({"process": ended})
    assert not is_dead({"process": own})
    for elsewhere in ({"pid_namespace": 1}, {"boot_id": "another host"}):
        assert not is_dead({"process": {**ended, **elsewhere}})

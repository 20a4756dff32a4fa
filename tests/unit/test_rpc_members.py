"""The log of who is in a dynamic group, against a model of it, over a store in memory."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
from torch.distributed import HashStore

from rankcall.rpc import _members
from rankcall.rpc._members import Lease, MemberLog


def card(session: int) -> dict[str, Any]:
    """Return what the log needs to know of a worker."""
    return {"node": {"name": f"w{session}"}, "rank": session, "session": session}


def soon() -> float:
    """Return a deadline that is not met."""
    return time.monotonic() + 20


@pytest.fixture
def short_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a log after eight lines."""
    monkeypatch.setattr(_members, "_LINES", 8)


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
        assert [each["session"] for each in before] == present
        present.append(session)
        if session % 50 == 0:
            for log in (*logs, MemberLog(store)):
                assert [each["session"] for each in log.members(soon())] == present


@pytest.mark.usefixtures("short_logs")
def test_the_store_does_not_fill_up() -> None:
    """What many visits leave behind is a line for each log that was closed."""
    store = HashStore()
    log = MemberLog(store)
    for session in range(150):
        assert log.enter(card(session), soon()) == []
        log.leave(session)
    kept = [len(store.get(key)) for key in store.list_keys()]
    assert sum(size > 20 for size in kept) <= 1
    assert sum(kept) < 20 * 150


@pytest.mark.usefixtures("short_logs")
def test_nobody_is_lost_between_two_logs() -> None:
    """Of any two who enter at once, one sees the other; all are there in the end."""
    store = HashStore()
    seen: dict[int, set[int]] = {}

    def visit(first: int) -> None:
        log = MemberLog(store)
        for session in range(first, first + 20):
            seen[session] = {each["session"] for each in log.enter(card(session), soon())}
            if session % 4:
                log.leave(session)

    visitors = [threading.Thread(target=visit, args=(1000 * each,)) for each in range(1, 5)]
    for each in visitors:
        each.start()
    for each in visitors:
        each.join()
    staying = {session for session in seen if session % 4 == 0}
    assert {each["session"] for each in MemberLog(store).members(soon())} == staying
    for one in staying:
        assert all(one in seen[other] or other in seen[one] for other in staying - {one})


def test_a_lease_passes_on_when_its_holder_is_gone() -> None:
    """It is taken over once it has not been renewed for as long as it lasts; not before."""
    store = HashStore()
    dead = Lease(store, "dead", lasts_s=0.3)
    dead._take(soon())  # and never renewed
    began = time.monotonic()
    with Lease(store, "next", lasts_s=0.3).held(soon()):
        assert time.monotonic() - began >= 0.3
        with (
            pytest.raises(RuntimeError, match=r"worker 'late' could not .*: worker 'next' has"),
            Lease(store, "late", lasts_s=20).held(time.monotonic() + 0.5),
        ):
            pass
    with Lease(store, "after", lasts_s=20).held(soon()):  # given back, not run out
        pass

"""One follower for several subscribers: each gets every event, or the number that it missed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import rankcall
from rankcall.capture import session
from rankcall.events import dispatch
from rankcall.events.dispatch import AT_EVENTS, NO_HURRY, Delivery, dispatcher
from rankcall.record import COMMIT_DONE, COMMIT_OPEN, RECORD
from rankcall.ring.follower import Batch, index_of

WAIT_S = 120.0  # far more than anything takes


class Keeper:
    """A subscriber that keeps its events, and can be held up."""

    wants_in_flight = False

    def __init__(self, name: str, hurry: int = NO_HURRY) -> None:
        self.name = name
        self._hurry = hurry
        self.events: list[tuple[int, str]] = []
        self.dropped = 0
        self.deliveries = 0  # with events
        self.finished = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def wake_at(self) -> int:
        """Return the urgency that the test chose."""
        return self._hurry

    def take(self, deliveries: list[Delivery], is_last: bool) -> None:
        """Keep the events, once the gate is open."""
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        self.deliveries += any(batches for _, batches, _ in deliveries)
        for _, batches, _ in deliveries:
            for batch in batches:
                self.events += events(batch)
                self.dropped += batch.dropped

    def finish(self) -> None:
        """Note the last call."""
        self.finished = True


def events(batch: Batch) -> list[tuple[int, str]]:
    """Return a batch's events in their order."""
    ordered = []
    for index, begins, ends in zip(index_of(batch.rows), batch.begins, batch.ends, strict=True):
        ordered += [(int(index), "start")] * bool(begins) + [(int(index), "end")] * bool(ends)
    return ordered


def both(first: int, last: int) -> list[tuple[int, str]]:
    """Return the start and the end of each record from ``first`` to ``last``."""
    return [(index, kind) for index in range(first, last) for kind in ("start", "end")]


@pytest.fixture(params=["native", "python"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """A Gloo group of one, recorded into a ring of 64 records."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    with rankcall.enable(tmp_path / "run", capture=request.param, capacity=64):
        yield
    dist.destroy_process_group()


def all_reduce(times: int) -> None:
    """Issue that many ops."""
    for _ in range(times):
        dist.all_reduce(torch.ones(1))


@pytest.mark.usefixtures("group")
def test_a_blocked_subscriber_does_not_delay_the_others() -> None:
    """It gets the contents of its queue later, and the number of events that it missed."""
    quick, blocked = Keeper("quick", AT_EVENTS), Keeper("blocked")
    blocked.gate.clear()
    subscriptions = [dispatcher.subscribe(quick), dispatcher.subscribe(blocked)]
    all_reduce(1)
    assert blocked.entered.wait(WAIT_S)
    for _ in range(20):
        all_reduce(20)
        assert subscriptions[0].flush(WAIT_S)
    assert quick.events == both(0, 401)
    assert quick.dropped == 0
    blocked.gate.set()
    assert subscriptions[1].flush(WAIT_S)
    assert len(blocked.events) + blocked.dropped == 2 * 401
    assert blocked.events[-64:] == both(401 - 32, 401)
    assert all(subscription.close(WAIT_S) for subscription in subscriptions)
    assert quick.finished
    assert blocked.finished


@pytest.mark.usefixtures("group")
def test_a_burst_is_delivered_in_batches() -> None:
    """A subscriber in a hurry takes the GIL from training once a millisecond at most.

    The bound holds at any speed of the machine: what is slow leaves time for fewer deliveries.
    """
    keeper = Keeper("keeper", AT_EVENTS)
    subscription = dispatcher.subscribe(keeper)
    began = time.monotonic()
    all_reduce(2000)
    deliveries = keeper.deliveries
    took_ms = (time.monotonic() - began) * 1e3
    assert subscription.flush(WAIT_S)
    assert len(keeper.events) + keeper.dropped == 2 * 2000
    assert deliveries <= took_ms + 1
    assert subscription.close(WAIT_S)


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_later_subscriber_gets_later_events() -> None:
    """Of an op that is in flight when it subscribes, it gets the end."""
    early, late = Keeper("early"), Keeper("late")
    first = dispatcher.subscribe(early)
    all_reduce(3)
    work = dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(1), async_op=True)  # record 3
    second = dispatcher.subscribe(late)
    all_reduce(2)
    work.wait()  # only this tells that a reduce_scatter of Gloo's has ended
    for subscription in (first, second):
        assert subscription.flush(WAIT_S)
        assert subscription.close(WAIT_S)
    assert len(early.events) == 2 * 6
    assert set(late.events) == {*both(4, 6), (3, "end")}


@pytest.mark.usefixtures("group")
def test_a_thread_that_is_left_behind_costs_the_others_nothing() -> None:
    """A subscriber that is closed while it is blocked gets no more events; the others go on."""
    blocked, other = Keeper("blocked"), Keeper("other")
    blocked.gate.clear()
    first, second = dispatcher.subscribe(blocked), dispatcher.subscribe(other)
    all_reduce(1)
    assert blocked.entered.wait(WAIT_S)
    assert not first.close(0.01)
    all_reduce(5)
    assert second.flush(WAIT_S)
    assert other.events == both(0, 6)
    assert second.close(WAIT_S)
    assert dispatcher.sources == []
    blocked.gate.set()
    first.thread.join(WAIT_S)
    assert not first.thread.is_alive()


def test_subscribing_switches_recording_on_and_off() -> None:
    """A subscription is a claim on the recording; without torch's ops it costs one thread."""
    subscription = dispatcher.subscribe(Keeper("keeper"))
    assert session.current() is not None
    assert subscription.thread.name == "rankcall-keeper"
    assert subscription.close(WAIT_S)
    assert session.current() is None


def batch_of(first: int, open_ops: list[int]) -> Batch:
    """Return a batch of four records, some of which have not ended."""
    rows = np.zeros(4, RECORD)
    index = np.arange(first, first + 4)
    ends = ~np.isin(index, open_ops)
    rows["commit"] = (index + 1) << 2 | np.where(ends, COMMIT_DONE, COMMIT_OPEN)
    return Batch(rows, np.ones(4, np.bool_), ends, 0)


@given(
    room=st.integers(1, 40),
    opened=st.lists(st.integers(0, 79), max_size=12, unique=True),
    lasting=st.sets(st.integers(0, 79)),
    taken_at=st.sets(st.integers(0, 19)),
)
def test_a_queue_drops_the_oldest_and_keeps_what_is_in_flight(
    room: int, opened: list[int], lasting: set[int], taken_at: set[int]
) -> None:
    """Every event is delivered once or counted; the start of an op that lasts is never dropped.

    ``opened`` are the ops that have not ended when they are first read, ``lasting`` those of them
    that stay in flight to the end.
    """
    queue = dispatch._Queue(room)
    delivered: list[tuple[int, str]] = []
    dropped = produced = 0
    still_open = np.array([op for op in opened if op in lasting], np.int64)
    for number in range(20):
        batch = batch_of(4 * number, opened)
        produced += len(events(batch))
        queue.add(batch, still_open[still_open < 4 * number + 4])
        if number in taken_at or number == 19:
            for taken in queue.take():
                delivered += events(taken)
                dropped += taken.dropped
    assert len(delivered) == len(set(delivered))
    assert delivered == sorted(delivered, key=lambda event: (event[0], event[1] == "end"))
    assert len(delivered) + dropped == produced
    assert {(int(op), "start") for op in still_open} <= set(delivered)
    assert delivered[-1][0] == 79  # the newest batch is never dropped

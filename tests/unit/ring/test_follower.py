"""The follower of a ring against a brute-force model: events, their order, and counted drops."""

from __future__ import annotations

import math
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankcall.record import (
    COMMIT_CLOSING,
    COMMIT_DONE,
    COMMIT_OPEN,
    COMMIT_WRITING,
    KINDS,
    OPS,
    RECORD,
    STATUSES,
)
from rankcall.ring import follower as follower_module
from rankcall.ring.follower import HOLD_NS, Batch, RingFollower
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import BODY_NAMES, Identity, PythonRing, create

ENQUEUED, STARTED, COMPLETED, _ = range(len(STATUSES))
PARKING = 64


def body(status: int = STARTED, **fields: float) -> tuple[float, ...]:
    """Return a record's fields for ``PythonRing.issue``."""
    values = {"status": status, "device_ms": math.nan, "peer": -1, "root": -1, **fields}
    flat: list[float] = []
    for name in BODY_NAMES:
        shape = RECORD[name].shape
        flat += [0] * shape[0] if shape else [values.get(name, 0)]
    return tuple(flat)


@dataclass
class Op:
    """The model's state of one op."""

    counter: int
    ended_ns: int | None = None
    start_told: bool = False
    end_told: bool = False


class World:
    """A small ring, its writer, its follower, and the model they are compared with."""

    def __init__(self, capacity: int, chunk: int = 2048) -> None:
        self.geometry = Geometry(capacity, PARKING, 4096)
        self.map = create(None, Identity(), self.geometry)
        self.ring = PythonRing(self.map, self.geometry)
        self.follower = RingFollower(self.map, self.geometry)
        self.chunk = chunk
        self.now = HOLD_NS * 10
        self.ops: list[Op] = []
        self.dropped = 0

    def issue(self, counter: int = 1, on_device: bool = False) -> int:
        self.ops.append(Op(counter))
        started = 0 if on_device else self.now
        return self.ring.issue(
            body(ENQUEUED if on_device else STARTED, group=counter, started_ns=started)
        )

    def start(self, index: int) -> None:
        self.ring.start(index, self.now)

    def finish(self, index: int) -> None:
        self.ops[index].ended_ns = self.now
        self.ring.finish(index, completed_ns=self.now, status=COMPLETED)

    def running(self) -> list[int]:
        return [at for at, op in enumerate(self.ops) if op.ended_ns is None]

    def poll(self) -> list[tuple[int, str]]:
        """Return the events that the follower delivers now; add up those that it drops."""
        polled: list[tuple[int, str]] = []
        with (
            mock.patch.object(follower_module, "_CHUNK", self.chunk),
            mock.patch.object(follower_module.time, "monotonic_ns", return_value=self.now),
        ):
            while (batch := self.follower.poll(self.ring.head)) is not None:
                self.dropped += batch.dropped
                polled += events(batch)
        return polled

    def readable(self) -> set[int]:
        """Return every record that is still somewhere in the file."""
        places = [self.geometry.inflight_offset + at * RECORD.itemsize for at in range(PARKING)]
        places += [
            self.geometry.records_offset + at * RECORD.itemsize
            for at in range(self.geometry.capacity)
        ]
        return {(struct.unpack_from("<Q", self.map, at)[0] >> 2) - 1 for at in places}

    def expected(self) -> tuple[set[tuple[int, str]], int]:
        """Return what a look must deliver now, and how many events it must count as dropped."""
        readable, due, dropped = self.readable(), set(), 0
        for index, op in enumerate(self.ops):
            if op.end_told:
                continue
            if index not in readable:
                dropped += 1 if op.start_told else 2
                op.start_told = op.end_told = True
                continue
            if not op.start_told:
                due.add((index, "start"))
                op.start_told = True
            if op.ended_ns is not None and not self.is_held(index):
                due.add((index, "end"))
                op.end_told = True
        return due, dropped

    def is_held(self, index: int) -> bool:
        op = self.ops[index]
        overtaken = any(
            earlier.ended_ns is None and earlier.counter == op.counter
            for earlier in self.ops[:index]
        )
        return overtaken and self.now - (op.ended_ns or 0) < HOLD_NS


def events(batch: Batch) -> list[tuple[int, str]]:
    """Return a batch's events in the order in which hooks get them."""
    ordered = []
    for row, begins, ends in zip(batch.rows, batch.begins, batch.ends, strict=True):
        index = int(row["commit"] >> 2) - 1
        ordered += [(index, "start")] * bool(begins) + [(index, "end")] * bool(ends)
    return ordered


def check_order(told: list[tuple[int, str]], ops: list[Op]) -> None:
    """One look's events: a start before its end, and each counter's in its order."""
    places = {event: at for at, event in enumerate(told)}
    assert len(places) == len(told), "an event came twice"
    for (index, kind), at in places.items():
        if kind == "end" and (index, "start") in places:
            assert places[index, "start"] < at
    for counter in {op.counter for op in ops}:
        for kind in ("start", "end"):
            order = [
                index for index, name in told if name == kind and ops[index].counter == counter
            ]
            assert order == sorted(order)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.integers(1, 2), st.booleans()),
        st.tuples(st.just("burst"), st.integers(1, 40)),
        st.tuples(st.just("start"), st.integers(0, 99)),
        st.tuples(st.just("finish"), st.integers(0, 99)),
        st.tuples(st.just("finish"), st.integers(0, 99)),
        st.tuples(st.just("wait"), st.sampled_from([HOLD_NS // 2, HOLD_NS * 2])),
        st.just(("poll",)),
    ),
    max_size=60,
)


@given(
    capacity=st.sampled_from([1, 2, 4, 16]), chunk=st.sampled_from([1, 3, 2048]), actions=ACTIONS
)
@example(capacity=4, chunk=1, actions=[("issue", 1, True), ("burst", 40), ("poll",), ("finish", 0)])
@example(capacity=4, chunk=1, actions=[("issue", 1, False), ("burst", 40), ("poll",), ("start", 0)])
def test_every_event_is_delivered_once_or_counted(
    capacity: int, chunk: int, actions: list[tuple[object, ...]]
) -> None:
    """Random schedules on tiny rings: each look delivers and counts exactly what the model says."""
    world = World(capacity, chunk)
    delivered: Counter[tuple[int, str]] = Counter()
    drops = 0

    def look() -> None:
        nonlocal drops
        due, dropped = world.expected()
        drops += dropped
        polled = world.poll()
        assert set(polled) == due
        check_order(polled, world.ops)
        delivered.update(polled)

    for name, *args in actions:
        running = world.running()
        if name == "issue" and len(running) < PARKING // 2:
            world.issue(*args)
        elif name == "burst":
            for _ in range(args[0]):
                world.finish(world.issue(counter=3))
        elif name == "start" and running:
            world.start(running[args[0] % len(running)])
        elif name == "finish" and running:
            world.finish(running[args[0] % len(running)])
        elif name == "wait":
            world.now += args[0]
        elif name == "poll":
            look()
    for index in world.running():
        world.finish(index)
    world.now += HOLD_NS
    look()
    world.finish(world.issue())  # so that the last dropped events are reported
    look()
    assert max(delivered.values()) == 1
    assert all((index, "start") in delivered for index, kind in delivered if kind == "end")
    assert world.dropped == drops
    assert len(delivered) + drops == 2 * len(world.ops)
    assert not world.follower.has_open


def test_what_is_in_flight_is_never_dropped() -> None:
    """Ops that stay open over many laps of the ring are reported when they end."""
    world = World(capacity=8, chunk=2)
    slow = [world.issue() for _ in range(5)]
    for _ in range(500):
        world.finish(world.issue(counter=2))
    polled = world.poll()
    assert [(index, "start") for index in slow] == [event for event in polled if event[0] in slow]
    assert [int(row["commit"] >> 2) - 1 for row in world.follower.unfinished()] == slow
    for index in slow:
        world.finish(index)
    assert world.poll() == [(index, "end") for index in slow]
    assert world.dropped == 2 * (500 - 8)


def test_a_full_table_of_ops_in_flight_is_counted() -> None:
    """More unfinished ops than the table holds: those that found no room count twice each."""
    world = World(capacity=1)
    for _ in range(PARKING + 6):
        world.issue()
    polled = world.poll()
    for index in world.running():
        world.finish(index)
    polled += world.poll()
    world.finish(world.issue())
    polled += world.poll()
    assert len(polled) + world.dropped == 2 * len(world.ops)
    assert world.dropped == 2 * 5


def test_a_later_op_that_ends_first_waits_for_the_earlier_one() -> None:
    """Ends of one counter come in order while the earlier op ends soon."""
    world = World(capacity=16)
    first, second, other = world.issue(), world.issue(), world.issue(counter=2)
    world.finish(second)
    world.finish(other)
    assert world.poll() == [
        (first, "start"),
        (second, "start"),
        (other, "start"),
        (other, "end"),
    ]
    assert world.follower.unsettled
    world.finish(first)
    assert world.poll() == [(first, "end"), (second, "end")]
    assert not world.follower.unsettled


def test_an_end_is_not_held_back_for_long() -> None:
    """An op that hangs does not hide for longer than HOLD_NS that a later one has ended."""
    world = World(capacity=16)
    first, second = world.issue(), world.issue()
    world.finish(second)
    assert world.poll() == [(first, "start"), (second, "start")]
    world.now += HOLD_NS
    assert world.poll() == [(second, "end")]
    assert not world.follower.unsettled


def test_sends_and_receives_are_counters_of_their_own() -> None:
    """A receive that hangs holds back no send, no other peer and no other tag, but its own kind."""
    world = World(capacity=16)
    p2p, send, recv = KINDS.index("p2p"), OPS.index("send"), OPS.index("recv")
    for op, peer, tag in ((recv, 1, 0), (recv, 1, 0), (send, 1, 0), (recv, 2, 0), (recv, 1, 7)):
        world.ops.append(Op(1))
        world.ring.issue(body(group=1, kind=p2p, op=op, peer=peer, tag=tag, started_ns=world.now))
    for index in (1, 2, 3, 4):
        world.finish(index)
    assert [index for index, kind in world.poll() if kind == "end"] == [2, 3, 4]


def test_a_device_op_starts_when_it_is_issued() -> None:
    """What its device tells later is no second start, and an op that never begins has one, too."""
    world = World(capacity=4)
    op = world.issue(on_device=True)
    assert world.poll() == [(op, "start")]
    assert len(world.follower.unfinished()) == 1
    world.start(op)
    assert world.poll() == []
    world.finish(op)
    assert world.poll() == [(op, "end")]
    late = world.issue(on_device=True)
    world.finish(late)
    assert world.poll() == [(late, "start"), (late, "end")]


def word_at(world: World, index: int) -> tuple[int, int]:
    """Return the offset of a record's commit word, and the word's number."""
    slot = index & (world.geometry.capacity - 1)
    return world.geometry.records_offset + slot * RECORD.itemsize, (index + 1) << 2


def set_state(world: World, index: int, state: int) -> None:
    """Put a record in a state that a preempted writer would leave it in."""
    at, word = word_at(world, index)
    struct.pack_into("<Q", world.map, at, word | state)


def test_a_record_being_written_is_waited_for() -> None:
    """Later records wait, too; no event is counted; the follower asks to be polled soon."""
    world = World(capacity=8)
    for _ in range(3):
        world.finish(world.issue())
    set_state(world, 1, COMMIT_WRITING)
    assert world.poll() == [(0, "start"), (0, "end")]
    assert world.follower.unsettled
    world.now += 99_000_000
    assert world.poll() == []
    set_state(world, 1, COMMIT_DONE)
    assert world.poll() == [(1, "start"), (1, "end"), (2, "start"), (2, "end")]
    assert world.dropped == 0


def test_a_record_that_is_never_written_is_counted() -> None:
    """A writer that gave up does not stop the reader: after 100 ms its op counts as dropped."""
    world = World(capacity=8)
    for _ in range(4):
        world.finish(world.issue())
    set_state(world, 0, COMMIT_WRITING)
    set_state(world, 2, COMMIT_WRITING)
    assert world.poll() == []
    world.now += 100_000_000
    assert world.poll() == [(1, "start"), (1, "end")]
    assert world.dropped == 2
    assert world.poll() == []  # the patience with record 2 begins only now
    world.now += 99_000_000
    assert world.poll() == []
    world.now += 1_000_000
    assert world.poll() == [(3, "start"), (3, "end")]
    assert world.dropped == 4


def test_a_record_that_is_about_to_end_is_not_forgotten() -> None:
    """A finisher preempted half way: the op counts as running, then its end is delivered."""
    world = World(capacity=8)
    op = world.issue()
    assert world.poll() == [(op, "start")]
    set_state(world, op, COMMIT_CLOSING)
    assert world.poll() == []
    assert len(world.follower.unfinished()) == 1
    set_state(world, op, COMMIT_OPEN)
    world.finish(op)
    assert world.poll() == [(op, "end")]


def test_a_record_on_its_way_to_the_table_is_not_forgotten() -> None:
    """A lapping writer preempted half way: the op it moves is neither lost nor reported twice."""
    world = World(capacity=8)
    op = world.issue()
    assert world.poll() == [(op, "start")]
    set_state(world, op, COMMIT_WRITING)
    assert world.poll() == []
    assert world.follower.has_open
    set_state(world, op, COMMIT_OPEN)
    world.finish(op)
    assert world.poll() == [(op, "end")]
    assert world.dropped == 0


def test_a_follower_that_begins_late_reports_ends_of_what_is_in_flight() -> None:
    """Of ops that were issued before, only the ends that are still to come are reported."""
    world = World(capacity=8)
    world.finish(world.issue())
    running = world.issue()
    world.follower = RingFollower(world.map, world.geometry, first=world.ring.head)
    assert world.poll() == []
    after = world.issue(counter=2)
    world.finish(running)
    assert world.poll() == [(running, "end"), (after, "start")]


@pytest.mark.parametrize("threads", [1, 4])
def test_writers_on_other_threads(threads: int) -> None:
    """While writers lap the ring all the time, the sum of events and drops stays exact."""
    world = World(capacity=64)
    ops_per_thread = 3000
    gate = threading.Barrier(threads + 1)

    def write() -> None:
        gate.wait(10)
        for _ in range(ops_per_thread):
            index = world.ring.issue(body(started_ns=1))
            world.ring.finish(index, completed_ns=1, status=COMPLETED)

    writers = [threading.Thread(target=write) for _ in range(threads)]
    for writer in writers:
        writer.start()
    gate.wait(10)
    seen: Counter[tuple[int, str]] = Counter()
    dropped = 0

    def look() -> None:
        nonlocal dropped
        while (batch := world.follower.poll(world.ring.head)) is not None:
            dropped += batch.dropped
            seen.update(events(batch))

    while any(writer.is_alive() for writer in writers):
        look()
        time.sleep(0.0005)  # a reader that never lets go of the GIL would starve the writers
    look()
    world.ring.finish(world.ring.issue(body(started_ns=1)), completed_ns=1, status=COMPLETED)
    look()
    assert max(seen.values()) == 1
    assert len(seen) + dropped == 2 * (ops_per_thread * threads + 1)

"""Which ops on devices end, given what their back end says it has completed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from device_bench import SECOND, Backend, Bench, Device, ProcessGroup

from rankcall.capture.device_ops import NO_NUMBER


@pytest.fixture
def group() -> ProcessGroup:
    """A group that the status knows as number 7."""
    return ProcessGroup(7)


@pytest.fixture
def bench(group: ProcessGroup) -> Bench:
    """A bench whose group 1 is ``group``."""
    made = Bench()
    made.status.add_group(1, group, new=True)
    return made


def test_collectives_end_up_to_the_number_completed(bench: Bench) -> None:
    """All collectives up to the number that completed last have completed, and no other."""
    for record in range(4):
        bench.issue(record, 10 + record)
    assert bench.look(9) == []
    assert bench.look(11) == [(0, True), (1, True)]
    assert bench.look(11) == []
    assert bench.look(13) == [(2, True), (3, True)]


def test_messages_of_a_block_end_with_a_later_collective(bench: Bench) -> None:
    """A collective that is over has let the blocks in front of it through, and blocks collectives.

    Number 1 can be a collective's or a block's. There are three blocks for each collective.
    """
    record = 0
    for collective in (1, 2):
        for _ in range(3):
            for _ in range(2):
                bench.issue(record, p2p=True, block=record - record % 2)
                record += 1
        bench.issue(record, collective)
        record += 2
    bench.enqueued = 2
    assert bench.look(0) == []
    assert sorted(bench.look(1)) == [(0, True), (1, True)]
    assert sorted(bench.look(3)) == [(number, True) for number in range(2, 6)]
    assert sorted(bench.look(4)) == [(6, True), (8, True), (9, True)]
    assert sorted(bench.look(6)) == [(number, True) for number in range(10, 14)]
    assert bench.look(2) == [(14, True)]


def test_an_op_that_never_completes_stays_in_flight(bench: Bench) -> None:
    """However often one looks: this is the hang that is to be found."""
    bench.issue(0, 1)
    bench.issue(1, 2)
    assert bench.look(1) == [(0, True)]
    for _ in range(100):
        assert bench.look(1) == []


def test_what_has_started_and_what_has_not(bench: Bench) -> None:
    """If the back end tells starts, each op in flight is told as begun or as not begun."""
    for record in range(3):
        bench.issue(record, 10 + record)
    bench.look(9)
    assert bench.starts == {}
    bench.started = 10
    bench.look(9)
    assert bench.starts == {0: 1, 1: 0, 2: 0}
    bench.started = 11
    bench.look(10)
    assert bench.starts == {0: 1, 1: 1, 2: 0}


def test_starts_that_cannot_be_told(bench: Bench) -> None:
    """A counted number may be too high, and one number is of collectives or of messages."""
    bench.started = 10
    bench.issue(0)  # without a number of its own
    bench.issue(1, 11)
    bench.look(9)
    assert bench.starts == {1: 0}
    bench.issue(2, 3, p2p=True)
    bench.look(9)
    assert bench.starts == {1: -1}


def test_nothing_is_read_while_nothing_is_in_flight(bench: Bench) -> None:
    """A job without ops on devices costs no look at the back end."""
    bench.look(1)
    assert bench.reads == 0
    bench.issue(0, 1)
    bench.look(1)
    assert bench.reads == 1
    bench.look(1)
    assert bench.reads == 1


def test_the_status_is_not_read_beside_a_first_op(bench: Bench) -> None:
    """torch adds a group to its table at the group's first op, and readers take no lock."""
    bench.issue(0, 1)
    bench.may_read = False
    assert bench.look(1) == []
    assert bench.reads == 0
    bench.may_read = True
    assert bench.look(1) == [(0, True)]


def test_groups_are_told_apart_by_their_back_ends_number() -> None:
    """Two groups count their collectives apart."""
    bench, first, second = Bench(), ProcessGroup(7), ProcessGroup(8)
    bench.status.add_group(1, first, new=False)
    bench.status.add_group(2, second, new=False)
    bench.issue(0, 5, group=1)
    bench.issue(1, 5, group=2)
    bench.completed = {7: 4, 8: 5}
    assert bench.look() == [(1, True)]


@pytest.mark.parametrize(("uid", "looks"), [(None, 1), (99, 3)])
def test_without_a_status_the_end_is_unknown(uid: int | None, looks: int) -> None:
    """If a back end keeps no status, its ops are closed, not completed.

    One without a number in the status keeps none, as ProcessGroupNCCL2. One with a number may only
    have issued nothing when the status was read.
    """
    bench, group = Bench(), ProcessGroup(uid)
    bench.status.add_group(1, group, new=False)
    bench.issue(0, 1)
    seen = [bench.look(5) for _ in range(looks)]
    assert seen == [[]] * (looks - 1) + [[(0, False)]]


def test_the_status_of_a_group_outlives_it() -> None:
    """A group is not kept alive; the back end still tells what completed before it went."""
    bench, group = Bench(), ProcessGroup(7)
    bench.status.add_group(1, group, new=False)
    bench.issue(0, 1)
    bench.issue(1, 2)
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    assert bench.look(1) == [(0, True)]
    assert bench.look(2) == [(1, True)]


def test_an_op_without_a_number_ends_with_what_was_enqueued_before_the_next_look(
    group: ProcessGroup,
) -> None:
    """Sends in a coalescing block have no Work; the block is enqueued when it ends."""
    bench = Bench()
    bench.status.add_group(1, group, new=False)
    for record in range(3):
        bench.issue(record, NO_NUMBER, p2p=True, block=0)
    bench.enqueued = 4  # the block is still open
    assert bench.look(4) == []
    bench.enqueued = 5
    assert bench.look(4) == []
    assert bench.look(4) == []
    assert bench.look(5) == [(0, True), (1, True), (2, True)]


def test_ops_without_a_number_are_counted(bench: Bench, group: ProcessGroup) -> None:
    """Synchronous collectives of a new group have no Work: the one that hangs is known exactly."""
    bench.status.add_group(1, group, new=True)
    for record in range(6):
        bench.issue(record)
    bench.enqueued = 6
    assert bench.look(4) == [(0, True), (1, True), (2, True), (3, True)]
    for record in range(6, 9):
        bench.issue(record)
    bench.enqueued = 9
    assert bench.look(7) == [(4, True), (5, True), (6, True)]
    for _ in range(10):
        assert bench.look(7) == []


def test_counting_goes_on_from_a_known_number(bench: Bench) -> None:
    """Ops with and without a Work take turns."""
    bench.issue(0, 10)
    bench.issue(1)
    bench.issue(2, 12)
    bench.issue(3)
    bench.enqueued = 13
    assert bench.look(11) == [(0, True), (1, True)]
    assert bench.look(12) == [(2, True)]
    assert bench.look(13) == [(3, True)]


def test_the_ops_of_a_block_count_as_one(bench: Bench) -> None:
    """A batch of sends and receives is launched under one number."""
    bench.issue(0, 4, p2p=True)
    for record in range(1, 4):
        bench.issue(record, p2p=True, block=1)
    for record in range(4, 6):
        bench.issue(record, p2p=True, block=4)
    bench.enqueued = 6
    assert bench.look(5) == [(0, True), (1, True), (2, True), (3, True)]
    assert bench.look(6) == [(4, True), (5, True)]


def test_counting_gives_up_if_it_does_not_fit(bench: Bench) -> None:
    """The back end launched something that was not seen: no op ends before all may have."""
    bench.issue(0, 10)
    bench.issue(1)
    bench.issue(2)
    bench.enqueued = 15
    assert bench.look(12) == [(0, True)]
    assert bench.look(13) == []
    assert bench.look(14) == [(1, True)]
    assert bench.look(15) == [(2, True)]


def test_a_block_that_hangs_stays_in_flight(bench: Bench) -> None:
    """The back end is still polled, and never reports that the block has completed."""
    bench.issue(0, NO_NUMBER, p2p=True)
    bench.enqueued = 5
    for _ in range(20):
        assert bench.look(4) == []


def test_numbers_of_one_kind_say_nothing_of_the_other(bench: Bench) -> None:
    """A number that only sends and receives have reached ends no collective."""
    for number in range(1, 101):
        bench.issue(number, number, p2p=True)
    bench.issue(0, 5)  # a collective that hangs
    assert bench.look(100) == [(number, True) for number in range(1, 101)]
    for _ in range(20):
        assert bench.look(100) == []


def test_a_number_of_either_kind_ends_what_came_before_both(bench: Bench) -> None:
    """Whichever of the two has completed, what was issued up to the earlier of them has."""
    bench.issue(0, 4)
    bench.issue(1, 5)
    bench.issue(2, 4, p2p=True)
    bench.issue(3, 5, p2p=True)
    assert bench.look(5) == [(0, True), (1, True)]
    for _ in range(20):
        assert bench.look(5) == []  # the second message may hang, or nothing
    assert bench.starts == {2: -2, 3: -2}
    bench.issue(4, 7, p2p=True)
    assert bench.look(7) == [(2, True), (3, True), (4, True)]
    assert bench.starts == {2: -1, 3: -1}


def test_a_number_that_was_reached_before_is_not_the_new_one(bench: Bench) -> None:
    """Eight messages are over; number 5, which is new, is a collective's."""
    for number in range(1, 9):
        bench.issue(number, number, p2p=True)
    assert len(bench.look(8)) == 8
    for number in range(1, 8):
        bench.issue(10 + number, number)
    assert bench.look(5) == [(10 + number, True) for number in range(1, 6)]


def test_two_kinds_that_take_turns_all_end(bench: Bench) -> None:
    """In a job that is well, no op stays behind for long."""
    ended: list[Any] = []
    for number in range(1, 8):
        bench.issue(2 * number, number)
        bench.issue(2 * number + 1, number, p2p=True)
        ended += bench.look(number)
    assert all(completed for _, completed in ended)
    assert {record for record, _ in ended} >= set(range(2, 14))


def test_a_future_ends_its_op_alone(bench: Bench) -> None:
    """Messages to two peers keep no order: one that hangs is not passed by the next."""
    bench.issue(0, 1, p2p=True, watched=True)
    bench.issue(1, 2, p2p=True, watched=True)
    bench.end(1)
    for _ in range(20):
        assert bench.look(2) == []
    assert bench.reads == 0


def test_a_future_ends_what_is_before_it_in_its_stream(bench: Bench) -> None:
    """A synchronous collective runs in its caller's stream, and the next op waits for it."""
    bench.issue(0, 1, stream=3, in_stream=True)
    bench.issue(1, 2, stream=4, in_stream=True)
    bench.issue(2, 1, p2p=True, watched=True, stream=3)
    bench.issue(3, 3, stream=3, in_stream=True)
    bench.end(2)
    assert bench.look(1) == [(0, True)]


def test_a_number_is_not_that_of_a_message_whose_future_is_not_done(bench: Bench) -> None:
    """The message hangs, so the collective of the same number is what has completed."""
    bench.issue(0, 1, stream=3, in_stream=True)
    bench.issue(1, 1, p2p=True, watched=True, stream=3)
    assert bench.look(1) == []  # its future may be done in a moment
    assert bench.look(1) == [(0, True)]
    for _ in range(20):
        assert bench.look(1) == []


def test_a_collective_whose_future_is_never_done_ends_by_its_number(bench: Bench) -> None:
    """ProcessGroupNCCL forgets the futures of collectives in a coalescing block."""
    bench.issue(0, 1, watched=True)
    bench.issue(1, 2, watched=True)
    assert bench.look(1) == [(0, True)]


def test_without_a_status_a_watched_op_stays_in_flight() -> None:
    """Its future is yet to tell; it may be what hangs."""
    bench, group = Bench(), ProcessGroup(None)
    bench.status.add_group(1, group, new=False)
    bench.issue(0, watched=True)
    bench.issue(1, p2p=True, watched=True)
    for _ in range(20):
        assert bench.look(5) == []


def test_what_came_at_the_last_moment_is_closed_at_the_end(bench: Bench) -> None:
    """An op that may have completed unseen is closed; one that was in flight before stays so."""
    bench.issue(0, 1)
    for _ in range(5):
        bench.look(0)
    bench.issue(1, 2)
    bench.ends = []
    bench.status.close()
    assert bench.ends == [(1, False)]


def test_what_is_kept_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that never completes anything does not make a job's memory grow."""
    monkeypatch.setattr("rankcall.capture.device_ops._MOST_OPS", 100)
    for record in range(250):
        bench.issue(record, record + 1)
    assert bench.look(0) == [(record, False) for record in range(150)]


def test_a_group_that_raises_hides_no_other() -> None:
    """A group without a back end for its device must not keep other groups' ops in flight."""

    class Broken(ProcessGroup):
        def _get_backend(self, device: Device) -> Backend:
            raise RuntimeError("no back end")

    bench, broken, sound = Bench(), Broken(1), ProcessGroup(7)
    bench.status.add_group(1, broken, new=False)
    bench.status.add_group(2, sound, new=False)
    bench.issue(0, 5, group=1)
    bench.issue(1, 5, group=2)
    assert bench.look(5) == [(0, False), (1, True)]  # the first one's end will not be known


def test_an_op_enqueued_during_a_look_is_not_counted_as_a_message(bench: Bench) -> None:
    """A look takes the noted ops, then reads the status. An op may be enqueued between the two.

    Its number is no message's, although the op that was noted last is a message: the message has a
    number of its own. If the message kind counted it, the number could be of either kind for ever.
    """
    bench.issue(0, number=1)
    bench.issue(1, number=1, p2p=True, watched=True)
    bench.enqueued = 2  # the collective of record 2, which is not noted yet
    bench.look(completed=1)
    bench.end(1)
    bench.issue(2, number=2)
    ended = bench.look(completed=2)
    assert (2, True) in ended + bench.look()


@pytest.mark.parametrize(("uid", "looks"), [(7, 1), (None, 2)])
def test_ends_are_known_until_an_earlier_look(uid: int | None, looks: int) -> None:
    """A back end's watchdog has its turn between two looks, or, if it keeps no status, in two.

    How long a look comes after another one says nothing: a busy machine delays the watchdog, too.
    """
    bench = Bench()
    bench.status.add_group(1, ProcessGroup(uid), new=False)
    bench.issue(0, 5, watched=True)
    begun = [bench.status.known_ns]
    for seconds in (1, 30, 1, 5):
        bench.now_ns += (seconds - 1) * SECOND
        bench.look(4)
        begun.append(bench.now_ns)
        assert bench.status.known_ns == begun[max(0, len(begun) - 1 - looks)]
    bench.end(0)
    bench.look(4)
    assert bench.status.known_ns == bench.now_ns  # nothing is in flight


def test_looks_that_follow_at_once_give_the_watchdog_no_time(bench: Bench) -> None:
    """A reader may ask for looks between those of each second."""
    bench.issue(0, 5)
    bench.look(4)
    known_ns = bench.status.known_ns
    for _ in range(5):
        bench.now_ns += SECOND // 10
        bench.status.poll()
        assert bench.status.known_ns == known_ns


def test_a_look_at_which_nothing_can_be_read_is_none(bench: Bench) -> None:
    """While a thread captures, the status is not read, and the ends since then are not known."""
    bench.issue(0, 5)
    bench.look(4)
    known_ns = bench.status.known_ns
    bench.may_read = False
    bench.look(5)
    assert bench.status.known_ns == known_ns
    bench.may_read = True
    assert bench.look(5) == [(0, True)]
    assert bench.status.known_ns == bench.now_ns


def test_nothing_ends_unnoticed_after_the_last_look(bench: Bench) -> None:
    """What is in flight after the end of a recording has not ended."""
    bench.issue(0, 5)
    bench.look(4)
    bench.now_ns += 10 * SECOND
    bench.status.close()
    assert bench.status.known_ns == bench.now_ns

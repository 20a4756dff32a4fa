"""Where ranks stop once one is asked to: every order of the ranks, their threads and the requests.

In the model, each rank is two processes on a simulated store: its training thread passes points as
``Stopping.pass_point`` does, and its listening thread freezes it and reports as ``ErrorChannel``
does. What the two threads share is in the store as well, so that the scheduler also tries every
order of their steps. The log and its requests are the real ones.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rankcall.c10d.parts import Log
from rankcall.join.shared_log import SharedLog
from rankcall.join.stopping import Stopping
from rankcall.testing.simulated_store import (
    Check,
    Mark,
    Process,
    Read,
    ReadMany,
    Set,
    Simulation,
    Steps,
    Violation,
    Wait,
    World,
)


class Rank:
    """The training thread and the listening thread of one rank of the model.

    ``epochs`` has the number of batches of every rank, for each iteration. ``looks_first`` and
    ``reads_first`` plant the two orders that ``Stopping`` forbids.
    """

    def __init__(
        self,
        rank: int,
        epochs: Sequence[Sequence[int]],
        looks_first: bool = False,
        reads_first: bool = False,
    ) -> None:
        self.rank = rank
        self.epochs = epochs
        self.ranks = range(len(epochs[0]))
        self.looks_first = looks_first
        self.reads_first = reads_first
        self.passed = 0
        self.steps = 0
        self.last: int | None = None
        self.has_requested = False

    def log(self, thread: str) -> SharedLog:
        """Return a thread's view of the log."""
        log = SharedLog("join")
        log._log = Log("join", nonce=f"{thread}{self.rank}".encode())
        return log

    def count(self, change: int) -> Steps[None]:
        """Change the number of points that this rank has passed."""
        self.passed += change
        yield Set(f"passed {self.rank}", b"%d" % self.passed)

    def is_frozen(self) -> Steps[bool]:
        """Return whether the listening thread has frozen this rank."""
        return bool((yield Check([f"frozen {self.rank}"])))

    def is_asked(self) -> Steps[bool]:
        """Return whether this rank was asked to stop."""
        return bool((yield Check([f"asked {self.rank}"])))

    # The training thread.

    def train(self) -> Steps[None]:
        """Run all iterations, or stop with the others."""
        self.training_log = self.log("training")
        for lengths in self.epochs:
            yield from self.iterate(lengths)
            passes = yield from self.pass_point()
            yield Mark("iteration", (self.steps, passes))
            if not passes:
                break
        yield Set(f"finished {self.rank}", b"1")
        yield Wait([f"finished {rank}" for rank in self.ranks])
        yield Set(f"out {self.rank}", b"1")
        yield from self.training_log.wake(self.rank)

    def iterate(self, lengths: Sequence[int]) -> Steps[None]:
        """Make this rank's steps; then shadow the others if one of them has run dry."""
        fewest = min(lengths)
        for step in range(lengths[self.rank]):
            if not (yield from self.pass_point()):
                if step < fewest:
                    return
                break
            self.steps += 1
            yield from self.meet(1)
        if fewest != max(lengths):
            while (yield from self.meet(0)):
                self.steps += 1
                yield from self.count(+1)
                if (yield from self.is_asked()):
                    yield from self.request_once()

    def meet(self, active: int) -> Steps[int]:
        """Add up the active ranks of one step, which every rank takes part in."""
        self.met = getattr(self, "met", 0) + 1
        yield Set(f"step {self.met} of {self.rank}", b"%d" % active)
        keys = [f"step {self.met} of {rank}" for rank in self.ranks]
        yield Wait(keys)
        return sum(map(int, (yield ReadMany(keys))))

    def pass_point(self) -> Steps[bool]:
        """Do what ``Stopping.pass_point`` does."""
        if not (yield from self.is_asked()):
            frozen = self.looks_first and (yield from self.is_frozen())
            yield from self.count(+1)
            if not self.looks_first:
                frozen = yield from self.is_frozen()
            if not frozen:
                return True
            yield from self.count(-1)
        if self.last is None:
            yield from self.request_once()
            self.last = yield from self.training_log.wait_for_stop(1)
            assert self.last is not None
        if self.passed >= self.last:
            return False
        yield from self.count(+1)
        return True

    def request_once(self) -> Steps[None]:
        """Request a stop, unless one is known."""
        if not self.has_requested and not (yield from self.is_frozen()):
            self.has_requested = True
            yield from self.training_log.append({"kind": "stop"}, list(self.ranks))

    # The listening thread.

    def listen(self) -> Steps[None]:
        """Freeze this rank and report, once a stop is requested."""
        log, has_reported = self.log("listening"), False
        while True:
            yield from log.wait_to_be_woken(self.rank)
            if (yield Check([f"out {self.rank}"])):
                return
            if (yield from log.read()) and not has_reported:
                if self.reads_first:
                    passed = yield Read(f"passed {self.rank}")
                yield Set(f"frozen {self.rank}", b"1")
                if not self.reads_first:
                    passed = yield Read(f"passed {self.rank}")
                yield from log.report_passed(self.rank, int(passed or 0), list(self.ranks))
                has_reported = True


def simulate(
    epochs: Sequence[Sequence[int]], asked: Sequence[int], after: int = 0, **orders: bool
) -> Simulation:
    """Return ranks with these batches, of which some are asked to stop at any time.

    With ``after``, that is after rank 0 has come to so many meetings.
    """
    ranks = range(len(epochs[0]))

    def ask() -> Steps[None]:
        if after:
            yield Wait([f"step {after} of 0"])
        for rank in asked:
            yield Set(f"asked {rank}", b"1")

    def check_end(world: World) -> None:
        ends = [world.marks(f"training-{rank}") for rank in ranks]
        # (steps, passes) of each iteration: all ranks made the same steps in it, and either all
        # of them stopped or none did.
        assert all(marks == ends[0] for marks in ends), ends
        outcomes.add(tuple(mark.value for mark in ends[0]))

    outcomes: set[tuple[Any, ...]] = set()
    processes = [Process("signals", ask)]
    for rank in ranks:
        processes += [
            Process(f"training-{rank}", lambda rank=rank: Rank(rank, epochs, **orders).train()),  # type: ignore[misc]
            Process(f"listening-{rank}", lambda rank=rank: Rank(rank, epochs, **orders).listen()),  # type: ignore[misc]
        ]
    simulation = Simulation(processes, at_end=check_end, expiries=False)
    simulation.outcomes = outcomes  # type: ignore[attr-defined]
    return simulation


def outcomes(simulation: Simulation) -> set[Any]:
    """Return the ends that schedules came to."""
    found: set[Any] = simulation.outcomes  # type: ignore[attr-defined]
    return found


def test_even_ranks_stop_at_one_step_in_every_order() -> None:
    """Two ranks with two batches stop after none, one or two, or end: always both alike."""
    simulation = simulate([(2, 2)], asked=[0])
    simulation.explore()
    assert outcomes(simulation) == {((0, False),), ((1, False),), ((2, False),), ((2, True),)}


def test_both_are_asked() -> None:
    """Requests of several ranks are one: launchers send their signal to every rank."""
    simulation = simulate([(1, 1)], asked=[1, 0])
    simulation.search(500)  # all orders take 8 s
    assert outcomes(simulation) == {((0, False),), ((1, False),), ((1, True),)}


@pytest.mark.parametrize("asked", [0, 1])
def test_a_rank_that_has_run_dry_stops_with_the_others(asked: int) -> None:
    """If rank 0 shadows rank 1, a request of either ends rank 1's loop and rank 0's shadowing."""
    simulation = simulate([(0, 2)], asked=[asked])
    simulation.explore()
    # Rank 0 has no batch at which it could ask, so it asks when it shadows the first step.
    at_once = {((0, False),)} if asked == 1 else set()
    later = {((1, False),), ((2, False),), ((2, True),)}
    assert outcomes(simulation) == at_once | later


def test_a_late_request_stops_the_next_iteration() -> None:
    """If all ranks have passed the end of one iteration, they all stop in the next one."""
    simulation = simulate([(1, 0), (1, 1)], asked=[0])
    simulation.explore()
    first, second = {(0, False), (1, False)}, {(1, False), (2, False), (2, True)}
    assert outcomes(simulation) == {(end,) for end in first} | {((1, True), end) for end in second}


@pytest.mark.parametrize("order", ["looks_first", "reads_first"])
def test_the_model_finds_a_wrong_order(order: str) -> None:
    """A rank that looks before it counts, or reads before it freezes, ends alone in some order."""
    with pytest.raises(Violation):
        simulate([(2, 2)], asked=[0], **{order: True}).explore()


@pytest.mark.parametrize(("after", "possible"), [(0, {0, 1, 2, 3}), (3, {2, 3}), (5, {3})])
def test_three_ranks(after: int, possible: set[int]) -> None:
    """Random orders of three ranks, some of which run dry, over two iterations.

    The first takes four meetings; in the last of them no rank is active any more. ``possible`` are
    the steps that it may have.
    """
    simulation = simulate([(1, 2, 3), (2, 2, 2)], asked=[2, 0], after=after)
    simulation.search(200)
    assert {outcome[0][0] for outcome in outcomes(simulation)} <= possible
    if after == 5:
        assert all(outcome[0][1] for outcome in outcomes(simulation)), "the second one is stopped"


@pytest.mark.parametrize("lengths", [*itertools.product([0, 3], repeat=2)])
def test_the_class_agrees_with_the_model(lengths: tuple[int, int]) -> None:
    """A rank stops at the agreed point, whether its own report counted the last point or not."""
    passed, agreed = lengths
    requests: list[int] = []
    stopping = Stopping(lambda: requests.append(1), lambda: agreed)
    for _ in range(passed):
        assert stopping.pass_point()
    assert stopping.freeze() == passed
    points = max(0, agreed - passed)
    assert [stopping.pass_point() for _ in range(points + 2)] == [True] * points + [False] * 2
    assert stopping.is_stopped
    assert not requests  # another rank has


def test_a_signal_only_sets_a_flag() -> None:
    """``ask`` requests nothing; the next point does, once, and waits for the answer."""
    requests: list[str] = []
    stopping = Stopping(lambda: requests.append("stop"), lambda: stopping.freeze())
    assert stopping.pass_point()
    stopping.ask()
    assert not requests
    assert not stopping.pass_point()
    assert not stopping.pass_point()
    stopping.follow()
    assert requests == ["stop"]


def test_two_threads() -> None:
    """Whenever the listening thread freezes, no point is passed beyond what it reports."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            reported = threading.Event()
            report: list[int] = []

            def agree(reported: threading.Event = reported, report: list[int] = report) -> int:
                assert reported.wait(60)
                return report[0]

            stopping = Stopping(lambda: None, agree)

            def listen(
                stopping: Stopping = stopping,
                reported: threading.Event = reported,
                report: list[int] = report,
            ) -> None:
                report.append(stopping.freeze())
                reported.set()

            thread = threading.Thread(target=listen)
            thread.start()
            passed = 0
            while stopping.pass_point():
                passed += 1
            thread.join(60)
            assert passed == report[0]
    finally:
        sys.setswitchinterval(interval)

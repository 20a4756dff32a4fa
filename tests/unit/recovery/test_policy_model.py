"""The policy ends every job that cannot go on: all orders of failures, tried one by one.

The adversary chooses each failure: its family, one of two signatures, and the step at which it
strikes. It may lose any number of steps, so a step up to the next new one is possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import pytest

from rankcall.recovery.policy import MACHINE, PROGRAM, UNCLEAR, Case, Failure, Limits, decide
from rankcall.run.recoveries import Signature

FAMILIES = PROGRAM, UNCLEAR, MACHINE
SIGNATURES = Signature("dead", line="a"), Signature("dead", line="b")
WITHOUT_PROGRESS = 3  # the restarts in a row that the guide allows
WINDOW_S = 60.0
# Counts of one failure above this are one state: no row tells them apart.
MOST_REPEATS = 3


def failures(history: Sequence[Failure], last_step: int, seconds: float) -> Iterator[Failure]:
    """Return all failures that the adversary can choose from."""
    furthest = max((failure.step for failure in history), default=0)
    for family, signature in itertools.product(FAMILIES, SIGNATURES):
        for step in range(min(furthest + 1, last_step) + 1):
            yield Failure(signature, family, step, step > furthest, seconds, by_window=True)


def row_of(history: Sequence[Failure]) -> list[Failure]:
    """Return the last failures between which the job got no further, the newest first."""
    return list(itertools.takewhile(lambda failure: not failure.progressed, reversed(history)))


def same_as(failure: Failure, history: Sequence[Failure]) -> int:
    """Count a failure in a history; one at the start of an attempt, since the last progress."""
    where = history if failure.step else row_of(history)
    key = failure.signature, failure.step
    return sum((before.signature, before.step) == key for before in where)


def state_of(history: Sequence[Failure]) -> object:
    """Return what the policy can tell of a history if each window has passed before the next."""
    counts = {
        (failure.signature, failure.step): min(MOST_REPEATS, same_as(failure, history))
        for failure in history
    }
    row = row_of(history)
    furthest = max((failure.step for failure in history), default=0)
    return frozenset(counts.items()), len(row), furthest


@pytest.mark.parametrize("last_step", [0, 1])
def test_a_job_that_tells_of_its_steps_ends(last_step: int) -> None:
    """It is restarted three times without progress at most, and then at each new step again.

    Each failure comes after the window of the one before, so --max-recoveries never strikes.
    """
    longest: dict[object, int] = {}

    def restarts(history: tuple[Failure, ...]) -> int:
        """Return the most restarts that the adversary still gets."""
        state = state_of(history)
        if state not in longest:
            now = (len(history) + 1) * 2 * WINDOW_S
            longest[state] = max(
                0
                if decide(Case(failure, history, Limits(1, WINDOW_S))).stops
                else 1 + restarts((*history, failure))
                for failure in failures(history, last_step, now)
            )
        return longest[state]

    assert restarts(()) == WITHOUT_PROGRESS * (last_step + 1) + last_step


def test_a_job_that_tells_nothing_ends() -> None:
    """Each attempt seems to get further. The limit counts all restarts, however long they take."""
    most = 2
    for count in range(most + 2):
        attempts = itertools.product(FAMILIES, SIGNATURES, (0, 7))
        for chosen in itertools.product(attempts, repeat=count):
            history: list[Failure] = []
            for number, (family, signature, step) in enumerate(chosen):
                seconds = number * 2 * WINDOW_S
                failure = Failure(signature, family, step, step > 0, seconds)
                stops = decide(Case(failure, history, Limits(most, WINDOW_S))).stops
                assert stops or len(history) < most
                if stops:
                    break
                history.append(failure)


@cache
def orders(length: int) -> tuple[tuple[Failure, ...], ...]:
    """Return all histories of so many restarts that the policy allows, at the steps 0 and 1."""
    if length == 0:
        return ((),)
    return tuple(
        (*history, failure)
        for history in orders(length - 1)
        for failure in failures(history, 1, float(length))
        if not decide(Case(failure, history)).stops
    )


def test_what_each_family_is_promised() -> None:
    """A fault of the program is tried once more at its step, an unclear one twice.

    At the start of an attempt, that begins anew once the job got further.

    A fault of the machine with progress is always followed by a restart at once, and no pause is
    longer than a minute.
    """
    for history in (*orders(0), *orders(1), *orders(2)):
        for failure in failures(history, 1, 3.0):
            decision = decide(Case(failure, history))
            same = same_as(failure, history)
            if failure.family == PROGRAM:
                assert decision.stops or same == 0
            if failure.family == UNCLEAR:
                assert decision.stops or same <= 1
            if failure.family == MACHINE and failure.progressed:
                assert (decision.stops, decision.delay_s) == (False, 0.0)
            assert 0 <= decision.delay_s <= 60
            assert not decision.delay_s or failure.family == MACHINE

"""Calls with a deadline on helper threads, and the budget that all waits at exit share."""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from collections.abc import Callable

import pytest

from rankcall import background
from rankcall.background import EXIT_S, BackgroundCall, ExitBudget

LONG_S = 120.0  # nothing here takes so long


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> ExitBudget:
    """Return the process's exit budget, for this test only, with a clock that stands still."""
    made = ExitBudget(clock=lambda: 0.0)
    monkeypatch.setattr(background, "exit_budget", made)
    return made


class Waits:
    """A wait that takes all it is given, by the clock that it moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.given: list[float] = []

    def clock(self) -> float:
        """Return the time."""
        return self.now

    def __call__(self, seconds: float) -> None:
        """Wait for so long."""
        self.given.append(seconds)
        self.now += seconds


def test_a_call_is_let_go_before_its_caller_hears_of_its_end() -> None:
    """What the call used, a user's store for example, is freed when the caller lets go of it."""
    begin, had_ended = threading.Event(), list[bool]()

    def work() -> None:
        assert begin.wait(LONG_S)

    call = BackgroundCall(work, "test")
    weakref.finalize(work, lambda: had_ended.append(call.ended(0)))
    del work
    begin.set()
    assert call.ended(LONG_S)
    assert had_ended == [False]


def test_a_call_returns_or_raises() -> None:
    """``outcome`` passes on what the call came to."""
    good, bad = BackgroundCall(lambda: 7, "good"), BackgroundCall(lambda: 1 // 0, "bad")
    assert good.ended(LONG_S)
    assert good.outcome() == 7
    assert bad.ended(LONG_S)
    with pytest.raises(ZeroDivisionError):
        bad.outcome()


def test_a_call_that_does_not_end_is_left_behind() -> None:
    """``ended`` gives up in time, and ``outcome`` never waits."""
    release = threading.Event()
    call = BackgroundCall(lambda: release.wait(LONG_S), "stuck")
    assert not call.ended(0.01)
    with pytest.raises(RuntimeError, match="has not ended"):
        call.outcome()
    release.set()
    assert call.ended(LONG_S)


def test_a_thread_that_cannot_start_is_a_call_that_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Near the end of the interpreter no thread starts: the caller gets that as the error."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    call = BackgroundCall(lambda: 7, "late")
    assert call.ended(0.0)
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        call.outcome()


def test_before_the_exit_each_wait_gets_what_it_asks_for() -> None:
    """The budget is for the exit only."""
    wait = Waits()
    budget = ExitBudget(clock=wait.clock)
    for _ in range(3):
        budget.spend(wait, EXIT_S)
    assert wait.given == [EXIT_S] * 3


def test_at_exit_all_waits_together_get_the_budget() -> None:
    """The sum is bounded, and time between the waits is not counted."""
    wait = Waits()
    budget = ExitBudget(clock=wait.clock)
    budget.begin()
    for seconds in (0.5, 1.0, 2.0, 2.0):
        budget.spend(wait, seconds)
        wait.now += 100.0  # an exit handler of the user's
    assert wait.given == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert sum(wait.given) == pytest.approx(EXIT_S)


def test_a_join_gives_up_on_a_blocked_thread(budget: ExitBudget) -> None:
    """It says whether the thread has ended."""
    release = threading.Event()
    thread = threading.Thread(target=release.wait, args=(LONG_S,))
    thread.start()
    assert not background.join(thread, 0.01)
    release.set()
    assert background.join(thread, LONG_S)


def test_a_join_with_a_thread_that_could_not_be_started(budget: ExitBudget) -> None:
    """It has ended. ``threading`` would raise an error, at a time when only cleaning up is left."""
    assert background.join(threading.Thread(target=print), LONG_S)


def test_a_lock_that_another_thread_holds(budget: ExitBudget) -> None:
    """The block runs all the same, and learns that it does not hold the lock."""
    lock, held, release = threading.Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            release.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(LONG_S)
    with background.holding(lock, 0.01) as is_held:
        assert not is_held
    assert lock.locked()
    release.set()
    thread.join(LONG_S)
    with background.holding(lock, LONG_S) as is_held:
        assert is_held
    assert not lock.locked()


def test_what_a_close_raises_stays_inside(
    budget: ExitBudget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``at_exit`` begins the budget, and logs an error of ``close``."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    background.at_exit(lambda: 1 // 0)
    (close,) = registered
    with caplog.at_level(logging.WARNING, logger="rankcall"):
        close()
    assert "closing down failed" in caplog.text
    wait = Waits()
    budget.spend(wait, 2 * EXIT_S)
    assert wait.given == [EXIT_S]

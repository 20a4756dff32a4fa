"""What is seen at moments: phases of torch, and a GIL that is held, against planted times."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import pytest

from rankcall.capture.moments import DOING, Look, Moments, ThreadTimes

MS = 1_000_000
TRAINS = 77


class Process:
    """A process whose times a test sets; all in ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000
        self.mine, self.trains = [0, 0], [0, 0]  # running, queued
        self.doing: str | None = ""
        self.stopped: int | None = 0
        self.collected = 0
        self.moments = Moments(self._look, self._times_of)
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now * MS)

    def _look(self, number: int) -> Look:
        stopped = None if self.stopped is None else self.stopped * MS
        return Look(self.doing, stopped, None)

    def _times_of(self, thread: int) -> ThreadTimes | None:
        times = self.trains if thread == TRAINS else self.mine
        return ThreadTimes(*(value * MS for value in times)) if times else None

    def look(self, after: int, late: int = 0, collected_late: int = 0) -> dict[str, int]:
        """Look after so long, so late; return the counters in ms."""
        due, self.now = self.now + after, self.now + after + late
        self.moments.look(TRAINS, due * MS, self.collected * MS, collected_late * MS)
        return {name: value // MS for name, value in self.moments.counters().items()}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    """Return a process that was looked at once."""
    made = Process(monkeypatch)
    made.look(0)
    return made


@pytest.mark.parametrize("doing", DOING[1:])
def test_a_look_stands_for_the_time_since_the_last(process: Process, doing: str) -> None:
    """Each counts for what was seen; no more than 1.5 s of a time in which nobody looked."""
    process.look(250)
    process.doing = doing
    assert process.look(300, late=5)[f"{doing}_ns"] == 305
    assert process.look(60_000)[f"{doing}_ns"] == 1805
    process.doing = ""
    counters = process.look(250)
    assert counters[f"{doing}_ns"] == 1805
    assert sum(counters[f"{name}_ns"] for name in DOING[1:]) == 1805


def test_a_look_that_comes_late_shows_no_phase(process: Process) -> None:
    """Unless a run queue made it late: what the thread does now is not what it did then."""
    process.doing = "data_loader"
    assert process.look(250, late=30)["data_loader_ns"] == 0
    process.doing = ""
    process.look(250)
    process.doing = "data_loader"
    process.mine[1] += 30
    assert process.look(250, late=30)["data_loader_ns"] == 280


def test_a_look_that_a_collection_or_a_run_queue_made_late(process: Process) -> None:
    """The training thread could not go on either, so what it does now, it did then."""
    process.doing = "checkpoint"
    assert process.look(250, late=100, collected_late=90)["checkpoint_ns"] == 350
    process.trains[1] += 315  # of 350 ms, nine tenths: so of the 100 ms, it may have moved for 10
    assert process.look(250, late=100)["checkpoint_ns"] == 700
    process.doing = "compilation"
    process.trains[1] += 175  # half of the time: it may have moved for 50 ms
    assert process.look(250, late=100)["compilation_ns"] == 0


def test_a_late_look_that_one_beside_it_confirms(process: Process) -> None:
    """A phase whose code in C holds the GIL now and then is counted whole.

    Late looks are not counted if no look in time beside them shows the same.
    """
    process.doing = "checkpoint"
    assert process.look(250, late=50)["checkpoint_ns"] == 0
    assert process.look(250)["checkpoint_ns"] == 300 + 250
    assert process.look(250, late=50)["checkpoint_ns"] == 850
    assert process.look(250, late=50)["checkpoint_ns"] == 850
    assert process.look(250, late=50)["checkpoint_ns"] == 850
    assert process.look(250)["checkpoint_ns"] == 850 + 300 + 250
    process.doing = ""
    process.look(250)
    process.doing = "checkpoint"
    assert process.look(250, late=50)["checkpoint_ns"] == 1400
    process.doing = "compilation"
    counters = process.look(250)
    assert (counters["checkpoint_ns"], counters["compilation_ns"]) == (1400, 250)


def test_what_follows_a_held_gil_is_hardly_counted() -> None:
    """A thread that holds the GIL for long, and then saves for a moment, does not seem to save."""
    with pytest.MonkeyPatch.context() as patch:
        process = Process(patch)
        process.moments._random = random.Random(5)
        process.look(0)
        for _ in range(2000):  # steps of 400 ms: the first 300 in C, then 20 ms of a checkpoint
            pause = int(process.moments.pause_s() * 1e3)
            at = (process.now + pause) % 400
            late = max(0, 300 - at)
            process.doing = "checkpoint" if late > 0 or at < 320 else ""
            counters = process.look(pause, late)
        assert counters["checkpoint_ns"] / process.now < 0.25


def test_without_frames_phases_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that cannot see them has no counter of them."""
    made = Process(monkeypatch)
    made.doing = None
    made.look(0)
    assert made.look(250) == {"stopped_ns": 0, "gil_ns": 0}


def held(process: Process, explain: Callable[[], None] = lambda: None) -> int:
    """Be 100 ms late, with an explanation; return how long the GIL was held, as it is counted."""
    explain()
    process.look(250, late=100)
    return process.look(250)["gil_ns"]


def test_a_gil_that_is_held(process: Process) -> None:
    """The look waited, and nothing else explains it: it stands for all the time since the last."""
    assert held(process) == 350
    assert process.look(250)["gil_ns"] == 350


def test_what_else_makes_a_look_late(process: Process) -> None:
    """A run queue, a stop, a collection, a training thread that ran or wanted to."""

    def queued() -> None:
        process.mine[1] += 90

    def ran() -> None:
        process.trains[0] += 90

    def wanted_to_run() -> None:
        process.trains[1] += 90

    def stopped() -> None:
        process.stopped = 90

    def collected() -> None:
        process.collected += 90

    for explain in (queued, ran, wanted_to_run, stopped, collected):
        assert held(process, explain) == 0, explain.__name__


def test_what_is_counted_a_moment_later_explains_it_too(process: Process) -> None:
    """The thread that counts stops may wake after the one that looks."""
    process.look(250, late=100)
    process.stopped = 90
    assert process.look(250)["gil_ns"] == 0
    process.look(250, late=100)
    process.collected = 90
    assert process.look(250)["gil_ns"] == 0


def test_nothing_is_said_without_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    """No counter of stops, or of a thread's times: then no counter of the GIL."""
    for stopped, trains in ((None, [0, 0]), (0, [])):
        made = Process(monkeypatch)
        made.stopped, made.trains = stopped, trains
        for late in (0, 100, 0):
            assert "gil_ns" not in made.look(250, late)


def test_stops_need_the_time_in_the_run_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, a thread that got no CPU looks as if it had been stopped."""
    made = Process(monkeypatch)
    made.mine, made.stopped = [], 500
    assert "stopped_ns" not in made.look(250)


def test_half_of_the_time_is_estimated_as_half(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of steps of any length, of which the loader takes half: pauses are not in step with it."""
    for step_ms in (100, 250, 500):
        process = Process(monkeypatch)
        process.moments._random = random.Random(5)
        process.look(0)
        for _ in range(2000):
            pause = int(process.moments.pause_s() * 1e3)
            in_loader = (process.now + pause) % step_ms < step_ms / 2
            process.doing = "data_loader" if in_loader else ""
            counters = process.look(pause)
        assert counters["data_loader_ns"] / process.now == pytest.approx(0.5, abs=0.05), step_ms


def test_the_programs_own_random_numbers_stay(process: Process) -> None:
    """A pause is drawn from a generator of its own."""
    state = random.getstate()
    pauses = {process.moments.pause_s() for _ in range(20)}
    assert random.getstate() == state
    assert len(pauses) > 1
    assert all(0.3 <= pause <= 0.7 for pause in pauses)


def test_python_numbers_threads_otherwise() -> None:
    """The capture is asked with Python's number of the training thread; 0 if there is none."""
    asked: list[int] = []

    def look(number: int) -> Look:
        asked.append(number)
        return Look()

    moments = Moments(look, lambda thread: None)
    for thread in (threading.get_native_id(), 1, 0):
        moments.look(thread, 0, 0)
    assert asked == [threading.get_ident(), 0, 0]

"""The thread that trains is found by its steps, or else by its calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from world import wait_until

from rankcall.capture.training_thread import TrainingThread
from rankcall.record import RECORD
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create, put

GEOMETRY = Geometry(64)


class Ring:
    """A ring in memory, with calls of chosen threads."""

    def __init__(self) -> None:
        self.map = create(None, Identity(rank=0), GEOMETRY)
        self.finder = TrainingThread(self.map, GEOMETRY)
        self.head = 0

    def issue(self, threads: Sequence[int]) -> None:
        """Add a record of each thread."""
        begin, most = GEOMETRY.records_offset, GEOMETRY.capacity
        records = np.frombuffer(self.map, RECORD, most, begin)
        for thread in threads:
            records["thread"][self.head % most] = thread
            self.head += 1
        put(self.map, "head", self.head)

    def found(self) -> int:
        """Return what readers see after the next heartbeat."""
        return self.finder.find()


class Waiting:
    """A thread of Python that can run a function, and runs until the end of the block."""

    def __init__(self, first: Callable[[], object] = lambda: None) -> None:
        self._stop = threading.Event()
        self._began = threading.Event()
        self._first = first
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        self._first()
        self._began.set()
        self._stop.wait(60)

    def __enter__(self) -> int:
        self._thread.start()
        assert self._began.wait(60)
        assert self._thread.native_id is not None
        return self._thread.native_id

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def ring() -> Ring:
    """Return a ring without calls, made by this thread."""
    return Ring()


def test_before_the_first_call(ring: Ring) -> None:
    """The thread that switched recording on is all that is known."""
    assert ring.found() == threading.get_native_id()


def test_the_thread_of_most_of_the_newest_calls(ring: Ring) -> None:
    """A thread that saves checkpoints issues fewer; calls that are long ago do not count."""
    with Waiting() as training, Waiting() as saving:
        ring.issue([saving] * 60)
        ring.issue([training] * 50)
        ring.issue([saving] * 3)
        assert ring.found() == training


def test_threads_without_python_do_not_count(ring: Ring) -> None:
    """Autograd's own threads issue DDP's calls on a GPU, and have no stack to show."""
    with Waiting() as training:
        ring.issue([1] * 40 + [training] * 2)
        assert ring.found() == training


def test_a_thread_that_poses_as_pythons(ring: Ring) -> None:
    """A hook that runs in autograd's thread makes that known to ``threading``; it stays out."""
    with Waiting() as training:
        dummy = threading._DummyThread.__new__(threading._DummyThread)
        threading.Thread.__init__(dummy, name="Dummy-1", daemon=True)
        dummy._native_id = 1  # type: ignore[attr-defined]
        threading._active[-7] = dummy  # type: ignore[attr-defined]
        try:
            ring.issue([1] * 40 + [training] * 2)
            assert ring.found() == training
        finally:
            del threading._active[-7]  # type: ignore[attr-defined]


def test_the_thread_that_steps_comes_first(ring: Ring) -> None:
    """A thread that steps an optimizer trains, whichever thread issues the calls."""
    with Waiting() as issuing, Waiting(ring.finder.note_step) as stepping:
        ring.issue([issuing] * 64)
        assert ring.found() == stepping


def test_a_thread_that_has_ended(ring: Ring) -> None:
    """The next likeliest thread counts, and none if all have ended."""
    with Waiting(ring.finder.note_step) as stepping, Waiting() as issuing:
        ring.issue([issuing] * 3)
        assert ring.found() == stepping
    # Python's join can return a moment before the kernel's thread has ended.
    wait_until(lambda: ring.found() == threading.get_native_id())


def test_a_look_searches_seldom(ring: Ring) -> None:
    """Who issues the calls is looked for at every ninth look, or if the thread has ended."""
    with Waiting() as second:
        with Waiting() as first:
            ring.issue([first] * 64)
            assert ring.finder.look() == first
            ring.issue([second] * 64)
            assert [ring.finder.look() for _ in range(8)] == [first] * 8
            assert ring.finder.look() == second
            ring.issue([first] * 64)
            assert ring.finder.look() == second
        ring.issue([second] * 64)
    wait_until(lambda: ring.finder.look() == threading.get_native_id())


def test_the_first_calls_decide_for_one_look_only(ring: Ring) -> None:
    """One thread makes the first calls, another one trains: the next look finds it."""
    assert ring.finder.look() == threading.get_native_id()  # no call yet
    with Waiting() as first, Waiting() as second:
        ring.issue([first] * 3)
        assert ring.finder.look() == first
        ring.issue([second] * 61)
        assert ring.finder.look() == second
        ring.issue([first] * 64)
        assert ring.finder.look() == first


def test_a_look_sees_the_first_step_at_once(ring: Ring) -> None:
    """A thread that steps an optimizer trains, whichever thread was found before."""
    ring.finder.look()
    with Waiting(ring.finder.note_step) as stepping:
        assert ring.finder.look() == stepping


def test_a_ring_that_no_living_thread_made() -> None:
    """Then the thread is not known: 0."""
    made: list[Ring] = []
    with Waiting(lambda: made.append(Ring())):
        pass
    assert made[0].found() == 0

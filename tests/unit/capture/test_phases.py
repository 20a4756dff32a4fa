"""``rankcall.expect``: a declared phase is in the process's ring for as long as it lasts."""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

import rankcall
from rankcall.capture import phases, session
from rankcall.ring.layout import FOREVER_NS, HEADER_BYTES, Geometry, Header, parse_header
from rankcall.ring.writer import Identity, create


@pytest.fixture
def ring() -> Iterator[mmap.mmap]:
    """Stand in for a recording's ring."""
    made = create(None, Identity(), Geometry(64))
    phases.publish_to(made)
    yield made
    phases.publish_to(None)
    assert not phases._phases


def header(ring: mmap.mmap) -> Header:
    """Read a ring's header as another process would."""
    return parse_header(ring[:HEADER_BYTES], "ring")


def test_a_phase_and_its_end(ring: mmap.mmap) -> None:
    """While it lasts: until when, and what; afterwards: when it ended."""
    assert (header(ring).expect_until_ns, header(ring).expect_what) == (0, "")
    began = time.monotonic_ns()
    with rankcall.expect(30, "checkpoint 1200"):
        inside = header(ring)
    assert inside.expect_what == "checkpoint 1200"
    assert 30e9 <= inside.expect_until_ns - began < 31e9
    after = header(ring)
    assert began < after.expect_until_ns <= time.monotonic_ns()


def test_nested_and_overlapping_phases(ring: mmap.mmap) -> None:
    """The one that ends last counts, on whatever thread it was declared."""
    with rankcall.expect(100, "outer"):
        with rankcall.expect(10, "inner"):
            assert header(ring).expect_what == "outer"
        assert header(ring).expect_what == "outer"

        def other() -> None:
            with rankcall.expect(1000, "other"):
                assert header(ring).expect_what == "other"

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert header(ring).expect_what == "outer"


def test_an_exception_ends_it(ring: mmap.mmap) -> None:
    """It gets out as it is."""
    with pytest.raises(KeyError, match="mine"), rankcall.expect(100, "doomed"):
        raise KeyError("mine")
    assert header(ring).expect_until_ns <= time.monotonic_ns()


def test_a_wait_for_work_has_no_end(ring: mmap.mmap) -> None:
    """``math.inf`` is written as a value of its own; a phase inside it does not end it."""
    with rankcall.expect(math.inf, "requests"):
        assert header(ring).expect_until_ns == FOREVER_NS
        with rankcall.expect(10, "inner"):
            assert header(ring).expect_what == "requests"
    assert header(ring).expect_until_ns <= time.monotonic_ns()


def test_as_a_decorator(ring: mmap.mmap) -> None:
    """Each call is a phase."""

    @rankcall.expect(50, "saving")
    def save() -> str:
        return header(ring).expect_what

    assert [save(), save()] == ["saving", "saving"]


def test_long_words_are_cut(ring: mmap.mmap) -> None:
    """Not within a character, and nothing beyond its place is written."""
    with rankcall.expect(10, "ü" * 500):
        ring_header = header(ring)
    assert ring_header.expect_what == "ü" * 127
    assert ring_header.overdue_ns == 0


def test_without_a_recording() -> None:
    """It does nothing."""
    assert session.current() is None
    with rankcall.expect(10, "nothing"):
        pass


@pytest.mark.parametrize("seconds", [0, -1, math.nan, -math.inf])
def test_no_time(seconds: float) -> None:
    """A phase takes some seconds."""
    with pytest.raises(ValueError, match="positive seconds"), rankcall.expect(seconds, "x"):
        pass


def test_a_timedelta_is_a_duration(ring: mmap.mmap) -> None:
    """As torch's time-outs are."""
    began = time.monotonic_ns()
    with rankcall.expect(timedelta(minutes=2), "compiling"):
        assert 120e9 <= header(ring).expect_until_ns - began < 121e9


def test_no_words() -> None:
    """A phase says what it is."""
    with pytest.raises(ValueError, match="what takes long"), rankcall.expect(1, " "):
        pass

"""Phases that a program names: measured exactly, for each thread, and harmless."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rankcall
from rankcall.analysis.snapshot import RankState, Snapshot, no_calls
from rankcall.analysis.spent import LATELY, SINCE, SPENT, Spending
from rankcall.analysis.verdicts.facts import Fact, Ranks, Relation
from rankcall.analysis.verdicts.reasons import reasons_for_absence, reasons_for_lateness
from rankcall.analysis.verdicts.sentences import summary
from rankcall.capture import named_phases
from rankcall.capture.moments import Look
from rankcall.capture.named_phases import names, phase, spent_by
from rankcall.capture.sampler import Sampler
from rankcall.ring.layout import PHASE_COUNTERS, SAMPLE_COUNTERS, Geometry, offset_of
from rankcall.ring.reader import read_ring
from rankcall.ring.writer import Identity, create


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the time, in ns, which a test moves; and forget all phases at the end."""
    named_phases.forget()
    now = [1000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    yield now
    named_phases.forget()


def mine() -> list[int]:
    """Return what this thread has spent in each phase that has a name."""
    return list(spent_by(threading.get_native_id()).values())


def test_time_counts_for_the_innermost(clock: list[int]) -> None:
    """A phase does not count those inside it, and counts on after them; an open one counts."""
    with rankcall.phase("step"):
        clock[0] += 10
        with phase("data"):
            clock[0] += 5
            assert mine() == [10, 5]
        clock[0] += 1
        assert mine() == [11, 5]
    clock[0] += 100
    assert mine() == [11, 5]
    assert names() == "step\ndata"


def test_as_a_decorator_and_through_exceptions(clock: list[int]) -> None:
    """What the block raises comes out, and its time counts."""

    @phase("load")
    def load() -> None:
        clock[0] += 7
        raise KeyError("x")

    for _ in range(3):
        with pytest.raises(KeyError):
            load()
    assert mine() == [21]


def test_threads_do_not_mix(clock: list[int]) -> None:
    """A thread that prefetches all the time is not what the training thread does."""

    def prefetch() -> None:
        with phase("prefetch"):
            clock[0] += 50

    thread = threading.Thread(target=prefetch)
    with phase("step"):
        thread.start()
        thread.join(20)
    assert mine() == [50, 0]


def test_nothing_grows(clock: list[int]) -> None:
    """Of thousands of names and threads, the first are measured, and the rest costs no memory."""
    for number in range(1000):
        with phase(f"p{number}"):
            clock[0] += 1
    assert names().split("\n") == ["p0", "p1", "p2", "p3"]
    assert mine() == [1, 1, 1, 1]
    assert len(named_phases._slots) == len(PHASE_COUNTERS)
    with phase("p0"), phase("of no slot"):
        clock[0] += 10
    assert mine() == [1, 1, 1, 1]


@pytest.mark.parametrize(("name", "error"), [("", ValueError), (" ", ValueError), (3, TypeError)])
def test_wrong_names(name: object, error: type[Exception]) -> None:
    """They raise before the block runs."""
    with pytest.raises(error), phase(name):  # type: ignore[arg-type]
        pytest.fail("it ran")


def test_names_are_cut_and_printable(clock: list[int]) -> None:
    """A name is a line of at most 32 bytes, whatever it was."""
    for name in ("x" * 100, "a\nb", "é" * 40):
        with phase(name):
            pass
    assert names().split("\n") == ["x" * 32, "a?b", "é" * 16]


def test_a_forked_child_starts_anew(clock: list[int]) -> None:
    """It leaves the phase that it was forked in without an error."""
    with phase("step"):
        named_phases.forget()
        clock[0] += 3
    assert mine() == []


def sampled(folder: Path, clock: list[int]) -> Path:
    """Return the ring of a process that was in two phases."""
    shape = Geometry(64, 8, 4096, sample_capacity=8)
    path = folder / "x.ring"
    ring: mmap.mmap = create(path, Identity(rank=0, world_size=1, host="h"), shape)
    sampler = Sampler(ring, shape, lambda thread: Look())
    sampler.sample(threading.get_native_id())
    with phase("data"):
        clock[0] += 40
        sampler.sample(threading.get_native_id())
    return path


def test_samples_have_them(tmp_path: Path, clock: list[int]) -> None:
    """The ring has the time in each phase, and the names."""
    ring = read_ring(sampled(tmp_path, clock))
    assert ring.header.phase_names == "data"
    assert ring.samples["phase_0_ns"].tolist()[-1] == 40
    assert int(ring.samples["known"][0]) >> SAMPLE_COUNTERS.index("phase_0_ns") == 0


def test_a_ring_of_another_width_of_samples(tmp_path: Path, clock: list[int]) -> None:
    """Rings of 0.2.0 had no phases: their records are read, and their samples are not."""
    old = Geometry(64, 8, 4096, sample_capacity=8, sample_bytes=88)
    path = tmp_path / "old.ring"
    ring = create(path, Identity(rank=0, world_size=1, host="h"), old)
    at = offset_of("sample_bytes")
    ring[at : at + 4] = bytes(4)  # the field did not exist
    assert read_ring(path).header.geometry == old
    assert len(read_ring(path).samples) == 0
    assert os.stat(path).st_size == old.file_bytes


def job(window: int, *rows: tuple[float, bytes, float]) -> Snapshot:
    """Return a job; of each rank: the time looked at, the names of its phases, s in the first."""
    spent = np.zeros(len(rows), SPENT)
    for rank, (seconds, phases, first_s) in enumerate(rows):
        spent[rank]["rank"], spent[rank]["window"] = rank, window
        spent[rank]["seconds"], spent[rank]["phases"] = seconds, phases
        spent[rank]["phase_0_s"] = first_s
    states = [RankState(rank, "node-a", 100 + rank) for rank in range(len(rows))]
    return Snapshot(states, no_calls(), spending=Spending((spent,)))


def named(facts: list[Fact]) -> list[tuple[str, float | None]]:
    """Return the phases that are named, each with its share."""
    return [(fact.value("name"), fact.number) for fact in facts if fact.value("cause") == "phase"]


def test_the_phase_that_explains_half_of_it_is_named() -> None:
    """It is compared by its name: another rank's first phase can be another one."""
    absent = job(SINCE, (10.0, b"data", 6.0))
    assert named(reasons_for_absence(absent, [0])) == [("data", 60.0)]
    assert named(reasons_for_absence(job(SINCE, (10.0, b"data", 4.9)), [0])) == []
    late = job(LATELY, (10.0, b"data", 6.0), (10.0, b"data", 2.0), (10.0, b"eval\ndata", 9.0))
    assert named(reasons_for_lateness(late, [0], 0.5)) == [("data", 100.0)]
    alike = job(LATELY, (10.0, b"data", 6.0), (10.0, b"data", 6.0))
    assert named(reasons_for_lateness(alike, [0], 0.5)) == []
    unlike = job(LATELY, (10.0, b"data", 6.0), (10.0, b"", 0.0))
    assert named(reasons_for_lateness(unlike, [0], 0.5)) == []
    (fact,) = reasons_for_absence(absent, [0])
    stopped = Fact(Relation.STOPPED, Ranks((0,)))
    assert summary([stopped, fact]).endswith("it spent 6.0 s of 10 s in its phase 'data'.")


def test_the_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase takes microseconds. The bound is wide, for a busy machine."""
    monkeypatch.undo()
    best = min(_timed() for _ in range(20))
    assert best < 50e-6


def _timed() -> float:
    began = time.perf_counter()
    for _ in range(100):
        with phase("step"):
            pass
    return (time.perf_counter() - began) / 100

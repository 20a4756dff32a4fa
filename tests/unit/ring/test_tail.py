"""The tail of a ring: a small ring file that says what the whole one says about the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rankcall.analysis.verdicts import diagnose
from rankcall.errors import CorruptRunError
from rankcall.record import RECORD
from rankcall.ring.layout import Geometry
from rankcall.ring.reader import read_ring
from rankcall.ring.tail import tail_of
from rankcall.ring.writer import BODY_NAMES, Identity, PythonRing, create
from rankcall.run.load import load
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run


def write(path: Path, count: int, open_ones: tuple[int, ...], capacity: int = 1024) -> Path:
    """Write a ring of so many records, some of which have not ended."""
    shape = Geometry(capacity)
    ring = PythonRing(create(path, Identity(rank=3, world_size=4, host="h"), shape), shape)
    ring.string("a name")
    blank = np.zeros(1, RECORD)[0]
    body: list[float] = []
    for name in BODY_NAMES:
        body += list(blank[name]) if name == "shape" else [blank[name].item()]
    for index in range(count):
        assert ring.issue(tuple(body)) == index
        if index not in open_ones:
            ring.finish(index, 2, 1_000 + index)
    return path


def indexes(path: Path) -> list[int]:
    """Return the indexes of the records of a ring file."""
    return [int(word >> 2) - 1 for word in read_ring(path).records["commit"]]


@pytest.mark.parametrize("capacity", [64, 1024])
def test_the_newest_and_what_is_in_flight(tmp_path: Path, capacity: int) -> None:
    """A tail has the newest records and older ones that have not ended; the rest is dropped."""
    whole = write(tmp_path / "x.ring", 900, (870, 890, 899), capacity)
    (tmp_path / "tail.ring").write_bytes(tail_of(whole, 16))
    tail = read_ring(tmp_path / "tail.ring")
    assert indexes(tmp_path / "tail.ring") == [870, *range(884, 900)]
    assert tail.dropped == 900 - 17
    assert tail.tables.strings == {1: "a name"}
    assert (tail.header.rank, tail.header.head, tail.problem) == (3, 900, None)
    words = dict(zip(indexes(whole), read_ring(whole).records, strict=True))
    for record in tail.records:
        assert record.tobytes() == words[int(record["commit"] >> 2) - 1].tobytes()


def test_a_call_that_was_parked_long_ago(tmp_path: Path) -> None:
    """The tail also has a call in flight whose slot was reused."""
    whole = write(tmp_path / "x.ring", 500, (0, 3), 64)
    (tmp_path / "tail.ring").write_bytes(tail_of(whole, 16))
    assert indexes(tmp_path / "tail.ring") == [0, 3, *range(484, 500)]


@pytest.mark.parametrize("count", [0, 1, 7, 16, 17])
def test_short_rings(tmp_path: Path, count: int) -> None:
    """A ring that has not filled its tail yet loses nothing."""
    whole = write(tmp_path / "x.ring", count, ())
    (tmp_path / "tail.ring").write_bytes(tail_of(whole, 16))
    assert indexes(tmp_path / "tail.ring") == list(range(max(0, count - 16), count))
    assert read_ring(tmp_path / "tail.ring").dropped == max(0, count - 16)


def test_the_tail_of_a_tail(tmp_path: Path) -> None:
    """A tail can be cut again."""
    whole = write(tmp_path / "x.ring", 300, (100,))
    (tmp_path / "a.ring").write_bytes(tail_of(whole, 64))
    (tmp_path / "b.ring").write_bytes(tail_of(tmp_path / "a.ring", 16))
    (tmp_path / "c.ring").write_bytes(tail_of(whole, 16))
    assert indexes(tmp_path / "b.ring") == indexes(tmp_path / "c.ring")


def test_what_is_no_ring(tmp_path: Path) -> None:
    """A damaged file has no tail."""
    (tmp_path / "x.ring").write_bytes(b"RANKCALL" + b"\xff" * 5_000)
    with pytest.raises(CorruptRunError):
        tail_of(tmp_path / "x.ring")
    with pytest.raises(CorruptRunError):
        tail_of(tmp_path / "none.ring")


@pytest.mark.parametrize("kind", ["missing", "stopped", "dead", "mismatch", "exhausted"])
def test_the_verdict_from_tails_is_the_same(tmp_path: Path, kind: str) -> None:
    """A hang is judged the same from tails as from whole rings."""
    run = tmp_path / "run"
    synthetic_run(run, 8, 900, planted=Planted(kind, (3,), 700), hung_s=120)
    whole = diagnose(load(run))
    for ring in (run / "rings").iterdir():
        ring.write_bytes(tail_of(ring))
    tails = diagnose(load(run))
    assert whole.findings
    assert [(f.kind, f.ranks, f.confidence, f.seq) for f in tails.findings] == [
        (f.kind, f.ranks, f.confidence, f.seq) for f in whole.findings
    ]

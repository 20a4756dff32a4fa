"""What each rank did when, compared with counting every nanosecond."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from worlds import MS, PAIR, Call, together, write_world

from rankcall.analysis.details import detail
from rankcall.analysis.timeline import MOST_ROWS, RankSpans, timeline
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

Rings = list[list[tuple[int, int, float]]]
RINGS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(0, 600), st.floats(0, 1)),
        min_size=1,
        max_size=12,
    ),
    min_size=1,
    max_size=2,
)


def spans(ops: list[tuple[int, int, float]]) -> RankSpans:
    """The spans of ops, each a begin, a length, and the part of it that is waiting."""
    ops = sorted(ops)
    begin = np.array([at for at, _, _ in ops])
    lasts = np.array([length for _, length, _ in ops])
    waited = np.array([int(length * part) for _, length, part in ops])
    return RankSpans(begin, begin + lasts, waited)


@given(RINGS, RINGS)
def test_every_nanosecond(first: Rings, second: Rings) -> None:
    """Each moment has the shares that counting finds. Time in two ops at once counts once."""
    rings = {0: [spans(ops) for ops in first], 1: [spans(ops) for ops in second]}
    drawn = timeline({0: 1.0, 1: 2.0}, lambda rank: rings[rank])
    begin = min(int(ring.begin[0]) for some in rings.values() for ring in some)
    end = max(int(ring.end.max()) for some in rings.values() for ring in some)
    if end <= begin:
        assert drawn is None
        return
    assert drawn is not None
    assert (drawn.ranks, drawn.fold) == ([0, 1], 1)
    bins = drawn.present.shape[1]
    edges = np.linspace(begin, end, bins + 1)
    grain = 8  # looks for each nanosecond
    looks = begin + (np.arange((end - begin) * grain) + 0.5) / grain
    which = np.minimum(np.searchsorted(edges, looks, side="right") - 1, bins - 1)
    for row, some in enumerate(rings.values()):
        busy, waits, there = (np.zeros(len(looks)) for _ in range(3))
        for ring in some:
            in_ring, waits_in_ring = np.zeros(len(looks), bool), np.zeros(len(looks), bool)
            for a, b, waited in zip(ring.begin, ring.end, ring.waited, strict=True):
                in_ring |= (looks > a) & (looks < b)
                waits_in_ring |= (looks > a) & (looks < a + waited)
            busy += in_ring
            waits += waits_in_ring
            there += (looks > ring.begin[0]) & (looks < ring.end.max())
        width = (end - begin) / bins
        off = 2 / grain / width + 1e-9  # of a moment, by the looks at its borders
        share_of = [np.bincount(which, part, bins) / grain / width for part in (busy, waits, there)]
        expected_busy = np.minimum(share_of[0], 1)
        found_busy = drawn.waiting[row] + drawn.transfer[row]
        if len(some) == 1:
            assert np.allclose(found_busy, expected_busy, atol=2 * off + len(some[0].begin) * off)
            assert np.allclose(
                drawn.waiting[row], np.minimum(share_of[1], expected_busy), atol=14 * off
            )
            assert np.allclose(drawn.present[row], np.minimum(share_of[2], 1), atol=14 * off)
        assert (found_busy <= drawn.present[row] + 1e-9).all()
        assert (drawn.waiting[row] >= -1e-9).all()
        assert (drawn.present[row] <= 1 + 1e-9).all()


def test_moments_add_up_to_the_columns(tmp_path: Path) -> None:
    """The same parts of each rank's time as its column, computed another way."""
    program = (Op(message_bytes=1 << 20, line=41), Op("all_gather", 1 << 16, line=57))
    synthetic_run(tmp_path / "run", 6, 120, program=program, straggler=4)
    details = detail(load(tmp_path / "run"))
    drawn = details.timeline
    assert drawn is not None
    for row, split in zip(range(6), details.splits, strict=True):
        assert drawn.ranks[row] == split.rank
        waiting = drawn.waiting[row].sum() * drawn.bin_ns / 1e6
        transfer = drawn.transfer[row].sum() * drawn.bin_ns / 1e6
        assert abs(waiting - split.waiting_ms) <= 0.01 * split.total_ms
        assert abs(transfer - split.transfer_ms) <= 0.01 * split.total_ms


def test_hosts_with_other_clocks(tmp_path: Path) -> None:
    """Rank 1's host is a second ahead; on the picture, both are in the call at the same time."""
    calls = [
        *together(1, [0, 30 * MS], 40 * MS, PAIR),
        *together(2, [50 * MS, 50 * MS], 100 * MS, PAIR),
    ]
    run = write_world(tmp_path / "run", calls, hosts={0: "a", 1: "b"}, offsets={"b": 1000 * MS})
    drawn = detail(load(run)).timeline
    assert drawn is not None
    assert abs(drawn.bin_ns * drawn.present.shape[1] - 100 * MS) < 5 * MS
    begun = np.flatnonzero(drawn.present[1] > 0)[0] / drawn.present.shape[1]
    assert 0.25 < begun < 0.35


def test_of_ranks_in_one_row_the_one_that_computes_longest(tmp_path: Path) -> None:
    """With more ranks than rows, the others of a row wait for the one that is drawn."""
    ranks = 2 * MOST_ROWS
    ring = RankSpans(np.array([0]), np.array([100]), np.array([0]))
    drawn = timeline({rank: float(rank % 2) for rank in range(ranks)}, lambda rank: [ring])
    assert drawn is not None
    assert drawn.fold == 2
    assert drawn.ranks == list(range(1, ranks, 2))


def test_no_op_has_a_length(tmp_path: Path) -> None:
    """A run of one call that never ended has no picture."""
    run = write_world(tmp_path / "run", [Call(0, 1, 0, None), Call(1, 1, 0, None)])
    assert detail(load(run)).timeline is None

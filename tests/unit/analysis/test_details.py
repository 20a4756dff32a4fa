"""The figures of the HTML page, compared with models that take one collective at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import MS, PAIR, Call, group_of, together, write_world

from rankcall.analysis.details import detail
from rankcall.analysis.waiting import covered
from rankcall.ring.tables import Group
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

PROGRAM = (
    Op(message_bytes=1 << 20, line=41),
    Op("all_gather", 1 << 16, family="tp", line=57),
    Op("reduce_scatter", 1 << 12, family="tp", line=61),
    Op("broadcast", 4096, line=12, root=1),
)
FAMILIES = {"tp": [[0, 1, 2], [3, 4, 5]]}


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=20))
def test_covered_is_the_union(spans: list[tuple[int, int]]) -> None:
    """Time that several intervals cover counts once."""
    spans.sort()
    begin = np.array([a for a, _ in spans])
    end = begin + np.array([length for _, length in spans])
    ticks = {tick for a, b in zip(begin, end, strict=True) for tick in range(a, b)}
    assert covered(begin, end) == len(ticks)


def test_split_by_hand(tmp_path: Path) -> None:
    """Rank 1 comes 3 ms late, the transfer takes 1 ms; overlapping ops count once."""
    calls = [
        *together(1, [0, 3 * MS], 4 * MS, PAIR),
        *together(2, [10 * MS, 10 * MS], 12 * MS, PAIR),
        *together(3, [10 * MS, 10 * MS], 12 * MS, PAIR),  # at the same time as the one before
    ]
    early, late = detail(load(write_world(tmp_path / "run", calls))).splits
    assert (early.compute_ms, early.waiting_ms, early.transfer_ms) == (6.0, 3.0, 3.0)
    assert (late.compute_ms, late.waiting_ms, late.transfer_ms) == (6.0, 0.0, 3.0)


def test_split_of_roots_and_messages(tmp_path: Path) -> None:
    """A broadcast waits for its root, a gather's root for the last, a receiver for its sender."""
    calls = [
        *together(1, [0, 2 * MS], 3 * MS, PAIR, op="broadcast", root=1),
        *together(2, [10 * MS, 14 * MS], 15 * MS, PAIR, op="gather", root=0),
        Call(0, 1, 20 * MS, 29 * MS, "recv", peer=1),
        Call(1, 1, 25 * MS, 26 * MS, "send", peer=0),
        Call(0, 3, 30 * MS, None),
    ]
    first, second = detail(load(write_world(tmp_path / "run", calls))).splits
    assert (first.waiting_ms, first.transfer_ms) == (2 + 4 + 5, 1 + 1 + 4)
    assert (second.waiting_ms, second.transfer_ms) == (0.0, 1 + 1 + 1)


def test_split_adds_up(tmp_path: Path) -> None:
    """The three parts are the rank's time, and the share in communication is the report's own."""
    synthetic_run(tmp_path / "run", 6, 240, program=PROGRAM, groups=FAMILIES, straggler=4)
    details = detail(load(tmp_path / "run"))
    records = load(tmp_path / "run").records
    for split, row in zip(details.splits, details.summary.ranks, strict=True):
        mine = records.filter(records["rank"] == split.rank)
        span = int(mine["completed_ns"].max()) - int(mine["started_ns"].min())
        assert split.total_ms == pytest.approx(span / 1e6, rel=1e-9)
        assert 1 - split.compute_ms / split.total_ms == pytest.approx(row.comm_share, rel=1e-9)
        assert split.steps == row.steps == 24
    assert max(details.splits, key=lambda split: split.compute_ms).rank == 4


def test_lateness_is_the_mean_over_the_collectives(tmp_path: Path) -> None:
    """Each cell of each map equals a loop over the collectives, with clocks a second apart."""
    truth = synthetic_run(
        tmp_path / "run",
        6,
        240,
        hosts=3,
        program=PROGRAM,
        groups=FAMILIES,
        straggler=4,
        clock_offsets_ns=[0, 1_000_000_000, -500_000_000],
    )
    late = detail(load(tmp_path / "run")).lateness
    families = {
        "all groups": {"world", "tp"},
        "default_pg (6 ranks)": {"world"},
        "tp (3 ranks)": {"tp"},
    }
    assert [heat_map.title for heat_map in late.maps] == list(families)
    for heat_map in late.maps:
        bins = heat_map.late_ms.shape[1]
        sums, counts = np.zeros((6, bins)), np.zeros((6, bins))
        first = _first_moment(truth)
        for row, op in enumerate(truth.program):
            if op.family not in families[heat_map.title] or op.op == "broadcast":
                continue
            for ranks in truth.families[op.family]:
                came = truth.arrivals[row, ranks]
                middle = np.sort(came)[(len(came) - 1) // 2]
                at = min(int((middle - first) / late.bin_ns), bins - 1)
                sums[ranks, at] += np.maximum(came - middle, 0)
                counts[ranks, at] += 1
        assert np.array_equal(counts > 0, ~np.isnan(heat_map.late_ms))
        expected = sums[counts > 0] / counts[counts > 0] / 1e6
        assert np.abs(expected - heat_map.late_ms[counts > 0]).max() < 0.1


def _first_moment(truth: object) -> float:
    arrivals = truth.arrivals  # type: ignore[attr-defined]
    return float(arrivals[arrivals >= 0].min())


def test_the_line_a_rank_is_late_to(tmp_path: Path) -> None:
    """The line at which the straggler costs most is named, with the line of the op before it."""
    synthetic_run(tmp_path / "run", 6, 240, program=PROGRAM, groups=FAMILIES, straggler=4)
    lines = [line for line in detail(load(tmp_path / "run")).late_lines if line.rank == 4]
    assert (lines[0].site.line, lines[0].op) == (41, "all_reduce")
    assert {(line.site.line, line.op) for line in lines[1:]} == {
        (57, "all_gather"),
        (61, "reduce_scatter"),
    }
    assert lines[0].since is not None
    assert lines[0].since.line == 12
    assert sum(line.share for line in lines) == pytest.approx(1.0)
    assert lines[0].times == 60


def test_traffic_by_hand(tmp_path: Path) -> None:
    """Each op's bytes are counted on the links that a ring, a chain, a root or a message uses."""
    world, hosts = group_of(4), {0: "a", 1: "a", 2: "b", 3: "b"}

    def sent(op: str, **fields: int) -> list[list[float]]:
        calls = together(1, [0] * 4, MS, world, op=op, bytes=1200, **fields)
        folder = tmp_path / f"{op}{len(list(tmp_path.iterdir()))}"
        return detail(load(write_world(folder, calls, hosts=hosts))).traffic.sent.tolist()

    # Two of the ring's four hops stay on a host, one goes each way.
    assert sent("all_reduce") == [[1800, 1800], [1800, 1800]]
    assert sent("all_gather") == [[900, 900], [900, 900]]
    assert sent("reduce_scatter") == [[3600, 3600], [3600, 3600]]
    assert sent("broadcast", root=3) == [[1200, 1200], [1200, 0]]
    assert sent("gather", root=0) == [[1200, 0], [2400, 0]]
    assert sent("scatter", root=0) == [[1200, 2400], [0, 0]]
    assert sent("all_to_all") == [[600, 1200], [1200, 600]]
    assert sent("barrier") == [[0, 0], [0, 0]]


def test_traffic_of_messages_counts_each_once(tmp_path: Path) -> None:
    """A message whose sender left no record is counted at its receiver."""
    group = Group("0", 0, "gloo", "d", (0, 1, 2))
    calls = [
        Call(0, 1, 0, MS, "send", 100, peer=1, group=group),
        Call(1, 1, 0, MS, "recv", 100, peer=0, group=group),
        Call(1, 2, 0, MS, "recv", 40, peer=2, group=group),
        Call(0, 2, 0, None, "send", 7, peer=1, group=group),
    ]
    hosts = {0: "a", 1: "b", 2: "c"}
    run = write_world(tmp_path / "run", calls, hosts=hosts, ranks=[2], world_size=3)
    traffic = detail(load(run)).traffic
    assert traffic.hosts == ["a", "b", "c"]
    assert traffic.sent.tolist() == [[0, 100, 0], [0, 0, 0], [0, 40, 0]]


def test_nothing_to_see(tmp_path: Path) -> None:
    """Runs without records, without an end, of one rank and of two attempts have figures."""
    empty = detail(load(write_world(tmp_path / "a", [], ranks=[0, 1])))
    assert (empty.splits, empty.late_lines) == ([], [])
    open_end = detail(load(write_world(tmp_path / "b", [Call(0, 1, 0, None), Call(1, 1, 0, None)])))
    assert [split.total_ms for split in open_end.splits] == [0.0, 0.0]
    alone = detail(load(write_world(tmp_path / "c", [Call(0, 1, 0, MS, group=group_of(1))])))
    assert alone.splits[0].transfer_ms == 1.0
    assert np.isnan(alone.lateness.maps[0].late_ms).all()
    twice = [*together(1, [0, MS], 2 * MS, PAIR), *together(1, [0, MS], 2 * MS, PAIR, attempt=1)]
    assert detail(load(write_world(tmp_path / "d", twice))).splits[0].waiting_ms == 2.0


def test_maps_of_ranks_that_belong_together(tmp_path: Path) -> None:
    """A row of several ranks is the mean of theirs; each rank is in one row of each map."""
    groups = {"tp": [list(range(at, at + 4)) for at in (0, 4, 8)]}
    program = (Op(message_bytes=1 << 20, line=41), Op("all_gather", 1 << 16, family="tp", line=57))
    synthetic_run(tmp_path / "run", 12, 240, hosts=6, program=program, groups=groups, straggler=7)
    late = detail(load(tmp_path / "run")).lateness
    every = late.maps[0].late_ms
    assert not np.isnan(every).any()
    rows_of = {
        "hosts": [[at, at + 1] for at in range(0, 12, 2)],
        "tp: places in the groups": [[at, at + 4, at + 8] for at in range(4)],
        "tp: groups": groups["tp"],
    }
    assert [folded.title for folded in late.folded] == list(rows_of)
    for folded in late.folded:
        rows = rows_of[folded.title]
        # Each rank takes part in as many collectives as the others, so means of means are right.
        assert np.allclose(folded.late_ms, [every[ranks].mean(axis=0) for ranks in rows])
        assert len(folded.names) == len(rows)
    assert late.folded[2].names == ["ranks 0-3", "ranks 4-7", "ranks 8-11"]

"""The analysis, compared with a model in plain Python that goes through every moment."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import Call, group_of, write_world

from rankcall.analysis.summary import Summary, summarise
from rankcall.run.load import load

SYNC = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, list[Call]]:
    """Draw a group of 2 to 5 ranks that issue some collectives; records and ends are missing."""
    size = draw(st.integers(2, 5))
    calls = []
    for seq in range(1, draw(st.integers(1, 8)) + 1):
        op = draw(st.sampled_from(SYNC + FROM_ROOT + TO_ROOT))
        root = draw(st.integers(0, size - 1)) if op in FROM_ROOT + TO_ROOT else -1
        length = draw(st.sampled_from([0, 1, 1000, 1024, 1 << 20, (1 << 20) + 1]))
        for rank in range(size):
            if draw(st.integers(0, 9)) == 0:
                continue
            # No two members arrive at the same moment, so that exactly one is the last.
            at = draw(st.integers(1, 4000)) * 8 + rank + (seq * 8000 if draw(st.booleans()) else 0)
            end = at + draw(st.integers(1, 9999)) if draw(st.integers(0, 9)) else None
            calls.append(
                Call(rank, seq, at, end, op, length, group=group_of(size), root=root, line=root + 9)
            )
    return size, calls


def summary_of(size: int, calls: list[Call]) -> Summary:
    """Write a world as rings and analyse them."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_world(Path(folder) / "run", calls, world_size=size, ranks=range(size))
        return summarise(load(path))


def by_seq(calls: Sequence[Call]) -> list[list[Call]]:
    """Group calls into collectives, in order."""
    collectives: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        collectives[call.seq].append(call)
    return [collectives[seq] for seq in sorted(collectives)]


def waited_for(call: Call, members: list[Call]) -> list[Call]:
    """Return the calls that must arrive before a call can end."""
    roots = [member for member in members if member.rank == call.root]
    if call.op in SYNC or (call.op in TO_ROOT and call.rank == call.root):
        return members
    return roots if call.op in FROM_ROOT else []


def blame(ops: list[tuple[Call, list[Call]]]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the waiting that each rank caused and suffered, summed over every moment.

    ``ops``: each call, and the calls that it waits for. A rank waits in the one that it came to
    first, until all have come, and not beyond its own end.
    """
    caused: dict[int, float] = defaultdict(float)
    suffered: dict[int, float] = defaultdict(float)
    for rank in {call.rank for call, _ in ops}:
        mine = [(c, others) for c, others in ops if c.rank == rank and others]
        mine.sort(key=lambda op: op[0].at)
        spans = [(c.at, max([c.at, *(o.at for o in others)])) for c, others in mine]
        spans = [
            (a, b if c.end is None else min(b, c.end))
            for (a, b), (c, _) in zip(spans, mine, strict=True)
        ]
        moments = {moment for span in spans for moment in span}
        moments |= {o.at for _, others in mine for o in others}
        for start, stop in pairwise(sorted(moments)):
            which = next((n for n, (a, b) in enumerate(spans) if a <= start and stop <= b), None)
            if which is None:
                continue
            call, others = mine[which]
            # If a call ended before all others had come, its wait ended with the last of them.
            shift = max([call.at, *(o.at for o in others)]) - spans[which][1]
            absent = [other for other in others if other.at >= stop + shift]
            cuts = sorted(
                {
                    start + shift,
                    stop + shift,
                    *(o.at for o in others if start + shift < o.at < stop + shift),
                }
            )
            suffered[rank] += stop - start
            for low, high in pairwise(cuts):
                absent = [other for other in others if other.at >= high]
                for other in absent:
                    caused[other.rank] += (high - low) / len(absent)
    return caused, suffered


def ops_of(calls: list[Call]) -> list[tuple[Call, list[Call]]]:
    """Return the calls of collectives, by sequence number, with those that each waits for."""
    return [(call, waited_for(call, members)) for members in by_seq(calls) for call in members]


@given(worlds())
def test_blame_is_what_a_look_at_every_moment_finds(world: tuple[int, list[Call]]) -> None:
    """Caused and suffered waiting and who came last equal the model's, rank by rank."""
    size, calls = world
    stragglers = {straggler.rank: straggler for straggler in summary_of(size, calls).stragglers}
    caused, suffered = blame(ops_of(calls))
    last: dict[int, int] = defaultdict(int)
    for members in by_seq(calls):
        if members[0].op in SYNC and len(members) > 1:
            last[max(members, key=lambda call: call.at).rank] += 1
    for rank in range(size):
        assert stragglers[rank].caused_wait_ms * 1e6 == pytest.approx(caused[rank], abs=1e-3)
        assert stragglers[rank].suffered_wait_ms * 1e6 == pytest.approx(suffered[rank], abs=1e-3)
        assert stragglers[rank].came_last == last[rank]
    total = sum(caused.values())
    assert total == pytest.approx(sum(suffered.values()))
    if total:
        assert stragglers[0].share == pytest.approx(caused[0] / total)


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))


def transfer_of(members: list[Call]) -> float | None:
    """Return t: the shortest duration; for rooted ops that of the slowest receiver."""
    spent = {call.rank: call.end - call.at for call in members if call.end is not None}
    if not spent:
        return None
    op, root = members[0].op, members[0].root
    if op in SYNC:
        return min(spent.values())
    root_came = any(call.rank == root for call in members)
    receives = {r: d for r, d in spent.items() if (r == root) == (op in TO_ROOT)}
    return max((receives if root_came and receives else spent).values())


S = {
    "all_reduce": lambda b, n: b,
    "broadcast": lambda b, n: b,
    "reduce": lambda b, n: b,
    "all_gather": lambda b, n: b,
    "all_to_all": lambda b, n: b,
    "reduce_scatter": lambda b, n: b * n,
    "gather": lambda b, n: b * n,
    "scatter": lambda b, n: b * n,
}
F = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1, "reduce": lambda n: 1}


@given(worlds())
def test_the_table_is_what_a_loop_finds(world: tuple[int, list[Call]]) -> None:
    """Counts, bytes, times and bandwidths of each row equal a loop's over the records."""
    size, calls = world
    expected: dict[tuple[str, int], list[list[Call]]] = defaultdict(list)
    for members in by_seq(calls):
        length = members[0].bytes
        expected[members[0].op, 2 ** math.floor(math.log2(length)) if length else 0].append(members)
    rows = {(row.op, row.bucket): row for row in summary_of(size, calls).collectives}
    assert rows.keys() == expected.keys()
    for key, collectives in expected.items():
        check_row(rows[key], collectives, size)


def check_row(row: object, collectives: list[list[Call]], size: int) -> None:
    """Compare one row with its collectives."""
    means, rates = [], []
    for members in collectives:
        spent = [call.end - call.at for call in members if call.end is not None]
        transfer = transfer_of(members)
        if spent:
            means.append(sum(spent) / len(spent))
        if transfer and members[0].op != "barrier" and members[0].bytes:
            rates.append(S[members[0].op](members[0].bytes, size) / transfer)
    assert row.count == len(collectives)
    assert row.unfinished == len(collectives) - len(means)
    assert row.bytes == sum(members[0].bytes for members in collectives)
    assert (row.total_ms is None) == (not means)
    busy: dict[int, set[int]] = defaultdict(set)
    for call in itertools.chain(*collectives):
        if call.end is not None:
            busy[call.rank].update(range(call.at, call.end))
    assert not means or row.total_ms * 1e6 == pytest.approx(max(map(len, busy.values())))
    for figure, share in ((row.median_ms, 0.5), (row.p95_ms, 0.95)):
        assert (figure is None) == (not means)
        assert not means or figure * 1e6 == pytest.approx(percentile(means, share))
    assert (row.algbw_gbps is None) == (not rates)
    if rates:
        # bytes / ns is GB/s
        assert row.algbw_gbps == pytest.approx(percentile(rates, 0.5))
        factor = F.get(row.op, lambda n: (n - 1) / n)(size)
        assert row.busbw_gbps == pytest.approx(percentile(rates, 0.5) * factor)
    if row.op in SYNC:
        assert 0.0 <= (row.waiting_share or 0.0) <= 1.0


@st.composite
def letters(draw: st.DrawFn) -> list[Call]:
    """Draw messages among three ranks over two tags; some ends are missing or unfinished."""
    calls, seqs = [], defaultdict(int)
    for _ in range(draw(st.integers(1, 12))):
        source, target = draw(st.permutations([0, 1, 2]))[:2]
        tag = draw(st.integers(0, 1))
        seqs[source, target, tag] += 1
        for rank, peer, op in ((source, target, "send"), (target, source, "recv")):
            if draw(st.integers(0, 5)):
                at = draw(st.integers(1, 5000))
                end = at + draw(st.integers(1, 5000)) if draw(st.integers(0, 5)) else None
                seq = seqs[source, target, tag]
                group, api = group_of(3), f"i{op}"
                calls.append(
                    Call(rank, seq, at, end, op, 64, group=group, peer=peer, tag=tag, api=api)
                )
    return draw(st.permutations(calls))


@given(letters())
def test_messages_are_matched_as_a_dict_matches_them(calls: list[Call]) -> None:
    """Waiting for senders equals a loop over (source, target, tag, seq).

    Whom it is charged to is in test_wait_chains.py.
    """
    sends = {
        (call.rank, call.peer, call.tag, call.seq): call for call in calls if call.op == "send"
    }
    times: dict[str, dict[int, set[int]]] = {"send": {}, "recv": {}}
    ops = []
    for call in calls:
        sent = sends.get((call.peer, call.rank, call.tag, call.seq))
        ops.append((call, [sent] if call.op == "recv" and sent is not None else []))
        if call.end is not None:
            times[call.op].setdefault(call.rank, set()).update(range(call.at, call.end))
    _, suffered = blame(ops)
    summary = summary_of(3, calls)
    assert summary.waiting_ms * 1e6 == pytest.approx(sum(suffered.values()), abs=1e-3)
    for straggler in summary.stragglers:
        assert straggler.suffered_wait_ms * 1e6 == pytest.approx(suffered[straggler.rank], abs=1e-3)
    for row in summary.collectives:
        assert row.count == sum(call.op == row.op for call in calls)
        busiest = max(map(len, times[row.op].values()), default=0)
        assert (row.total_ms is None) == (not times[row.op])
        assert (row.total_ms or 0.0) * 1e6 == pytest.approx(busiest)

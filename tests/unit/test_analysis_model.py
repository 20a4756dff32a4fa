"""The analysis against a model in plain Python that looks at every moment of every collective."""

from __future__ import annotations

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

from rankcall.analysis import Summary, summarise
from rankcall.run import load

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
            # No two members come at the same moment: who came last has one answer.
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
    found: dict[int, list[Call]] = defaultdict(list)
    for call in calls:
        found[call.seq].append(call)
    return [found[seq] for seq in sorted(found)]


def sweep(
    waiters: list[Call], members: list[Call], begin: int, caused: dict, suffered: dict
) -> None:
    """Walk over time: each moment of waiting is shared by those who have not come."""
    moments = sorted({call.at for call in members} | {begin})
    for start, stop in pairwise(moments):
        absent = [call for call in members if call.at >= stop]
        waiting = [call for call in waiters if call.at <= start]
        if start < begin:
            continue
        for call in waiting:
            suffered[call.rank] += stop - start if absent else 0
        for call in absent:
            caused[call.rank] += (stop - start) * len(waiting) / len(absent)


def blame(calls: list[Call]) -> tuple[dict[int, float], dict[int, float], dict[int, int]]:
    """Return the waiting that each rank caused and suffered, and how often it came last."""
    caused: dict[int, float] = defaultdict(float)
    suffered: dict[int, float] = defaultdict(float)
    last: dict[int, int] = defaultdict(int)
    begin = -(10**9)
    for members in by_seq(calls):
        op = members[0].op
        roots = [call for call in members if call.rank == call.root]
        if op in SYNC:
            sweep(members, members, begin, caused, suffered)
            latest = max(members, key=lambda call: call.at)
            begin = max(begin, latest.at)
            last[latest.rank] += len(members) > 1
        elif op in TO_ROOT and roots:
            sweep(roots, members, -(10**9), caused, suffered)
        elif roots:
            for call in members:
                wait = max(0, roots[0].at - call.at)
                caused[roots[0].rank] += wait
                suffered[call.rank] += wait
    return caused, suffered, last


@given(worlds())
def test_blame_is_what_a_sweep_over_time_finds(world: tuple[int, list[Call]]) -> None:
    """Caused and suffered waiting and who came last equal the model's, rank by rank."""
    size, calls = world
    found = {each.rank: each for each in summary_of(size, calls).stragglers}
    caused, suffered, last = blame(calls)
    for rank in range(size):
        assert found[rank].caused_wait_ms * 1e6 == pytest.approx(caused[rank], abs=1e-3)
        assert found[rank].suffered_wait_ms * 1e6 == pytest.approx(suffered[rank], abs=1e-3)
        assert found[rank].came_last == last[rank]
    total = sum(caused.values())
    assert total == pytest.approx(sum(suffered.values()))
    if total:
        assert found[0].share == pytest.approx(caused[0] / total)


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
    assert row.total_ms * 1e6 == pytest.approx(sum(means))
    for found, share in ((row.median_ms, 0.5), (row.p95_ms, 0.95)):
        assert (found is None) == (not means)
        assert not means or found * 1e6 == pytest.approx(percentile(means, share))
    assert (row.algbw_gbps is None) == (not rates)
    if rates:
        # bytes / ns is GB/s
        assert row.algbw_gbps == pytest.approx(percentile(rates, 0.5))
        factor = F.get(row.op, lambda n: (n - 1) / n)(size)
        assert row.busbw_gbps == pytest.approx(percentile(rates, 0.5) * factor)
    if row.op in SYNC:
        spent = [[c.end - c.at for c in m if c.end is not None] for m in collectives]
        whole = sum(map(sum, spent))
        beyond = sum(sum(s) - min(s) * len(s) for s in spent if s)
        assert (row.waiting_share or 0.0) == pytest.approx(beyond / whole if whole else 0.0)


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
                calls.append(
                    Call(rank, seq, at, end, op, 64, group=group_of(3), peer=peer, tag=tag)
                )
    return draw(st.permutations(calls))


@given(letters())
def test_messages_are_matched_as_a_dict_matches_them(calls: list[Call]) -> None:
    """Waiting for senders, and whose it is, equal a loop's over (source, target, tag, seq)."""
    sends = {
        (call.rank, call.peer, call.tag, call.seq): call for call in calls if call.op == "send"
    }
    caused: dict[int, float] = defaultdict(float)
    suffered: dict[int, float] = defaultdict(float)
    times: dict[str, list[float]] = defaultdict(list)
    for call in calls:
        if call.op == "recv" and (key := (call.peer, call.rank, call.tag, call.seq)) in sends:
            sent = sends[key]
            wait = min(max(0, sent.at - call.at), 0 if call.end is None else call.end - call.at)
            caused[sent.rank] += wait
            suffered[call.rank] += wait
        if call.end is not None:
            times[call.op].append(call.end - call.at)
    summary = summary_of(3, calls)
    for each in summary.stragglers:
        assert each.caused_wait_ms * 1e6 == pytest.approx(caused[each.rank], abs=1e-3)
        assert each.suffered_wait_ms * 1e6 == pytest.approx(suffered[each.rank], abs=1e-3)
    for row in summary.collectives:
        assert row.count == sum(call.op == row.op for call in calls)
        assert row.total_ms * 1e6 == pytest.approx(sum(times[row.op]))

"""What a rank spent its time on, against a model that walks through the time in small steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcall.analysis.node_snapshot import NodeSnapshot, decode, encode, merge
from rankcall.analysis.snapshot import RankState, no_calls
from rankcall.analysis.spent import LATELY, SINCE, SPENT, RankSamples, Spending, spent_in
from rankcall.ring.layout import PHASE_COUNTERS, SAMPLE, SAMPLE_COUNTERS
from rankcall.ring.samples import Samples

_OF_THREAD = ("running_ns", "runnable_ns", "woken_ns", "disk_wait_ns", *PHASE_COUNTERS)
ALL = (1 << len(SAMPLE_COUNTERS)) - 1
S = 1_000_000_000
NAN, INFINITE = float("nan"), float("inf")


def samples_of(rows: list[tuple[int, int, int, dict[str, int]]]) -> Samples:
    """Return samples: time in ms, thread, known counters, and counters in ms."""
    samples = np.zeros(len(rows), SAMPLE)
    for row, (time_ms, thread, known, counters) in zip(samples, rows, strict=True):
        row["time_ns"], row["thread"], row["known"] = time_ms * 1_000_000, thread, known
        for name, value in counters.items():
            row[name] = value * 1_000_000
    return samples


@st.composite
def sampled(draw: st.DrawFn) -> list[tuple[int, int, int, dict[str, int]]]:
    """Draw samples whose counters grow, of one or two threads."""
    rows, time_ms = [], 0
    counters = dict.fromkeys(SAMPLE_COUNTERS, 0)
    for _ in range(draw(st.integers(0, 8))):
        time_ms += draw(st.integers(1, 900))
        thread = draw(st.sampled_from((7, 7, 7, 9)))
        counters = {name: value + draw(st.integers(0, 400)) for name, value in counters.items()}
        rows.append((time_ms, thread, draw(st.sampled_from((ALL, ALL, ALL - 4))), dict(counters)))
    return rows


def expected(
    rows: list[tuple[int, int, int, dict[str, int]]], name: str, begin_ms: int
) -> float | None:
    """Add up a counter ms by ms; None if it never grew between two samples that know it."""
    total, is_known = 0.0, False
    bit = 1 << SAMPLE_COUNTERS.index(name)
    for before, after in pairwise(rows):
        if not (before[2] & bit and after[2] & bit):
            continue
        if name in _OF_THREAD and before[1] != after[1]:
            continue
        is_known = True
        each = (after[3][name] - before[3][name]) / (after[0] - before[0])
        total += sum(each for moment in range(before[0], after[0]) if moment >= begin_ms)
    return total / 1e3 if is_known else None


@given(rows=sampled(), begin_ms=st.integers(0, 3000))
def test_figures_are_the_models(
    rows: list[tuple[int, int, int, dict[str, int]]], begin_ms: int
) -> None:
    """Seconds, and every counter that is not derived."""
    rank = RankSamples(3, samples_of(rows), begin_ms * 1_000_000, 0, 0, 10 * S)
    spent = spent_in(rank, LATELY)
    covered = sum(
        after[0] - max(before[0], begin_ms)
        for before, after in pairwise(rows)
        if after[0] > begin_ms
    )
    assert len(spent) == (covered > 0)
    if covered <= 0:
        return
    assert spent["seconds"][0] == pytest.approx(covered / 1e3)
    for name in SAMPLE_COUNTERS:
        if name not in ("gc_ns", "blocked_ns", "sleeping_ns"):  # these are put together
            model = expected(rows, name, begin_ms)
            figure = spent[name.removesuffix("_ns") + "_s"][0]
            if model is not None and name != "throttled_ns":
                model = min(model, covered / 1e3)
            assert np.isnan(figure) if model is None else figure == pytest.approx(model)
    young, full = (expected(rows, name, begin_ms) for name in ("gc_ns", "full_gc_ns"))
    if young is not None and full is not None:
        assert spent["gc_s"][0] == pytest.approx(min(young + full, covered / 1e3))


@pytest.mark.parametrize(
    ("counters", "blocked_s"),
    [
        # Asleep for 4 s of 10 by the kernel, and never seen in another sleep.
        ({"running_ns": 4000, "runnable_ns": 2000, "blocked_ns": 900}, 4.0),
        ({"running_ns": 4000, "runnable_ns": 2000, "blocked_ns": 900, "sleeping_ns": 2700}, 1.0),
        ({"running_ns": 4000, "runnable_ns": 2000, "sleeping_ns": 2700}, 0.0),
        ({"running_ns": 9000, "runnable_ns": 1000, "blocked_ns": 900}, 0.0),
        ({"running_ns": 4000, "runnable_ns": 2000}, 0.0),  # seen in no sleep at all
        ({"running_ns": 9000, "runnable_ns": 4000, "blocked_ns": 900}, 0.9),  # cannot be
    ],
)
def test_state_d_is_a_share_of_the_time_asleep(counters: dict[str, int], blocked_s: float) -> None:
    """How long a thread was asleep is exact; looks say which part of that was in state D."""
    rows = [(1000, 7, ALL, {}), (11_000, 7, ALL, counters)]
    (spent,) = spent_in(RankSamples(0, samples_of(rows), 0, 0, 0, 12 * S), SINCE)
    assert spent["blocked_s"] == pytest.approx(blocked_s)
    for unknown, seen_s in (
        ("running_ns", counters.get("blocked_ns", 0) / 1e3),
        ("blocked_ns", NAN),
    ):
        known = ALL - (1 << SAMPLE_COUNTERS.index(unknown))
        rows = [(1000, 7, known, {}), (11_000, 7, known, counters)]
        (spent,) = spent_in(RankSamples(0, samples_of(rows), 0, 0, 0, 12 * S), SINCE)
        assert spent["blocked_s"] == pytest.approx(seen_s, nan_ok=True)


def test_a_collection_that_runs() -> None:
    """It counts up to now, in a time of which there is no sample; and also without any sample."""
    rows = [(1000, 7, ALL, {}), (2000, 7, ALL, {"full_gc_ns": 100})]
    rank = RankSamples(0, samples_of(rows), 0, 2_500_000_000, 3 * S, 33 * S)
    (since,) = spent_in(rank, SINCE)
    assert (since["seconds"], since["full_gc_s"], since["gc_s"]) == (30.5, 30.0, 30.0)
    (alone,) = spent_in(rank._replace(samples=samples_of([])), SINCE)
    assert (alone["seconds"], alone["full_gc_s"]) == (30.5, 30.0)
    assert np.isnan(alone["runnable_s"])
    assert len(spent_in(rank._replace(gc_since_ns=40 * S), SINCE)) == 0  # damage: in the future


def test_a_node_sends_the_rows_of_its_ranks() -> None:
    """And takes of each rank those that came with the rank's newest state."""
    rows = [(1000, 7, ALL, {}), (3000, 7, ALL, {"runnable_ns": 500})]
    spending = Spending(sampled=[RankSamples(1, samples_of(rows), 0, 0, 0, 9 * S)])
    sent = NodeSnapshot(2, [RankState(1, "b", silent_s=1.0)], no_calls(), spending=spending)
    older = NodeSnapshot(2, [RankState(1, "b", silent_s=9.0)], no_calls(), spending=spending)
    merged = merge([decode(encode(older)), decode(encode(sent))])
    assert merged.spending.table.tobytes() == spending.table.tobytes()
    assert merged.spending.table["runnable_s"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("name", "value"), [("seconds", 0.0), ("seconds", NAN), ("gc_s", -1.0), ("gc_s", INFINITE)]
)
def test_impossible_times(name: str, value: float) -> None:
    """A node's snapshot with such a row is none. NaN stands for what is not known."""
    row = np.zeros(1, SPENT)
    row["seconds"], row["runnable_s"] = 1.0, NAN
    node = NodeSnapshot(2, [RankState(1)], no_calls(), spending=Spending((row,)))
    assert len(decode(encode(node)).spending.table) == 1
    row[name] = value
    with pytest.raises(ValueError, match="impossible"):
        decode(encode(NodeSnapshot(2, [RankState(1)], no_calls(), spending=Spending((row,)))))


def test_rows_of_ranks_that_are_not_there() -> None:
    """A node's snapshot with such rows is none."""
    rows = [(1000, 7, ALL, {}), (3000, 7, ALL, {})]
    spending = Spending(sampled=[RankSamples(5, samples_of(rows), 0, 0, 0, 9 * S)])
    with pytest.raises(ValueError, match="not there"):
        decode(encode(NodeSnapshot(2, [RankState(1)], no_calls(), spending=spending)))

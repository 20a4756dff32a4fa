"""Small cases whose values are calculated by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from worlds import MS, Call, group_of, together, write_world

from rankcall.analysis.arrivals import Arrivals
from rankcall.analysis.charging import shares
from rankcall.analysis.summary import Row, Summary, size_name, summarise
from rankcall.record import FLAG_ANY_SOURCE, FLAG_DEVICE, bus_factor
from rankcall.ring.tables import Group
from rankcall.run.load import load


def analysed(folder: Path, calls: list[Call], **options: object) -> Summary:
    """Write a world and analyse it."""
    return summarise(load(write_world(folder / "run", calls, **options)))  # type: ignore[arg-type]


def only_row(summary: Summary) -> Row:
    """Return the table's only row."""
    (row,) = summary.collectives
    return row


def charged(came: Arrivals) -> list[float]:
    """Return the waiting that each member caused, if all wait from their arrival on."""
    waited = np.where(came.here, came.last[:, None] - came.times, 0)
    caused = shares(came, waited)
    assert caused.sum() == waited.sum()
    (result,) = caused.tolist()
    return list(result)


def test_one_straggler_is_charged_all_but_the_second_latest() -> None:
    """With arrivals 0, 10, 30, two ranks share the first 10, and the last causes the rest."""
    came = Arrivals(np.array([[0, 10, 30]]), np.ones((1, 3), bool))
    assert charged(came) == [0, 5, 45]


def test_two_stragglers_both_show() -> None:
    """With arrivals 0, 0, 20, 20, each of the two late ranks causes half of the 40."""
    came = Arrivals(np.array([[0, 0, 20, 20]]), np.ones((1, 4), bool))
    assert charged(came) == [0, 0, 20, 20]


def test_absent_members_are_neither_blamed_nor_pitied() -> None:
    """A member without a record is left out: with arrivals 0, -, 10, the first waits for 10."""
    came = Arrivals(np.array([[0, 99, 10]]), np.array([[True, False, True]]))
    assert charged(came) == [0, 0, 10]


def test_a_wait_that_begins_later_than_its_member_came() -> None:
    """With arrivals 0, 10, 30, if the first waits elsewhere until 20, the last causes the rest."""
    came = Arrivals(np.array([[0, 10, 30]]), np.ones((1, 3), bool))
    assert shares(came, np.array([[10, 20, 0]])).tolist() == [[0, 0, 30]]
    assert shares(came, np.array([[25, 20, 0]])).tolist() == [[0, 2.5, 42.5]]


def test_a_burst_behind_one_late_rank_counts_once(tmp_path: Path) -> None:
    """Rank 0 issues three async ops at 0, 1, 2 ms; rank 1 comes at 20, 21, 22: 22 ms, not 60."""
    group = group_of(2)
    calls = [
        call
        for i in range(3)
        for call in together(i + 1, [i * MS, (20 + i) * MS], (23 + i) * MS, group)
    ]
    summary = analysed(tmp_path, calls)
    assert summary.stragglers[0].rank == 1
    assert summary.stragglers[0].caused_wait_ms == pytest.approx(22)
    assert summary.waiting_ms == pytest.approx(22)


@pytest.mark.parametrize(
    ("op", "fields", "size", "factor"),
    [
        ("all_reduce", {}, 1e6, 1.5),
        ("broadcast", {"root": 0}, 1e6, 1),
        ("reduce", {"root": 0}, 1e6, 1),
        ("all_gather", {"in_bytes": 250_000}, 1e6, 0.75),
        ("reduce_scatter", {"in_bytes": 4_000_000}, 4e6, 0.75),
        ("all_to_all", {}, 1e6, 0.75),
        ("gather", {"root": 0, "out_bytes": 0}, 4e6, 0.75),
        ("scatter", {"root": 0, "in_bytes": 0}, 4e6, 0.75),
    ],
)
def test_bandwidth_of_every_op(
    tmp_path: Path, op: str, fields: dict, size: float, factor: float
) -> None:
    """1 MB by 4 ranks in 2 ms: S / t and f by nccl-tests' table, 1 GB = 1e9 bytes."""
    calls = together(1, [0, 0, 0, 0], 2 * MS, group_of(4), op=op, bytes=1_000_000, **fields)
    row = only_row(analysed(tmp_path, calls))
    assert row.algbw_gbps == pytest.approx(size / 2e-3 / 1e9)
    assert row.busbw_gbps == pytest.approx(size / 2e-3 / 1e9 * factor)
    assert bus_factor(op, 4) == factor


def test_uneven_all_to_all_counts_its_largest_member(tmp_path: Path) -> None:
    """S is the larger of what any member sends and receives."""
    calls = [
        Call(0, 1, 0, MS, "all_to_all", 1000, in_bytes=1000, out_bytes=3000),
        Call(1, 1, 0, MS, "all_to_all", 3000, in_bytes=3000, out_bytes=1000),
    ]
    assert only_row(analysed(tmp_path, calls)).algbw_gbps == pytest.approx(3000 / 1e-3 / 1e9)


def test_a_barrier_has_no_bandwidth(tmp_path: Path) -> None:
    """A barrier moves no data, and so it has no bandwidth."""
    row = only_row(analysed(tmp_path, together(1, [0, 5], MS, group_of(2), op="barrier", bytes=1)))
    assert (row.algbw_gbps, row.busbw_gbps) == (None, None)


def test_n_is_the_groups_size_even_with_a_ring_missing(tmp_path: Path) -> None:
    """If only two of four ranks left records, f is that of four, and the run names the others."""
    calls = [Call(rank, 1, 0, MS, bytes=1000, group=group_of(4)) for rank in (0, 1)]
    summary = analysed(tmp_path, calls, world_size=4)
    row = only_row(summary)
    assert row.busbw_gbps == pytest.approx(row.algbw_gbps * 1.5)
    assert summary.missing_ranks == [2, 3]
    assert "no ring for ranks 2-3 of 4" in summary.problems[0].text


def test_waiting_share_by_hand(tmp_path: Path) -> None:
    """Durations 10, 8 and 2 ms: t is 2, so 14 of the 20 ms are waiting."""
    calls = together(1, [0, 2 * MS, 8 * MS], 10 * MS, group_of(3))
    row = only_row(analysed(tmp_path, calls))
    assert row.transfer_ms == pytest.approx(2)
    assert row.waiting_share == pytest.approx(14 / 20)
    assert row.total_ms == pytest.approx(10)


def test_a_failed_op_counts_but_its_time_does_not(tmp_path: Path) -> None:
    """A time-out of half an hour does not count as a transfer."""
    calls = together(1, [0, 0], MS, group_of(2))
    calls += together(2, [2 * MS, 2 * MS], 1_800_000 * MS, group_of(2), status="failed")
    row = only_row(analysed(tmp_path, calls))
    assert (row.count, row.unfinished) == (2, 1)
    assert row.total_ms == pytest.approx(1)


def test_on_a_device_the_shortest_came_last(tmp_path: Path) -> None:
    """Both ranks issue at 0; rank 1's device takes 7 ms less, so it came 7 ms later."""
    calls = [
        Call(0, 1, 0, 900 * MS, device_ms=9, flags=FLAG_DEVICE),
        Call(1, 1, 0, 900 * MS, device_ms=2, flags=FLAG_DEVICE),
    ]
    worst = analysed(tmp_path, calls).stragglers[0]
    assert (worst.rank, worst.late_by_ms) == (1, pytest.approx(7))
    assert worst.caused_wait_ms == pytest.approx(7)


def test_sends_meet_their_receives(tmp_path: Path) -> None:
    """Rank 1 waits 4 ms for rank 0's message; tags and numbers keep two channels apart."""
    group = group_of(2)
    calls = [
        Call(0, 1, 5 * MS, 6 * MS, "send", 1000, group=group, peer=1, tag=7),
        Call(0, 1, 0, 1 * MS, "send", 1000, group=group, peer=1, tag=8),
        Call(1, 1, 1 * MS, 6 * MS, "recv", 1000, group=group, peer=0, tag=7),
        Call(1, 1, 6 * MS, 7 * MS, "recv", 1000, group=group, peer=0, tag=8),
    ]
    summary = analysed(tmp_path, calls)
    rows = {row.op: row for row in summary.collectives}
    assert rows["recv"].count == rows["send"].count == 2
    # t is that of the receivers, 5 and 1 ms, also for the sends.
    assert rows["send"].transfer_ms == rows["recv"].transfer_ms == pytest.approx(3)
    assert rows["recv"].waiting_share == pytest.approx(4 / 6)
    worst = summary.stragglers[0]
    assert (worst.rank, worst.caused_wait_ms) == (0, pytest.approx(4))


def test_a_receive_without_its_send(tmp_path: Path) -> None:
    """A message without its other end is counted, and its wait is blamed on no rank."""
    calls = [
        Call(1, 0, 0, None, "recv", group=group_of(2), peer=-1, flags=FLAG_ANY_SOURCE),
        Call(1, 3, 0, 5 * MS, "recv", group=group_of(2), peer=0),
    ]
    summary = analysed(tmp_path, calls, world_size=2, ranks=[0])
    assert only_row(summary).count == 2
    assert summary.waiting_ms == 0


def test_restarts_are_never_matched_with_each_other(tmp_path: Path) -> None:
    """Seq 1 of attempt 0 and of attempt 1 are two collectives; so are two runs in one folder."""
    group = group_of(2)
    calls = together(1, [0, 3 * MS], 4 * MS, group)
    calls += together(1, [100 * MS, 101 * MS], 102 * MS, group, attempt=1)
    calls += together(1, [200 * MS, 202 * MS], 203 * MS, group, life=1)
    summary = analysed(tmp_path, calls)
    assert only_row(summary).count == 3
    assert summary.stragglers[0].rank == 1
    assert summary.stragglers[0].caused_wait_ms == pytest.approx(3 + 1 + 2)


def test_namesake_groups_stay_apart(tmp_path: Path) -> None:
    """Groups that differ in any property have separate rows with separate labels."""
    first, second = group_of(2, "tp"), Group("tp", 0, "gloo", "default_pg", (0, 2))
    again = Group("tp", 1000, "gloo", "default_pg", (0, 1))
    calls = [call for group in (first, second, again) for call in together(1, [0, 1], MS, group)]
    labels = {row.group for row in analysed(tmp_path, calls).collectives}
    assert labels == {"tp", "tp[0,2]", "tp#2"}


def test_comm_share_by_hand(tmp_path: Path) -> None:
    """Step 0 lasts 10 ms with ops over 0-3 and 2-4; step 1 lasts 5 with 1: 0.4, 0.2, 5/15."""
    group = group_of(1)
    calls = [
        Call(0, 1, 0, 3 * MS, group=group, step=0),
        Call(0, 2, 2 * MS, 4 * MS, group=group, step=0),
        Call(0, 3, 10 * MS, 10 * MS + MS // 2, group=group, step=1),
        Call(0, 4, 14 * MS + MS // 2, 15 * MS, group=group, step=1),
    ]
    summary = analysed(tmp_path, calls)
    assert [(s.step, round(s.share, 9), round(s.ms, 9)) for s in summary.steps] == [
        (0, 0.4, 10.0),
        (1, 0.2, 5.0),
    ]
    assert summary.comm_share == pytest.approx(5 / 15)
    assert summary.duration_ms == pytest.approx(15)


def test_call_sites_by_hand(tmp_path: Path) -> None:
    """Two lines, two ranks: calls, the busiest rank's total, median and worst."""
    group = group_of(2)
    calls = together(1, [0, 2 * MS], 4 * MS, group, line=5)  # 4 and 2 ms
    calls += together(2, [5 * MS, 5 * MS], 6 * MS, group, line=5)  # 1 and 1 ms
    calls += together(3, [7 * MS, 7 * MS], 8 * MS, group, line=9)
    first, second = analysed(tmp_path, calls).call_sites
    assert (str(first.site), first.count, first.ranks) == ("train.py:5", 4, 2)
    assert (first.total_ms, first.median_ms, first.worst_ms) == (
        pytest.approx(5),
        pytest.approx(1.5),
        pytest.approx(4),
    )
    assert (str(second.site), second.total_ms) == ("train.py:9", pytest.approx(1))


def test_a_run_without_collectives(tmp_path: Path) -> None:
    """An empty run has a summary without a division by zero."""
    summary = analysed(tmp_path, [], ranks=[0, 1])
    assert (summary.collectives, summary.comm_share, summary.records) == ([], None, 0)
    assert summary.started_epoch_ns is None


def test_lapped_rings_meet_where_both_still_have_records(tmp_path: Path) -> None:
    """If ranks lost seq 1-50 and 1-20, a collective counts with the ranks that have it."""
    group = group_of(2)
    calls = [Call(0, seq, seq * MS, seq * MS + 500, group=group) for seq in range(51, 101)]
    calls += [Call(1, seq, seq * MS + 200, seq * MS + 500, group=group) for seq in range(21, 101)]
    summary = analysed(tmp_path, calls)
    assert only_row(summary).count == 80
    assert summary.stragglers[0].rank == 1
    assert summary.stragglers[0].collectives == 50


def test_a_wild_sequence_number_costs_no_memory(tmp_path: Path) -> None:
    """A damaged seq makes one odd collective, not a matrix of 2**60 columns."""
    group = group_of(2)
    calls = [Call(r, s, s * MS, s * MS + 9, group=group) for r in (0, 1) for s in (1, 2, 3)]
    calls.append(Call(0, 2**60, 9 * MS, 9 * MS + 9, group=group))
    assert only_row(analysed(tmp_path, calls)).count == 4


@pytest.mark.parametrize(
    ("size", "name"), [(0, "0 B"), (1, "1 B"), (512, "512 B"), (4096, "4 KiB"), (1 << 25, "32 MiB")]
)
def test_bucket_names(size: int, name: str) -> None:
    """Buckets are named by their smallest size."""
    assert size_name(size) == name

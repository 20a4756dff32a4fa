"""The identities that the figures of a run must keep, whatever was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankcall.analysis.details import Details, detail
from rankcall.errors import RankcallError
from rankcall.report.headline import headline
from rankcall.run.load import Run, load


def check_all_below(folder: Path) -> int:
    """Check each recorded run below a folder; return how many there are.

    A run that some test has damaged is left out.
    """
    checked = 0
    for rings in sorted(folder.rglob("rings")):
        if any(rings.glob("*.ring")):
            try:
                run = load(rings.parent)
            except RankcallError:
                continue
            check(run)
            checked += 1
    return checked


def check(run: Run) -> Details:
    """Check every identity that the figures of a run must keep."""
    details = detail(run)
    summary = details.summary
    caused = sum(straggler.caused_wait_ms or 0 for straggler in summary.stragglers)
    suffered = sum(straggler.suffered_wait_ms or 0 for straggler in summary.stragglers)
    assert caused == pytest.approx(suffered, abs=1e-6)
    assert caused == pytest.approx(summary.waiting_ms, abs=1e-6)
    assert sum(split.waiting_ms for split in details.splits) == pytest.approx(caused, abs=1e-6)
    elapsed = {split.rank: split.total_ms for split in details.splits}
    records = run.records
    # Of a rank that recorded twice, or in several attempts, single figures speak of one of these.
    once = len({head.header.rank for head in run.heads}) == len(run.heads)
    for split in details.splits:
        for part in (split.compute_ms, split.waiting_ms, split.transfer_ms):
            assert -1e-9 <= part <= split.total_ms + 1e-9
        mine = records.filter(records["rank"] == split.rank)
        ended = mine.filter(mine["status"] == "completed")  # failed ops are in no figure
        # The times at which ends on devices were noticed are in no figure either.
        on_cpu = not summary.sources.device and not summary.sources.unknown
        if len(ended) == len(mine) and once and on_cpu:
            span = int(ended["completed_ns"].max()) - int(ended["enqueued_ns"].min())
            assert split.total_ms == pytest.approx(span / 1e6)
    for straggler in summary.stragglers:
        assert 0 <= (straggler.share or 0) <= 1 + 1e-9
        assert 0 <= straggler.came_last <= straggler.collectives
        assert (straggler.suffered_wait_ms or 0) <= elapsed.get(straggler.rank, 0.0) + 1e-6
    assert sum(straggler.share or 0 for straggler in summary.stragglers) == pytest.approx(
        1 if caused else 0
    )
    for row in summary.collectives:
        assert row.waiting_share is None or 0 <= row.waiting_share <= 1
        assert (row.median_ms is None) == (row.p95_ms is None) == (row.total_ms is None)
        if row.total_ms is None:
            continue
        assert row.median_ms is not None
        assert row.p95_ms is not None
        assert max(row.median_ms, row.p95_ms) <= row.total_ms + 1e-9
        assert row.total_ms <= max(elapsed.values()) + 1e-6
    for site in summary.call_sites:
        # Single durations are kept in single precision.
        assert (site.worst_ms is None) == (site.total_ms is None)
        if site.total_ms is not None and site.worst_ms is not None:
            assert site.worst_ms <= site.total_ms * (1 + 1e-6)
            assert site.total_ms <= max(elapsed.values(), default=0.0) + 1e-6
        assert site.most_calls <= site.count <= site.most_calls * site.ranks
    for share in (*(row.comm_share for row in summary.ranks), summary.comm_share):
        assert share is None or 0 <= share <= 1
    steps = {row.rank: row.steps for row in summary.ranks}
    assert not once or all(split.steps == steps[split.rank] for split in details.splits)
    assert len(summary.steps) <= max(steps.values(), default=0)
    if summary.late is not None:
        assert 0 < summary.late.cost <= 1
        assert 0 < summary.late.share <= 1 + 1e-9
    assert "nan" not in headline(summary).text.lower()
    return details

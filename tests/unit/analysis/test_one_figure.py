"""One fact has one figure, wherever it is shown: report, page, diagnosis, live views."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from worlds import MS, Call, group_of, write_world

from rankcall.analysis.details import Details, detail
from rankcall.analysis.recent_figures import recent_figures
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.recent_calls import recent_calls
from rankcall.analysis.verdicts.wording import duration
from rankcall.analysis.windows import known_since_s
from rankcall.report.formatting import percent, time
from rankcall.report.headline import headline
from rankcall.report.html import render
from rankcall.report.html.charts import overall
from rankcall.report.html.first_screen import verdict, verdict_of_finding
from rankcall.run.load import load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

LATE = {"straggler": 2, "straggler_ms": 30.0}
PAIRS = {"pairs": [[0, 1], [2, 3]]}
JOBS: dict[str, dict[str, object]] = {
    "one group": LATE,
    "several lines and sizes": {
        **LATE,
        "program": (Op("all_reduce", 1 << 20, line=3), Op("all_gather", 1 << 10, line=9)),
    },
    "messages too": {
        **LATE,
        "groups": PAIRS,
        "program": (Op("exchange", 1 << 16, "pairs", line=3), Op("all_reduce", 1 << 20, line=4)),
    },
    "a host that is late": {"straggler": (2, 3), "straggler_ms": 30.0, "hosts": 2},
    "clocks apart": {**LATE, "hosts": 2, "clock_offsets_ns": [0, 10**9]},
    "healthy": {"pace": Pace(jitter_ms=1.0)},
}


def both(folder: Path, **options: object) -> tuple[Details, Diagnosis]:
    """Return a run's report and its diagnosis."""
    options = {"collectives": 300, **options}
    synthetic_run(folder / "run", 4, **options)  # type: ignore[arg-type]
    return detail(load(folder / "run")), diagnose(load(folder / "run"))


def caused(finding: Finding) -> dict[str, float]:
    """Return the figures in a straggler's evidence."""
    (fact,) = [fact for fact in finding.facts if fact.relation is Relation.CAUSED_WAITING]
    return {"share": fact.number or 0.0, "span_s": float(fact.value("span_s"))}


@pytest.mark.parametrize("name", JOBS)
def test_report_page_and_diagnosis_agree(tmp_path: Path, name: str) -> None:
    """Shares of waiting, the cost, the time in communication and the times a rank came last."""
    details, diagnosis = both(tmp_path, **JOBS[name])
    summary = details.summary
    going = diagnosis.going
    parts = {part["kind"]: part["share"] for part in overall(details.splits)}
    assert summary.waiting_share == pytest.approx(parts["waiting"], rel=1e-6)
    assert summary.comm_share == pytest.approx(parts["waiting"] + parts["transfer"], rel=1e-6)
    if going is not None:
        assert going.pace.share == pytest.approx(summary.comm_share, rel=1e-3)
    stragglers = [finding for finding in diagnosis.findings if finding.kind == "straggler"]
    assert bool(stragglers) == (name != "healthy") == (summary.late is not None)
    if summary.late is None:
        return
    figures = caused(stragglers[0])
    assert figures["share"] == pytest.approx(100 * summary.late.share, rel=0.01)
    assert figures["span_s"] == pytest.approx(summary.late.span_s, rel=0.01)
    shares = [row.share or 0.0 for row in summary.stragglers if row.rank in summary.late.ranks]
    assert sum(shares) == pytest.approx(summary.late.share, rel=0.01)
    costs = [fact.number for fact in stragglers[0].facts if fact.relation is Relation.MAKES_WAIT]
    assert costs == [pytest.approx(100 * summary.late.cost, rel=0.01)]
    text = headline(summary)
    assert percent(summary.late.share if summary.late.host else shares[0]) in text.text
    assert f"{percent(summary.late.cost)} of the run" in text.detail


@pytest.mark.parametrize("name", [name for name in JOBS if name != "healthy"])
def test_report_and_live_page_name_one_line_and_one_cost(tmp_path: Path, name: str) -> None:
    """The first card of the report is that of the live page, which shows the finding."""
    details, diagnosis = both(tmp_path, **JOBS[name])
    (finding,) = [finding for finding in diagnosis.findings if finding.kind == "straggler"]
    report, live = verdict(details, diagnosis.findings), verdict_of_finding(finding)
    assert report.who == live.who
    assert report.where is not None
    assert live.where is not None
    assert (report.where[0], report.where[2]) == (live.where[0], live.where[2])
    assert report.cost is not None
    assert live.cost is not None
    assert report.cost[0] == live.cost[0]
    assert report.cost[1].split(" of ")[0] == live.cost[1].split(" of ")[0]
    page = render(details, diagnosis.findings)
    assert page.count(f"at {live.where[2]}") > 0


def test_one_line_with_several_sizes_is_one_line(tmp_path: Path) -> None:
    """What a line costs is not divided by the sizes of its calls, as those of DDP's buckets."""
    sizes = (Op(message_bytes=1 << 20, line=3), Op(message_bytes=1 << 10, line=3), Op(line=4))
    details, diagnosis = both(tmp_path, **LATE, program=sizes)
    finding = next(finding for finding in diagnosis.findings if finding.kind == "straggler")
    assert finding.call_site == "train.py:3"
    assert {line.site.line for line in details.late_lines[:1]} == {3}


def test_a_slow_start_is_in_no_figure_of_the_headline(tmp_path: Path) -> None:
    """The headline's share is that of the diagnosis, and says of which time it is."""
    world, calls, base = group_of(4), [], 0
    for step in range(60):
        late = [5000, 0, 0, 0] if step == 0 else [0, 0, 40, 10]
        came = [base + delay * MS for delay in late]
        end = max(came) + MS
        calls += [
            Call(rank, step + 1, at, end, group=world, step=step) for rank, at in enumerate(came)
        ]
        base = end + 50 * MS
    run = load(write_world(tmp_path / "run", calls))
    summary, (finding, *_) = detail(run).summary, diagnose(run).findings
    share = caused(finding)["share"]
    assert f"{share:.0f} % of all after the first 5.05 s." in headline(summary).text
    assert f"{share:.0f} % of all waiting" in finding.evidence[0]
    # Of the whole run it is far less: rank 0 kept the others for 15 s together.
    assert summary.stragglers[0].rank == 0


@pytest.mark.parametrize("name", [name for name in JOBS if name != "messages too"])
def test_totals_by_op_are_those_by_line(tmp_path: Path, name: str) -> None:
    """The same collectives take as long in the table of ops as in that of call sites."""
    details, _ = both(tmp_path, **JOBS[name])
    by_op = {row.op: row.total_ms for row in details.summary.collectives}
    by_line = {row.op: row.total_ms for row in details.summary.call_sites}
    if len(by_op) == len(details.summary.collectives) == len(details.summary.call_sites):
        assert by_op == pytest.approx(by_line, rel=1e-6)
    else:
        # Several lines issue the same op.
        for op in by_op:
            rows = [row for row in details.summary.collectives if row.op == op]
            lines = [row for row in details.summary.call_sites if row.op == op]
            assert sum(row.total_ms or 0.0 for row in rows) == pytest.approx(
                sum(row.total_ms or 0.0 for row in lines), rel=0.05
            )


def test_ops_in_flight_together_count_once_in_both_tables(tmp_path: Path) -> None:
    """Three all_reduces from 0 to 10 ms take a rank 10 ms, not 30."""
    calls = [Call(rank, seq, 0, 10 * MS) for rank in (0, 1) for seq in (1, 2, 3)]
    summary = detail(load(write_world(tmp_path / "run", calls))).summary
    assert [row.total_ms for row in summary.collectives] == [10.0]
    assert [row.total_ms for row in summary.call_sites] == [10.0]


def pipeline(steps: int, late_ms: int) -> list[Call]:
    """Return a pipeline of four stages; the middle ones issue twice as many messages.

    Stage 2 is late by ``late_ms`` in the newer half of the steps only.
    """
    world, calls = group_of(4), []
    for step in range(steps):
        at = step * 100 * MS
        for stage in range(3):
            slow = late_ms if stage == 2 and step >= steps // 2 else 0
            sent = at + (10 * stage + 10 + slow) * MS
            calls.append(
                Call(
                    stage, step + 1, sent, sent + MS, "send", group=world, peer=stage + 1, step=step
                )
            )
            asked = at + (10 * stage + 5) * MS
            calls.append(
                Call(
                    stage + 1,
                    step + 1,
                    asked,
                    sent + MS,
                    "recv",
                    group=world,
                    peer=stage,
                    step=step,
                )
            )
    return sorted(calls, key=lambda call: (call.at, call.rank))


def test_the_window_is_one_time_for_all_ranks(tmp_path: Path) -> None:
    """With room for fewer calls than there are, no rank's figures reach further back."""
    from rankcall.analysis.run_snapshot import snapshot_of_run

    run = load(write_world(tmp_path / "run", pipeline(200, 0)))
    snapshot = snapshot_of_run(run, window=64)
    calls = snapshot.calls
    kept = [int((calls["rank"] == rank).sum()) for rank in range(4)]
    assert min(kept) >= 64
    recent = recent_calls(snapshot)
    shown = recent.snapshot.calls
    assert recent.is_cut
    since_s = known_since_s(calls)
    for rank in range(4):
        mine, of_rank = shown[shown["rank"] == rank], calls[calls["rank"] == rank]
        assert len(mine) == np.count_nonzero(of_rank["age_s"] <= since_s)
    # 32 steps of the stages that issue two messages a step: those that issue one have half as many.
    counts = [int((shown["rank"] == rank).sum()) for rank in range(4)]
    assert all(64 <= count <= 66 for count in counts[1:3])
    assert abs(counts[0] - 32) <= 1
    assert abs(counts[3] - 32) <= 1


def test_a_longer_run_says_that_its_diagnosis_is_of_the_newest_time(tmp_path: Path) -> None:
    """A diagnosis that does not know the whole run names the time that it knows."""
    synthetic_run(tmp_path / "run", 4, 600, straggler=1, straggler_ms=30.0, capacity=256)
    (finding,) = diagnose(load(tmp_path / "run")).findings
    assert "% of all waiting in the last " in finding.evidence[0]
    (whole,) = both(tmp_path / "whole", **LATE)[1].findings
    assert " on record; " in whole.evidence[0]


def test_live_figures_are_those_of_the_diagnosis(tmp_path: Path) -> None:
    """The share of waiting on the live page is that of a report on the same calls."""
    details, diagnosis = both(tmp_path, **LATE)
    figures = recent_figures(diagnosis.snapshot)
    assert figures.waiting == pytest.approx(details.summary.waiting_share, rel=0.02)
    assert figures.share == pytest.approx(details.summary.comm_share, rel=0.01)
    assert [late.rank for late in figures.late] == [2]
    assert figures.late[0].share == pytest.approx(details.summary.stragglers[0].share, rel=0.01)
    rows = {(row.op, row.group): row.total_ms for row in figures.rows}
    whole = {(row.op, row.group): row.total_ms for row in details.summary.collectives}
    assert rows == pytest.approx(whole, rel=1e-3)


def test_a_duration_has_one_unit() -> None:
    """A sentence and a table write the same duration in the same unit, and agree in two digits."""
    for seconds in np.geomspace(1.0, 1e6, 2000).tolist():
        words, cell = duration(seconds), time(seconds * 1e3)
        number, unit = re.fullmatch(r"([\d,.]+) (\w+)", words).groups()  # type: ignore[union-attr]
        other, other_unit = re.fullmatch(r"([\d,.]+) (\w+)", cell).groups()  # type: ignore[union-attr]
        assert unit == other_unit, (words, cell)
        assert float(number.replace(",", "")) == pytest.approx(
            float(other.replace(",", "")), rel=0.1
        )

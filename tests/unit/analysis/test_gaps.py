"""The lines between which a rank that keeps others waiting spends its time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from worlds import MS, Call, group_of, write_world

from rankcall.analysis.details import detail
from rankcall.report import json as json_report
from rankcall.report import summary_text
from rankcall.report.html import render
from rankcall.run.load import Run, load

SLOW = 2


def pipeline(
    folder: Path, *, slow_ms: int = 15, first_ms: int = 0, fast_ms: int = 3, steps: int = 20
) -> Run:
    """Write a pipeline of four stages: receive at line 15, compute, send at line 18.

    The slow stage needs ``first_ms`` longer in its first step.
    """
    group, calls, free = group_of(4), [], [0] * 4
    for step in range(1, steps + 1):
        for stage in range(4):
            if stage:
                before = stage - 1
                sent, asked = free[before], free[stage]
                end = max(sent, asked) + MS
                ends = ((before, stage, "send", sent, 18), (stage, before, "recv", asked, 15))
                for rank, peer, op, at, line in ends:
                    calls.append(Call(rank, step, at, end, op, group=group, peer=peer, line=line))
                free[before] = free[stage] = end
            free[stage] += (slow_ms if stage == SLOW else fast_ms) * MS
            free[stage] += first_ms * MS if (stage, step) == (SLOW, 1) else 0
    calls.sort(key=lambda call: call.at)
    return load(write_world(folder / "run", calls))


def test_the_slow_stage_and_its_lines(tmp_path: Path) -> None:
    """Text, page and JSON say between which lines the slow stage computes."""
    details = detail(pipeline(tmp_path))
    (gap,) = details.summary.gaps
    assert gap.rank == SLOW
    assert (str(gap.after), str(gap.before)) == ("train.py:15", "train.py:18")
    assert gap.median_ms == pytest.approx(15.0)
    assert gap.usual_ms == pytest.approx(3.0)
    words = "rank 2: 15.0 ms between train.py:15 and :18, 20 times; others 3.00 ms"
    assert words in summary_text.render(details.summary, 100)
    assert words.partition(";")[0].capitalize() in render(details)
    (row,) = json.loads(json_report.render(details.summary))["gaps"]
    assert (row["rank"], row["after"], row["before"]) == (2, "train.py:15", "train.py:18")


def test_equal_stages_have_no_such_lines(tmp_path: Path) -> None:
    """No lines are named if a rank's time between them is that of the others."""
    summary = detail(pipeline(tmp_path, slow_ms=3)).summary
    assert [gap.rank for gap in summary.gaps if gap.usual_ms is not None] == []


def test_one_long_pass_is_no_slow_stage(tmp_path: Path) -> None:
    """The figure is a median, so what is named has to be longer there, and not only once."""
    summary = detail(pipeline(tmp_path, slow_ms=3, first_ms=300)).summary
    assert [gap.rank for gap in summary.gaps if gap.usual_ms is not None] == []


def test_a_gap_is_of_no_op(tmp_path: Path) -> None:
    """Time in another op that is still in flight is no gap."""
    calls = []
    for step in range(8):
        at = step * 100 * MS
        calls.append(Call(0, 2 * step + 1, at, at + 60 * MS, line=1))
        calls.append(Call(0, 2 * step + 2, at + 50 * MS, at + 61 * MS, line=2))
        calls.append(Call(1, 2 * step + 1, at + 59 * MS, at + 60 * MS, line=1))
        calls.append(Call(1, 2 * step + 2, at + 60 * MS, at + 61 * MS, line=2))
    summary = detail(load(write_world(tmp_path / "run", calls))).summary
    for gap in summary.gaps:
        assert (str(gap.after), str(gap.before)) == ("train.py:2", "train.py:1")
        assert gap.rank == 1
        assert gap.median_ms == pytest.approx(98.0)

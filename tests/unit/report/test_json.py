"""The JSON report: documented keys, the terminal's numbers, and nothing that is not JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from worlds import MS, group_of, together, write_world

from rankcall.analysis.stragglers import Stragglers
from rankcall.analysis.summary import Summary, summarise
from rankcall.analysis.verdicts.facts import Fact, Ranks, Relation
from rankcall.report import json as json_report
from rankcall.run.load import load

DOCS = Path(__file__).parents[3] / "docs" / "report-json.md"


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Return a summary of two ranks and three collectives in two steps."""
    group = group_of(2)
    calls = together(1, [0, 3 * MS], 4 * MS, group, bytes=5000)
    calls += together(2, [5 * MS, 5 * MS + 1], 6 * MS, group, bytes=5000)
    calls += together(3, [8 * MS, 9 * MS], 10 * MS, group, op="barrier", bytes=1, step=1)
    return summarise(load(write_world(tmp_path_factory.mktemp("json") / "run", calls)))


def test_who_is_late_and_why(summary: Summary) -> None:
    """The stragglers, with the cause and how much of their lateness it explains."""
    assert json.loads(json_report.render(summary))["late"] is None
    late = Stragglers((1,), "", (24.0,), 0.9, 0.4, 0.8, None, 0, 60.0, 0.0)
    values = (("cause", "no_cpu"), ("of_s", "40.0"), ("seconds", "12.0"))
    why = Fact(Relation.LATE_BECAUSE, Ranks((1,)), values=values, number=75.0, unit="%")
    unknown = json.loads(json_report.render(replace(summary, late=late)))["late"]
    known = json.loads(json_report.render(replace(summary, late=late, late_because=(why,))))
    named = {"ranks": [1], "share": 0.9, "cost": 0.4}
    assert unknown == {**named, "cause": None, "explains": None}
    assert known["late"] == {**named, "cause": "no_cpu", "explains": 0.75}


def test_documented_numbers(summary: Summary) -> None:
    """The keys that the issue names hold the values worked out by hand."""
    report = json.loads(json_report.render(summary))
    assert report["schema"] == 1
    assert [row["rank"] for row in report["ranks"]] == [0, 1]
    assert report["ranks"][0].keys() >= {"host", "pid", "attempt", "records", "dropped", "steps"}
    row = next(row for row in report["collectives"] if row["op"] == "all_reduce")
    assert (row["group"], row["count"], row["bytes"]) == ("0", 2, 10_000)
    assert (row["size_bucket"], row["size_bucket_bytes"]) == ("4 KiB", 4096)
    # 4 and 1 ms, then 1 ms twice: rank 0 is the busiest. t is 1 ms each.
    assert row["total_ms"] == pytest.approx(4 + 1, abs=1e-5)
    assert row["median_ms"] == pytest.approx(1.75, abs=1e-5)
    assert row["p95_ms"] == pytest.approx(1 + 0.95 * 1.5, abs=1e-5)
    assert row["algbw_gbps"] == row["busbw_gbps"] == pytest.approx(0.005, rel=1e-5)
    assert row["waiting_share"] == pytest.approx(3 / 7, abs=1e-5)
    first = report["stragglers"][0]
    assert (first["rank"], first["came_last"]) == (1, 3)
    assert first["caused_wait_ms"] == pytest.approx(4, abs=1e-5)
    assert first["share"] == 1
    assert report["comm_share"]["overall"] == pytest.approx((7 + 3) / (10 + 7), abs=1e-5)
    assert [step["step"] for step in report["comm_share"]["steps"]] == [0, 1]
    assert report["call_sites"][0]["call_site"] == "train.py:1"
    assert (report["dropped"], report["problems"]) == (0, [])


def test_stragglers_are_sorted_by_what_they_caused(summary: Summary) -> None:
    """The worst comes first."""
    waits = [
        straggler["caused_wait_ms"] for straggler in json_report.as_object(summary)["stragglers"]
    ]
    assert waits == sorted(waits, reverse=True)


def test_no_nan(summary: Summary) -> None:
    """Numbers that JSON has no word for become null."""
    row = replace(summary.collectives[0], total_ms=math.nan, algbw_gbps=math.inf)
    report = json.loads(json_report.render(replace(summary, collectives=[row])))
    assert report["collectives"][0]["total_ms"] is None
    assert report["collectives"][0]["algbw_gbps"] is None


def keys_of(value: object) -> set[str]:
    """Return all keys of a nested object but those of ``about``, which is the run's own."""
    if isinstance(value, dict):
        inner = [keys_of(child) for key, child in value.items() if key != "about"]
        return set(value).union(*inner)
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_is_documented(summary: Summary) -> None:
    """docs/report-json.md names each key in code type."""
    text = DOCS.read_text(encoding="utf-8")
    assert {
        key for key in keys_of(json_report.as_object(summary)) if f"`{key}`" not in text
    } == set()

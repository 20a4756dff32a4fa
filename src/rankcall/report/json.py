"""A summary or a diagnosis as JSON.

The keys are documented in docs/report-json.md and docs/diagnose-json.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rankcall.analysis.snapshot import RankPosition, rank_positions
from rankcall.analysis.verdicts import Diagnosis, Kept
from rankcall.analysis.verdicts.encoding import finding_object
from rankcall.analysis.verdicts.finding import Finding
from rankcall.problems import texts
from rankcall.run.stack_classes import stack_classes

if TYPE_CHECKING:
    # A rank that is watched writes diagnoses, and does not load what summaries need.
    from rankcall.analysis.summary import Summary

SCHEMA = 1  # of both objects
Object = dict[str, Any]


def render(summary: Summary, findings: Sequence[Finding] = ()) -> str:
    """Return the report as one JSON object, a line for each entry of its lists."""
    return json.dumps(as_object(summary, findings), indent=1, allow_nan=False) + "\n"


def as_object(summary: Summary, findings: Sequence[Finding] = ()) -> Object:
    """Return the report as plain dicts and lists; times in ms, no NaN."""
    from rankcall.report.headline import headline

    report: Object = {
        "schema": SCHEMA,
        "headline": headline(summary).text,
        "run": _run(summary),
        "ranks": [dict(vars(row)) for row in summary.ranks],
        "groups": _groups(summary),
        "hosts": _hosts(summary),
        "collectives": _collectives(summary),
        "stragglers": [dict(vars(straggler)) for straggler in summary.stragglers],
        "call_sites": _call_sites(summary),
        "comm_share": _comm_share(summary),
        "joins": [asdict(join) for join in summary.joins],
        "findings": [finding_object(finding) for finding in findings],
        "dropped": summary.dropped,
        "problems": texts(summary.problems),
    }
    return {key: _finite(value) for key, value in report.items()}


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which damaged rings can hold, by null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _run(summary: Summary) -> Object:
    return {
        "path": summary.path,
        "about": summary.about,
        "world_size": summary.world_size,
        "missing_ranks": summary.missing_ranks,
        "attempts": len({row.attempt for row in summary.ranks}),
        "started_epoch_ns": summary.started_epoch_ns,
        "duration_ms": summary.duration_ms,
        "records": summary.records,
        "spent_ms": summary.spent_ms,
        "waiting_ms": summary.waiting_ms,
    }


def _groups(summary: Summary) -> list[Object]:
    return [
        {
            "group": run_group.label,
            "name": run_group.group.name,
            "description": run_group.group.description,
            "backend": run_group.group.backend,
            "ranks": list(run_group.group.ranks),
            "cross_host": run_group.cross_host,
        }
        for run_group in summary.groups
    ]


def _hosts(summary: Summary) -> list[Object]:
    return [
        {
            "host": clock.host,
            "ranks": clock.ranks,
            "clock_shift_ms": -clock.shift / 1e6,
            "clock_drift_ppm": -clock.slope * 1e6,
            "clock_error_ms": clock.error_ns / 1e6,
            "linked": clock.linked,
        }
        for clock in summary.hosts
    ]


def _collectives(summary: Summary) -> list[Object]:
    from rankcall.analysis.summary import size_name

    rows = []
    for row in summary.collectives:
        entry = dict(vars(row))
        bucket = entry.pop("bucket")
        rows.append({**entry, "size_bucket": size_name(bucket), "size_bucket_bytes": bucket})
    return rows


def _call_sites(summary: Summary) -> list[Object]:
    rows = []
    for row in summary.call_sites:
        entry = dict(vars(row))
        site = entry.pop("site")
        entry["code"] = row.code or None
        user = site.user
        site_fields = {
            "call_site": str(site) if site.line else None,
            "user_line": site.user_line or None,
            "user_function": user.function if user is not None else None,
            **{name: getattr(site, name) for name in ("file", "line", "function", "api")},
        }
        rows.append({**site_fields, **entry})
    return rows


def _comm_share(summary: Summary) -> Object:
    return {
        "overall": summary.comm_share,
        "ranks": [
            {"rank": row.rank, "attempt": row.attempt, "share": row.comm_share}
            for row in summary.ranks
        ],
        "steps": [dict(vars(step)) for step in summary.steps],
    }


def render_diagnosis(diagnosis: Diagnosis, stacks: Mapping[int, str] | None = None) -> str:
    """Return the diagnosis as one JSON object; ``stacks`` are texts by rank."""
    return json.dumps(diagnosis_object(diagnosis, stacks), indent=1, allow_nan=False) + "\n"


def diagnosis_object(diagnosis: Diagnosis, stacks: Mapping[int, str] | None = None) -> Object:
    """Return the diagnosis as plain dicts and lists; times in s, no NaN."""
    return {
        "schema": SCHEMA,
        "run": diagnosis.run,
        "verdict": diagnosis.verdict,
        "hang_after_s": diagnosis.hang_after,
        "findings": [finding_object(finding) for finding in diagnosis.findings],
        "ranks": [_rank(position) for position in rank_positions(diagnosis.snapshot)],
        "stacks": {str(rank): text for rank, text in (stacks or {}).items()},
        "stack_classes": stack_objects(stacks or {}),
        "problems": texts(diagnosis.snapshot.problems),
        "hangs": [_hang(verdict) for verdict in diagnosis.kept],
    }


def stack_objects(stacks: Mapping[int, str]) -> list[Object]:
    """Return the classes of equal stacks, the smallest first; a native frame has no line."""
    return [
        {
            "ranks": list(stack_class.ranks),
            "frames": [{**vars(frame), "line": frame.line or None} for frame in stack_class.frames],
            "text": stack_class.text,
        }
        for stack_class in stack_classes(stacks)
    ]


def _hang(kept: Kept) -> Object:
    return {
        "place": kept.place,
        "epoch_ns": kept.epoch_ns,
        "causes": [{"kind": kind, "ranks": list(ranks)} for kind, ranks in kept.causes],
        "stacks": kept.stacks,
        "over_s": kept.over_s,
    }


def _rank(place: RankPosition) -> Object:
    return {
        "rank": place.rank,
        "host": place.host or None,
        "pid": place.pid or None,
        "state": place.state,
        "in_call": place.in_call,
        "failed": place.failed,
        "group": place.group or None,
        "seq": place.seq or None,
        "op": place.op or None,
        "call_site": place.call_site or None,
        "user_line": place.user_line or None,
        "age_s": round(place.age_s, 3),
        "exit": place.exit,
    }

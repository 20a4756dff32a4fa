"""A summary as JSON; docs/report-json.md documents the keys."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from rankcall.analysis.timing.summary import Summary, size_name
from rankcall.report.headline import headline

SCHEMA = 1
Object = dict[str, Any]


def render(summary: Summary) -> str:
    """Return the report as one JSON object, a line for each entry of its lists."""
    return json.dumps(as_object(summary), indent=1, allow_nan=False) + "\n"


def as_object(summary: Summary) -> Object:
    """Return the report as plain dicts and lists; times in ms, no NaN."""
    found: Object = {
        "schema": SCHEMA,
        "headline": headline(summary).text,
        "run": _run(summary),
        "ranks": [dict(vars(row)) for row in summary.ranks],
        "groups": _groups(summary),
        "hosts": _hosts(summary),
        "collectives": _collectives(summary),
        "stragglers": [dict(vars(each)) for each in summary.stragglers],
        "call_sites": _call_sites(summary),
        "comm_share": _comm_share(summary),
        "joins": [asdict(join) for join in summary.joins],
        "dropped": summary.dropped,
        "problems": summary.problems,
    }
    return {key: _finite(value) for key, value in found.items()}


def _finite(value: Any) -> Any:
    """Replace what JSON cannot say (damaged rings can hold it) by null."""
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
            "group": known.label,
            "name": known.group.name,
            "description": known.group.description,
            "backend": known.group.backend,
            "ranks": list(known.group.ranks),
            "cross_host": known.cross_host,
        }
        for known in summary.groups
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
        rows.append({"call_site": str(site) if site.line else None, **vars(site), **entry})
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

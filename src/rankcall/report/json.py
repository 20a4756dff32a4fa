"""A summary or a verdict as JSON.

The keys are documented in docs/report-json.md and docs/diagnose-json.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rankcall.analysis.attempts import Attempt
from rankcall.analysis.gaps import Gap
from rankcall.analysis.recoveries import PHASES, Recovery
from rankcall.analysis.summary import Summary, size_name
from rankcall.analysis.verdicts.encoding import (
    SCHEMA,
    Object,
    finding_object,
    stack_objects,
    verdict_object,
)
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.imports.node import NodeReport
from rankcall.problems import texts
from rankcall.report.headline import headline


def render(
    summary: Summary, findings: Sequence[Finding] = (), stacks: Mapping[int, str] | None = None
) -> str:
    """Return the report as one JSON object, a line for each entry of its lists."""
    return json.dumps(as_object(summary, findings, stacks), indent=1, allow_nan=False) + "\n"


def as_object(
    summary: Summary, findings: Sequence[Finding] = (), stacks: Mapping[int, str] | None = None
) -> Object:
    """Return the report as plain dicts and lists; times in ms, no NaN."""
    report: Object = {
        "schema": SCHEMA,
        "headline": headline(summary).text,
        "run": _run(summary),
        "ranks": [dict(vars(row)) for row in summary.ranks],
        "groups": _groups(summary),
        "hosts": _hosts(summary),
        "collectives": _collectives(summary),
        "stragglers": [dict(vars(straggler)) for straggler in summary.stragglers],
        "late": _late(summary),
        "gaps": [_gap(gap) for gap in summary.gaps],
        "call_sites": _call_sites(summary),
        "comm_share": _comm_share(summary),
        "joins": [asdict(join) for join in summary.joins],
        "recoveries": [_recovery(recovery) for recovery in summary.carried.recoveries],
        "attempts": [_attempt(attempt) for attempt in summary.carried.attempts.attempts],
        "goodput": summary.carried.goodput,
        "checks": [asdict(checked) for checked in summary.carried.checked],
        "findings": [finding_object(finding) for finding in findings],
        "stack_classes": stack_objects(stacks or {}),
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
        "waiting_ms": summary.waiting_ms if summary.sources.is_waiting_known else None,
        "times": vars(summary.sources),
    }


def _late(summary: Summary) -> Object | None:
    late = summary.late
    if late is None:
        return None
    why = summary.late_because[0] if summary.late_because else None
    return {
        "ranks": list(late.ranks),
        "share": late.share,
        "cost": late.cost,
        "cause": why.value("cause") if why is not None else None,
        "explains": (why.number or 0.0) / 100 if why is not None else None,
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
    rows = []
    for row in summary.collectives:
        entry = dict(vars(row))
        bucket = entry.pop("bucket")
        rows.append({**entry, "size_bucket": size_name(bucket), "size_bucket_bytes": bucket})
    return rows


def _gap(gap: Gap) -> Object:
    return {**vars(gap), "after": gap.after.shown, "before": gap.before.shown}


def _attempt(attempt: Attempt) -> Object:
    end = attempt.end
    return {
        "restart": attempt.restart,
        "began_epoch_ns": attempt.began_ns,
        "worked_until_epoch_ns": attempt.worked_until_ns,
        "kind": end.signature.kind if end is not None else None,
        "culprits": list(end.culprits) if end is not None else [],
        "decision": end.decision if end is not None else None,
    }


def _recovery(recovery: Recovery) -> Object:
    end = recovery.end
    return {
        "restart": end.restart,
        "kind": end.signature.kind,
        "culprits": list(end.culprits),
        "summary": end.summary,
        "family": end.family,
        "rule": end.rule,
        "step": end.step,
        "lost_steps": end.lost if end.lost >= 0 else None,
        "phases_s": dict(zip(PHASES, recovery.phases_s, strict=True)),
        "down_s": recovery.down_s,
    }


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


def render_verdict(
    verdict: Verdict, stacks: Mapping[int, str] | None = None, node: NodeReport | None = None
) -> str:
    """Return a verdict as one JSON object.

    Args:
        verdict: The verdict.
        stacks: Texts by rank.
        node: What the node of the reader knows; None if it was not asked.
    """
    content = verdict_object(verdict, stacks)
    if node is not None:
        content["node"] = dict(vars(node))
    return json.dumps(content, indent=1, allow_nan=False) + "\n"

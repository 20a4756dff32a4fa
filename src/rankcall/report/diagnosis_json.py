"""A diagnosis as JSON; docs/diagnose-json.md documents the keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rankcall.analysis.diagnosis import Diagnosis, Kept
from rankcall.analysis.state.snapshot import RankPosition, rank_positions
from rankcall.analysis.verdicts.finding import Finding

SCHEMA = 1
_FINDING = (
    "kind", "ranks", "victims", "hosts", "group", "seq", "op", "call_site", "since_s", "confidence",
    "summary", "evidence", "advice",
)  # fmt: skip
Object = dict[str, Any]


def render(diagnosis: Diagnosis, stacks: Mapping[int, str] | None = None) -> str:
    """Return the diagnosis as one JSON object; ``stacks`` are texts by rank."""
    return json.dumps(as_object(diagnosis, stacks), indent=1, allow_nan=False) + "\n"


def as_object(diagnosis: Diagnosis, stacks: Mapping[int, str] | None = None) -> Object:
    """Return the diagnosis as plain dicts and lists; times in s, no NaN."""
    return {
        "schema": SCHEMA,
        "run": diagnosis.run,
        "verdict": diagnosis.verdict,
        "hang_after_s": diagnosis.hang_after,
        "findings": [_finding(each) for each in diagnosis.findings],
        "ranks": [_rank(each) for each in rank_positions(diagnosis.snapshot)],
        "stacks": {str(rank): text for rank, text in (stacks or {}).items()},
        "problems": diagnosis.snapshot.problems,
        "hangs": [_hang(each) for each in diagnosis.kept],
    }


def _hang(kept: Kept) -> Object:
    return {
        "place": kept.place,
        "epoch_ns": kept.epoch_ns,
        "causes": [{"kind": kind, "ranks": list(ranks)} for kind, ranks in kept.causes],
        "stacks": kept.stacks,
    }


def _finding(found: Finding) -> Object:
    fields: Object = {name: getattr(found, name) for name in _FINDING}
    for name in ("ranks", "victims", "hosts", "evidence"):
        fields[name] = list(fields[name])
    for name in ("group", "seq", "op", "call_site"):
        fields[name] = fields[name] or None
    return {**fields, "since_s": round(found.since_s, 3)}


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
        "age_s": round(place.age_s, 3),
        "exit": place.exit,
    }

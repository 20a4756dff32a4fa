"""A verdict as a plain object, for JSON, the store and the disk. ``decoding`` reads it back.

``docs/diagnose-json.md`` has the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rankcall.analysis.snapshot import END_UNKNOWN, RankPosition
from rankcall.analysis.verdicts.facts import Fact, Ranks
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Kept, Verdict
from rankcall.run.stack_classes import stack_classes

SCHEMA = 1  # docs/diagnose-json.md: new keys may come under the same number
Object = dict[str, Any]
_KEYS = (
    "kind",
    "ranks",
    "victims",
    "hosts",
    "group",
    "seq",
    "op",
    "call_site",
    "user_line",
    "since_s",
    "confidence",
    "summary",
    "evidence",
    "advice",
)
LISTS = ("ranks", "victims", "hosts", "evidence")


def encode(verdict: Verdict) -> bytes:
    """Return a watcher's verdict for other nodes, and for the run directory."""
    content = {**verdict_object(verdict), "hang": asdict(verdict.origin)}
    if verdict.again_s:
        content["again_s"] = verdict.again_s
    return json.dumps(content, indent=1).encode()


def verdict_object(verdict: Verdict, stacks: Mapping[int, str] | None = None) -> Object:
    """Return a verdict as plain dicts and lists; times in s, no NaN. ``stacks`` are by rank."""
    return {
        "schema": SCHEMA,
        "run": verdict.run,
        "verdict": verdict.kind,
        "hang_after_s": verdict.hang_after,
        "findings": [finding_object(finding) for finding in verdict.findings],
        "ranks": [_rank_object(verdict, position) for position in verdict.ranks],
        "stacks": {str(rank): text for rank, text in (stacks or {}).items()},
        "stack_classes": stack_objects(stacks or {}),
        "problems": verdict.problems,
        "hangs": [_kept_object(kept) for kept in verdict.kept],
    }


def finding_object(finding: Finding) -> Object:
    """Return a finding as plain dicts and lists; a value that does not apply is None."""
    written: Object = {name: getattr(finding, name) for name in _KEYS}
    for name in LISTS:
        written[name] = list(written[name])
    for name in ("group", "seq", "op", "call_site", "user_line"):
        written[name] = written[name] or None
    facts = [fact_object(fact) for fact in finding.facts]
    return {
        **written,
        "culprit_line": finding.culprit_line or None,
        "since_s": round(finding.since_s, 3),
        "facts": facts,
    }


def fact_object(fact: Fact) -> Object:
    """Return a fact as plain dicts and lists."""
    return {
        "relation": fact.relation.value,
        "subject": _ranks_object(fact.ranks),
        "call": asdict(fact.call) if fact.call is not None else None,
        "others": _ranks_object(fact.others),
        "values": dict(fact.values),
        "number": fact.number,
        "unit": fact.unit or None,
        "confidence": fact.confidence,
    }


def _ranks_object(ranks: Ranks | None) -> Object | None:
    if ranks is None:
        return None
    return {"ranks": list(ranks.numbers), "hosts": list(ranks.hosts), "pid": ranks.pid or None}


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


def _kept_object(kept: Kept) -> Object:
    findings = kept.verdict.findings
    return {
        "place": kept.place,
        "epoch_ns": kept.verdict.origin.epoch_ns,
        "causes": [{"kind": finding.kind, "ranks": list(finding.ranks)} for finding in findings],
        "stacks": kept.stacks,
        "over_s": kept.over_s,
    }


def _rank_object(verdict: Verdict, position: RankPosition) -> Object:
    process = position.process
    return {
        "rank": process.rank,
        "host": process.host or None,
        "pid": process.pid or None,
        "state": process.state,
        "blind": process.blind,
        "closed": process.closed,
        "stands": position.how or None,
        "in_call": None if position.how == END_UNKNOWN else position.in_call,
        "failed": position.failed,
        "group": position.group or None,
        "group_size": position.group_size or None,
        "seq": position.seq or None,
        "op": position.op or None,
        "call_site": position.call_site or None,
        "user_line": position.user_line or None,
        "line": verdict.stands_at(position) or position.shown_line or None,
        "age_s": round(position.age_s, 3),
        "exit": process.exit,
    }

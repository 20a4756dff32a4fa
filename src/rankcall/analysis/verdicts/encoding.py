"""Findings as plain objects, for JSON, the store and the disk, and back.

``docs/diagnose-json.md`` has the keys. Anybody may have written what is in a store or in a run
directory, so the decoder treats it as hostile: a finding with a value of a wrong type is left out,
and texts, lists and numbers have bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks, Relation
from rankcall.analysis.verdicts.finding import CONFIDENCES, Finding

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
_LISTS = ("ranks", "victims", "hosts", "evidence")
_LONGEST_S = 1e9  # a longer time is damage
# Above all that a job of 100,000 ranks can state, and small enough that reading costs nothing.
_MOST_FACTS = 1024  # of one finding
_MOST_RANKS = 1 << 20
_MOST_TEXT = 1 << 14  # characters
_MOST_NUMBER = 1e15


def finding_object(finding: Finding) -> Object:
    """Return a finding as plain dicts and lists; a value that does not apply is None."""
    written: Object = {name: getattr(finding, name) for name in _KEYS}
    for name in _LISTS:
        written[name] = list(written[name])
    for name in ("group", "seq", "op", "call_site", "user_line"):
        written[name] = written[name] or None
    facts = [fact_object(fact) for fact in finding.facts]
    return {**written, "since_s": round(finding.since_s, 3), "facts": facts}


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


def sound_findings(written: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return findings from the objects that a report or a watcher wrote.

    Any user may have written the objects, so those with a value of a wrong type are left out.
    """
    return [_finding_from(values) for values in written if _is_sound(values)]


_MODEL: dict[str, Any] = vars(Finding("", ()))


def _finding_from(values: Mapping[str, Any]) -> Finding:
    known: dict[str, Any] = {
        name: tuple(value) if name in _LISTS else value
        for name, value in values.items()
        if name in _MODEL and name != "facts" and value is not None
    }
    return Finding(**{**known, "facts": facts_from(values.get("facts"))})


def _is_sound(values: Mapping[str, Any]) -> bool:
    if values.get("kind") is None or values.get("ranks") is None:
        return False
    return values.get("confidence", "certain") in CONFIDENCES and all(
        _is_sound_value(name, value)
        for name, value in values.items()
        if name in _MODEL and name != "facts" and value is not None
    )


def _is_sound_value(name: str, value: Any) -> bool:
    if name in _LISTS:
        return (
            isinstance(value, (list, tuple))
            and len(value) <= _MOST_RANKS
            and all(_is_sound_item(name, item) for item in value)
        )
    if isinstance(_MODEL[name], float):
        return type(value) in (int, float) and abs(value) < _LONGEST_S  # nor is it NaN
    if type(value) is not type(_MODEL[name]):
        return False
    if isinstance(value, str):
        return len(value) <= _MOST_TEXT
    return bool(abs(value) < _MOST_NUMBER)  # an int of a thousand digits is a number for JSON, too


def _is_sound_item(name: str, item: Any) -> bool:
    if name in ("ranks", "victims"):
        return type(item) is int and 0 <= item < _MOST_RANKS
    return isinstance(item, str) and len(item) <= _MOST_TEXT


def facts_from(written: Any) -> tuple[Fact, ...]:
    """Return the facts of a finding, without those that are damaged or that a later version made.

    The finding's words and ranks do not depend on its facts, so it counts without them.
    """
    if not isinstance(written, list):
        return ()
    facts = (_fact_from(values) for values in written[:_MOST_FACTS])
    return tuple(fact for fact in facts if fact is not None)


def _fact_from(values: Any) -> Fact | None:
    try:
        number = values["number"]
        fact = Fact(
            Relation(values["relation"]),
            _ranks_from(values["subject"]),
            _call_from(values["call"]),
            _ranks_from(values["others"]),
            tuple((_text(name), _text(value)) for name, value in values["values"].items()),
            None if number is None else _number(number),
            _text(values["unit"] or ""),
            _text(values["confidence"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return fact if fact.confidence in CONFIDENCES else None


def _ranks_from(values: Any) -> Ranks | None:
    if values is None:
        return None
    numbers = tuple(_whole(rank) for rank in _list(values["ranks"]))
    hosts = tuple(_text(host) for host in _list(values["hosts"]))
    return Ranks(numbers, hosts, _whole(values["pid"] or 0))


def _call_from(values: Any) -> CallFact | None:
    if values is None:
        return None
    peer = values["peer"]
    return CallFact(
        _text(values["op"]),
        _whole(values["seq"]),
        _text(values["group"]),
        _text(values["description"]),
        _text(values["function"]),
        None if peer is None else _whole(peer, least=-1),  # -1: any rank
        _whole(values["tag"], least=-(1 << 31)),
        _text(values["line"]),
    )


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > _MOST_RANKS:
        raise ValueError("not a list, or too long")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MOST_TEXT:
        raise ValueError("not a text, or too long")
    return value


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError("not a whole number, or impossible")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < _MOST_NUMBER:  # nor is it NaN
        raise ValueError("not a number, or impossible")
    return float(value)

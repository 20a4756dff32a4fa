"""A verdict from its JSON, as ``encoding`` wrote it into the store or the run directory.

Anybody may have written what is there, so it is hostile: a finding with a value of a wrong type is
left out, and texts, lists and numbers have bounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rankcall.analysis.snapshot import END_UNKNOWN, FAILED_IN, IN, LEFT, RankPosition, RankState
from rankcall.analysis.verdicts.encoding import LISTS
from rankcall.analysis.verdicts.facts import CallFact, Fact, Ranks, Relation
from rankcall.analysis.verdicts.finding import CONFIDENCES, Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict

_LONGEST_S = 1e9  # a longer time is damage
_LATEST_NS = 1 << 62  # a later time is damage; with it, int64 arithmetic would overflow
# Above all that a job of 100,000 ranks can state, and small enough that reading costs nothing.
_MOST_FACTS = 1024  # of one finding
_MOST_RANKS = 1 << 20
_MOST_TEXT = 1 << 14  # characters
_MOST_NUMBER = 1e15


def decode(raw: bytes, *, with_ranks: bool = True) -> Verdict:
    """Return a verdict that a watcher wrote.

    Args:
        raw: What ``encode`` returned.
        with_ranks: Whether to read the positions of the ranks. In a large job that takes most of
            the time, and few readers need more than what was said.

    Raises:
        ValueError: The verdict is damaged.
    """
    try:
        content = json.loads(raw)
        written = content["findings"]
        findings = findings_from(written)
        ranks = content.get("ranks") or [] if with_ranks else []
        verdict = Verdict(
            _text(content.get("run") or ""),
            findings,
            _number(content.get("hang_after_s") or 0.0),
            [_position_from(values) for values in _list(ranks)],
            [_text(line) for line in _list(content.get("problems") or [])],
            origin=_origin_from(content["hang"]),
            again_s=_number(content.get("again_s") or 0.0),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a verdict: {type(error).__name__}: {error}") from error
    if written and not findings:
        raise ValueError("not a verdict: its findings are damaged")
    return verdict


def findings_from(written: Any) -> list[Finding]:
    """Return the findings of a verdict, without those that have a value of a wrong type."""
    return [_finding_from(values) for values in _list(written) if _is_sound(values)]


def _origin_from(values: Mapping[str, Any]) -> Origin:
    """Read who gave a verdict. That of rankcall 0.1 has no id, but a time and a process."""
    epoch_ns, mono_ns = int(values["epoch_ns"]), int(values.get("mono_ns") or 0)
    if not (0 <= epoch_ns < _LATEST_NS and 0 <= mono_ns < _LATEST_NS):
        raise ValueError("not a verdict: its time is impossible")
    by_pid = _whole(values.get("by_pid") or 0)
    name = _text(values.get("id") or f"{by_pid}@{epoch_ns}")
    return Origin(name, _text(values.get("boot_id") or ""), mono_ns, epoch_ns, by_pid)


def _position_from(values: Mapping[str, Any]) -> RankPosition:
    code = values["exit"]
    return RankPosition(
        RankState(
            _whole(values["rank"]),
            _text(values["host"] or ""),
            _whole(values["pid"] or 0),
            state=_text(values["state"]),
            exit=None if code is None else _whole(code, least=-(1 << 31)),
            closed=values.get("closed") is True,
            blind=values.get("blind") is True,
        ),
        _how_from(values),
        _text(values["group"] or ""),
        _whole(values.get("group_size") or 0),
        _whole(values["seq"] or 0),
        _text(values["op"] or ""),
        _text(values["call_site"] or ""),
        _text(values["user_line"] or ""),
        _number(values["age_s"]),
    )


def _how_from(values: Mapping[str, Any]) -> str:
    """Read how a rank stands with its call; before version 0.2, two keys said so."""
    how = values.get("stands")
    if how in _STANDS:
        return str(how)
    if not values["op"]:
        return ""
    return FAILED_IN if values["failed"] is True else IN if values["in_call"] is True else LEFT


_STANDS = (IN, LEFT, FAILED_IN, END_UNKNOWN)
_MODEL: dict[str, Any] = vars(Finding("", ()))


def _finding_from(values: Mapping[str, Any]) -> Finding:
    known: dict[str, Any] = {
        name: tuple(value) if name in LISTS else value
        for name, value in values.items()
        if name in _MODEL and name != "facts" and value is not None
    }
    return Finding(**{**known, "facts": facts_from(values.get("facts"))})


def _is_sound(values: Any) -> bool:
    if not isinstance(values, dict):
        raise ValueError("not a verdict: a finding is not an object")
    if values.get("kind") is None or values.get("ranks") is None:
        return False
    return values.get("confidence", "certain") in CONFIDENCES and all(
        _is_sound_value(name, value)
        for name, value in values.items()
        if name in _MODEL and name != "facts" and value is not None
    )


def _is_sound_value(name: str, value: Any) -> bool:
    if name in LISTS:
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

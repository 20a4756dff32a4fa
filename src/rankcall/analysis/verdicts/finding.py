"""A finding, the words that findings share, and the base class of all kinds of verdict.

The words that findings share say how ranks, calls, waits and durations are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rankcall.ring.tables import both_lines

HEALTHY = "healthy"
CONFIDENCES = ("certain", "likely", "possible")

_LISTS = ("ranks", "victims", "hosts", "evidence")

_LONGEST_S = 1e9  # a longer time is damage


@dataclass(frozen=True)
class Finding:
    """One cause of trouble. ``ranks`` are the culprits, never the victims.

    ``hosts`` are the culprits'. ``group``, ``seq``, ``op`` and ``call_site`` are those of the call
    that the victims are in (empty, or 0, without one). ``user_line`` is the user's own line, if the
    call site is a framework's, and ``since_s`` is the time that they have
    been in it. ``stops``, ``is_fault`` and ``predicate`` are for reports only, and not part of the
    JSON.
    """

    kind: str
    ranks: tuple[int, ...]
    victims: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    group: str = ""
    seq: int = 0
    op: str = ""
    call_site: str = ""
    since_s: float = 0.0
    confidence: str = "certain"
    summary: str = ""
    evidence: tuple[str, ...] = field(default=())
    advice: str = ""
    stops: bool = True  # it keeps the run from going on, and does not only slow it
    is_fault: bool = True  # something is wrong
    predicate: str = "hold the others up"  # follows the ranks in a title: "Rank 2 died"
    user_line: str = ""

    @property
    def shown_line(self) -> str:
        """The line of the call: the user's first, if there are two."""
        return both_lines(self.call_site, self.user_line)


def sound_findings(written: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """Return findings from the objects that a report or a watcher wrote.

    Any user may have written the objects, so those with a value of a wrong type are left out.
    """
    return [_finding_from(values) for values in written if _is_sound(values)]


_MODEL = vars(Finding("", ()))


def _finding_from(values: Mapping[str, Any]) -> Finding:
    known: dict[str, Any] = {
        name: tuple(value) if name in _LISTS else value
        for name, value in values.items()
        if name in _MODEL and value is not None
    }
    return Finding(**known)


def _is_sound(values: Mapping[str, Any]) -> bool:
    if values.get("kind") is None or values.get("ranks") is None:
        return False
    return values.get("confidence", "certain") in CONFIDENCES and all(
        _is_sound_value(name, value)
        for name, value in values.items()
        if name in _MODEL and value is not None
    )


def _is_sound_value(name: str, value: Any) -> bool:
    if name in ("ranks", "victims"):
        return isinstance(value, (list, tuple)) and all(
            type(rank) is int and rank >= 0 for rank in value
        )
    if name in _LISTS:
        return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)
    if isinstance(_MODEL[name], float):
        return type(value) in (int, float) and abs(value) < _LONGEST_S  # nor is it NaN
    return type(value) is type(_MODEL[name])


def less_sure(confidence: str, steps: int = 1) -> str:
    """Return a confidence that is lower by some steps."""
    return CONFIDENCES[min(CONFIDENCES.index(confidence) + steps, len(CONFIDENCES) - 1)]

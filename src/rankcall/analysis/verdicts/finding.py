"""One cause of trouble, as every reader gets it: who, where, how sure, and the facts behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.analysis.verdicts.wording import begin_sentence
from rankcall.ranks import with_noun
from rankcall.ring.tables import both_lines

HEALTHY = "healthy"
CONFIDENCES = ("certain", "likely", "possible")


class Predicate(NamedTuple):
    """What follows the ranks in a title, as in "Rank 2 died": of one rank, and of several.

    ``of_none`` is the whole title of a finding that names no rank; empty if it speaks of them all.
    """

    of_one: str
    of_several: str
    of_none: str = ""

    def title(self, ranks: Sequence[int]) -> str:
        """Return the title of a finding about these ranks."""
        if not ranks:
            return self.of_none or f"The ranks {self.of_several}"
        words = self.of_one if len(ranks) == 1 else self.of_several
        return f"{begin_sentence(with_noun(ranks))} {words}"


# The facts that say where a culprit stands, the most telling first: the call that differs, then
# what its stack shows, then the call that it is in.
_CULPRITS_PLACES = (
    frozenset({Relation.ISSUED}),
    frozenset({Relation.PASSED, Relation.SENDS, Relation.RECEIVES}),
    frozenset({Relation.NOT_COME, Relation.STANDS_AT, Relation.SEEN_AT}),
    frozenset({Relation.STILL_IN, Relation.NOT_STARTED, Relation.LAST_IS_IN, Relation.LEFT_BEHIND}),
)


HOLDS_UP = Predicate("holds the others up", "hold the others up")


@dataclass(frozen=True)
class Finding:
    """One cause of trouble. ``ranks`` are the culprits, never the victims.

    ``hosts`` are the culprits'. ``group``, ``seq``, ``op`` and ``call_site`` are those of the call
    that the victims are in (empty, or 0, without one). ``user_line`` is the user's own line, if the
    call site is a framework's, and ``since_s`` is the time that they have
    been in it. ``summary`` and ``evidence`` are ``facts`` in words (``sentences``,
    ``log_sentences``); the evidence from a log is quoted. They are written when the finding is
    made, and travel with it: what is read from a store or a file may have been written by another
    version of rankcall, whose facts have no template here. ``stops``, ``is_fault`` and
    ``predicate`` are for reports only, and not part of the JSON.
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
    predicate: Predicate = HOLDS_UP
    user_line: str = ""
    facts: tuple[Fact, ...] = ()  # what the summary and the evidence state

    @property
    def culprit_line(self) -> str:
        """The line at which the culprits stand, or of the call in which they differ; else empty.

        The line of a call is as in ``shown_line``.
        """
        fact = self.culprit_place
        return "" if fact is None else _line_in(fact)

    @property
    def culprit_place(self) -> Fact | None:
        """The fact that says where the culprits stand; None if they stand at several lines."""
        culprits = set(self.ranks)
        for relations in _CULPRITS_PLACES:
            facts = {
                _line_in(fact): fact
                for fact in reversed(self.facts)
                if fact.relation in relations
                and fact.ranks is not None
                and culprits.issuperset(fact.ranks.numbers)
                and _line_in(fact)
            }
            if facts:
                place = facts.popitem()[1] if len(facts) == 1 else None
                return None if place is None or self._is_elsewhere(culprits, place) else place
        return None

    def _is_elsewhere(self, culprits: set[int], place: Fact) -> bool:
        """Return whether a culprit is known to have left another call, and not to be at a place.

        If ranks in a call and one that has not come to it die together, the line of the call is
        not that one's.
        """
        left, there = set[int](), set[int]()
        for fact in self.facts:
            if fact.ranks is not None:
                ranks = culprits.intersection(fact.ranks.numbers)
                if fact.relation is Relation.LAST_LEFT:
                    left |= ranks
                elif _line_in(fact) == _line_in(place):
                    there |= ranks
        return bool(left - there)

    @property
    def shown_line(self) -> str:
        """The line of the call: the user's first, if there are two."""
        return both_lines(self.call_site, self.user_line)


def _line_in(fact: Fact) -> str:
    """Return the line that a fact states; empty without one, or without a subject."""
    if fact.ranks is None or not fact.ranks.numbers:
        return ""
    return fact.call.line if fact.call is not None else fact.value("line")


def less_sure(confidence: str, steps: int = 1) -> str:
    """Return a confidence that is lower by some steps."""
    return CONFIDENCES[min(CONFIDENCES.index(confidence) + steps, len(CONFIDENCES) - 1)]

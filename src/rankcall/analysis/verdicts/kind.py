"""The base class of all kinds of verdict, and two families that share their words.

A kind finds its cause in the evidence, says how likely it is to be the root cause, words it, and
gives the next step to take. Reports take all of that from the finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rankcall.analysis.snapshot import GONE, RankState, Snapshot, unfinished
from rankcall.analysis.verdicts.disagreements import (
    SPLITS,
    Disagreement,
    OtherLine,
    Side,
    values_of,
)
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    CallFact,
    Fact,
    Ranks,
    Relation,
    call_of,
    call_of_wait,
    fields_of_wait,
    hosts_of,
    last_call,
    lines_of_site,
    not_known,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import CONFIDENCES, HOLDS_UP, Finding, less_sure
from rankcall.analysis.verdicts.reasons import advice_for
from rankcall.analysis.verdicts.recent_calls import RecentCalls
from rankcall.analysis.verdicts.sentences import SHOWN, summary
from rankcall.analysis.verdicts.sentences import evidence as written
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects
from rankcall.analysis.verdicts.wait import Wait


class Kind:
    """One kind of verdict. A kind overrides the methods for the evidence that it reads."""

    kind = ""
    order = 0  # among findings of one confidence; the lowest is the likeliest root cause
    stops = True  # it keeps the run from going on, and does not only slow it
    is_fault = True  # something is wrong
    predicate = HOLDS_UP  # of its findings

    def in_hang(self, evidence: HangEvidence) -> Iterable[Finding]:
        """Return the findings of this kind in a job that may hang."""
        return ()

    def if_unexplained(self, evidence: HangEvidence) -> Iterable[Finding]:
        """Return the findings of this kind if ``in_hang`` of no kind found any."""
        return ()

    def in_running_job(self, recent: RecentCalls) -> Iterable[Finding]:
        """Return the findings of this kind in a job that goes on."""
        return ()

    def settles_in(self, snapshot: Snapshot, hang_after: float, ranks: Sequence[int]) -> float:
        """Return in how many s it will be clear whether a finding about ``ranks`` holds."""
        return 0.0

    def finding(
        self,
        ranks: Sequence[int],
        *,
        said: Sequence[Fact] = (),
        shown: Sequence[Fact] = (),
        live: bool = True,
        **fields: Any,
    ) -> Finding:
        """Make a finding of this kind.

        Args:
            ranks: The culprits.
            said: The facts of the summary; the first one's template says how they are put.
            shown: The facts of the evidence, a line each.
            live: Whether the run goes on, which decides the tense.
            fields: The other fields of the finding.
        """
        if said:
            fields["summary"] = summary(said, live)
        if shown:
            fields["evidence"] = written(shown, live)
        return Finding(
            self.kind,
            tuple(ranks),
            stops=self.stops,
            is_fault=self.is_fault,
            predicate=self.predicate,
            facts=tuple(dict.fromkeys((*said, *shown))),
            **fields,
        )

    def of_unended_call(
        self, evidence: HangEvidence, wait: Wait, relation: Relation, advice: str
    ) -> Finding:
        """Return a finding about a call that all members have issued, and that does not end.

        No rank differs from the others, so none is named, and the cause is only possible.
        """
        snapshot = evidence.snapshot
        waiters = ranks_of(snapshot, wait.waiters)
        unended = Fact(
            relation,
            ranks_of(snapshot, wait.present),
            call_of_wait(snapshot, wait),
            waiters,
            number=_waited_s(snapshot, wait, wait.waiters),
            unit="s",
            confidence="possible",
        )
        in_flight = wait.rows[unfinished(snapshot.calls[wait.rows])]
        still_there = sorted(set(snapshot.calls["rank"][in_flight].tolist()))
        still = [Fact(Relation.STILL_IN_TRANSFER, ranks_of(snapshot, still_there))]
        return self.finding(
            (),
            victims=tuple(sorted(evidence.graph.victims([wait]))),
            confidence="possible",
            said=[unended],
            shown=still if still_there else (),
            live=snapshot.live,
            advice=advice,
            **fields_of_wait(snapshot, wait),
        )


class CulpritKind(Kind):
    """A kind of verdict about ranks that others wait for and that wait for no other rank."""

    may_have_skipped = False

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Return how sure it is that this kind fits a suspect; None if it does not."""
        raise NotImplementedError

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return the state of the ranks, which says why they hold others up, for ``held_s`` s."""
        raise NotImplementedError

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write the next step to take."""
        raise NotImplementedError

    def reasons(self, snapshot: Snapshot, ranks: Sequence[int]) -> list[Fact]:
        """Return what the ranks did meanwhile, if that is known; of running processes only."""
        return []

    def counts(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether a case is a cause that must be reported."""
        return self.has_waited_long(suspects, case) and not all(map(suspects.explained, case.waits))

    def has_waited_long(self, suspects: Suspects, case: Case) -> bool:
        """Tell whether other ranks have waited for a rank long enough."""
        overdue, first_s = suspects.overdue(case.waits), suspects.exits.first_s
        if first_s is None or case.state.state != GONE:
            return bool(overdue)
        # Another process died first and ended this one, which may have been on its way. It is a
        # cause only if others had waited for it for long before.
        return any(wait.age_s - first_s >= suspects.hang_after for wait in overdue)

    def before_others_failed(
        self, evidence: HangEvidence, ranks: Sequence[int], advice: str
    ) -> Finding:
        """Return a finding about ranks that ended before others failed because of that."""
        snapshot, exits = evidence.snapshot, evidence.exits
        states = snapshot.ranks
        victims = sorted(exits.bereft)
        first = max(victims, key=lambda rank: states[rank].gone_s or 0.0)
        since_s = max(states[rank].gone_s or 0.0 for rank in ranks)
        lost = Fact(
            Relation.ENDED_FIRST,
            ranks_of(snapshot, ranks),
            others=ranks_of(snapshot, victims),
            values=(("error", states[first].failure),),
            number=since_s - (states[first].gone_s or 0.0),
            unit="s",
        )
        return self.finding(
            ranks,
            victims=tuple(victims),
            hosts=hosts_of(snapshot, ranks),
            since_s=since_s,
            confidence="likely" if len(exits.before) == 1 else "possible",
            said=[lost],
            shown=[last_call(snapshot, rank) for rank in ranks[:SHOWN]],
            live=snapshot.live,
            advice=advice,
        )

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for all ranks that are waited for in the same place."""
        alike: dict[int, list[Case]] = {}
        for case in evidence.cases:
            if case.kind is self:
                alike.setdefault(id(case.longest), []).append(case)
        for cases in alike.values():
            yield self._of_cases(evidence, cases)

    def _of_cases(self, evidence: HangEvidence, cases: Sequence[Case]) -> Finding:
        snapshot = evidence.snapshot
        ranks, longest = tuple(sorted(case.rank for case in cases)), cases[0].longest
        waits = list({id(wait): wait for case in cases for wait in case.waits}.values())
        held_s = max((case.held_s(longest) for case in cases if longest is not None), default=0.0)
        ended = {
            state.rank
            for state in snapshot.ranks
            if longest is not None and state.gone_s is not None and state.gone_s > held_s
        }
        victims = tuple(sorted(evidence.graph.victims(waits) - set(ranks) - ended))
        confidence = max((case.confidence for case in cases), key=CONFIDENCES.index)
        gaps = _gaps(snapshot, ranks, waits)
        if gaps:
            confidence = less_sure(confidence)
        states = [snapshot.ranks[rank] for rank in ranks]
        reasons = self.reasons(snapshot, ranks)
        place: dict[str, Any] = {
            "since_s": max((state.gone_s or 0.0 for state in states), default=0.0)
        }
        if longest is not None:
            place = {**fields_of_wait(snapshot, longest), "since_s": held_s}
        return self.finding(
            ranks,
            victims=victims,
            hosts=hosts_of(snapshot, ranks),
            confidence=confidence,
            said=[
                self.state(snapshot, states, held_s),
                *_held_up(snapshot, ranks, longest, held_s, victims),
                *reasons,
            ],
            shown=[*_waiting(evidence, ranks, waits), *gaps],
            live=snapshot.live,
            advice=advice_for(reasons) or self.advice(snapshot, states),
            **place,
        )


def _held_up(
    snapshot: Snapshot,
    culprits: Sequence[int],
    wait: Wait | None,
    held_s: float,
    victims: Sequence[int],
) -> list[Fact]:
    """Return which ranks cannot go on: only some of them may be in the call that waits longest."""
    if wait is None or not victims:
        return []
    there = sorted(set(wait.waiters) & set(victims))
    if there:  # not the culprits' own wait, which may have begun long before
        held_s = _waited_s(snapshot, wait, there, held_s)
    elsewhere = sorted(set(victims) - set(there))
    facts = [
        Fact(
            Relation.HELD_UP,
            ranks_of(snapshot, there) if there else Ranks(()),
            call_of_wait(snapshot, wait),
            ranks_of(snapshot, culprits),
            number=held_s,
            unit="s",
        )
    ]
    if elsewhere:
        facts.append(Fact(Relation.HELD_UP_ELSEWHERE, ranks_of(snapshot, elsewhere)))
    return facts


def _waited_s(
    snapshot: Snapshot, wait: Wait, ranks: Sequence[int], most: float = math.inf
) -> float:
    """Return how long some of the waiting ranks have waited, the longest of them.

    A call that has failed waits no longer, however long ago that was.

    Args:
        snapshot: The job.
        wait: The wait.
        ranks: Some of its ranks.
        most: For how long the wait has been held up by those whom the sentence is about.
    """
    calls = snapshot.calls
    rows = wait.rows[np.isin(calls["rank"][wait.rows], ranks)]
    if not len(rows):
        return min(wait.age_s, most)
    since_end = np.nan_to_num(calls["ended_s"][rows], nan=0.0)
    return float(np.maximum(np.minimum(calls["age_s"][rows], most) - since_end, 0.0).max())


def _waiting(evidence: HangEvidence, ranks: Sequence[int], waits: Sequence[Wait]) -> list[Fact]:
    """Return the culprits' last calls, and the calls that other ranks wait for them in."""
    snapshot = evidence.snapshot
    facts = [last_call(snapshot, rank) for rank in ranks[:SHOWN] if not snapshot.ranks[rank].blind]
    for wait in sorted(waits, key=lambda wait: -wait.age_s)[:SHOWN]:
        waiting = [rank for rank in wait.waiters if rank not in ranks]
        if waiting:
            facts.append(
                Fact(
                    Relation.WAITS_IN,
                    ranks_of(snapshot, waiting),
                    call_of_wait(snapshot, wait),
                    number=_waited_s(snapshot, wait, waiting),
                    unit="s",
                )
            )
        arrived, absent = sorted(set(ranks) & set(wait.waiters)), set(wait.absent) - set(ranks)
        if arrived and absent and not wait.any_source:
            facts.append(
                Fact(
                    Relation.WAITS_FOR,
                    ranks_of(snapshot, arrived),
                    call_of_wait(snapshot, wait),
                    ranks_of(snapshot, sorted(absent)),
                )
            )
    direct = {rank for wait in waits for rank in wait.waiters}
    others = sorted(evidence.graph.victims(waits) - direct - set(ranks))
    if others:
        facts.append(Fact(Relation.WAITS_IN_TURN, ranks_of(snapshot, others)))
    return facts


def _gaps(snapshot: Snapshot, ranks: Sequence[int], waits: Iterable[Wait]) -> list[Fact]:
    """Return the gaps in the records that could change a verdict about some ranks."""
    gaps = []
    groups = {wait.group for wait in waits}
    members = {rank for group in groups for rank in snapshot.groups[group].ranks}
    blind = _blind(snapshot, members)
    if blind:
        unheard = any(state.unheard for state in snapshot.ranks)
        gaps.append(not_known(snapshot, blind, "unheard" if unheard else "no records"))
    for rank in ranks:
        state = snapshot.ranks[rank]
        mine = snapshot.calls[snapshot.calls["rank"] == rank]
        if state.dropped and not groups & set(mine["group"].tolist()):
            subject = ranks_of(snapshot, [rank])
            dropped = int(state.dropped)
            gaps.append(Fact(Relation.OVERWRITTEN, subject, number=dropped, unit="records"))
    return gaps


def _blind(snapshot: Snapshot, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose calls are not known."""
    count = len(snapshot.ranks)
    return [rank for rank in sorted(ranks) if rank >= count or snapshot.ranks[rank].blind]


class DisagreementKind(Kind):
    """A kind of verdict about members that do not issue the same call as the others."""

    order_differs = False

    def differences(self, snapshot: Snapshot, disagreement: Disagreement) -> list[Fact]:
        """Return which ranks differ, at which call, and in what."""
        raise NotImplementedError

    def advice(self, disagreement: Disagreement) -> str:
        """Write the next step to take."""
        raise NotImplementedError

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for each disagreement of this kind."""
        for disagreement in evidence.disagreements:
            if disagreement.order_differs == self.order_differs:
                yield self._of_disagreement(evidence, disagreement)

    def _of_disagreement(self, evidence: HangEvidence, disagreement: Disagreement) -> Finding:
        snapshot, graph, culprits = evidence.snapshot, evidence.graph, disagreement.culprits
        members = {rank for side in disagreement.sides for rank in side.ranks}
        behind = (
            [
                wait
                for wait in graph.waits
                if wait.group == disagreement.group and wait.seq >= disagreement.seq
            ]
            if disagreement.open
            else []
        )
        victims = (members | graph.victims(behind)) - set(culprits)
        row = disagreement.sides[-1].row
        # If only the lines differ, they may differ for another reason.
        likely = not culprits or (disagreement.order_differs and "op" not in disagreement.differing)
        confidence = "likely" if likely else "certain"
        unseen = _blind(snapshot, set(snapshot.groups[disagreement.group].ranks) - members)
        gaps: list[Fact] = []
        if unseen and not disagreement.message:
            confidence = less_sure(confidence)
            gaps = [not_known(snapshot, unseen)]
        sides = [_side(snapshot, disagreement, side) for side in disagreement.sides[:SHOWN]]
        if disagreement.in_join:
            sides.append(Fact(Relation.IN_JOIN, ranks_of(snapshot, disagreement.in_join)))
        if disagreement.other_line is not None:
            sides.append(_other_line(snapshot, disagreement, disagreement.other_line))
        return self.finding(
            culprits,
            victims=tuple(sorted(victims)),
            hosts=hosts_of(snapshot, culprits),
            group=snapshot.labels[disagreement.group],
            seq=disagreement.seq,
            op=snapshot.op(row),
            **lines_of_site(snapshot, int(snapshot.calls["site"][row])),
            since_s=float(snapshot.calls["age_s"][disagreement.rows].max()),
            confidence=confidence,
            said=self.differences(snapshot, disagreement),
            shown=[*sides, *gaps],
            live=snapshot.live,
            advice=self.advice(disagreement),
        )


def _side(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> Fact:
    """Return one side: its ranks, its op, its line and the fields that differ."""
    shown_elsewhere = disagreement.differing in (("op",), (SPLITS,))
    values = () if shown_elsewhere else values_of(snapshot, disagreement, side)
    ranks = ranks_of(snapshot, side.ranks)
    return Fact(Relation.PASSED, ranks, call_of_side(snapshot, disagreement, side), values=values)


def _other_line(snapshot: Snapshot, disagreement: Disagreement, other: OtherLine) -> Fact:
    """Return the earlier call that two sides issued from two lines."""
    first, last = (ranks_of(snapshot, disagreement.sides[at].ranks) for at in (0, -1))
    line = snapshot.shown_site(int(snapshot.calls["site"][other.theirs]))
    call = call_of(snapshot, other.mine)
    return Fact(Relation.OTHER_LINE, first, call, others=last, values=(("line", line),))


def call_of_side(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> CallFact:
    """Return the call of a side; with the function that issued it, if all have the same line."""
    numbers = [int(snapshot.calls["site"][other.row]) for other in disagreement.sides]
    lines, apis = (set(map(of, numbers)) for of in (snapshot.shown_site, snapshot.api))
    call = call_of(snapshot, side.row)
    if len(lines) > 1 or len(apis) < len(numbers):
        return call
    return replace(call, function=snapshot.api(int(snapshot.calls["site"][side.row])))

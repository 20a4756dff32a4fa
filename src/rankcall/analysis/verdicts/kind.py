"""The base class of all kinds of verdict, and two families that share their words.

A kind finds its cause in the evidence, says how likely it is to be the root cause, words it, and
gives the next step to take. Reports take all of that from the finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rankcall.analysis.snapshot import GONE, RankState, Snapshot
from rankcall.analysis.verdicts.disagreements import SPLITS, Disagreement, Side, values
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.finding import CONFIDENCES, Finding, less_sure
from rankcall.analysis.verdicts.recent_calls import RecentCalls
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects
from rankcall.analysis.verdicts.wait_graph import Wait
from rankcall.analysis.verdicts.wording import (
    begin_sentence,
    common_site,
    count_of,
    duration,
    hosts_of,
    last_call,
    lines_of_site,
    name_ranks,
    name_wait,
)

SHOWN = 3  # ranks, waits, sides or hosts that a finding names one by one


class Verdict:
    """One kind of verdict. A kind overrides the methods for the evidence that it reads."""

    kind = ""
    order = 0  # among findings of one confidence; the lowest is the likeliest root cause
    stops = True  # it keeps the run from going on, and does not only slow it
    is_fault = True  # something is wrong
    predicate = ""  # follows the ranks in a title: "Rank 2 died"

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

    def finding(self, ranks: Sequence[int], **fields: Any) -> Finding:
        """Make a finding of this kind."""
        return Finding(
            self.kind,
            tuple(ranks),
            stops=self.stops,
            is_fault=self.is_fault,
            predicate=self.predicate,
            **fields,
        )


class CulpritVerdict(Verdict):
    """A kind of verdict about ranks that others wait for and that wait for no other rank."""

    may_have_skipped = False

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Return how sure it is that this kind fits a suspect; None if it does not."""
        raise NotImplementedError

    def matter(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write the state of the ranks, to follow their names."""
        raise NotImplementedError

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write the next step to take."""
        raise NotImplementedError

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
        victims = tuple(sorted(evidence.graph.victims(waits) - set(ranks)))
        confidence = max((case.confidence for case in cases), key=CONFIDENCES.index)
        gaps = _gaps(snapshot, ranks, waits)
        if gaps:
            confidence = less_sure(confidence)
        states = [snapshot.ranks[rank] for rank in ranks]
        place: dict[str, Any] = {
            "since_s": max((state.gone_s or 0.0 for state in states), default=0.0)
        }
        if longest is not None:
            place = _place(snapshot, longest)
        return self.finding(
            ranks,
            victims=victims,
            hosts=hosts_of(snapshot, ranks),
            confidence=confidence,
            summary=self._summary(snapshot, states, longest, victims),
            evidence=(*_waiting(evidence, ranks, waits), *gaps),
            advice=self.advice(snapshot, states),
            **place,
        )

    def _summary(
        self,
        snapshot: Snapshot,
        states: Sequence[RankState],
        wait: Wait | None,
        victims: Sequence[int],
    ) -> str:
        name = name_ranks(snapshot, [state.rank for state in states])
        begin = f"{begin_sentence(name)} {self.matter(snapshot, states)}"
        if wait is None or not victims:
            return f"{begin}."
        return f"{begin}. {_held_up(snapshot, len(states), wait, victims)}"


def _held_up(snapshot: Snapshot, culprits: int, wait: Wait, victims: Sequence[int]) -> str:
    """Write which ranks cannot go on: only some of them may be in the call that waits longest."""
    live = snapshot.live
    there = len(set(wait.waiters) & set(victims))
    elsewhere = len(victims) - there
    have = ("has" if there == 1 else "have") if live else "had"
    waited = (
        f"{have} waited {duration(wait.age_s)} for {'it' if culprits == 1 else 'them'} "
        f"in {name_wait(snapshot, wait)}"
    )
    if not elsewhere:
        return f"{count_of(there, 'rank')} {waited}."
    verb = ("is" if elsewhere == 1 else "are") if live else ("was" if elsewhere == 1 else "were")
    others = "in another call" if elsewhere == 1 else "in other calls"
    return (
        f"{count_of(len(victims), 'rank')} {'cannot' if live else 'could not'} go on: "
        f"{there:,} {waited}, and {elsewhere:,} {verb} {others}."
    )


def _place(snapshot: Snapshot, wait: Wait) -> dict[str, Any]:
    """Return the fields of a finding that name the call that the victims are in."""
    return {
        "group": snapshot.labels[wait.group],
        "seq": wait.seq,
        "op": snapshot.op(int(wait.rows[0])),
        **lines_of_site(snapshot, common_site(snapshot, wait)),
        "since_s": wait.age_s,
    }


def _waiting(evidence: HangEvidence, ranks: Sequence[int], waits: Sequence[Wait]) -> list[str]:
    """Write the culprits' last calls, and the calls that other ranks wait for them in."""
    snapshot = evidence.snapshot
    lines = [
        f"rank {rank}: {last_call(snapshot, rank)}"
        for rank in ranks[:SHOWN]
        if not snapshot.ranks[rank].blind
    ]
    for wait in sorted(waits, key=lambda wait: -wait.age_s)[:SHOWN]:
        waiting = [rank for rank in wait.waiters if rank not in ranks]
        if waiting:
            lines.append(
                f"{name_ranks(snapshot, waiting)}: in {name_wait(snapshot, wait)} "
                f"for {duration(wait.age_s)}"
            )
    direct = {rank for wait in waits for rank in wait.waiters}
    others = sorted(evidence.graph.victims(waits) - direct - set(ranks))
    if others:
        verb = "waits" if len(others) == 1 else "wait"
        lines.append(f"{name_ranks(snapshot, others)}: {verb} for those in turn")
    return lines


def _gaps(snapshot: Snapshot, ranks: Sequence[int], waits: Iterable[Wait]) -> list[str]:
    """Write the gaps in the records that could change a verdict about some ranks."""
    gaps = []
    groups = {wait.group for wait in waits}
    members = {rank for group in groups for rank in snapshot.groups[group].ranks}
    blind = _blind(snapshot, members)
    if blind:
        unheard = any(state.unheard for state in snapshot.ranks)
        why = "no answer from there" if unheard else "no records of it here"
        gaps.append(f"nothing is known of {name_ranks(snapshot, blind)}: {why}")
    for rank in ranks:
        state = snapshot.ranks[rank]
        mine = snapshot.calls[snapshot.calls["rank"] == rank]
        if state.dropped and not groups & set(mine["group"].tolist()):
            gaps.append(
                f"{count_of(state.dropped, 'record')} of rank {rank} were overwritten, and "
                "none of this group is left: it may have been there"
            )
    return gaps


def _blind(snapshot: Snapshot, ranks: Iterable[int]) -> list[int]:
    """Return the ranks whose calls are not known."""
    count = len(snapshot.ranks)
    return [rank for rank in sorted(ranks) if rank >= count or snapshot.ranks[rank].blind]


class DisagreementVerdict(Verdict):
    """A kind of verdict about members that do not issue the same call as the others."""

    order_differs = False

    def summary(self, snapshot: Snapshot, disagreement: Disagreement) -> str:
        """Write which ranks differ, at which call, and in which fields."""
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
        gaps = []
        if unseen and not disagreement.message:
            confidence = less_sure(confidence)
            names = name_ranks(snapshot, unseen)
            gaps = [f"nothing is known of {names}: no records of it here"]
        sides = [_side(snapshot, disagreement, side) for side in disagreement.sides[:SHOWN]]
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
            summary=self.summary(snapshot, disagreement),
            evidence=(*sides, *gaps),
            advice=self.advice(disagreement),
        )


def _side(snapshot: Snapshot, disagreement: Disagreement, side: Side) -> str:
    """Write one side: its ranks, its op, its line and the fields that differ."""
    site = snapshot.shown_site(int(snapshot.calls["site"][side.row]))
    op = snapshot.op(side.row)
    shown_elsewhere = disagreement.differing in (("op",), (SPLITS,))
    fields = "" if shown_elsewhere else f", {values(snapshot, disagreement, side)}"
    return f"{name_ranks(snapshot, side.ranks)}: {op}{f' at {site}' if site else ''}{fields}"

"""A finding, the words that findings share, and the base class of all kinds of verdict.

The words that findings share say how ranks, calls, waits and durations are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankcall.analysis.snapshot import COMPLETED, FAILED, GONE, SEND, RankState, Snapshot
from rankcall.analysis.verdicts.disagreements import SPLITS, Disagreement, Side, values
from rankcall.analysis.verdicts.evidence import HangEvidence, RecentCalls
from rankcall.analysis.verdicts.wait_graph import Case, Suspect, Suspects, Wait
from rankcall.record import format_ranks
from rankcall.ring import both_lines
from rankcall.run.stacks import LOADER, CodePlace

HEALTHY = "healthy"
CONFIDENCES = ("certain", "likely", "possible")
SHOWN = 3  # ranks, waits, sides or hosts that a finding names one by one
_LISTS = ("ranks", "victims", "hosts", "evidence")
_NO_DESCRIPTIONS = ("default_pg", "undefined")  # torch's own descriptions
_LONGEST_S = 1e9  # a longer time is damage
_LONGEST = 40  # characters of a list of ranks; a longer list is written as a count


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


def count_of(count: int, singular: str) -> str:
    """Write a count with its noun: ``1 rank``, ``1,023 ranks``."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``72 s``, ``12 min``, ``3.1 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 300:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def short_duration(seconds: float) -> str:
    """Write a short duration: ``0.35 ms``, ``20 ms``, ``1.2 s``."""
    if seconds >= 1:
        return duration(seconds)
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def ago(snapshot: Snapshot, seconds: float) -> str:
    """Write a time in the past: ``12 s ago``, or for a dead run ``12 s before the end``."""
    if snapshot.live:
        return f"{duration(seconds)} ago"
    return f"{duration(seconds)} before the end" if seconds >= 0.05 else "at the end"


def name_ranks(snapshot: Snapshot, ranks: Sequence[int]) -> str:
    """Name ranks: ``rank 2 (node-a, pid 4711)``, ``ranks 8-15 (node-b)``."""
    if len(ranks) == 1:
        state = snapshot.ranks[ranks[0]]
        where = [state.host, f"pid {state.pid}" if state.pid else ""]
        inside = ", ".join(text for text in where if text)
        return f"rank {state.rank}{f' ({inside})' if inside else ''}"
    hosts = list(dict.fromkeys(snapshot.ranks[rank].host for rank in ranks))
    named = [host for host in hosts if host]
    if len(named) > 3:
        inside = f"on {len(named):,} hosts"
    else:
        inside = ", ".join(named)
    text = format_ranks(ranks)
    if len(text) > _LONGEST:
        return f"{len(ranks):,} ranks{f' ({inside})' if inside else ''}"
    return f"ranks {text}{f' ({inside})' if inside else ''}"


def begin_sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


class Verbs(NamedTuple):
    """The verbs and the pronoun that agree with some ranks, in the tense of the run."""

    be: str
    have: str
    do: str
    they: str


def verbs_for(snapshot: Snapshot, count: int) -> Verbs:
    """Return the verbs for so many ranks: past tense after the run has ended."""
    single, live = count == 1, snapshot.live
    be = ("is" if single else "are") if live else ("was" if single else "were")
    have = ("has" if single else "have") if live else "had"
    return Verbs(be, have, "does" if single else "do", "it" if single else "they")


def hosts_of(snapshot: Snapshot, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of some ranks, each once."""
    hosts = dict.fromkeys(snapshot.ranks[rank].host for rank in ranks)
    return tuple(host for host in hosts if host)


def numbered(op: str, seq: int) -> str:
    """Return ``recv #51``, or ``recv`` if it has no number before its message comes."""
    return f"{op} #{seq}" if seq > 0 else op


def name_call(snapshot: Snapshot, row: int, *, line: bool = True) -> str:
    """Name a call: ``all_reduce #51 of group 0 at train.py:13``."""
    call = snapshot.calls[row]
    function = snapshot.sites[int(call["site"])].api if snapshot.sites else ""
    whose = f"{function}'s " if "object" in function else ""  # it issues several ops
    group = name_group(snapshot, int(call["group"]))
    text = f"{whose}{numbered(snapshot.op(row), int(call['seq']))} of group {group}"
    site = snapshot.shown_site(int(call["site"]))
    return f"{text} at {site}" if line and site else text


def name_group(snapshot: Snapshot, number: int) -> str:
    """Name a group by its label, with its description if its maker gave one: ``3 (mesh_dp)``."""
    label, description = snapshot.labels[number], snapshot.groups[number].description
    if description in (*_NO_DESCRIPTIONS, "") or description in label:
        return label
    return f"{label} ({description})"


def name_wait(snapshot: Snapshot, wait: Wait) -> str:
    """Name the call that ranks wait in: a collective, or one end of a message."""
    if wait.channel is None:
        return name_call(snapshot, int(wait.rows[0]), line=False) + at_line(snapshot, wait)
    source, target, tag = wait.channel
    call = snapshot.calls[int(wait.rows[0])]
    if int(call["op"]) == SEND:
        text = f"{numbered('send', wait.seq)} to rank {target}"
    else:
        whom = f"rank {source}" if source >= 0 else "any rank"
        text = f"{numbered('recv', wait.seq)} from {whom}"
    text += f" (tag {tag}, group {name_group(snapshot, int(call['group']))})"
    return text + at_line(snapshot, wait)


def common_site(snapshot: Snapshot, wait: Wait) -> int:
    """Return the call site of most of the waiting ranks, as an index into the snapshot's."""
    sites, counts = np.unique(snapshot.calls["site"][wait.rows], return_counts=True)
    return int(sites[np.argmax(counts)])


def lines_of_site(snapshot: Snapshot, number: int) -> dict[str, str]:
    """Return the fields of a finding that name the line of a call."""
    return {"call_site": snapshot.site(number), "user_line": snapshot.user_line(number)}


def at_line(snapshot: Snapshot, wait: Wait) -> str:
    """Return `` at FILE:LINE``, or nothing if the line is not known."""
    site = snapshot.shown_site(common_site(snapshot, wait))
    return f" at {site}" if site else ""


def name_place(place: CodePlace) -> str:
    """Write the place at which a rank's code stands: ``in new_group at train.py:12``."""
    where = f"at {place.line}" if place.line else ""
    if place.inside == LOADER:
        return f"waiting for its data loader {where}".rstrip()
    if place.inside:
        return f"in {place.inside} {where}".rstrip()
    return f"{where} in {place.function}" if where and place.function else where


def last_call(snapshot: Snapshot, rank: int) -> str:
    """Write a rank's newest call, and when the rank left it."""
    rows = np.flatnonzero(snapshot.calls["rank"] == rank)
    if not len(rows):
        return "it has issued nothing"
    row = int(rows[np.argmax(snapshot.calls["index"][rows])])
    ended, age = (float(snapshot.calls[name][row]) for name in ("ended_s", "age_s"))
    if snapshot.calls["status"][row] == FAILED:
        return f"{name_call(snapshot, row)} failed {ago(snapshot, ended)}"
    if snapshot.calls["status"][row] == COMPLETED and np.isnan(ended):
        return f"last in {name_call(snapshot, row)}, which it left"
    if np.isnan(ended):
        return f"in {name_call(snapshot, row)} for {duration(age)}"
    return f"last in {name_call(snapshot, row)}, which it left {ago(snapshot, ended)}"


# The base class of all kinds of verdict, and two families that share their words.
#
# A kind finds its cause in the evidence, says how likely it is to be the root cause, words it, and
# gives the next step to take. Reports take all of that from the finding.


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

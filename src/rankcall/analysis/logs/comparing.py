"""Ranks that can be compared by what they wrote.

torch itself compares them in DETAIL mode, at barriers, and in reports on a desync. NCCL's watchdogs
write how far each rank had come in a group, and what it timed out in. Numbers of ranks in messages
are those within a process group: they are believed only if they are those of the job
(``Numbering``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from rankcall.analysis.logs.case import SAME, Case, Numbering, minority, ranks_text, subject
from rankcall.analysis.verdicts.facts import CallFact, Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.facts import (
    BarrierFailed,
    BarrierReached,
    Fingerprint,
    GroupName,
    Lagging,
    Mismatch,
    ModelsDiffer,
    Progress,
    StoreBarrier,
    Timeout,
)

# Ops whose members all have the same sizes.
_SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def mismatch(case: Case) -> list[Finding]:
    """Return what TORCH_DISTRIBUTED_DEBUG=DETAIL found to differ."""
    reports = case.facts(Mismatch)
    numbering = Numbering()
    calls: dict[int, Fingerprint] = {}
    for report in reports:
        calls[report.rank] = report.own
        if report.by_rank:
            numbering.note(case.rank(report.line), report.rank)
        else:
            calls[report.other] = report.others
    reporters = set(calls)
    for report in reports:
        # In some versions, the report of another rank lacks fields.
        calls.setdefault(report.other, report.others)
    if not reports or numbering.wrong:
        return []
    sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, call in calls.items():
        sides[call.seq, call.op, call.shape, call.dtype].add(rank)
    known = all(rank in reporters for rank in range(max({*calls, *case.seen()}) + 1))
    named = minority(list(sides.values())) if known else ()
    ops = {call.op for call in calls.values()}
    kind = "desync" if len(ops) > 1 or len({call.seq for call in calls.values()}) > 1 else ""
    called = [
        _called(case, side, calls[min(side)])
        for side in sorted(sides.values(), key=lambda side: (len(side), min(side)))
    ]
    call = calls[min(calls)]
    return [
        case.finding(
            kind or "mismatch",
            named,
            tuple(sorted(set(calls) - set(named))) if named else (),
            called,
            [report.line for report in reports],
            SAME,
            numbering.confidence(calls),
            op=call.op if len(ops) == 1 else "",
            seq=max(call.seq, 0),
        )
    ]


def models(case: Case) -> list[Finding]:
    """Return the ranks whose models DDP found to differ; it compares each rank with rank 0."""
    reports, numbering = case.facts(ModelsDiffer), Numbering()
    for report in reports:
        numbering.note(case.rank(report.line), report.writer)
    if not reports or numbering.wrong:
        return []
    differing = {report.rank for report in reports}
    others = {report.other for report in reports} | (case.seen() - differing)
    known = set(range(max(differing | others) + 1)) <= differing | others
    named = minority([differing, others]) if known else tuple(sorted(differing | others))
    first = reports[0]
    return [
        case.finding(
            "mismatch",
            named,
            tuple(sorted((differing | others) - set(named))) if named else (),
            [
                Fact(
                    Relation.MODELS_DIFFER,
                    subject([first.rank]),
                    others=subject([first.other]),
                    values=(("has", first.what),),
                )
            ],
            [report.line for report in reports],
            "Build the same model on all ranks: compare what depends on the rank, on the number of "
            "devices or on a checkpoint before DDP wraps it.",
            "likely" if known else "possible",
        )
    ]


def _called(case: Case, side: set[int], call: Fingerprint) -> Fact:
    values = {
        "seq": str(call.seq) if call.seq >= 0 else "",
        "shape": call.shape,
        "dtype": call.dtype.lower(),
    }
    return Fact(
        Relation.CALLED,
        subject(side),
        CallFact(call.op, line=case.site(side)),
        values=tuple((name, value) for name, value in values.items() if value),
    )


def absent(case: Case) -> list[Finding]:
    """Return the ranks that did not come to a barrier that knows its members."""
    return _monitored_barrier(case) or _store_barrier(case)


def _monitored_barrier(case: Case) -> list[Finding]:
    reports, numbering = case.facts(BarrierFailed), Numbering()
    for report in reports:
        numbering.note(case.rank(report.line), report.rank)
    for arrival in case.facts(BarrierReached):
        numbering.note(case.rank(arrival.line), arrival.rank)
    came = {arrival.rank for arrival in case.facts(BarrierReached)}
    missing = {rank for report in reports for rank in report.missing} - came
    if not missing or numbering.wrong:
        return []
    waited = max(report.seconds for report in reports)
    others = came | {report.rank for report in reports}
    line = case.site(others)
    return [
        case.finding(
            "missing",
            tuple(missing),
            tuple(sorted(others)),
            [
                Fact(
                    Relation.NOT_AT_BARRIER,
                    subject(missing),
                    others=subject(others),
                    values=(("line", line),) if line else (),
                    number=waited,
                    unit="s",
                )
            ],
            [report.line for report in reports],
            f"Look at what {ranks_text(missing)} did then: its own log, and the line that "
            "the others wait in.",
            numbering.confidence(missing),
            since=waited,
        )
    ]


def _store_barrier(case: Case) -> list[Finding]:
    by_key: dict[tuple[str, int], list[StoreBarrier]] = defaultdict(list)
    for report in case.facts(StoreBarrier):
        by_key[report.key, report.world_size].append(report)
    for (_, size), reports in by_key.items():
        came = {report.rank for report in reports}
        joined = max(report.joined for report in reports)
        if not (1 < size < 1 << 17 and len(came) == joined < size and max(came) < size):
            continue
        missing = set(range(size)) - came
        return [
            case.finding(
                "missing",
                tuple(missing),
                tuple(sorted(came)),
                [
                    Fact(
                        Relation.NOT_AT_SETUP,
                        subject(missing),
                        others=subject(came),
                        values=(("joined", str(joined)), ("world_size", str(size))),
                    )
                ],
                [report.line for report in reports],
                f"Look at the log of {ranks_text(missing)}: it did not start, or it failed before.",
                "likely",
            )
        ]
    return []


def lagging(case: Case) -> list[Finding]:
    """Return the ranks that TORCH_NCCL_DESYNC_DEBUG holds responsible, in the world's group."""
    reports = [report for report in case.facts(Lagging) if not report.joined]
    groups = {fact.group.is_world for fact in case.progress if fact.failed >= 0}
    missing = {rank for report in reports for rank in report.ranks}
    if not missing or groups != {True} or len({report.ranks for report in reports}) > 1:
        return []
    return [
        case.finding(
            "missing",
            tuple(missing),
            tuple(sorted(case.waited - missing - {-1})),
            [Fact(Relation.REPORTED_MISSING, subject(missing))],
            [report.line for report in reports],
            f"Look at what {ranks_text(missing)} did then.",
            "likely",
            since=case.longest(),
        )
    ]


class Late(NamedTuple):
    """Ranks that had not come to a collective in which others timed out.

    ``waiting`` has the states of those others by rank. ``alone``: the log shows no other group.
    """

    ranks: tuple[int, ...]
    waiting: dict[int, Progress]
    states: list[Progress]
    seq: int
    alone: bool


def late_ranks(case: Case) -> Late | None:
    """Return the ranks whose last collective is older than the one that others timed out in."""
    for name, states in _groups(case).items():
        waiting = {state.group.rank: state for state in states if state.failed > 0}
        last = _last(case, states)
        if not waiting or last is None:
            continue
        reached = min(state.failed for state in waiting.values())
        late = sorted(
            rank
            for rank, enqueued in last.items()
            if enqueued < reached and rank not in waiting and rank not in case.waited
        )
        if late:
            others = {state.group.name for state in case.progress} - {name, states[0].group.name}
            return Late(tuple(late), waiting, states, reached, not others)
    return None


def _last(case: Case, states: Sequence[Progress]) -> dict[int, int] | None:
    """Return the last collective of each rank; None if a rank counts from the beginning again."""
    last: dict[int, int] = {}
    for state in states:
        if state.enqueued < last.get(state.group.rank, -1):
            case.problem(
                f"rank {state.group.rank} counts from the beginning again: the log has several "
                "attempts of the job; give this command the lines of one"
            )
            return None
        last[state.group.rank] = state.enqueued
    return last


def behind(case: Case) -> list[Finding]:
    """Return the ranks whose last collective is older than the one that others timed out in.

    If the job has other groups, such a rank may wait in one of them for another rank.
    """
    late = late_ranks(case)
    if late is None or not late.alone:
        return []
    group = late.states[0].group
    timeouts = [timeout for timeout in case.timeouts if timeout.seq == late.seq]
    op = next((timeout.op for timeout in timeouts if timeout.op), "")
    own = [state for state in late.states if state.group.rank in late.ranks]
    return [
        case.finding(
            "missing",
            late.ranks,
            tuple(sorted(late.waiting)),
            [
                Fact(
                    Relation.BEHIND,
                    subject(late.ranks),
                    _call_in(group, late.seq, op),
                    subject(late.waiting),
                    number=max(state.enqueued for state in own),
                )
            ],
            [
                *(state.line for state in own),
                *(timeout.line for timeout in timeouts[:2]),
                *(state.line for state in late.waiting.values()),
            ],
            f"Look at what {ranks_text(late.ranks)} did then: in its own log, or in a Flight "
            "Recorder dump.",
            "likely",
            group=group.name,
            seq=late.seq,
            op=op,
            since=case.longest(),
        )
    ]


def different(case: Case) -> list[Finding]:
    """Return the collectives that have one number, and are not the same on all ranks."""
    calls_of = {(timeout.line.writer, timeout.seq): timeout for timeout in reversed(case.timeouts)}
    for name, states in _groups(case).items():
        by_seq: dict[int, dict[int, Timeout]] = defaultdict(dict)
        for state in states:
            call = calls_of.get((state.line.writer, state.failed))
            if call is not None and call.op and state.failed > 0:
                by_seq[state.failed][state.group.rank] = call
        for seq, calls in by_seq.items():
            finding = _differing(case, name, states[0].group, seq, calls)
            if finding is not None:
                return [finding]
    return _different_without_groups(case)


def _different_without_groups(case: Case) -> list[Finding]:
    """Return what differs if no message has the group, as before torch 2.3.

    Calls of several groups must not be compared. They would seldom all have one number, and some
    rank would have two. Where ranks have a number in the job too, it must be the same.
    """
    seqs = {timeout.seq for timeout in case.timeouts}
    calls = {timeout.in_group: timeout for timeout in case.timeouts}
    numbering = Numbering()
    for rank, call in calls.items():
        numbering.note(case.rank(call.line), rank)
    is_one_group = len(seqs) == 1 and len(calls) == len(case.timeouts) and -1 not in calls
    if case.progress or not is_one_group or numbering.wrong or not all(seqs):
        return []
    if not all(call.op for call in calls.values()):
        return []
    finding = _differing(case, "", GroupName("", "", min(calls)), min(seqs), calls)
    return [] if finding is None else [replace(finding, confidence="possible")]


def _differing(
    case: Case, name: str, group: GroupName, seq: int, calls: dict[int, Timeout]
) -> Finding | None:
    ops = {call.op for call in calls.values()}
    sides: dict[tuple[str, tuple[int, ...]], set[int]] = defaultdict(set)
    for rank, call in calls.items():
        sides[call.op, call.sizes if call.op in _SIZED else ()].add(rank)
    if len(sides) < 2:
        return None
    # If the calls of some ranks are not in the log, it is not known which side is the smaller one:
    # both are named. Of two equal sides, neither is.
    known = set(range(max({*calls, *case.seen()}) + 1)) <= set(calls)
    named = minority(list(sides.values())) if known else tuple(sorted(calls))
    timed_out = [
        _timed_out(ranks, _call_in(group, seq, op), sizes)
        for (op, sizes), ranks in sorted(
            sides.items(), key=lambda item: (len(item[1]), min(item[1]))
        )
    ]
    return case.finding(
        "desync" if len(ops) > 1 else "mismatch",
        named,
        tuple(sorted(set(calls) - set(named))) if named else (),
        timed_out,
        [call.line for call in calls.values()],
        SAME,
        "likely" if known else "possible",
        group=name,
        seq=seq,
        op=min(ops) if len(ops) == 1 else "",
        since=case.longest(),
    )


def _groups(case: Case) -> dict[str, list[Progress]]:
    """Return what was written about each group whose members can be compared.

    Several groups can have one name, each with other members. They are one group if each rank
    has the same number in the group as in the job.
    """
    states_of: dict[str, list[Progress]] = defaultdict(list)
    for state in case.progress:
        rank = case.rank(state.line)
        if state.group.is_world and rank in (-1, state.group.rank):
            states_of["0"].append(state)
        elif rank >= 0 and rank == state.group.rank:
            states_of[state.group.name].append(state)
    return states_of


def _timed_out(ranks: set[int], call: CallFact, sizes: Sequence[int]) -> Fact:
    elements = " ".join(str(size) for size in dict.fromkeys(sizes))
    values = (("sizes", elements),) if elements else ()
    return Fact(Relation.TIMED_OUT_IN, subject(ranks), call, values=values)


def _call_in(group: GroupName, seq: int, op: str) -> CallFact:
    description = "" if group.description == "default_pg" else group.description
    return CallFact(op, seq, group.name, description)

"""Ranks that can be compared by what they wrote.

torch itself compares them in DETAIL mode, at barriers, and in reports on a desync. NCCL's watchdogs
write how far each rank had come in a group, and what it timed out in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from rankcall.analysis.logs.case import SAME, Case, Ranks, minority, ranks_text
from rankcall.analysis.verdicts.finding import Finding, begin_sentence, count_of, duration
from rankcall.imports.log_messages import (
    BarrierFailed,
    BarrierReached,
    Fingerprint,
    GroupName,
    Lagging,
    Mismatch,
    Progress,
    StoreBarrier,
    Timeout,
)

# Ops whose members all have the same sizes.
_SIZED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")


def mismatch(case: Case) -> list[Finding]:
    """Return what TORCH_DISTRIBUTED_DEBUG=DETAIL found to differ."""
    reports = case.facts(Mismatch)
    ranks = Ranks()
    said: dict[int, Fingerprint] = {}
    for each in reports:
        ranks.note(case.rank(each.line), each.rank)
        said[each.rank] = each.own
    own = set(said)
    for each in reports:
        # In some versions, the report of another rank lacks fields.
        said.setdefault(each.other, each.others)
    if not reports or ranks.wrong:
        return []
    sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, call in said.items():
        sides[call.seq, call.op, call.shape, call.dtype].add(rank)
    known = all(rank in own for rank in range(max({*said, *case.seen()}) + 1))
    named = minority(list(sides.values())) if known else ()
    ops = {call.op for call in said.values()}
    kind = "desync" if len(ops) > 1 or len({call.seq for call in said.values()}) > 1 else ""
    texts = [
        f"{ranks_text(each)} called {_call_text(said[min(each)])}{_at(case.site(each))}"
        for each in sorted(sides.values(), key=lambda each: (len(each), min(each)))
    ]
    call = said[min(said)]
    return [
        case.finding(
            kind or "mismatch",
            named,
            tuple(sorted(set(said) - set(named))) if named else (),
            begin_sentence("; ".join(texts[:4])) + ".",
            [each.line for each in reports],
            SAME,
            ranks.confidence(said),
            op=call.op if len(ops) == 1 else "",
            seq=max(call.seq, 0),
        )
    ]


def _call_text(call: Fingerprint) -> str:
    parts = [call.op or "another op", call.shape and f"of shape {call.shape}", call.dtype.lower()]
    if call.seq >= 0:
        parts.append(f"as #{call.seq}")
    return " ".join(part for part in parts if part)


def _at(site: str) -> str:
    return f" at {site}" if site else ""


def absent(case: Case) -> list[Finding]:
    """Return the ranks that did not come to a barrier that knows its members."""
    return _monitored_barrier(case) or _store_barrier(case)


def _monitored_barrier(case: Case) -> list[Finding]:
    reports, ranks = case.facts(BarrierFailed), Ranks()
    for each in reports:
        ranks.note(case.rank(each.line), each.rank)
    for other in case.facts(BarrierReached):
        ranks.note(case.rank(other.line), other.rank)
    came = {each.rank for each in case.facts(BarrierReached)}
    missing = {rank for each in reports for rank in each.missing} - came
    if not missing or ranks.wrong:
        return []
    waited = max(each.seconds for each in reports)
    others = came | {each.rank for each in reports}
    where = _at(case.site(others))
    text = f"{begin_sentence(ranks_text(missing))} did not come to a monitored barrier{where}"
    return [
        case.finding(
            "missing",
            tuple(missing),
            tuple(sorted(others)),
            f"{text} within {duration(waited)}; TORCH_DISTRIBUTED_DEBUG=DETAIL makes one "
            "before each collective.",
            [each.line for each in reports],
            f"Look at what {ranks_text(missing)} did then: its own log, and the line that "
            "the others wait in.",
            ranks.confidence(missing),
            since=waited,
        )
    ]


def _store_barrier(case: Case) -> list[Finding]:
    by_key: dict[tuple[str, int], list[StoreBarrier]] = defaultdict(list)
    for each in case.facts(StoreBarrier):
        by_key[each.key, each.world_size].append(each)
    for (_, size), reports in by_key.items():
        came = {each.rank for each in reports}
        joined = max(each.joined for each in reports)
        if not (1 < size < 1 << 17 and len(came) == joined < size and max(came) < size):
            continue
        missing = set(range(size)) - came
        return [
            case.finding(
                "missing",
                tuple(missing),
                tuple(sorted(came)),
                f"{begin_sentence(ranks_text(missing))} did not come while a process group "
                f"was made: {joined} of {count_of(size, 'rank')} did.",
                [each.line for each in reports],
                f"Look at the log of {ranks_text(missing)}: it did not start, or it failed before.",
                "likely",
            )
        ]
    return []


def lagging(case: Case) -> list[Finding]:
    """Return the ranks that TORCH_NCCL_DESYNC_DEBUG holds responsible, in the world's group."""
    reports = [each for each in case.facts(Lagging) if not each.joined]
    groups = {fact.group.is_world for fact in case.progress if fact.failed >= 0}
    missing = {rank for each in reports for rank in each.ranks}
    if not missing or groups != {True} or len({each.ranks for each in reports}) > 1:
        return []
    return [
        case.finding(
            "missing",
            tuple(missing),
            tuple(sorted(case.waited - missing - {-1})),
            f"{begin_sentence(ranks_text(missing))} had not come to the collective that the "
            "others timed out in, says TORCH_NCCL_DESYNC_DEBUG.",
            [each.line for each in reports],
            f"Look at what {ranks_text(missing)} did then.",
            "likely",
            since=case.longest(),
        )
    ]


# --- what NCCL's watchdogs wrote ---


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
        waiting = {each.group.rank: each for each in states if each.failed > 0}
        last = _last(case, states)
        if not waiting or last is None:
            continue
        reached = min(each.failed for each in waiting.values())
        late = sorted(
            rank
            for rank, enqueued in last.items()
            if enqueued < reached and rank not in waiting and rank not in case.waited
        )
        if late:
            others = {each.group.name for each in case.progress} - {name, states[0].group.name}
            return Late(tuple(late), waiting, states, reached, not others)
    return None


def _last(case: Case, states: Sequence[Progress]) -> dict[int, int] | None:
    """Return the last collective of each rank; None if a rank counts from the beginning again."""
    last: dict[int, int] = {}
    for each in states:
        if each.enqueued < last.get(each.group.rank, -1):
            case.problem(
                f"rank {each.group.rank} counts from the beginning again: the log has several "
                "attempts of the job; give this command the lines of one"
            )
            return None
        last[each.group.rank] = each.enqueued
    return last


def behind(case: Case) -> list[Finding]:
    """Return the ranks whose last collective is older than the one that others timed out in.

    If the job has other groups, such a rank may wait in one of them for another rank.
    """
    late = late_ranks(case)
    if late is None or not late.alone:
        return []
    group = late.states[0].group
    timeouts = [each for each in case.timeouts if each.seq == late.seq]
    op = next((each.op for each in timeouts if each.op), "")
    own = [each for each in late.states if each.group.rank in late.ranks]
    return [
        case.finding(
            "missing",
            late.ranks,
            tuple(sorted(late.waiting)),
            f"{begin_sentence(ranks_text(late.ranks))} had not come to {op or 'the collective'} "
            f"#{late.seq} of group {_group_text(group)}, which {ranks_text(late.waiting)} timed "
            f"out in: {_issued(max(each.enqueued for each in own))}.",
            [
                *(each.line for each in own),
                *(each.line for each in timeouts[:2]),
                *(each.line for each in late.waiting.values()),
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


def _issued(seq: int) -> str:
    return f"the last one issued there was #{seq}" if seq > 0 else "none had been issued there"


def different(case: Case) -> list[Finding]:
    """Return the collectives that have one number, and are not the same on all ranks."""
    calls_of = {(each.line.source, each.seq): each for each in reversed(case.timeouts)}
    for name, states in _groups(case).items():
        by_seq: dict[int, dict[int, Timeout]] = defaultdict(dict)
        for each in states:
            call = calls_of.get((each.line.source, each.failed))
            if call is not None and call.op and each.failed > 0:
                by_seq[each.failed][each.group.rank] = call
        for seq, calls in by_seq.items():
            found = _differing(case, name, states[0], seq, calls)
            if found is not None:
                return [found]
    return []


def _differing(
    case: Case, name: str, state: Progress, seq: int, calls: dict[int, Timeout]
) -> Finding | None:
    ops = {call.op for call in calls.values()}
    sides: dict[tuple[object, ...], set[int]] = defaultdict(set)
    for rank, call in calls.items():
        sides[call.op, call.sizes if call.op in _SIZED else ()].add(rank)
    if len(sides) < 2:
        return None
    known = set(range(max({*calls, *case.seen()}) + 1)) <= set(calls)
    named = minority(list(sides.values())) if known else ()
    texts = [
        f"{ranks_text(ranks)} in {key[0]}" + (f" of {_sizes_text(key[1])}" if key[1] else "")
        for key, ranks in sorted(sides.items(), key=lambda item: (len(item[1]), min(item[1])))
    ]
    return case.finding(
        "desync" if len(ops) > 1 else "mismatch",
        named,
        tuple(sorted(set(calls) - set(named))) if named else (),
        f"The ranks timed out in different calls, all of which are #{seq} of group "
        f"{_group_text(state.group)}: {'; '.join(texts[:4])}.",
        [call.line for call in calls.values()],
        SAME,
        "likely",
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
    found: dict[str, list[Progress]] = defaultdict(list)
    for each in case.progress:
        rank = case.rank(each.line)
        if each.group.is_world and rank in (-1, each.group.rank):
            found["0"].append(each)
        elif rank >= 0 and rank == each.group.rank:
            found[each.group.name].append(each)
    return found


def _sizes_text(sizes: object) -> str:
    numbers = sizes if isinstance(sizes, tuple) else ()
    return " and ".join(f"{size:,}" for size in dict.fromkeys(numbers)) + " elements"


def _group_text(group: GroupName) -> str:
    described = group.description not in ("", "default_pg")
    return f"{group.name} ({group.description})" if described else group.name

"""Ranks that torch itself compared: in DETAIL mode, at barriers, and in reports on a desync."""

from __future__ import annotations

from collections import defaultdict

from rankcall.analysis.logs.case import SAME, Case, Ranks, minority, ranks_text
from rankcall.analysis.verdicts.finding import Finding, begin_sentence, count_of, duration
from rankcall.imports.log_messages import (
    BarrierFailed,
    BarrierReached,
    Fingerprint,
    Lagging,
    Mismatch,
    StoreBarrier,
)


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
        # What another rank says of it can lack fields in some versions.
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
        f"{ranks_text(each)} called {_call_text(said[min(each)])}"
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
    text = f"{begin_sentence(ranks_text(missing))} did not come to a monitored barrier"
    return [
        case.finding(
            "missing",
            tuple(missing),
            tuple(sorted(came | {each.rank for each in reports})),
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

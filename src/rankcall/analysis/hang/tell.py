"""What was found, as findings: in words, with evidence and advice."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rankcall.analysis.finding import CONFIDENCES, Finding, less_sure
from rankcall.analysis.hang import explain
from rankcall.analysis.hang.culprits import FROZEN_S, Case
from rankcall.analysis.hang.graph import Graph
from rankcall.analysis.hang.waits import Wait
from rankcall.analysis.state.snapshot import GONE, STOPPED, UNKNOWN, RankState, Snapshot
from rankcall.record import OPS

_SHOWN = 3  # ranks, waits, sides or hosts that are told one by one
_SIGNAL, _MUTE, _GIL = "signal", "mute", "gil"  # what shows that a process stands still


def of_cases(snapshot: Snapshot, graph: Graph, alike: Sequence[Case]) -> Finding:
    """Say what is the matter with ranks that are alike: one kind, waited for in one place."""
    ranks = tuple(sorted(case.rank for case in alike))
    kind, longest = alike[0].kind, alike[0].longest
    waits = list({id(wait): wait for case in alike for wait in case.waits}.values())
    victims = tuple(sorted(graph.victims(waits) - set(ranks)))
    confidence = max((case.confidence for case in alike), key=CONFIDENCES.index)
    gaps = _gaps(snapshot, ranks, waits)
    if gaps:
        confidence = less_sure(confidence)
    states = [snapshot.ranks[rank] for rank in ranks]
    place: dict[str, Any] = {}
    since = max((state.gone_s or 0.0 for state in states), default=0.0)
    if longest is not None:
        call, since = snapshot.calls[longest.rows[0]], longest.age_s
        place = {
            "group": snapshot.labels[longest.group], "seq": longest.seq,
            "op": OPS[int(call["op"])], "call_site": explain.common_site(snapshot, longest),
        }  # fmt: skip
    return Finding(
        kind, ranks, victims, explain.hosts(snapshot, ranks), since_s=since, confidence=confidence,
        summary=_summary(snapshot, kind, states, longest, len(victims)),
        evidence=(*_evidence(snapshot, graph, ranks, waits), *gaps),
        advice=_advice(snapshot, kind, states), **place,
    )  # fmt: skip


def of_vanished(snapshot: Snapshot, ranks: Collection[int]) -> list[Finding]:
    """Say that ranks ended together, in the middle of their work, and nobody noted how."""
    if not ranks:
        return []
    found = tuple(sorted(ranks))
    name = explain.who(snapshot, found)
    end = "ended" if len(found) == 1 else "ended together"
    copied = any(snapshot.ranks[rank].state == UNKNOWN for rank in found)
    if copied:
        end = f"{end}, or still ran when these records were copied"
    summary = f"{name[0].upper()}{name[1:]} {end}; nobody noted how, and none had waited for long."
    lasts = [f"rank {rank}: {explain.last_call(snapshot, rank)}" for rank in found[:_SHOWN]]
    return [
        Finding(
            "dead", found, hosts=explain.hosts(snapshot, found),
            confidence="possible" if copied else "likely", summary=summary, evidence=tuple(lasts),
            advice="Most likely killed from outside, with whatever started them: look at the "
            "scheduler (a time limit, a cancelled job), at the kernel (out of memory: dmesg -T) or "
            "for a host that was lost.",
        )
    ]  # fmt: skip


def _gaps(snapshot: Snapshot, ranks: Sequence[int], waits: Iterable[Wait]) -> list[str]:
    """Say what is not known that could change a verdict about some ranks."""
    gaps = []
    members = {rank for wait in waits for rank in snapshot.groups[wait.group].ranks}
    blind = [
        rank
        for rank in sorted(members)
        if rank >= len(snapshot.ranks) or snapshot.ranks[rank].blind
    ]
    if blind:
        gaps.append(f"nothing is known of {explain.who(snapshot, blind)}: {_why_blind(snapshot)}")
    groups = {wait.group for wait in waits}
    for rank in ranks:
        state = snapshot.ranks[rank]
        mine = snapshot.calls[snapshot.calls["rank"] == rank]
        if state.dropped and not groups & set(mine["group"].tolist()):
            gaps.append(
                f"{explain.many(state.dropped, 'record')} of rank {rank} were overwritten, and "
                "none of this group is left: it may have been there"
            )
    return gaps


def _why_blind(snapshot: Snapshot) -> str:
    unheard = any(state.unheard for state in snapshot.ranks)
    return "no answer from there" if unheard else "no records of it here"


def _summary(
    snapshot: Snapshot, kind: str, states: Sequence[RankState], wait: Wait | None, victims: int
) -> str:
    ranks = [state.rank for state in states]
    name = explain.who(snapshot, ranks)
    begin = f"{name[0].upper()}{name[1:]} {_matter(snapshot, kind, states)}"
    if wait is None or not victims:
        return f"{begin}."
    held = explain.many(victims, "rank")
    if snapshot.live:
        held += f" {'has' if victims == 1 else 'have'} waited"
    else:
        held += " had waited"
    it = "it" if len(ranks) == 1 else "them"
    where = explain.what(snapshot, wait)
    return f"{begin}. {held} {explain.lasts(wait.age_s)} for {it} in {where}."


def _matter(snapshot: Snapshot, kind: str, states: Sequence[RankState]) -> str:
    first, one, live = states[0], len(states) == 1, snapshot.live
    they = "it" if one else "they"
    be = ("is" if one else "are") if live else ("was" if one else "were")
    have = ("has" if one else "have") if live else "had"
    if kind == "dead":
        endings = {explain.ending(state, one=one) for state in states}
        text = endings.pop() if len(endings) == 1 else "ended badly"
        gone = first.gone_s if first.gone_s is not None else first.silent_s
        return f"{text} {explain.ago(snapshot, gone)}"
    if kind == "stopped":
        halt = _halt(first)
        if halt == _SIGNAL:
            return f"{be} stopped (SIGSTOP, or a debugger)"
        if halt == _MUTE:
            return f"{have} given no sign of life for {explain.lasts(first.mute_s)}"
        return f"{have} held the GIL for {explain.lasts(first.gil_held_s)}"
    if kind == "exhausted":
        if first.exit == 0:
            then = explain.ago(snapshot, first.gone_s or 0.0)
            return f"left the loop and exited with code 0 {then}"
        if first.state == GONE:
            return f"left the loop and ended {explain.ago(snapshot, first.gone_s or 0.0)}"
        return f"left the loop: {they} {be} closing down"
    if first.unheard:
        return f"{'does' if one else 'do'} not answer: no word has come from where {they} ran"
    if first.blind:
        return f"{have} left no records here"
    if first.closed:
        return f"{have} stopped recording (rankcall.disable): whether {they} came is not known"
    return f"{have} not come: {they} {be} in user code"


def _evidence(
    snapshot: Snapshot, graph: Graph, ranks: Sequence[int], waits: Sequence[Wait]
) -> list[str]:
    lines = [
        f"rank {rank}: {explain.last_call(snapshot, rank)}"
        for rank in ranks[:_SHOWN]
        if not snapshot.ranks[rank].blind
    ]
    for wait in sorted(waits, key=lambda wait: -wait.age_s)[:_SHOWN]:
        waiting = [rank for rank in wait.waiters if rank not in ranks]
        if waiting:
            lines.append(
                f"{explain.who(snapshot, waiting)}: in {explain.what(snapshot, wait)} "
                f"for {explain.lasts(wait.age_s)}"
            )
    direct = {rank for wait in waits for rank in wait.waiters}
    others = sorted(graph.victims(waits) - direct - set(ranks))
    if others:
        verb = "waits" if len(others) == 1 else "wait"
        lines.append(f"{explain.who(snapshot, others)}: {verb} for those in turn")
    return lines


def _advice(snapshot: Snapshot, kind: str, states: Sequence[RankState]) -> str:
    first = states[0]
    on = f" on {first.host}" if first.host else ""
    if kind == "dead":
        if first.launcher_signal:
            return f"See who ended the launcher{on}: a preempted or cancelled node, or a Ctrl-C."
        if first.exit in (-9, 137):
            return (
                "A SIGKILL that nobody sent is mostly the kernel out of memory: "
                f"dmesg -T | grep -i 'killed process'{on}."
            )
        if first.exit is not None and first.exit > 0:
            return f"Its own error comes first: look at the end of rank {first.rank}'s stderr."
        return f"Look for a core dump and at the end of rank {first.rank}'s stderr{on}."
    if kind == "stopped":
        return _stopped_advice(states)
    if kind == "exhausted":
        return "Give every rank as many batches (drop_last, a sampler), or use a Join."
    if first.unheard:
        lost = ", ".join(explain.hosts(snapshot, [state.rank for state in states])[:_SHOWN])
        return (
            f"See whether {lost or 'their host'} is up, and what the launcher there says: a host "
            "that is lost or stands still takes all its ranks with it."
        )
    if first.blind:
        return "Bring the records of all nodes together (rankcall collect), then ask again."
    if not snapshot.live:
        return f"Look at what rank {first.rank} does after the call it was last in."
    return f"See what it does: rankcall diagnose --stacks, or py-spy dump --pid {first.pid}{on}."


def _halt(state: RankState) -> str:
    """Tell what shows that a process stands still."""
    if state.state == STOPPED:
        return _SIGNAL
    return _MUTE if state.mute_s > FROZEN_S else _GIL


def _stopped_advice(states: Sequence[RankState]) -> str:
    first = states[0]
    on = f" on {first.host}" if first.host else ""
    halt = _halt(first)
    if halt == _SIGNAL:
        pids: dict[str, list[str]] = {}
        for state in states:
            pids.setdefault(state.host, []).append(str(state.pid))
        orders = [
            f"kill -CONT {' '.join(each)}{f' on {host}' if host else ''}"
            for host, each in pids.items()
        ]
        more = ", and so on," if len(orders) > _SHOWN else ""
        them = "it" if len(states) == 1 else "them"
        return f"{', '.join(orders[:_SHOWN])}{more} lets {them} go on."
    if first.state == GONE:
        return f"See what stopped it{on}: a SIGSTOP, a debugger, swapping, a held GIL."
    if halt == _MUTE:
        return f"See whether it is swapped out, or its host stands still{on}: pid {first.pid}."
    return f"See which extension holds the GIL: py-spy dump --native --pid {first.pid}{on}."

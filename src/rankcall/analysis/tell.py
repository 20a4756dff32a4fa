"""What was found, as findings: in words, with evidence and advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rankcall.analysis import explain
from rankcall.analysis.culprits import FROZEN_S, Case
from rankcall.analysis.cycles import Cycle
from rankcall.analysis.disagree import Disagreement, Side
from rankcall.analysis.finding import CONFIDENCES, Finding, less_sure
from rankcall.analysis.graph import Graph
from rankcall.analysis.snapshot import GONE, STOPPED, RankState, Snapshot
from rankcall.analysis.waits import Wait
from rankcall.record import OPS

_SHOWN = 3  # ranks, waits or sides that are told one by one


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
        kind, ranks, victims, _hosts(snapshot, ranks), since_s=since, confidence=confidence,
        summary=_summary(snapshot, kind, states, longest, len(victims)),
        evidence=(*_evidence(snapshot, graph, ranks, waits), *gaps),
        advice=_advice(snapshot, kind, states), **place,
    )  # fmt: skip


def _hosts(snapshot: Snapshot, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of some ranks, each once."""
    hosts = dict.fromkeys(snapshot.ranks[rank].host for rank in ranks)
    return tuple(host for host in hosts if host)


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
        gaps.append(f"nothing is known of {explain.who(snapshot, blind)}: no records of it here")
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
        endings = {explain.ending(state) for state in states}
        text = endings.pop() if len(endings) == 1 else "ended badly"
        text = text if one else text.replace("was ", "were ").replace("is ", "are ")
        gone = first.gone_s if first.gone_s is not None else first.silent_s
        return f"{text} {explain.ago(snapshot, gone)}"
    if kind == "stopped":
        if first.state == STOPPED:
            return f"{be} stopped (SIGSTOP, or a debugger)"
        if first.silent_s > FROZEN_S:
            return f"{have} given no sign of life for {explain.lasts(first.silent_s)}"
        return f"{have} held the GIL for {explain.lasts(first.gil_s)}"
    if kind == "exhausted":
        if first.exit == 0:
            then = explain.ago(snapshot, first.gone_s or 0.0)
            return f"left the loop and exited with code 0 {then}"
        if first.state == GONE:
            return f"left the loop and ended {explain.ago(snapshot, first.gone_s or 0.0)}"
        return f"left the loop: {they} {be} closing down"
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
        if first.exit in (-9, 137):
            return (
                "A SIGKILL that nobody sent is mostly the kernel out of memory: "
                f"dmesg -T | grep -i 'killed process'{on}."
            )
        if first.exit is not None and first.exit > 0:
            return f"Its own error comes first: look at the end of rank {first.rank}'s stderr."
        return f"Look for a core dump and at the end of rank {first.rank}'s stderr{on}."
    if kind == "stopped":
        if first.state == STOPPED:
            return f"kill -CONT {first.pid}{on} lets it go on."
        if first.silent_s > FROZEN_S:
            return f"See whether it is swapped out, or its host stands still{on}: pid {first.pid}."
        return f"See which extension holds the GIL: py-spy dump --native --pid {first.pid}{on}."
    if kind == "exhausted":
        return "Give every rank as many batches (drop_last, a sampler), or use a Join."
    if first.blind:
        return "Bring the records of all nodes together (rankcall collect), then ask again."
    if not snapshot.live:
        return f"Look at what rank {first.rank} does after the call it was last in."
    return f"See what it does: rankcall diagnose --stacks, or py-spy dump --pid {first.pid}{on}."


def of_disagreement(snapshot: Snapshot, graph: Graph, found: Disagreement) -> Finding:
    """Say who does not do what the others do."""
    culprits = found.culprits
    everybody = {rank for side in found.sides for rank in side.ranks}
    behind = [
        wait for wait in graph.waits if wait.group == found.group and wait.seq >= found.seq
    ] if found.open else []  # fmt: skip
    victims = (everybody | graph.victims(behind)) - set(culprits)
    call = snapshot.calls[found.sides[-1].row]
    confidence = "certain"
    if not culprits or (found.shift and "op" not in found.differing):
        confidence = "likely"
    gaps = _unseen(snapshot, found)
    if gaps:
        confidence = less_sure(confidence)
    return Finding(
        found.kind, culprits, tuple(sorted(victims)), _hosts(snapshot, culprits),
        snapshot.labels[found.group], found.seq, OPS[int(call["op"])],
        snapshot.site(int(call["site"])), float(snapshot.calls["age_s"][found.rows].max()),
        confidence, _clash(snapshot, found),
        (*(_side(snapshot, found, side) for side in found.sides[:_SHOWN]), *gaps),
        _clash_advice(found),
    )  # fmt: skip


def _clash(snapshot: Snapshot, found: Disagreement) -> str:
    place = f"#{found.seq} of group {snapshot.labels[found.group]}"
    first, last = found.sides[0], found.sides[-1]
    one, other = explain.who(snapshot, first.ranks), explain.who(snapshot, last.ranks)
    if found.message:
        one, other = (f"rank {side.ranks[0]}" for side in (first, last))
        sizes = _values(snapshot, found, first), _values(snapshot, found, last)
        return f"{one} sends {sizes[0]} and {other} receives {sizes[1]}, in message {place}."
    one = one[0].upper() + one[1:]
    if found.kind == "mismatch":
        names = " and ".join(name.replace("_", " ") for name in found.differing)
        done = "" if found.open else " It went through all the same: the results are wrong."
        return (
            f"{one} and {other} differ in {names} in {OPS[int(snapshot.calls['op'][last.row])]} "
            f"{place}: {_values(snapshot, found, first)} against "
            f"{_values(snapshot, found, last)}.{done}"
        )
    verb = "is" if len(first.ranks) == 1 else "are"
    text = f"{one} {verb} out of step with {other} since {place}"
    if found.shift:
        way = "ahead: skipped" if found.shift > 0 else "behind: issued"
        extra = "" if found.shift > 0 else " too many"
        count = explain.many(abs(found.shift), "call")
        return f"{text}, {count} {way} {'it' if abs(found.shift) == 1 else 'them'}{extra}."
    return f"{text}: {_called(snapshot, first)} there, against {_called(snapshot, last)}."


def _called(snapshot: Snapshot, side: Side) -> str:
    call = snapshot.calls[side.row]
    site = snapshot.site(int(call["site"]))
    return OPS[int(call["op"])] + (f" ({site})" if site else "")


def _values(snapshot: Snapshot, found: Disagreement, side: Side) -> str:
    return ", ".join(explain.value(snapshot, side.row, name) for name in found.differing)


def _side(snapshot: Snapshot, found: Disagreement, side: Side) -> str:
    site = snapshot.site(int(snapshot.calls["site"][side.row]))
    op = OPS[int(snapshot.calls["op"][side.row])]
    values = "" if found.differing == ("op",) else f", {_values(snapshot, found, side)}"
    return f"{explain.who(snapshot, side.ranks)}: {op}{f' at {site}' if site else ''}{values}"


def _unseen(snapshot: Snapshot, found: Disagreement) -> list[str]:
    """Say whose calls at that place are not on record."""
    seen = {rank for side in found.sides for rank in side.ranks}
    silent = [
        rank
        for rank in snapshot.groups[found.group].ranks
        if rank not in seen and (rank >= len(snapshot.ranks) or snapshot.ranks[rank].blind)
    ]
    if found.message or not silent:
        return []
    return [f"nothing is known of {explain.who(snapshot, silent)}: no records of it here"]


def _clash_advice(found: Disagreement) -> str:
    if found.message:
        return "Make both ends the same size."
    if found.kind == "mismatch":
        return "All members of a group must pass the same: compare what the lines above are given."
    return (
        "All members must issue the same calls in the same order: look for a branch, an early "
        "continue or a set that only some ranks take on the way to these lines."
    )


def of_cycle(snapshot: Snapshot, graph: Graph, found: Cycle) -> Finding:
    """Say who waits for whom in a circle."""
    longest = max(found.waits, key=lambda wait: wait.age_s)
    victims = tuple(sorted(graph.victims(found.waits) - set(found.ranks)))
    call = snapshot.calls[longest.rows[0]]
    tags = _tags(found.waits)
    steps = [
        f"{explain.who(snapshot, _inside(found, wait.waiters))} in "
        f"{explain.what(snapshot, wait)}, for {explain.who(snapshot, _inside(found, wait.absent))}"
        for wait in found.waits
    ]
    name = explain.who(snapshot, found.ranks)
    summary = f"{name[0].upper()}{name[1:]} wait for each other: {'; '.join(steps[:_SHOWN])}."
    if tags:
        summary = f"{name[0].upper()}{name[1:]} wait for each other: {tags}."
    return Finding(
        "deadlock", found.ranks, victims, _hosts(snapshot, found.ranks),
        snapshot.labels[longest.group], longest.seq, OPS[int(call["op"])],
        explain.common_site(snapshot, longest), longest.age_s,
        "likely" if any(wait.soft for wait in found.waits) else "certain", summary,
        tuple(steps), _cycle_advice(found),
    )  # fmt: skip


def _inside(found: Cycle, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank in found.ranks] or list(ranks)


def _tags(waits: Sequence[Wait]) -> str:
    """Say where one rank sends with one tag and the other receives with another."""
    channels = [wait.channel for wait in waits if wait.channel is not None]
    for one in channels:
        for other in channels:
            if one[:2] == other[:2] and one.tag < other.tag:
                tags = f"tag {one.tag} and tag {other.tag}"
                return f"{tags} do not match, from rank {one.source} to rank {one.target}"
    return ""


def _cycle_advice(found: Cycle) -> str:
    if any(wait.channel is not None for wait in found.waits):
        return (
            "Let one of them receive first, or issue both ends at once (batch_isend_irecv); each "
            "send needs a receive with the same tag."
        )
    return "Let all ranks use the groups in the same order."


def of_stuck(snapshot: Snapshot, graph: Graph, wait: Wait) -> Finding:
    """Say that all have come and nobody gets out."""
    call = snapshot.calls[wait.rows[0]]
    ranks = explain.many(len(wait.present), "rank")
    return Finding(
        "slow_link", (), tuple(sorted(graph.victims([wait]))), (), snapshot.labels[wait.group],
        wait.seq, OPS[int(call["op"])], explain.common_site(snapshot, wait), wait.age_s, "possible",
        f"All {ranks} have come to {explain.what(snapshot, wait)}, and "
        f"{explain.many(len(wait.waiters), 'rank')} did not get out for "
        f"{explain.lasts(wait.age_s)}: the transfer itself is stuck.",
        (f"{explain.who(snapshot, wait.waiters)} still in it",),
        "Look at the network between their hosts, and at the back end's log.",
    )  # fmt: skip

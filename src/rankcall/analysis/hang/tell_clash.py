"""Disagreements and circles, as findings: which sides there are, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence

from rankcall.analysis.finding import Finding, less_sure
from rankcall.analysis.hang import explain
from rankcall.analysis.hang.cycles import Cycle
from rankcall.analysis.hang.disagree import Disagreement, Side
from rankcall.analysis.hang.graph import Graph
from rankcall.analysis.hang.waits import Wait
from rankcall.analysis.state.snapshot import Snapshot
from rankcall.record import OPS

_SHOWN = 3  # sides or waits that are told one by one


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
        found.kind, culprits, tuple(sorted(victims)), explain.hosts(snapshot, culprits),
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
        "deadlock", found.ranks, victims, explain.hosts(snapshot, found.ranks),
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

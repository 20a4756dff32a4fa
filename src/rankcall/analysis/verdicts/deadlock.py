"""The verdict ``deadlock``: ranks wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.analysis.snapshot import P2P, SEND, Snapshot
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    Fact,
    Relation,
    call_of_wait,
    fields_of_wait,
    hosts_of,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.wait import Wait
from rankcall.analysis.verdicts.wait_graph import Cycle


class Deadlock(Kind):
    """Each rank of a circle waits for the next one, in another group or another message."""

    kind = "deadlock"
    order = 60
    predicate = Predicate("waits for itself", "wait for each other")

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield one finding for each circle."""
        for cycle in evidence.cycles:
            yield self._of_cycle(evidence, cycle)

    def _of_cycle(self, evidence: HangEvidence, cycle: Cycle) -> Finding:
        snapshot = evidence.snapshot
        longest = max(cycle.waits, key=lambda wait: wait.age_s)
        steps = [
            Fact(
                Relation.WAITS_FOR,
                ranks_of(snapshot, _inside(cycle, wait.waiters)),
                call_of_wait(snapshot, wait),
                ranks_of(snapshot, _inside(cycle, wait.absent)),
            )
            for wait in cycle.waits
        ]
        circle = Fact(Relation.WAIT_FOR_EACH_OTHER, ranks_of(snapshot, cycle.ranks))
        tags = _different_tags(snapshot, cycle.waits)
        return self.finding(
            cycle.ranks,
            victims=tuple(sorted(evidence.graph.victims(cycle.waits) - set(cycle.ranks))),
            hosts=hosts_of(snapshot, cycle.ranks),
            confidence=_confidence(cycle),
            said=[circle, *(tags or steps)],
            # The steps are said once: in the summary, as far as it has room for them.
            shown=[*(steps if tags else steps[SHOWN:]), *_so_far(snapshot, cycle.waits)],
            live=snapshot.live,
            advice=_advice(cycle),
            **fields_of_wait(snapshot, longest),
        )


def _confidence(cycle: Cycle) -> str:
    """Return "likely" if an end may not be waited for, or if the order of a device is concluded."""
    return "likely" if any(wait.soft or wait.unstarted for wait in cycle.waits) else "certain"


def _inside(cycle: Cycle, ranks: Sequence[int]) -> list[int]:
    return [rank for rank in ranks if rank in cycle.ranks] or list(ranks)


def _so_far(snapshot: Snapshot, waits: Sequence[Wait]) -> list[Fact]:
    """Return how many messages went through each channel of a circle, as far as that is known."""
    facts, calls = [], snapshot.calls
    for wait in waits:
        channel = wait.channel
        if channel is None or len(wait.absent) != 1 or len(wait.waiters) != 1 or wait.any_source:
            continue
        # The end that has not come: the sender of a message that is awaited, or the receiver.
        absent, waiter = wait.absent[0], wait.waiters[0]
        way = "sent" if absent == channel.source else "received"
        rows = (
            (calls["kind"] == P2P)
            & (calls["rank"] == absent)
            & (calls["group"] == wait.group)
            & (calls["peer"] == waiter)
            & (calls["tag"] == channel.tag)
            & ((calls["op"] == SEND) == (way == "sent"))
        )
        count = int(calls["seq"][rows].max(initial=0))
        if count != wait.seq - 1:
            continue  # the older records are lost, or other threads issue messages there
        ends = (ranks_of(snapshot, [rank]) for rank in (absent, waiter))
        subject, others = ends
        group = snapshot.labels[wait.group]
        values = (("way", way), ("tag", str(channel.tag)), ("group", group))
        so_far = Relation.MESSAGES_SO_FAR
        facts.append(
            Fact(so_far, subject, others=others, values=values, number=count, unit="messages")
        )
    return facts


def _different_tags(snapshot: Snapshot, waits: Sequence[Wait]) -> list[Fact]:
    """Return that two tags do not match, if the ends of a channel use different ones."""
    channels = [wait.channel for wait in waits if wait.channel is not None]
    for lower in channels:
        for higher in channels:
            if lower[:2] == higher[:2] and lower.tag < higher.tag:
                ends = (ranks_of(snapshot, [rank]) for rank in (lower.source, lower.target))
                source, target = ends
                tags = (("tags", f"{lower.tag} {higher.tag}"),)
                return [Fact(Relation.TAGS_DIFFER, source, others=target, values=tags)]
    return []


def _advice(cycle: Cycle) -> str:
    messages = [wait.channel is not None for wait in cycle.waits]
    if any(messages) and not all(messages):
        return (
            "Let them issue the message and the collective in orders that fit, and look for a "
            "message that one of them leaves out."
        )
    if any(messages):
        return (
            "Let one of them receive first, or issue both ends at once (batch_isend_irecv); each "
            "send needs a receive with the same tag."
        )
    return "Let all ranks use the groups in the same order."

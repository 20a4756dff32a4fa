"""The verdict ``alone``: a rank is alone in a call that the others have left, or never came to.

If others have left it, all have come: neither a rank that is missing nor the transfer as a whole
holds it up. If no other member has come, dumps alone cannot tell who is at fault, but they show
which rank differs. In both cases no other rank need be waiting for it on record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rankcall.analysis.snapshot import Snapshot
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
from rankcall.analysis.verdicts.wait import Wait
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE


class Alone(Kind):
    """A rank does not get out of a call, and the other members are not in it."""

    kind = "alone"
    order = 72
    predicate = Predicate(
        "does not leave a call", "do not leave a call", "A call does not end on some ranks"
    )

    def in_hang(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield a finding for each such call whose ranks no other finding can be about."""
        clashing = {clash.group for clash in evidence.disagreements}
        for wait in _first_waits(evidence):
            # If others wait for a rank in a later call, it is ``missing`` there. If members passed
            # different sizes, some of them can get out.
            named = any(rank in evidence.graph.waits_for for rank in wait.waiters)
            if not wait.hung or named or wait.group in clashing:
                continue
            if _is_left(evidence, wait):
                yield self._left_behind(evidence, wait)
            elif evidence.is_alone_in(wait):
                yield self._alone(evidence, wait)

    def _left_behind(self, evidence: HangEvidence, wait: Wait) -> Finding:
        hosts = hosts_of(evidence.snapshot, wait.waiters)
        advice = (
            f"Look at the device of rank {wait.waiters[0]}{f' on {hosts[0]}' if hosts else ''} and "
            "at its links (dmesg -T | grep -i xid), and at what its process does: the other "
            "members have left that call."
        )
        may_be_replayed = _has_calls_without_end(evidence.snapshot, wait.group)
        if may_be_replayed:
            advice = (
                "Earlier calls of this group have no known end. If they were captured into a CUDA "
                "graph, compare how often each rank replays it: replays are not on record, and a "
                f"replay too many takes the place of another rank's call. If not: {advice}"
            )
        # One rank alone can only be held up by its own process, device or link. Several may be
        # held up by one link between them. With replays, the members may be out of step.
        is_likely = len(wait.waiters) == 1 and not may_be_replayed
        return self._in_call(
            evidence,
            wait,
            Relation.LEFT_BEHIND,
            wait.left,
            "likely" if is_likely else "possible",
            advice,
        )

    def _alone(self, evidence: HangEvidence, wait: Wait) -> Finding:
        return self._in_call(
            evidence,
            wait,
            Relation.ALONE_IN,
            wait.absent,
            "possible",
            f"See whether rank {wait.waiters[0]} takes another branch than the others before this "
            "call; if not, look at what the others did after their last one.",
        )

    def _in_call(
        self,
        evidence: HangEvidence,
        wait: Wait,
        relation: Relation,
        others: Sequence[int],
        confidence: str,
        advice: str,
    ) -> Finding:
        snapshot, ranks = evidence.snapshot, ranks_of(evidence.snapshot, wait.waiters)
        call, them, age_s = call_of_wait(snapshot, wait), ranks_of(snapshot, others), wait.age_s
        said = Fact(relation, ranks, call, them, number=age_s, unit="s", confidence=confidence)
        return self.finding(
            wait.waiters,
            hosts=hosts_of(snapshot, wait.waiters),
            confidence=confidence,
            said=[said],
            live=snapshot.live,
            advice=advice,
            **fields_of_wait(snapshot, wait),
        )


def _has_calls_without_end(snapshot: Snapshot, group: int) -> bool:
    """Tell whether a group has calls on devices without a known end, such as captured ones."""
    calls = snapshot.calls
    flags = calls["flags"][calls["group"] == group]
    return bool(((flags & FLAG_DEVICE != 0) & (flags & FLAG_ABANDONED != 0)).any())


def _first_waits(evidence: HangEvidence) -> Iterator[Wait]:
    """Yield the waits that are the oldest one of each rank in them.

    A device that does not get out of a call does not come to those that were issued behind it.
    """
    index, oldest = evidence.snapshot.calls["index"], dict[int, int]()
    for wait in evidence.graph.waits:
        for rank, issued in zip(wait.waiters, index[wait.rows].tolist(), strict=True):
            oldest[rank] = min(issued, oldest.get(rank, issued))
    for wait in evidence.graph.waits:
        if index[wait.rows].tolist() == [oldest[rank] for rank in wait.waiters]:
            yield wait


def _is_left(evidence: HangEvidence, wait: Wait) -> bool:
    """Tell whether all members but those that wait have left a call, and these are not the more.

    If only some have, a link may hold up all others.
    """
    blind = {state.rank for state in evidence.snapshot.ranks if state.blind}
    members = set(evidence.snapshot.groups[wait.group].ranks)
    return members - blind == {*wait.waiters, *wait.left} and len(wait.waiters) <= len(wait.left)

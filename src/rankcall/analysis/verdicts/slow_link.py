"""The verdict ``slow_link``: a transfer between some ranks is slow, or stuck.

A transfer begins when both ends (all members) have come. Even the quick transfers of a slow link
are slow, so the lower quartile is compared: a busy moment says nothing about a link. On a machine
that is busy all the time, the quartiles of equal links differ by chance as well. So a slow link's
transfers must also take longer than those of the others more often than chance would have it, and
cost some part of the time, and not too little of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankcall.analysis.arrivals import SYNC
from rankcall.analysis.clocks import HostClock, RowClocks, align_messages
from rankcall.analysis.collectives import DEVICE, CollectiveTable, present
from rankcall.analysis.snapshot import SEND, Snapshot
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import (
    Fact,
    Relation,
    hosts_of,
    ranks_of,
)
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.recent_calls import RecentCalls
from rankcall.record import FLAG_DEVICE, OPS

_TIMES = 2.5  # slower than the median link of the kind
_LEAST_S = 1e-3  # slower by so much; a smaller difference is not worth a finding
_ENOUGH = 12  # transfers of a link
_MOST_LINKS = 4  # in one diagnosis
_PEERS = 2  # least number of other links of the kind
# That any link of equal ones seems as slow. Of 4,000 made-up jobs of 3 to 6 links, put together
# from messages on a machine with ten times as many threads as cores, 1,938 had a slow link without
# this bound, and 10 with it.
_CHANCE = 0.01
_COST = 0.01  # of the time on record: what a link's transfers take longer than usual, together
# A second says nothing about a link, because transfers are not independent of each other: while a
# rank has no CPU, all of its transfers are slow. As for stragglers.
_LEAST_SPAN_S, _LEAST_COST_S = 1.0, 0.2

Key = tuple[int, ...]


class SlowLink(Kind):
    """The transfer itself takes long: all ranks have arrived, and it does not end soon."""

    kind = "slow_link"
    order = 90
    stops = False
    predicate = Predicate(
        "is linked slowly", "are linked slowly", "A call that all have come to does not end"
    )

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield the longest wait that all ranks have arrived at, if a call is overdue.

        On a device, a call that was issued may not have begun: see ``stuck``.
        """
        snapshot, wait = evidence.snapshot, evidence.stuck
        if wait is None or snapshot.calls["flags"][wait.rows[0]] & FLAG_DEVICE:
            return
        advice = _where_to_look(snapshot, wait.present)
        yield self.of_unended_call(evidence, wait, Relation.STUCK_TRANSFER, advice)

    def in_running_job(self, recent: RecentCalls) -> Iterator[Finding]:
        """Yield the slowest links."""
        snapshot = recent.snapshot
        for link in slow_links(recent)[:_MOST_LINKS]:
            hosts = " and ".join(link.hosts)
            look = f"the network between {hosts}: errors, speed, a shared uplink."
            if len(link.hosts) < 2:
                look = "what these ranks share on their host: its cores, memory and links."
            yield self.finding(
                sorted(link.ranks),
                hosts=link.hosts,
                op=link.op,
                since_s=link.seconds,
                confidence="likely",
                said=[_slow(snapshot, link)],
                shown=[
                    Fact(
                        Relation.TRANSFERS,
                        values=(("most_bytes", str(link.bytes)),),
                        number=link.count,
                        unit="transfers",
                    )
                ],
                live=snapshot.live,
                advice=f"Look at {look}",
            )


@dataclass(frozen=True)
class LinkTimes:
    """Transfer times of a link, in s. ``ranks`` are its ends, or all members of a group."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    op: str
    bytes: int
    seconds: float
    usual: float
    count: int
    compared: int

    @property
    def cost_s(self) -> float:
        """By how much all of its transfers together took longer than those of the others, s."""
        return (self.seconds - self.usual) * self.count

    @property
    def kept(self) -> tuple[int, ...]:
        """The ranks that its transfers keep from going on. A sender may go on before the end."""
        return self.ranks[1:] if self.op == "send" else self.ranks


def _slow(snapshot: Snapshot, link: LinkTimes) -> Fact:
    """Return how slow a link is beside the others of its kind. A message has a direction."""
    values = (("op", link.op), ("usual_s", repr(link.usual)), ("compared", str(link.compared)))
    ranks, others = ranks_of(snapshot, link.ranks), None
    if link.op == "send":
        ranks, others = (ranks_of(snapshot, part) for part in (link.ranks[:1], link.ranks[1:]))
    return Fact(
        Relation.SLOW_TRANSFER,
        ranks,
        others=others,
        values=values,
        number=link.seconds,
        unit="s",
        confidence="likely",
    )


def _where_to_look(snapshot: Snapshot, ranks: Sequence[int]) -> str:
    """Write what to look at if a call that all members have come to does not end."""
    log = "the back end's log (TORCH_DISTRIBUTED_DEBUG=DETAIL, NCCL_DEBUG=INFO)"
    if len(hosts_of(snapshot, ranks)) > 1:
        return f"Look at the network between their hosts, and at {log}."
    return f"All of them are on one host: look at {log}."


def slow_links(recent: RecentCalls) -> list[LinkTimes]:
    """Return the links that are slower than others of the same op, size class and member count."""
    snapshot, tables, clocks = recent.snapshot, recent.tables, recent.clocks
    if recent.seconds < _LEAST_SPAN_S:
        return []
    least_s = max(_LEAST_COST_S, _COST * recent.seconds)
    kinds: dict[Key, dict[tuple[int, ...], list[float]]] = defaultdict(dict)
    for table in tables:
        for kind, times in _transfers(table, clocks).items():
            kinds[kind].setdefault(tuple(table.ranks.tolist()), []).extend(times)
    for pair, by_kind in _messages(recent).items():
        for kind, times in by_kind.items():
            kinds[kind].setdefault(pair, []).extend(times)
    outliers = [
        link
        for kind, links in kinds.items()
        for link in _outliers(snapshot, kind, links)
        if link.cost_s >= least_s
    ]
    best: dict[tuple[int, ...], LinkTimes] = {}
    for link in sorted(outliers, key=lambda link: -link.seconds / link.usual):
        best.setdefault(link.ranks, link)
    return list(best.values())


def _outliers(
    snapshot: Snapshot, kind: Key, links: dict[tuple[int, ...], list[float]]
) -> list[LinkTimes]:
    typical = {
        ranks: float(np.quantile(times, 0.25))
        for ranks, times in links.items()
        if len(times) >= _ENOUGH
    }
    outliers = []
    for ranks, seconds in typical.items():
        others = [quartile for link, quartile in typical.items() if link != ranks]
        if len(others) < _PEERS:
            continue
        usual = float(np.median(others))
        if seconds <= _TIMES * max(usual, 1e-9) or seconds - usual <= _LEAST_S:
            continue
        theirs = [took for link in typical if link != ranks for took in links[link]]
        if len(typical) * _chance_of(links[ranks], float(np.median(theirs))) <= _CHANCE:
            outliers.append(
                LinkTimes(
                    ranks,
                    hosts_of(snapshot, ranks),
                    OPS[kind[0]],
                    1 << kind[1],
                    seconds,
                    usual,
                    len(links[ranks]),
                    len(others),
                )
            )
    return outliers


def _chance_of(times: Sequence[float], usual: float) -> float:
    """Return how likely at most it is that so many transfers take longer than usual by chance.

    Half of equal ones do. This is Chernoff's bound on the tail of that binomial distribution, whose
    exact sum would overflow for thousands of transfers.
    """
    slow = sum(took > usual for took in times) / len(times)
    if slow <= 0.5:
        return 1.0
    parts = [part * math.log(2.0 * part) for part in (slow, 1.0 - slow) if part]
    return math.exp(-len(times) * sum(parts))


def _transfers(table: CollectiveTable, clocks: list[HostClock]) -> dict[Key, list[float]]:
    """Return how long a group's collectives took once all had arrived, by op and size class."""
    columns = np.flatnonzero(
        SYNC[table.op] & present(table.arrival).all(axis=0) & present(table.completed).all(axis=0)
    )
    if not len(columns) or len(table.ranks) < 2:
        return {}
    clock = RowClocks([clocks[host] for host in table.hosts])
    came = clock.align(np.ascontiguousarray(table.arrival[:, columns].T))
    ended = clock.align(np.ascontiguousarray(table.completed[:, columns].T))
    lasted = (np.median(ended, axis=1) - came.max(axis=1)) / 1e9
    times_of: dict[Key, list[float]] = defaultdict(list)
    for column, seconds in zip(columns.tolist(), lasted.tolist(), strict=True):
        size = int(table.bytes[column]).bit_length()
        times_of[int(table.op[column]), size, len(table.ranks)].append(max(seconds, 0.0))
    return times_of


def _messages(recent: RecentCalls) -> dict[tuple[int, int], dict[Key, list[float]]]:
    """Return how long messages took once both ends had arrived, by pair and size class.

    On the CPU, a receive ends when its caller has waited for it. Of one that was issued ahead
    (``irecv``, ``batch_isend_irecv``), that tells when the caller was ready, and not how long the
    message took.
    """
    times_of: dict[tuple[int, int], dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    for messages in recent.messages:
        columns = messages.columns
        both = (messages.sent >= 0) & (messages.received >= 0)
        both &= present(columns["completed"][messages.received])
        is_exact = columns["blocking"] | (columns["source"] == DEVICE)
        both &= is_exact[messages.received]
        send, recv = messages.sent[both], messages.received[both]
        came, ended = (
            align_messages(messages, name, recent.clocks) for name in ("arrival", "completed")
        )
        lasted = np.maximum(ended[recv] - np.maximum(came[recv], came[send]), 0) / 1e9
        size = [int(count).bit_length() for count in columns["bytes"][recv].tolist()]
        pairs = zip(columns["rank"][send].tolist(), columns["rank"][recv].tolist(), strict=True)
        for pair, power, seconds in zip(pairs, size, lasted.tolist(), strict=True):
            times_of[pair][SEND, power, 2].append(seconds)
    return times_of

"""How long each rank waited for others, in each of its ops.

A member waits in an op from its arrival until the ranks that it waits for have arrived, and not
longer than it is in the op. It waits for

* all members, in an op that no member leaves before the last has come,
* the root, in a broadcast or scatter,
* all members, at the root of a reduce or gather,
* the sender, in a receive; and the receiver, in a send that blocks until its message has gone.

A rank that waits in several ops at once waits once: the time counts in the op whose wait began
first. An op without an end (it failed, for example) counts until those ranks have arrived. An op on
a device whose times are not known counts nothing: its host issued it ahead of the device, so nobody
came then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rankcall.analysis.arrivals import FROM_ROOT, NEVER, SYNC, TO_ROOT, Ints
from rankcall.analysis.clocks import HostClock, align_messages
from rankcall.analysis.collectives import ISSUE, CollectiveTable, MessageTable, present
from rankcall.analysis.wait_chains import WaitChains, message_waits


@dataclass
class Waits:
    """How long each record's rank waited in it, in ns, each moment of a rank counted once.

    ``of_tables``: ``[member, collective]`` for each table of collectives; ``of_messages``: by row
    for each table of messages. ``chains``: the ranks that waits for messages are due to.
    """

    of_tables: list[Ints]
    of_messages: list[Ints]
    chains: WaitChains
    # The same before overlapping waits were shortened; None if all ops of the table have ended.
    whole_of_tables: list[Ints | None] = field(default_factory=list)
    whole_of_messages: list[Ints | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.whole_of_tables = [None] * len(self.of_tables)
        self.whole_of_messages = [None] * len(self.of_messages)


def waits_of(
    tables: Sequence[CollectiveTable],
    messages: Sequence[MessageTable],
    clocks: Sequence[HostClock],
) -> Waits:
    """Return how long all ranks of a run waited in each of their ops."""
    waits = Waits(
        [_in_collectives(table, clocks) for table in tables],
        [_in_messages(message_table, clocks) for message_table in messages],
        WaitChains([], [], []),
    )
    for number, (table, waited) in enumerate(zip(tables, waits.of_tables, strict=True)):
        if np.any(waited[~present(table.completed)]):
            waits.whole_of_tables[number] = waited.copy()
    for number, (message_table, waited) in enumerate(zip(messages, waits.of_messages, strict=True)):
        if np.any(waited[~present(message_table.columns["completed"])]):
            waits.whole_of_messages[number] = waited.copy()
    by_rank: dict[tuple[int, object], list[tuple[Ints, Ints]]] = {}
    for table, waited in zip(tables, waits.of_tables, strict=True):
        for row, rank in enumerate(table.ranks.tolist()):
            by_rank.setdefault((rank, table.session), []).append((table.arrival[row], waited[row]))
    parts = []
    for message_table, waited in zip(messages, waits.of_messages, strict=True):
        for rank in np.unique(message_table.columns["rank"]).tolist():
            rows = np.flatnonzero(message_table.columns["rank"] == rank)
            part = waited[rows]
            spans = by_rank.setdefault((rank, message_table.session), [])
            spans.append((message_table.columns["arrival"][rows], part))
            parts.append((waited, rows, part))
    for spans in by_rank.values():
        _count_once(spans)
    for waited, rows, part in parts:
        waited[rows] = part
    waits.chains = WaitChains(messages, waits.of_messages, clocks)
    return waits


def _in_collectives(table: CollectiveTable, clocks: Sequence[HostClock]) -> Ints:
    """Return how long each member waited in each collective: ``[member, collective]``."""
    last = np.full(len(table.seq), NEVER)
    for row, host in enumerate(table.hosts):
        came = clocks[host].align(table.arrival[row])
        np.maximum(last, np.where(present(table.arrival[row]), came, NEVER), out=last)
    until = np.where(SYNC[table.op] | TO_ROOT[table.op], last, NEVER)
    is_rooted = FROM_ROOT[table.op] | TO_ROOT[table.op]
    for row in np.unique(table.root[is_rooted]).tolist():
        columns = is_rooted & (table.root == row)
        if row < 0:
            until[columns] = NEVER
            continue
        columns &= FROM_ROOT[table.op] & present(table.arrival[row])
        until[columns] = clocks[table.hosts[row]].align(table.arrival[row][columns])
    until[table.source == ISSUE] = NEVER
    waited = np.zeros(table.arrival.shape, np.int64)
    only_root = TO_ROOT[table.op]
    for row, host in enumerate(table.hosts):
        came, ended = table.arrival[row], table.completed[row]
        counts = present(came) & (until != NEVER) & (~only_root | (table.root == row))
        # Most members come to all of them, and a mask would copy each column.
        rows = slice(None) if counts.all() else counts
        wait = np.maximum(until[rows] - clocks[host].align(came[rows]), 0)
        lasted = np.where(present(ended), np.maximum(ended - came, 0), np.iinfo(np.int64).max)
        waited[row, rows] = np.minimum(wait, lasted[rows])
    return waited


def _in_messages(messages: MessageTable, clocks: Sequence[HostClock]) -> Ints:
    """Return how long each end of a message waited for the other one to begin."""
    waited = np.zeros(len(messages.columns["arrival"]), np.int64)
    waits = message_waits(messages, clocks)
    arrival = align_messages(messages, "arrival", clocks)[waits.rows]
    waited[waits.rows] = np.maximum(waits.until - arrival, 0)
    return waited


def _count_once(spans: Sequence[tuple[Ints, Ints]]) -> None:
    """Shorten waits of one rank that overlap, in place: each is (arrivals, waited).

    Each wait loses the part in which an earlier one still lasts, so that its end stays.
    """
    if len(spans) == 1:
        begin, waited = spans[0]
    else:
        begin, waited = (np.concatenate(column) for column in zip(*spans, strict=True))
    order = None
    if np.any(begin[1:] < begin[:-1]):
        order = np.argsort(begin, kind="stable")
        begin, waited = begin[order], waited[order]
    reach = np.maximum.accumulate(begin + waited)
    over = np.zeros(len(begin), np.int64)
    np.maximum(reach[:-1] - begin[1:], 0, out=over[1:])
    if not (over.any() or order is not None or len(spans) > 1):
        return
    shortened = np.maximum(waited - over, 0)
    if order is not None:
        back = np.empty_like(shortened)
        back[order] = shortened
        shortened = back
    start = 0
    for _, part in spans:
        part[:] = shortened[start : start + len(part)]
        start += len(part)


def covered(begin: Ints, end: Ints) -> float:
    """Return how much time intervals cover together; ``begin`` ascends."""
    if not (begin[1:] < end[:-1]).any() and not (end < begin).any():  # one after the other
        return float((end - begin).sum())
    reach = np.maximum.accumulate(end)
    fresh = end.copy()
    fresh -= begin
    fresh[1:] = end[1:] - np.maximum(begin[1:], reach[:-1])
    return float(np.maximum(fresh, 0).sum(dtype=np.float64))

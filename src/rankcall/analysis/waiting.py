"""Which ranks waited, which came last, and which rank's lateness a wait is charged to.

A member waits in an op from its arrival until the ranks that it waits for have arrived, and not
longer than it is in the op. For ops that no member leaves before the last has come, those are all
members; at the members of a broadcast or scatter it is the root, at the root of a reduce or gather
all members, and at a receiver the sender. A rank that waits in several ops at once waits once: the
time counts in the op whose wait began first. An op without an end (it failed, for example) counts
until those ranks have arrived. An op on a device whose times are not known counts nothing: its host
issued it ahead of the device, so nobody came then.

Each moment that a member waits is shared equally by the ranks that it waits for at that moment. So
one straggler bears all the waiting that it causes beyond the second-latest rank, two that come late
together bear half each, and the waiting that all ranks cause is the waiting that all ranks suffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall import record
from rankcall.analysis.clocks import HostClock, RowClocks, align_messages
from rankcall.analysis.collectives import ISSUE, CollectiveTable, MessageTable, present

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]

_BLOCK = 1 << 17  # records: 1 MiB a column of times
_NEVER = np.iinfo(np.int64).min
SYNC = np.array([name in record.SYNCHRONISING for name in record.OPS])
FROM_ROOT = np.array([name in record.FROM_ROOT for name in record.OPS])
TO_ROOT = np.array([name in record.TO_ROOT for name in record.OPS])


@dataclass
class Arrivals:
    """The times at which members came to some collectives: ``[collective, member]``, aligned ns.

    ``order`` sorts each row; absent members come first.
    """

    times: Ints
    here: Bools
    order: Indices = field(init=False)
    sorted: Ints = field(init=False)
    absent: Indices = field(init=False)  # of each collective

    def __post_init__(self) -> None:
        self.absent = self.times.shape[1] - np.count_nonzero(self.here, axis=1)
        if self.absent.any():
            self.times = np.where(self.here, self.times, _NEVER)
        self.order = np.argsort(self.times, axis=1)
        self.sorted = np.take_along_axis(self.times, self.order, axis=1)

    @property
    def last(self) -> Ints:
        """The time at which the last member came."""
        return self.sorted[:, -1]

    @property
    def last_member(self) -> Indices:
        """The member that came last."""
        return self.order[:, -1]

    @property
    def behind(self) -> Floats:
        """By how much the last came after the second-latest; 0 if it was alone."""
        count = self.times.shape[1] - self.absent
        if self.times.shape[1] < 2:
            return np.zeros(len(self.times))
        gap = (self.sorted[:, -1] - self.sorted[:, -2]).astype(np.float64)
        return np.where(count > 1, gap, 0.0)


# --- how long each member waits in each op ---


@dataclass
class Waits:
    """How long each record's rank waited in it, in ns, each moment of a rank counted once.

    ``of_tables``: ``[member, collective]`` for each table of collectives; ``of_messages``: by row
    for each table of messages.
    """

    of_tables: list[Ints]
    of_messages: list[Ints]
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
    return waits


def _in_collectives(table: CollectiveTable, clocks: Sequence[HostClock]) -> Ints:
    """Return how long each member waited in each collective: ``[member, collective]``."""
    last = np.full(len(table.seq), _NEVER)
    for row, host in enumerate(table.hosts):
        came = clocks[host].align(table.arrival[row])
        np.maximum(last, np.where(present(table.arrival[row]), came, _NEVER), out=last)
    until = np.where(SYNC[table.op] | TO_ROOT[table.op], last, _NEVER)
    is_rooted = FROM_ROOT[table.op] | TO_ROOT[table.op]
    for row in np.unique(table.root[is_rooted]).tolist():
        columns = is_rooted & (table.root == row)
        if row < 0:
            until[columns] = _NEVER
            continue
        columns &= FROM_ROOT[table.op] & present(table.arrival[row])
        until[columns] = clocks[table.hosts[row]].align(table.arrival[row][columns])
    until[table.source == ISSUE] = _NEVER
    waited = np.zeros(table.arrival.shape, np.int64)
    only_root = TO_ROOT[table.op]
    for row, host in enumerate(table.hosts):
        came, ended = table.arrival[row], table.completed[row]
        counts = present(came) & (until != _NEVER) & (~only_root | (table.root == row))
        wait = np.maximum(until[counts] - clocks[host].align(came[counts]), 0)
        lasted = np.where(present(ended), np.maximum(ended - came, 0), np.iinfo(np.int64).max)
        waited[row, counts] = np.minimum(wait, lasted[counts])
    return waited


def _in_messages(messages: MessageTable, clocks: Sequence[HostClock]) -> Ints:
    """Return how long each receiver waited for its sender to begin; 0 for sends."""
    columns = messages.columns
    arrival = align_messages(messages, "arrival", clocks)
    waited = np.zeros(len(arrival), np.int64)
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    known = (columns["source"][sent] != ISSUE) & (columns["source"][received] != ISSUE)
    sent, received = sent[known], received[known]
    came, ended = columns["arrival"][received], columns["completed"][received]
    lasted = np.where(present(ended), np.maximum(ended - came, 0), np.iinfo(np.int64).max)
    waited[received] = np.minimum(np.maximum(arrival[sent] - arrival[received], 0), lasted)
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
    reach = np.maximum.accumulate(end)
    fresh = end.copy()
    fresh -= begin
    fresh[1:] = end[1:] - np.maximum(begin[1:], reach[:-1])
    return float(np.maximum(fresh, 0).sum(dtype=np.float64))


# --- whose lateness it is charged to ---


def shares(came: Arrivals, waited: Ints) -> Floats:
    """Share out the waiting in some collectives: ``[collective, member]``, what each caused.

    ``waited``: ``[collective, member]``, how long each member waited before the last came.
    """
    full = np.where(came.here, came.last[:, None] - came.times, 0)
    simple = (waited == full).all(axis=1)
    caused = np.zeros(waited.shape)
    if simple.any():
        caused[simple] = _shares_of_all(came, simple)
    rest = ~simple & waited.any(axis=1)
    if rest.any():
        caused[rest] = _shares_of_some(
            came.times[rest], came.here[rest], came.last[rest], waited[rest]
        )
    return caused


def _shares_of_all(came: Arrivals, rows: Bools) -> Floats:
    """Share out the waiting of collectives in which all members wait from their arrival on."""
    members = came.times.shape[1]
    absent, times = came.absent[rows], came.sorted[rows]
    if absent.any():
        first = np.minimum(absent, members - 1)[:, None]
        times = np.maximum(times, np.take_along_axis(times, first, axis=1))
    gaps = np.diff(times, axis=1).astype(np.float64)
    # After arrival k, the k ranks that have come, less the absent ones, wait for the others.
    waiting = np.maximum(np.arange(1, members) - absent[:, None], 0)
    sums = np.zeros((len(times), members))
    np.cumsum(gaps * (waiting / np.arange(members - 1, 0, -1)), axis=1, out=sums[:, 1:])
    caused = np.empty_like(sums)
    np.put_along_axis(caused, came.order[rows], sums, axis=1)
    return caused


def _shares_of_some(times: Ints, here: Bools, last: Ints, waited: Ints) -> Floats:
    """Share out waits that begin later than their members' arrivals.

    Between two events (a wait begins, a member arrives) the members that wait and the members that
    have not arrived stay the same.
    """
    rows, members = times.shape
    arrivals = np.where(here, times, last[:, None])
    events = np.concatenate([last[:, None] - waited, arrivals], axis=1)
    order = np.argsort(events, axis=1)  # the order of events at one time makes no difference
    counts = np.concatenate([waited > 0, here], axis=1)
    counts = np.take_along_axis(counts, order, axis=1)
    is_arrival = order >= members
    waiting = np.cumsum(counts & ~is_arrival, axis=1)
    to_come = np.count_nonzero(here, axis=1)[:, None] - np.cumsum(counts & is_arrival, axis=1)
    spans = np.diff(np.take_along_axis(events, order, axis=1), axis=1)
    sums = np.zeros((rows, 2 * members))
    rates = waiting[:, :-1] / np.maximum(to_come[:, :-1], 1)
    np.cumsum(spans * rates, axis=1, out=sums[:, 1:])
    by_event = np.empty_like(sums)
    np.put_along_axis(by_event, order, sums, axis=1)
    return np.where(here, by_event[:, members:], 0.0)


@dataclass
class LastComers:
    """How often each rank came last to a collective, by global rank."""

    ranks: int
    times: Ints = field(init=False)
    late_by: Floats = field(init=False)  # ns after the second-latest, summed over those
    took_part: Ints = field(init=False)  # in collectives with a last arrival

    def __post_init__(self) -> None:
        self.late_by = np.zeros(self.ranks)
        self.times, self.took_part = (np.zeros(self.ranks, np.int64) for _ in range(2))

    def add(self, ranks: Indices, came: Arrivals, rows: Bools) -> None:
        """Count who came last in some rows, and by how much, if two or more came."""
        together = rows & (came.times.shape[1] - came.absent > 1)
        last, behind = came.last_member[together], came.behind[together]
        members = len(ranks)
        self.times[ranks] += np.bincount(last, minlength=members)
        self.late_by[ranks] += np.bincount(last, weights=behind, minlength=members)
        self.took_part[ranks] += np.count_nonzero(came.here[together], axis=0)

    def late_by_ms(self, rank: int) -> float | None:
        """Return by how much a rank that came last was late, on average; None if it never did."""
        times = int(self.times[rank])
        return float(self.late_by[rank]) / times / 1e6 if times else None


@dataclass
class WaitTotals:
    """Waiting by global rank, summed over all that was measured.

    ``edges``: aligned times that cut the run into parts, ascending; ``by_part`` has the waiting
    that each rank caused in each of the ``len(edges) + 1`` parts, and ``suffered_by_part`` the
    waiting that it suffered. ``lasts``: who came last. ``issue_lasts``: who issued last, of ops
    on devices of which it is not known when anybody came.
    """

    ranks: int
    edges: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    by_part: Floats = field(init=False)
    suffered_by_part: Floats = field(init=False)
    lasts: LastComers = field(init=False)
    issue_lasts: LastComers = field(init=False)

    def __post_init__(self) -> None:
        shape = len(self.edges) + 1, self.ranks
        self.by_part, self.suffered_by_part = np.zeros(shape), np.zeros(shape)
        self.lasts, self.issue_lasts = LastComers(self.ranks), LastComers(self.ranks)

    @property
    def caused(self) -> Floats:
        """The waiting that each rank caused, ns."""
        caused: Floats = self.by_part.sum(axis=0)
        return caused

    @property
    def suffered(self) -> Floats:
        """The waiting that each rank suffered, ns."""
        suffered: Floats = self.suffered_by_part.sum(axis=0)
        return suffered

    def charge(self, ranks: Indices, until: Ints, caused: Floats, waited: Floats) -> None:
        """Add ``[collective, member]`` of some members; waiting ended at ``until``."""
        parts = np.searchsorted(self.edges, until, side="right")
        for part in np.unique(parts).tolist():
            rows = parts == part
            self.by_part[part, ranks] += caused[rows].sum(axis=0)
            self.suffered_by_part[part, ranks] += waited[rows].sum(axis=0)

    def charge_messages(
        self, senders: Indices, receivers: Indices, until: Ints, waited: Ints
    ) -> None:
        """Add waits of receivers for their senders."""
        parts = np.searchsorted(self.edges, until, side="right")
        np.add.at(self.by_part, (parts, senders), waited)
        np.add.at(self.suffered_by_part, (parts, receivers), waited)


# --- measuring ---


@dataclass
class Measured:
    """Some collectives or messages of one group, one element each. Times in ns.

    NaN if no member finished it. ``rank`` and ``begin``: of messages only, of their records.
    """

    op: npt.NDArray[np.uint8]
    bytes: Ints
    size: Floats  # S
    transfer: Floats  # t
    mean: Floats  # of its members' durations
    spent: Floats  # by all members together
    waited: Floats  # by all members together
    source: npt.NDArray[np.uint8]  # of its times: HOST, DEVICE or ISSUE
    rank: Ints | None = None
    begin: Ints | None = None


@dataclass
class Block:
    """Some collectives of a table as ``[collective, member]``, aligned."""

    columns: Indices
    came: Arrivals
    duration: Floats  # NaN if it did not end
    ended: Bools


def measure_collectives(
    table: CollectiveTable, waited: Ints, clocks: Sequence[HostClock], totals: WaitTotals
) -> Measured:
    """Measure all collectives of a table and charge the waiting in them (see ``waits_of``)."""
    count = len(table.seq)
    transfer, mean, spent, waits = (np.full(count, np.nan) for _ in range(4))
    measured = Measured(
        table.op, table.bytes, table.size, transfer, mean, spent, waits, table.source
    )
    measured.waited[:] = waited.sum(axis=0)
    for kind in (SYNC, FROM_ROOT, TO_ROOT, ~(SYNC | FROM_ROOT | TO_ROOT)):
        for block in blocks(table, np.flatnonzero(kind[table.op]), clocks):
            _durations(block, measured, slowest=kind is not SYNC)
            if kind is FROM_ROOT or kind is TO_ROOT:
                _slowest_receiver(table, block, measured, receive=kind is TO_ROOT)
            mine = np.ascontiguousarray(waited[:, block.columns].T)
            if kind is SYNC:
                issued = table.source[block.columns] == ISSUE
                totals.lasts.add(table.ranks, block.came, ~issued)
                totals.issue_lasts.add(table.ranks, block.came, issued)
            if mine.any():
                caused = (
                    _shares_of_root(table, block, mine)
                    if kind is FROM_ROOT
                    else shares(block.came, mine)
                )
                totals.charge(table.ranks, block.came.last, caused, mine)
    recorded = np.flatnonzero(present(table.arrival).any(axis=0))
    return measured if len(recorded) == count else _only(measured, recorded)


def _shares_of_root(table: CollectiveTable, block: Block, waited: Ints) -> Floats:
    """Charge the root for all waiting in a broadcast or scatter."""
    caused = np.zeros(waited.shape)
    root = table.root[block.columns]
    known = np.flatnonzero(root >= 0)
    caused[known, root[known]] = waited[known].sum(axis=1)
    return caused


def _only(measured: Measured, rows: npt.NDArray[Any]) -> Measured:
    """Leave out sequence numbers that no member has a record of (a gap in all rings)."""
    columns = (column[rows] for column in vars(measured).values() if column is not None)
    return Measured(*columns)


def blocks(
    table: CollectiveTable, columns: Indices, clocks: Sequence[HostClock]
) -> Iterator[Block]:
    """Yield some of a table's collectives, a block at a time, with their arrivals sorted."""
    width = max(1, _BLOCK // len(table.ranks))
    clock = RowClocks([clocks[host] for host in table.hosts])
    for start in range(0, len(columns), width):
        part = columns[start : start + width]
        run = slice(int(part[0]), int(part[-1]) + 1)
        pick: Any = run if run.stop - run.start == len(part) else part
        arrival, completed = table.arrival[:, pick], table.completed[:, pick]
        here, ended = present(arrival), present(completed)
        aligned = clock.align(np.ascontiguousarray(arrival.T))
        spent = (completed - table.started[:, pick]).T.astype(np.float64, order="C")
        if not ended.all():
            spent[~ended.T] = np.nan
        yield Block(part, Arrivals(aligned, np.ascontiguousarray(here.T)), spent, ended.T)


def _durations(block: Block, measured: Measured, *, slowest: bool) -> None:
    """Fill in the columns that follow from the durations alone.

    ``slowest``: t is the longest duration, not the shortest.
    """
    spent, columns = block.duration, block.columns
    whole = bool(block.ended.all())
    least, most = (np.min, np.max) if whole else (np.fmin.reduce, np.fmax.reduce)
    total = spent.sum(axis=1) if whole else np.nansum(spent, axis=1)
    ends = np.count_nonzero(block.ended, axis=1)
    some = ends > 0
    measured.spent[columns] = total
    measured.mean[columns[some]] = total[some] / ends[some]
    measured.transfer[columns] = (most if slowest else least)(spent, axis=1)


def _slowest_receiver(
    table: CollectiveTable, block: Block, measured: Measured, *, receive: bool
) -> None:
    """Set t of ops with a root: the slowest receiver's duration."""
    root = table.root[block.columns]
    rows = np.flatnonzero(root >= 0)
    rows = rows[block.came.here[rows, root[rows]]]
    if not len(rows):
        return
    root, columns = root[rows], block.columns[rows]
    is_root = np.arange(len(table.ranks)) == root[:, None]
    receivers = np.where(is_root == receive, block.duration[rows], np.nan)
    slowest = np.fmax.reduce(receivers, axis=1)
    # A scatter without records of its receivers still took as long as its root did.
    measured.transfer[columns] = np.where(np.isnan(slowest), measured.transfer[columns], slowest)


def measure_messages(
    messages: MessageTable, waited: Ints, clocks: Sequence[HostClock], totals: WaitTotals
) -> Measured:
    """Measure all messages of a group, its sends and its receives each as one element."""
    columns = messages.columns
    duration = (columns["completed"] - columns["started"]).astype(np.float64)
    duration[~present(columns["completed"])] = np.nan
    transfer = duration.copy()
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    transfer[sent] = np.where(np.isnan(duration[received]), duration[sent], duration[received])
    arrival = align_messages(messages, "arrival", clocks)
    totals.charge_messages(
        columns["rank"][sent], columns["rank"][received], arrival[sent], waited[received]
    )
    return Measured(
        columns["op"],
        columns["bytes"],
        columns["size"],
        transfer,
        duration,
        np.nan_to_num(duration),
        waited.astype(np.float64),
        columns["source"],
        columns["rank"],
        columns["started"],
    )

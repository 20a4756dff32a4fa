"""Everything that a report or a page says of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import CollectiveTable, HostClock, MessageTable, present
from rankcall.analysis.lateness import (
    LateLine,
    Lateness,
    Stragglers,
    find_stragglers,
    late_lines,
    lateness,
    parts_of,
    slow_start,
)
from rankcall.analysis.run_tables import (
    RankRow,
    RingVisitor,
    RunTables,
    SiteRow,
    StepShare,
    by_step,
    gather,
    median_share,
)
from rankcall.analysis.snapshot import Snapshot, pace
from rankcall.analysis.verdicts.evidence import recent_calls
from rankcall.analysis.waiting import (
    Ints,
    Measured,
    WaitTotals,
    covered,
    measure_collectives,
    measure_messages,
    waits_of,
)
from rankcall.record import BYTES_PER_GB, OPS, bus_factor
from rankcall.run.load import Progress, Run, RunGroup, label_groups
from rankcall.run.outcomes import JoinSummary

_BUCKETS = 64
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True)
class Row:
    """All collectives of one op, group and size bucket. None: nothing could be measured."""

    op: str
    group: str
    bucket: int  # the smallest size in it, in bytes: a power of two, or 0
    count: int
    unfinished: int  # collectives that no member finished
    bytes: int
    total_ms: float  # what a member spent in them, on average; of messages, the busiest rank
    median_ms: float | None  # of the members' mean durations
    p95_ms: float | None
    transfer_ms: float | None  # median t
    algbw_gbps: float | None  # median; GB/s, 1 GB = 1e9 bytes
    busbw_gbps: float | None
    waiting_share: float | None  # of the time that all members spent


def size_name(size: int) -> str:
    """Return a bucket's human name: ``4 KiB``."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size >> (10 * power)} {_UNITS[power]}"


@dataclass(frozen=True)
class Source:
    """Measured collectives of one group, with its label and size."""

    label: str
    members: int
    measured: Measured


def rows_by_size(sources: Sequence[Source]) -> list[Row]:
    """Return the table by op, group and size; the rows that took longest come first."""
    parts_by_key: dict[tuple[str, int], list[tuple[Source, npt.NDArray[np.intp]]]] = {}
    for source in sources:
        key = source.measured.op.astype(np.intp) * _BUCKETS + _bucket(source.measured.bytes)
        order = np.argsort(key, kind="stable")
        edges = np.flatnonzero(np.diff(key[order])) + 1
        for part in np.split(order, edges) if len(order) else []:
            parts_by_key.setdefault((source.label, int(key[part[0]])), []).append((source, part))
    table = [_row(label, key, parts) for (label, key), parts in parts_by_key.items()]
    return sorted(table, key=lambda row: (-row.total_ms, row.group, row.op, row.bucket))


def _bucket(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return 0 for no bytes, else 1 + the power of two at or below."""
    # frexp is exact up to 2**53, and no message is longer.
    return np.frexp(np.maximum(sizes, 0).astype(np.float64))[1].astype(np.intp)


def _row(label: str, key: int, parts: list[tuple[Source, npt.NDArray[np.intp]]]) -> Row:
    op, power = OPS[key // _BUCKETS], key % _BUCKETS
    mean, transfer, size, spent, waited, count_bytes = (
        np.concatenate([getattr(source.measured, name)[part] for source, part in parts])
        for name in ("mean", "transfer", "size", "spent", "waited", "bytes")
    )
    finished = mean[~np.isnan(mean)]
    usable = (transfer > 0) & (size > 0)
    rates = size[usable] / transfer[usable] * (1e9 / BYTES_PER_GB)
    algbw = float(np.median(rates)) if len(rates) else None
    factor = bus_factor(op, parts[0][0].members)
    total = float(spent.sum())
    return Row(
        op,
        label,
        1 << (power - 1) if power else 0,
        len(mean),
        len(mean) - len(finished),
        sum(count_bytes.tolist()),
        _total_ns(parts, finished) / 1e6,
        _ms(finished, 50),
        _ms(finished, 95),
        _ms(transfer[~np.isnan(transfer)], 50),
        algbw,
        None if algbw is None else algbw * factor,
        min(1.0, float(waited.sum()) / total) if total > 0 else None,
    )


def _total_ns(
    parts: list[tuple[Source, npt.NDArray[np.intp]]], means: npt.NDArray[np.float64]
) -> float:
    """Return the time that a member spent in collectives, or the busiest rank in messages.

    A rank may issue many messages at once. The time in which any is in flight counts once.
    """
    spent: dict[int, list[npt.NDArray[np.int64]]] = {}
    for source, rows in parts:
        measured = source.measured
        if measured.rank is None or measured.begin is None:
            return float(means.sum())
        ended = rows[~np.isnan(measured.mean[rows])]
        for rank in np.unique(measured.rank[ended]).tolist():
            mine = ended[measured.rank[ended] == rank]
            lasted = measured.mean[mine].astype(np.int64)
            spent.setdefault(rank, []).append(np.stack([measured.begin[mine], lasted]))
    totals = [0.0]
    for columns in spent.values():
        begin, lasted = np.concatenate(columns, axis=1)
        order = np.argsort(begin, kind="stable")
        totals.append(covered(begin[order], begin[order] + lasted[order]))
    return max(totals)


def _ms(times: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(times, percent)) / 1e6 if len(times) else None


@dataclass(frozen=True)
class Straggler:
    """The cost of one rank's late arrivals to the others."""

    rank: int
    host: str
    caused_wait_ms: float
    share: float  # of all waiting
    suffered_wait_ms: float
    came_last: int
    collectives: int  # that it took part in and that a rank can be last to
    late_by_ms: float | None  # after the second-latest rank, on average, if it came last


@dataclass(frozen=True)
class Summary:
    """Everything that a report says. Each list begins with what matters most."""

    path: str
    about: dict[str, Any]
    world_size: int
    started_epoch_ns: int | None
    duration_ms: float
    ranks: list[RankRow]
    missing_ranks: list[int]
    groups: list[RunGroup]
    hosts: list[HostClock]
    collectives: list[Row]
    stragglers: list[Straggler]
    late: Stragglers | None  # those of them that make the others wait, by the one rule
    slow_start_ms: float  # the time of the first steps, if they took far longer than the others
    waiting_ms: float  # of all ranks together
    spent_ms: float  # by all ranks together, in collectives and messages
    call_sites: list[SiteRow]
    comm_share: float | None
    steps: list[StepShare]
    joins: list[JoinSummary]
    problems: list[str]

    @property
    def records(self) -> int:
        """Number of records that were read."""
        return sum(row.records for row in self.ranks)

    @property
    def dropped(self) -> int:
        """Number of records that were overwritten or lost before they could be read."""
        return sum(row.dropped for row in self.ranks)


def summarise(
    run: Run, progress: Progress | None = None, also: RingVisitor | None = None
) -> Summary:
    """Read all rings of a run once and analyse them; see ``gather`` for the arguments."""
    return conclude(run, gather(run, progress, also))


def conclude(run: Run, run_tables: RunTables) -> Summary:
    """Return the summary of a run whose rings have been read."""
    tables, messages, clocks = run_tables.tables, run_tables.messages, run_tables.clocks.hosts
    used = {table.group for table in tables} | {table.group for table in messages}
    groups = label_groups(used, run.hosts)
    highest = max((row.rank for row in run_tables.ranks), default=-1)
    parts = parts_of(run_tables.step_begins, *run_tables.span)
    totals = WaitTotals(highest + 1, parts.edges)
    waits = run_tables.waits
    sources = [
        Source(
            groups[table.group].label,
            table.members,
            measure_collectives(table, waited, clocks, totals),
        )
        for table, waited in zip(tables, waits.of_tables, strict=True)
    ]
    sources += [
        Source(
            groups[table.group].label,
            len(table.group.ranks),
            measure_messages(table, waited, clocks, totals),
        )
        for table, waited in zip(messages, waits.of_messages, strict=True)
    ]
    started, duration = _when(run, run_tables)
    return Summary(
        path=str(run.path),
        about=run.about,
        world_size=run.world_size,
        started_epoch_ns=started,
        duration_ms=duration,
        ranks=sorted(run_tables.ranks, key=lambda row: (row.rank, row.attempt, row.pid)),
        missing_ranks=run.missing_ranks,
        groups=list(groups.values()),
        hosts=clocks,
        collectives=rows_by_size(sources),
        stragglers=_stragglers(totals, run.hosts),
        late=find_stragglers(totals, parts, [run.hosts.get(n, "") for n in range(totals.ranks)]),
        slow_start_ms=float(parts.lengths[: slow_start(parts)].sum()) / 1e6,
        waiting_ms=float(totals.caused.sum()) / 1e6,
        spent_ms=sum(float(source.measured.spent.sum()) for source in sources) / 1e6,
        call_sites=run_tables.sites.rows(),
        comm_share=median_share(run_tables.shares),
        steps=by_step(run_tables.shares),
        joins=run.joins,
        problems=list(run.problems),
    )


def _when(run: Run, run_tables: RunTables) -> tuple[int | None, float]:
    """Return the epoch ns at which the first op was issued and the ms from then to the last end."""
    if not run_tables.first_ns:
        return None, 0.0
    first = min(run_tables.first_ns)
    head = run.heads[0].header
    base = run_tables.clocks.hosts[run_tables.clocks.of_ring(head)].base
    epoch = first - base + head.anchor_epoch_ns - head.anchor_mono_ns
    return epoch, (max(run_tables.last_ns) - first) / 1e6


def _stragglers(totals: WaitTotals, hosts: dict[int, str]) -> list[Straggler]:
    """List the ranks by the waiting that they caused, most first."""
    total = float(totals.caused.sum())
    stragglers = [
        Straggler(
            rank,
            hosts.get(rank, ""),
            float(totals.caused[rank]) / 1e6,
            float(totals.caused[rank]) / total if total else 0.0,
            float(totals.suffered[rank]) / 1e6,
            int(totals.came_last[rank]),
            int(totals.took_part[rank]),
            float(totals.late_by[rank]) / int(totals.came_last[rank]) / 1e6
            if totals.came_last[rank]
            else None,
        )
        for rank in sorted(hosts)
        if 0 <= rank < totals.ranks  # a ring that was removed since it was found has no records
    ]
    return sorted(stragglers, key=lambda straggler: (-straggler.caused_wait_ms, straggler.rank))


# What a page shows beyond the summary: where each rank's time went, its lateness, and traffic.
#
# At any moment a rank is in some collective or message, or in none. The time in none is computing
# (or whatever else the script does). Of the time in some, waiting is until the op could begin (see
# ``analysis.waiting``). The rest is transfer. Ops that overlap count once, so the three add up to
# the rank's time, and the waiting of all ranks is the waiting in the summary.
#
# A message's two hosts are recorded. The bytes that a collective sends between two hosts are not:
# they depend on the back end. The figures here are those of the plainest algorithm, in the group's
# order: a ring for all_reduce, all_gather and reduce_scatter (each member sends S * f to the next,
# with S and f of nccl-tests), a chain from or to the root for broadcast and reduce, one message a
# member for gather and scatter, an equal slice to each for all_to_all.


_SUSPECTS = 3


@dataclass(frozen=True)
class Details:
    """A summary and the figures behind it."""

    summary: Summary
    splits: list[RankSplit]
    lateness: Lateness
    late_lines: list[LateLine]  # of the ranks that caused most waiting
    traffic: Traffic


def detail(run: Run, progress: Progress | None = None, also: RingVisitor | None = None) -> Details:
    """Analyse a run in depth; ``summarise`` is part of it. See ``gather`` for the arguments.

    All rings are read once. The rings of the ranks that caused most waiting are read again, for the
    lines that these ranks came from.
    """
    run_tables = gather(run, progress, also)
    splits, late = split(run_tables), lateness(run_tables)
    sent = traffic(run_tables, run.hosts)
    summary = conclude(run, run_tables)
    suspects = [
        straggler.rank for straggler in summary.stragglers[:_SUSPECTS] if straggler.came_last
    ]
    return Details(summary, splits, late, late_lines(run, late.lasts, suspects), sent)


Spans = tuple[Ints, Ints, Ints]  # begin, end (the host's own ns) and how long of it was waiting


@dataclass(frozen=True)
class RankSplit:
    """One rank's time, over all its attempts. ``steps``: optimizer steps it finished."""

    rank: int
    compute_ms: float
    waiting_ms: float
    transfer_ms: float
    steps: int

    @property
    def total_ms(self) -> float:
        """From its first op to the end of its last."""
        return self.compute_ms + self.waiting_ms + self.transfer_ms


def split(run_tables: RunTables) -> list[RankSplit]:
    """Split every rank's time; leave out ranks without a finished op."""
    spans: dict[tuple[int, object], list[Spans]] = {}
    waits = run_tables.waits
    collectives = zip(run_tables.tables, waits.of_tables, waits.whole_of_tables, strict=True)
    for table, waited, whole in collectives:
        for rank, rank_spans in _of_collectives(table, waited, whole):
            spans.setdefault((rank, table.session), []).append(rank_spans)
    letters = zip(run_tables.messages, waits.of_messages, waits.whole_of_messages, strict=True)
    for messages, waited, whole in letters:
        for rank, rank_spans in _of_messages(messages, waited, whole):
            spans.setdefault((rank, messages.session), []).append(rank_spans)
    totals: dict[int, npt.NDArray[np.float64]] = {}
    for (rank, _), parts in spans.items():
        totals[rank] = totals.get(rank, np.zeros(3)) + _measure(parts)
    steps: dict[int, int] = {}
    for ring in run_tables.ranks:
        steps[ring.rank] = steps.get(ring.rank, 0) + ring.steps
    rows = []
    for rank in sorted(totals):
        compute, waiting, transfer = (totals[rank] / 1e6).tolist()
        rows.append(RankSplit(rank, compute, waiting, transfer, steps.get(rank, 0)))
    return rows


def _measure(parts: Sequence[Spans]) -> npt.NDArray[np.float64]:
    """Return computing, waiting and transferring, ns."""
    begin, end, waited = (np.concatenate(column) for column in zip(*parts, strict=True))
    if not len(begin):
        return np.zeros(3)
    order = np.argsort(begin, kind="stable")
    busy, waiting = covered(begin[order], end[order]), float(waited.sum(dtype=np.float64))
    return np.array([end.max() - begin.min() - busy, waiting, busy - waiting], np.float64)


def _of_collectives(
    table: CollectiveTable, waited: Ints, whole: Ints | None
) -> Iterable[tuple[int, Spans]]:
    whole = waited if whole is None else whole
    for row, rank in enumerate(table.ranks.tolist()):
        yield rank, _spans(table.arrival[row], table.completed[row], waited[row], whole[row])


def _of_messages(
    messages: MessageTable, waited: Ints, whole: Ints | None
) -> Iterable[tuple[int, Spans]]:
    whole = waited if whole is None else whole
    columns = messages.columns
    for rank in np.unique(columns["rank"]).tolist():
        rows = columns["rank"] == rank
        yield (
            rank,
            _spans(columns["arrival"][rows], columns["completed"][rows], waited[rows], whole[rows]),
        )


def _spans(came: Ints, ended: Ints, waited: Ints, whole: Ints) -> Spans:
    """Return the ops that have ended, and those without an end as far as their rank waited."""
    until = np.where(present(ended), ended, came + whole)
    some = present(came) & (until >= came) & (present(ended) | (whole > 0))
    return came[some], until[some], waited[some]


Floats = npt.NDArray[np.float64]

_SEND = OPS.index("send")


@dataclass
class Traffic:
    """Bytes from host i to host j, as ``sent[i, j]``; i and j may be equal."""

    hosts: list[str]
    sent: Floats


def traffic(run_tables: RunTables, host_of: dict[int, str]) -> Traffic:
    """Add up what all finished collectives and messages sent."""
    hosts = list(dict.fromkeys(host_of[rank] for rank in sorted(host_of)))
    index = {host: number for number, host in enumerate(hosts)}
    host_traffic = Traffic(hosts, np.zeros((len(hosts), len(hosts))))
    for table in run_tables.tables:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in table.group.ranks]
        _add_collectives(table, np.array(places, np.intp), host_traffic.sent)
    for messages in run_tables.messages:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in messages.group.ranks]
        _add_messages(messages, np.array(places, np.intp), host_traffic.sent)
    return host_traffic


def _add_collectives(table: CollectiveTable, place: npt.NDArray[np.intp], sent: Floats) -> None:
    members = len(place)
    done = present(table.completed).any(axis=0)
    for code in np.unique(table.op[done]):
        op, rows = OPS[code], done & (table.op == code)
        size = table.size[rows]
        if op in ("all_reduce", "all_gather", "reduce_scatter"):
            ring = float(size.sum()) * bus_factor(op, members)
            if members > 1:
                _hops(place, np.roll(place, -1), ring, sent)
        elif op == "all_to_all":
            _to_all(place, float(size.sum()) / members, sent)
        elif op in ("broadcast", "reduce", "gather", "scatter"):
            _add_rooted(op, table, rows, place, sent)


def _hops(
    source: npt.NDArray[np.intp], target: npt.NDArray[np.intp], amount: float, sent: Floats
) -> None:
    """Add an amount for each pair of members; leave out members on unknown hosts."""
    known = (source >= 0) & (target >= 0)
    np.add.at(sent, (source[known], target[known]), amount)


def _to_all(place: npt.NDArray[np.intp], amount: float, sent: Floats) -> None:
    on_host = np.bincount(place[place >= 0], minlength=len(sent)).astype(np.float64)
    pairs = np.outer(on_host, on_host)
    np.fill_diagonal(pairs, on_host * (on_host - 1))
    sent += pairs * amount


def _add_rooted(
    op: str,
    table: CollectiveTable,
    rows: npt.NDArray[np.bool_],
    place: npt.NDArray[np.intp],
    sent: Floats,
) -> None:
    rank_of = table.ranks.tolist()
    for row in np.unique(table.root[rows]):
        if row < 0:
            continue
        at = table.group.ranks.index(rank_of[row])
        amount = float(table.size[rows & (table.root == row)].sum())
        from_root = np.roll(place, -at)
        root = np.full(len(from_root) - 1, from_root[0])
        if op in ("broadcast", "reduce"):
            ends = from_root[:-1], from_root[1:]
        else:
            ends, amount = (root, from_root[1:]), amount / len(place)
        _hops(*(ends if op in ("broadcast", "scatter") else ends[::-1]), amount, sent)


def _add_messages(messages: MessageTable, place: npt.NDArray[np.intp], sent: Floats) -> None:
    """Count each message once: as sent, or as received if its sender left no record."""
    columns = messages.columns
    rows = np.where(messages.sent >= 0, messages.sent, messages.received)
    rows = rows[present(columns["completed"][rows]) & (columns["peer"][rows] >= 0)]
    rows = rows[columns["peer"][rows] < len(place)]
    is_send = columns["op"][rows] == _SEND
    own, peer = place[columns["own"][rows]], place[columns["peer"][rows]]
    source, target = np.where(is_send, own, peer), np.where(is_send, peer, own)
    known = (source >= 0) & (target >= 0)
    np.add.at(
        sent, (source[known], target[known]), columns["bytes"][rows][known].astype(np.float64)
    )


# Waiting and bandwidth of a job's newest calls.


_MOST_ROWS, _MOST_LATE = 8, 3
_LEAST_SHARE = 0.005  # of the time: less waiting names no rank
_STANDS_OUT, _TIMES_ITS_SHARE = 0.1, 1.5  # of all waiting; ranks that cause less are not named
_NEWEST_CALLS = 1 << 15  # of all ranks; figures of a live page need no more


@dataclass(frozen=True)
class LateRank:
    """A rank that others wait for. ``share``: of all waiting; ``came_last``: of its collectives."""

    rank: int
    host: str
    share: float
    came_last: float


@dataclass(frozen=True)
class Figures:
    """The newest calls of a job that goes on.

    ``waiting``: the share of the ranks' time that they wait for others. ``share``: that of their
    time in communication. ``rows``: by op, group and
    size, those that take most time first. ``late``: the ranks that cause most of the waiting.
    """

    seconds: float
    waiting: float | None
    steps_per_s: float | None
    calls_per_s: float | None
    share: float | None = None
    rows: tuple[Row, ...] = ()
    late: tuple[LateRank, ...] = ()


def recent_figures(snapshot: Snapshot) -> Figures:
    """Measure the newest calls of each rank."""
    speed = pace(snapshot)
    recent = recent_calls(_newest(snapshot))
    if (not recent.tables and not recent.messages) or recent.seconds <= 0:
        return Figures(0.0, None, speed.steps_per_s, speed.calls_per_s, speed.share)
    totals = WaitTotals(len(snapshot.ranks))
    waits = waits_of(recent.tables, recent.messages, recent.clocks)
    sources = []
    for table, waited in zip(recent.tables, waits.of_tables, strict=True):
        measured = measure_collectives(table, waited, recent.clocks, totals)
        label = snapshot.labels[snapshot.groups.index(table.group)]
        sources.append(Source(label, table.members, measured))
    for messages, waited in zip(recent.messages, waits.of_messages, strict=True):
        measured = measure_messages(messages, waited, recent.clocks, totals)
        label = snapshot.labels[snapshot.groups.index(messages.group)]
        sources.append(Source(label, 2, measured))
    taking_part = len(np.unique(recent.snapshot.calls["rank"]))
    whole_ns = recent.seconds * 1e9 * max(1, taking_part)
    waiting = min(1.0, float(totals.suffered.sum()) / whole_ns)
    return Figures(
        recent.seconds,
        waiting,
        speed.steps_per_s,
        speed.calls_per_s,
        speed.share,
        tuple(rows_by_size(sources)[:_MOST_ROWS]),
        tuple(_late(snapshot, totals)) if waiting >= _LEAST_SHARE else (),
    )


def _newest(snapshot: Snapshot) -> Snapshot:
    """Keep the newest calls of each rank, fewer of each the more ranks there are."""
    calls = snapshot.calls
    if len(calls) <= _NEWEST_CALLS:
        return snapshot
    calls_per_rank = max(16, _NEWEST_CALLS // max(1, len(snapshot.ranks)))
    newest = np.zeros(int(calls["rank"].max()) + 1, np.int64)
    np.maximum.at(newest, calls["rank"], calls["index"])
    return replace(snapshot, calls=calls[calls["index"] > newest[calls["rank"]] - calls_per_rank])


def _late(snapshot: Snapshot, totals: WaitTotals) -> Iterator[LateRank]:
    caused = totals.caused
    whole = float(caused.sum())
    for rank in np.argsort(-caused, kind="stable")[:_MOST_LATE].tolist():
        if caused[rank] > whole * max(_STANDS_OUT, _TIMES_ITS_SHARE / max(1, len(caused))):
            part = int(totals.took_part[rank])
            last = int(totals.came_last[rank]) / part if part else 0.0
            host = snapshot.ranks[rank].host
            yield LateRank(rank, host, float(caused[rank]) / whole, last)

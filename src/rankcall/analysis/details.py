"""What a page shows beyond the summary: where each rank's time went, its lateness, and traffic.

At any moment a rank is in some collective or message, or in none. The time in none is computing
(or whatever else the script does). Of the time in some, waiting is until the op could begin (see
``timing.waiting``). The rest is transfer. Ops that overlap count once, so the three add up to the
rank's time, and the waiting of all ranks is the waiting in the summary.

A message's two hosts are recorded. The bytes that a collective sends between two hosts are not:
they depend on the back end. The figures here are those of the plainest algorithm, in the group's
order: a ring for all_reduce, all_gather and reduce_scatter (each member sends S * f to the next,
with S and f of nccl-tests), a chain from or to the root for broadcast and reduce, one message a
member for gather and scatter, an equal slice to each for all_to_all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.collectives import CollectiveTable, MessageTable, present
from rankcall.analysis.timing.lateness import LateLine, Lateness, late_lines, lateness
from rankcall.analysis.timing.run_tables import RingVisitor, RunTables, gather
from rankcall.analysis.timing.summary import Summary, conclude
from rankcall.analysis.timing.waiting import Ints, covered
from rankcall.ops import bus_factor
from rankcall.record import OPS
from rankcall.run.load import Progress, Run

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

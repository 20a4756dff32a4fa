"""What a page shows beyond the summary: where each rank's time went, its lateness, and traffic.

At any moment a rank is in some collective or message, or in none. The time in none is computing
(or whatever else the script does). Of the time in some, waiting is until the op could begin (see
``analysis.waiting``). The rest is transfer. Ops that overlap count once, so the three add up to
the rank's time, and the waiting of all ranks is the waiting in the summary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import Ints
from rankcall.analysis.call_sites import SiteBranch
from rankcall.analysis.collectives import CollectiveTable, MessageTable, Session, present
from rankcall.analysis.late_lines import LateLine, late_lines
from rankcall.analysis.lateness import Lateness, lateness
from rankcall.analysis.run_tables import (
    RingVisitor,
    RunTables,
    gather,
)
from rankcall.analysis.summary import Summary, conclude
from rankcall.analysis.timeline import RankSpans, Timeline, aligned, timeline
from rankcall.analysis.traffic import Traffic, traffic
from rankcall.analysis.waiting import covered
from rankcall.run.load import Progress, Run

_SUSPECTS = 3  # ranks whose late lines are looked up: that reads all records of these ranks


@dataclass(frozen=True)
class Details:
    """A summary and the figures behind it."""

    summary: Summary
    splits: list[RankSplit]
    timeline: Timeline | None  # None: no op has a length
    lateness: Lateness
    late_lines: list[LateLine]  # of the ranks that caused most waiting
    traffic: Traffic
    site_tree: list[SiteBranch]  # the summary's call sites by file and function


def detail(run: Run, progress: Progress | None = None, also: RingVisitor | None = None) -> Details:
    """Analyse a run in depth; ``summarise`` is part of it. See ``gather`` for the arguments.

    All rings are read once. The rings of the ranks that caused most waiting are read again, for the
    lines that these ranks came from.
    """
    run_tables = gather(run, progress, also)
    spans = spans_of(run_tables)
    splits, late = split(spans, run_tables), lateness(run_tables)
    sent = traffic(run_tables, run.hosts)
    summary = conclude(run, run_tables)
    suspects = [
        straggler.rank for straggler in summary.stragglers[:_SUSPECTS] if straggler.came_last
    ]
    moments = _moments(spans, splits, run_tables)
    lines = late_lines(run, late.lasts, suspects)
    return Details(summary, splits, moments, late, lines, sent, run_tables.sites.tree())


@dataclass(frozen=True)
class RingSpans:
    """The ops of one ring that have a length."""

    host: int  # index of the host's clock
    begin: Ints  # the host's own ns
    end: Ints
    waited: Ints  # how long of it was waiting


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


def spans_of(run_tables: RunTables) -> dict[tuple[int, Session], RingSpans]:
    """Return the ops of each ring that have a length, by rank and session."""
    parts: dict[tuple[int, Session], list[RingSpans]] = {}
    waits = run_tables.waits
    collectives = zip(run_tables.tables, waits.of_tables, waits.whole_of_tables, strict=True)
    for table, waited, whole in collectives:
        for rank, rank_spans in _of_collectives(table, waited, whole):
            parts.setdefault((rank, table.session), []).append(rank_spans)
    letters = zip(run_tables.messages, waits.of_messages, waits.whole_of_messages, strict=True)
    for messages, waited, whole in letters:
        for rank, rank_spans in _of_messages(messages, waited, whole):
            parts.setdefault((rank, messages.session), []).append(rank_spans)
    return {key: _together(some) for key, some in parts.items()}


def _together(parts: Sequence[RingSpans]) -> RingSpans:
    columns = [(part.begin, part.end, part.waited) for part in parts]
    return RingSpans(parts[0].host, *map(np.concatenate, zip(*columns, strict=True)))


def _moments(
    spans: Mapping[tuple[int, Session], RingSpans],
    splits: Sequence[RankSplit],
    run_tables: RunTables,
) -> Timeline | None:
    """Draw what each rank did when, on one clock for all hosts."""
    keys: dict[int, list[tuple[int, Session]]] = {}
    for key in spans:
        keys.setdefault(key[0], []).append(key)

    def rings_of(rank: int) -> list[RankSpans]:
        return [
            aligned(
                run_tables.clocks.hosts[spans[key].host],
                spans[key].begin,
                spans[key].end,
                spans[key].waited,
            )
            for key in keys[rank]
        ]

    return timeline({split.rank: split.compute_ms for split in splits}, rings_of)


def split(spans: Mapping[tuple[int, Session], RingSpans], run_tables: RunTables) -> list[RankSplit]:
    """Split every rank's time; leave out ranks without a finished op."""
    totals: dict[int, npt.NDArray[np.float64]] = {}
    for (rank, _), ring_spans in spans.items():
        totals[rank] = totals.get(rank, np.zeros(3)) + _measure(ring_spans)
    steps: dict[int, int] = {}
    for ring in run_tables.ranks:
        steps[ring.rank] = steps.get(ring.rank, 0) + ring.steps
    rows = []
    for rank in sorted(totals):
        compute, waiting, transfer = (totals[rank] / 1e6).tolist()
        rows.append(RankSplit(rank, compute, waiting, transfer, steps.get(rank, 0)))
    return rows


def _measure(ring: RingSpans) -> npt.NDArray[np.float64]:
    """Return computing, waiting and transferring, ns."""
    begin, end, waited = ring.begin, ring.end, ring.waited
    if not len(begin):
        return np.zeros(3)
    order = np.argsort(begin, kind="stable")
    busy, waiting = covered(begin[order], end[order]), float(waited.sum(dtype=np.float64))
    return np.array([end.max() - begin.min() - busy, waiting, busy - waiting], np.float64)


def _of_collectives(
    table: CollectiveTable, waited: Ints, whole: Ints | None
) -> Iterable[tuple[int, RingSpans]]:
    whole = waited if whole is None else whole
    for row, rank in enumerate(table.ranks.tolist()):
        came, ended = table.arrival[row], table.completed[row]
        yield rank, _spans(table.hosts[row], came, ended, waited[row], whole[row])


def _of_messages(
    messages: MessageTable, waited: Ints, whole: Ints | None
) -> Iterable[tuple[int, RingSpans]]:
    whole = waited if whole is None else whole
    columns = messages.columns
    for rank in np.unique(columns["rank"]).tolist():
        rows = columns["rank"] == rank
        host = int(columns["host"][rows][0])  # a ring is of one host
        came, ended = columns["arrival"][rows], columns["completed"][rows]
        yield rank, _spans(host, came, ended, waited[rows], whole[rows])


def _spans(host: int, came: Ints, ended: Ints, waited: Ints, whole: Ints) -> RingSpans:
    """Return the ops that have ended, and those without an end as far as their rank waited."""
    until = np.where(present(ended), ended, came + whole)
    some = present(came) & (until >= came) & (present(ended) | (whole > 0))
    return RingSpans(host, came[some], until[some], waited[some])

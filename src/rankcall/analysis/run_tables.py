"""A run's rings, read once: what every figure of a report starts from.

``gather`` makes the tables of all groups with one clock for all hosts, the time by call site, and
the share of each rank's time that it spends in communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import Ints
from rankcall.analysis.call_sites import SiteTimes
from rankcall.analysis.clocks import RunClocks, align_hosts, anchored
from rankcall.analysis.collectives import (
    MISSING,
    CollectiveTable,
    Columns,
    MessageTable,
    RankCollectives,
    RankMessages,
    Session,
    collective_table,
    columns_of,
    message_table,
    sessions_of,
    share_agreed,
    split_by_group,
)
from rankcall.analysis.device_times import end_together
from rankcall.analysis.recoveries import FirstMoments
from rankcall.analysis.stragglers import turns_of
from rankcall.analysis.waiting import Waits, waits_of
from rankcall.ring.reader import Ring
from rankcall.ring.tables import Group
from rankcall.run.load import Progress, Run
from rankcall.run.recoveries import read_recoveries

Floats = npt.NDArray[np.float64]


@dataclass
class RankShare:
    """One ring's time in communication. A step lasts to the beginning of the next one's ops."""

    rank: int
    attempt: int
    busy_ns: float
    span_ns: float
    steps: npt.NDArray[np.int64]
    step_share: Floats
    step_ns: Floats

    @property
    def share(self) -> float | None:
        """Share of the time from its first op to the end of its last."""
        return self.busy_ns / self.span_ns if self.span_ns > 0 else None


@dataclass(frozen=True)
class StepShare:
    """One step: the median over the ranks."""

    step: int
    share: float
    ms: float


def rank_share(rank: int, attempt: int, columns: Columns, finished: int) -> RankShare:
    """Measure one ring: the union of the times that its ops were in flight.

    Of its steps, the ``finished`` ones count; ops after the last belong to no step.
    """
    done = columns["completed_ns"] != MISSING
    start, end, step = (columns[name] for name in ("started_ns", "completed_ns", "step"))
    if not done.all():
        start, end, step = start[done], end[done], step[done]
    if not len(start):
        nothing = np.zeros(0)
        return RankShare(rank, attempt, 0.0, 0.0, nothing.astype(np.int64), nothing, nothing)
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end, step = start[order], end[order], step[order]
    reach, busy = end, end - start
    if np.any(start[1:] < end[:-1]) or np.any(end < start):
        reach = np.maximum.accumulate(end)
        busy[1:] = end[1:] - np.maximum(start[1:], reach[:-1])
    busy = np.maximum(busy, 0).astype(np.float64)
    span = float(reach[-1] - start[0])
    steps, shares, lasts = _by_step(start, reach, step, busy)
    whole = steps < finished
    return RankShare(
        rank, attempt, float(busy.sum()), span, steps[whole], shares[whole], lasts[whole]
    )


def _by_step(
    start: npt.NDArray[np.int64],
    reach: npt.NDArray[np.int64],
    step: npt.NDArray[np.int64],
    busy: Floats,
) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """Cut at each new step; an op that runs over the cut counts to the step that issued it."""
    first, reached = _steps_reached(step)
    if len(first) == 1:
        return reached[:0], busy[:0], busy[:0]
    inside = np.add.reduceat(busy, first)
    lasts = np.diff(np.concatenate([start[first], reach[-1:]])).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(lasts > 0, np.minimum(inside / lasts, 1.0), 1.0)
    return reached, share, lasts


def _steps_reached(step: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], Ints]:
    """Return the rows at which a rank came to a step, and those steps.

    A thread that lags may record an older step again, but steps only go up.
    """
    change = np.diff(step)
    if (change < 0).any():
        step = np.maximum.accumulate(step)
        change = np.diff(step)
    first = np.concatenate([[0], np.flatnonzero(change) + 1])
    return first, step[first]


def share_of_all(shares: Sequence[RankShare]) -> float | None:
    """Return the share of the time of all ranks together."""
    span_ns = sum(ring_share.span_ns for ring_share in shares)
    return sum(ring_share.busy_ns for ring_share in shares) / span_ns if span_ns > 0 else None


def by_step(shares: Sequence[RankShare]) -> list[StepShare]:
    """Return each step's median over the ranks of the last attempt that has steps."""
    last = max((ring_share.attempt for ring_share in shares if len(ring_share.steps)), default=None)
    mine = [
        ring_share for ring_share in shares if ring_share.attempt == last and len(ring_share.steps)
    ]
    if not mine:
        return []
    if all(np.array_equal(ring_share.steps, mine[0].steps) for ring_share in mine):
        share = np.median([ring_share.step_share for ring_share in mine], axis=0)
        lasts = np.median([ring_share.step_ns for ring_share in mine], axis=0)
        return _listed(mine[0].steps, share, lasts)
    steps = np.concatenate([ring_share.steps for ring_share in mine])
    order = np.argsort(steps, kind="stable")
    pieces = np.split(order, np.flatnonzero(np.diff(steps[order])) + 1)
    share = np.concatenate([ring_share.step_share for ring_share in mine])
    lasts = np.concatenate([ring_share.step_ns for ring_share in mine])
    return _listed(
        steps[[piece[0] for piece in pieces]],
        np.array([np.median(share[piece]) for piece in pieces]),
        np.array([np.median(lasts[piece]) for piece in pieces]),
    )


def _listed(steps: npt.NDArray[np.int64], share: Floats, lasts: Floats) -> list[StepShare]:
    rows = zip(steps.tolist(), share.tolist(), (lasts / 1e6).tolist(), strict=True)
    return [StepShare(*row) for row in rows]


@dataclass(frozen=True)
class RankRow:
    """One ring: the rank that wrote it, and its figures."""

    rank: int
    host: str
    pid: int
    attempt: int
    capture: str
    records: int
    dropped: int
    steps: int
    closed: bool
    comm_share: float | None


@dataclass
class RunTables:
    """The records of all rings, lined up by group, and one clock for all hosts."""

    clocks: RunClocks
    sites: SiteTimes = field(default_factory=SiteTimes)
    shares: list[RankShare] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    tables: list[CollectiveTable] = field(default_factory=list)
    messages: list[MessageTable] = field(default_factory=list)
    # Once all are lined up, aligned ns: the first arrival and the last end, and by ring, when its
    # steps began, and ``turns_of`` its calls.
    span: tuple[int, int] = (0, 0)
    step_begins: list[Ints] = field(default_factory=list)
    turns: list[Ints] = field(default_factory=list)
    _moments: list[_Moments] = field(default_factory=list)
    first_moments: FirstMoments = field(default_factory=FirstMoments)
    _collectives: dict[tuple[Session, Group], list[RankCollectives]] = field(default_factory=dict)
    _messages: dict[tuple[Session, Group], list[RankMessages]] = field(default_factory=dict)

    def add(self, ring: Ring, session: Session) -> None:
        """Copy what analysis needs from one ring; the ring itself is not kept."""
        self.first_moments.add(ring)
        head = ring.header
        columns = columns_of(ring)
        host = self.clocks.of_ring(head)
        share = rank_share(head.rank, head.attempt, columns, head.step)
        self.shares.append(share)
        self.sites.add(head.rank, columns, ring.tables)
        self.ranks.append(_rank_row(ring, share))
        if len(ring.records):
            issued, ended = columns["enqueued_ns"], columns["completed_ns"]
            span = np.array([issued.min(), max(issued.max(), ended.max())])
            moments = _Moments(host, span, _step_begins(columns), turns_of(issued))
            self._moments.append(moments)
        by_group = split_by_group(ring, columns, host)
        for group, member in by_group.collectives.items():
            members = self._collectives.setdefault((session, group), [])
            if members:
                share_agreed(member, members[-1])
            members.append(member)
        for group, messages in by_group.messages.items():
            self._messages.setdefault((session, group), []).append(messages)

    @cached_property
    def waits(self) -> Waits:
        """How long each rank waited in each of its ops."""
        return waits_of(self.tables, self.messages, self.clocks.hosts)

    def line_up(self) -> None:
        """Line up the members of each group, once all rings have been added."""
        self.tables = [
            collective_table(*key, members) for key, members in self._collectives.items()
        ]
        self.messages = [message_table(*key, messages) for key, messages in self._messages.items()]
        self._collectives.clear()
        self._messages.clear()
        align_hosts(self.clocks.hosts, self.tables)
        end_together(self.tables, self.messages, self.clocks.hosts)
        self._align_moments()

    def _align_moments(self) -> None:
        """Bring the rings' moments onto the clock of the arrivals.

        By the hosts' anchors alone, they were as far apart as the hosts' clocks of the day, and the
        parts of the run longer than their calls.
        """
        spans = []
        for moments in self._moments:
            align = self.clocks.hosts[moments.host].align
            spans.append(align(moments.span))
            self.step_begins.append(align(moments.step_begins))
            self.turns.append(align(moments.turns))
        if spans:
            first, last = np.stack(spans).T
            self.span = int(first.min()), int(last.max())
        self._moments.clear()


@dataclass(frozen=True)
class _Moments:
    """Moments of one ring, in its host's monotonic ns."""

    host: int
    span: Ints  # the first arrival, and the last issue or end
    step_begins: Ints
    turns: Ints


def _step_begins(columns: Columns) -> Ints:
    """Return when a rank issued the first op of each step."""
    first, _ = _steps_reached(columns["step"])
    begins: Ints = columns["enqueued_ns"][first]
    return begins


def _rank_row(ring: Ring, share: RankShare) -> RankRow:
    head = ring.header
    return RankRow(
        head.rank,
        head.host,
        head.pid,
        head.attempt,
        head.capture,
        len(ring.records),
        ring.dropped,
        head.step,
        head.closed_ns != 0,
        share.share,
    )


RingVisitor = Callable[[Ring], None]


def gather(
    run: Run, progress: Progress | None = None, also: RingVisitor | None = None
) -> RunTables:
    """Read all rings of a run once, and keep some 24 bytes of each record.

    Args:
        run: The run.
        progress: Called with the number of rings that are done, and of all rings.
        also: Called with each ring, so that another analysis need not read it again.
    """
    moments = FirstMoments(read_recoveries(run.path))
    gathered = RunTables(anchored(head.header for head in run.heads), first_moments=moments)
    sessions = sessions_of(run)
    for ring in run.iter_rings(progress):
        gathered.add(ring, sessions[ring.path.name])
        if also is not None:
            also(ring)
    gathered.line_up()
    return gathered

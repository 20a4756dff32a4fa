"""The summary of a run: what every report says of it. What a page adds is in ``details``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.call_sites import SiteRow
from rankcall.analysis.charging import WaitTotals
from rankcall.analysis.clocks import HostClock
from rankcall.analysis.collectives import OP_NAMES
from rankcall.analysis.device_times import TimeSources, sources_of
from rankcall.analysis.gaps import Gap, gaps_of
from rankcall.analysis.measuring import Measured, measure_collectives, measure_messages
from rankcall.analysis.recoveries import Carried
from rankcall.analysis.run_tables import (
    RankRow,
    RingVisitor,
    RunTables,
    StepShare,
    by_step,
    gather,
    share_of_all,
)
from rankcall.analysis.stragglers import Stragglers, find_stragglers, parts_of, slow_start
from rankcall.analysis.verdicts.facts import Fact
from rankcall.problems import Problem
from rankcall.record import BYTES_PER_GB, bus_factor
from rankcall.run.joins import JoinSummary
from rankcall.run.load import Progress, Run, RunGroup, label_groups

TIMES = ("host", "device", "unknown")  # the names of HOST, DEVICE and ISSUE
# Ranks whose lines are looked up: stragglers, and those that caused so much of the waiting.
_SUSPICIOUS, _MOST_SUSPECTS = 0.3, 3
_BUCKETS = 64  # of sizes, by powers of two: a size has at most 63 bits
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
    total_ms: float | None  # of the rank that spent most in them; ops that overlap count once
    median_ms: float | None  # of the members' mean durations
    p95_ms: float | None
    transfer_ms: float | None  # median t
    algbw_gbps: float | None  # median; GB/s, 1 GB = 1e9 bytes
    busbw_gbps: float | None
    waiting_share: float | None  # of the time that all members spent
    times: str = "host"  # where these times come from: one of TIMES, or mixed


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
    return sorted(table, key=lambda row: (-(row.total_ms or 0.0), row.group, row.op, row.bucket))


def _bucket(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return 0 for no bytes, else 1 + the power of two at or below."""
    # frexp is exact up to 2**53, and no message is longer.
    return np.frexp(np.maximum(sizes, 0).astype(np.float64))[1].astype(np.intp)


def _row(label: str, key: int, parts: list[tuple[Source, npt.NDArray[np.intp]]]) -> Row:
    op, power = OP_NAMES[key // _BUCKETS], key % _BUCKETS
    mean, transfer, size, spent, waited, count_bytes = (
        np.concatenate([getattr(source.measured, name)[part] for source, part in parts])
        for name in ("mean", "transfer", "size", "spent", "waited", "bytes")
    )
    finished = mean[~np.isnan(mean)]
    kinds = np.unique(np.concatenate([source.measured.source[part] for source, part in parts]))
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
        _total_ns(parts) / 1e6 if len(finished) else None,
        _ms(finished, 50),
        _ms(finished, 95),
        _ms(transfer[~np.isnan(transfer)], 50),
        algbw,
        None if algbw is None else algbw * factor,
        min(1.0, float(waited.sum()) / total) if total > 0 else None,
        TIMES[int(kinds[0])] if len(kinds) == 1 else "mixed",
    )


def _total_ns(parts: list[tuple[Source, npt.NDArray[np.intp]]]) -> float:
    """Return the time that the busiest rank spent in some ops.

    A rank may have many of them in flight at once. The time in which any is counts once.
    """
    totals: dict[int, float] = {}
    for source, rows in parts:
        for rank, spent_ns in source.measured.spent_by_rank(rows):
            totals[rank] = totals.get(rank, 0.0) + spent_ns
    return max(totals.values(), default=0.0)


def _ms(times: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(times, percent)) / 1e6 if len(times) else None


@dataclass(frozen=True)
class LateArrivals:
    """The cost of one rank's late arrivals to the others."""

    rank: int
    host: str
    caused_wait_ms: float | None  # None, like the next two: no op shows how long ranks waited
    share: float | None  # of all waiting
    suffered_wait_ms: float | None
    came_last: int
    collectives: int  # that it took part in and that a rank can be last to
    late_by_ms: float | None  # after the second-latest rank, on average, if it came last
    # The same of issuing, for ops on devices of which it is not known when anybody came.
    issued_last: int = 0
    issued: int = 0
    issued_late_by_ms: float | None = None


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
    sources: TimeSources  # of the times behind all figures
    stragglers: list[LateArrivals]
    late: Stragglers | None  # those of them that make the others wait, by the one rule
    late_because: tuple[Fact, ...]  # what these spend the time on; empty if that is not known
    gaps: list[Gap]  # where those that caused much of the waiting spend their time
    slow_start_ms: float  # the time of the first steps, if they took far longer than the others
    waiting_ms: float  # of all ranks together
    spent_ms: float  # by all ranks together, in collectives and messages
    elapsed_ms: float  # of all ranks together, each from its first op to the end of its last
    call_sites: list[SiteRow]
    comm_share: float | None  # of the time of all ranks together
    steps: list[StepShare]
    joins: list[JoinSummary]
    problems: list[Problem]
    carried: Carried = field(default_factory=Carried)  # the recoveries of the job

    @property
    def waiting_share(self) -> float:
        """Share of the time of all ranks together that they waited for each other."""
        return min(1.0, self.waiting_ms / self.elapsed_ms) if self.elapsed_ms > 0 else 0.0

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
    time_sources = sources_of(tables, messages)
    on_devices = time_sources.device + time_sources.unknown > 0
    parts = parts_of(run_tables.step_begins, run_tables.turns, *run_tables.span, ahead=on_devices)
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
            measure_messages(table, waited, clocks, totals, waits.chains),
        )
        for table, waited in zip(messages, waits.of_messages, strict=True)
    ]
    started, duration = _when(run, run_tables)
    stragglers = _stragglers(totals, run.hosts, time_sources.is_waiting_known)
    late = find_stragglers(totals, parts, [run.hosts.get(n, "") for n in range(totals.ranks)])
    suspects = list(late.ranks) if late else []
    suspects += [row.rank for row in stragglers if (row.share or 0.0) >= _SUSPICIOUS]
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
        sources=time_sources,
        late_because=(),  # the samples are in the rings, which the caller may have read as well
        stragglers=stragglers,
        late=late,
        gaps=gaps_of(run, list(dict.fromkeys(suspects))[:_MOST_SUSPECTS]),
        slow_start_ms=float(parts.lengths[: slow_start(parts)].sum()) / 1e6,
        waiting_ms=float(totals.caused.sum()) / 1e6,
        spent_ms=sum(float(source.measured.spent.sum()) for source in sources) / 1e6,
        elapsed_ms=sum(share.span_ns for share in run_tables.shares) / 1e6,
        call_sites=run_tables.sites.rows(),
        comm_share=share_of_all(run_tables.shares),
        steps=by_step(run_tables.shares),
        joins=run.joins,
        problems=list(run.problems),
        carried=run_tables.first_moments.finish(),
    )


def _when(run: Run, run_tables: RunTables) -> tuple[int | None, float]:
    """Return the epoch ns at which the first op was issued and the ms from then to the last end."""
    if not run_tables.turns:
        return None, 0.0
    first, last = run_tables.span
    head = run.heads[0].header
    clock = run_tables.clocks.hosts[run_tables.clocks.of_ring(head)]
    ahead = int(clock.align(np.zeros(1, np.int64))[0])
    epoch = first - ahead + head.anchor_epoch_ns - head.anchor_mono_ns
    return epoch, (last - first) / 1e6


def _stragglers(
    totals: WaitTotals, hosts: dict[int, str], is_waiting_known: bool
) -> list[LateArrivals]:
    """List the ranks by the waiting that they caused, or by how often they issued last."""
    total = float(totals.caused.sum())
    lasts, issues = totals.lasts, totals.issue_lasts
    stragglers = [
        LateArrivals(
            rank,
            hosts.get(rank, ""),
            float(totals.caused[rank]) / 1e6 if is_waiting_known else None,
            (float(totals.caused[rank]) / total if total else 0.0) if is_waiting_known else None,
            float(totals.suffered[rank]) / 1e6 if is_waiting_known else None,
            int(lasts.times[rank]),
            int(lasts.took_part[rank]),
            lasts.late_by_ms(rank),
            int(issues.times[rank]),
            int(issues.took_part[rank]),
            issues.late_by_ms(rank),
        )
        for rank in sorted(hosts)
        if 0 <= rank < totals.ranks  # a ring that was removed since it was found has no records
    ]
    return sorted(
        stragglers,
        key=lambda straggler: (
            -(straggler.caused_wait_ms or 0.0),
            -straggler.issued_last,
            straggler.rank,
        ),
    )

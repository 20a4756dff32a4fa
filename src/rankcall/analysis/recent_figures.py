"""Waiting and bandwidth of a job's newest calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from rankcall.analysis.charging import WaitTotals
from rankcall.analysis.device_times import sources_of
from rankcall.analysis.measuring import measure_collectives, measure_messages
from rankcall.analysis.pace import pace
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.summary import Row, Source, rows_by_size
from rankcall.analysis.verdicts.recent_calls import recent_calls
from rankcall.analysis.waiting import waits_of

_MOST_ROWS, _MOST_LATE = 8, 3  # of bandwidths and of late ranks: what a glance takes in
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

    ``waiting``: the share of the ranks' time that they wait for others, and ``share``: that of
    their time in communication; None if it is not known. ``rows``: by op, group and size, those
    that take most time first. ``late``: the ranks that cause most of the waiting.
    """

    seconds: float
    waiting: float | None
    steps_per_s: float | None
    calls_per_s: float | None
    share: float | None = None
    rows: tuple[Row, ...] = ()
    late: tuple[LateRank, ...] = ()


def recent_figures(snapshot: Snapshot) -> Figures:
    """Measure the newest calls of all ranks."""
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
        measured = measure_messages(messages, waited, recent.clocks, totals, waits.chains)
        label = snapshot.labels[snapshot.groups.index(messages.group)]
        sources.append(Source(label, 2, measured))
    taking_part = len(np.unique(recent.snapshot.calls["rank"]))
    whole_ns = recent.seconds * 1e9 * max(1, taking_part)
    waiting = None
    if sources_of(recent.tables, recent.messages).is_waiting_known:
        waiting = min(1.0, float(totals.suffered.sum()) / whole_ns)
    return Figures(
        recent.seconds,
        waiting,
        speed.steps_per_s,
        speed.calls_per_s,
        speed.share,
        tuple(rows_by_size(sources)[:_MOST_ROWS]),
        tuple(_late(snapshot, totals)) if (waiting or 0.0) >= _LEAST_SHARE else (),
    )


def _newest(snapshot: Snapshot) -> Snapshot:
    """Keep the calls of a shorter time if there are many, the same time for all ranks."""
    calls = snapshot.calls
    most = max(_NEWEST_CALLS, 16 * len(snapshot.ranks))
    if len(calls) <= most:
        return snapshot
    since_s = np.partition(calls["age_s"], most)[most]
    return replace(snapshot, calls=calls[calls["age_s"] <= since_s])


def _late(snapshot: Snapshot, totals: WaitTotals) -> Iterator[LateRank]:
    caused = totals.caused
    whole = float(caused.sum())
    for rank in np.argsort(-caused, kind="stable")[:_MOST_LATE].tolist():
        if caused[rank] > whole * max(_STANDS_OUT, _TIMES_ITS_SHARE / max(1, len(caused))):
            part = int(totals.lasts.took_part[rank])
            last = int(totals.lasts.times[rank]) / part if part else 0.0
            host = snapshot.ranks[rank].host
            yield LateRank(rank, host, float(caused[rank]) / whole, last)

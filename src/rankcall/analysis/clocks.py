"""Align the clocks of all hosts, by collectives that end on all of them at once.

Ranks of one host share CLOCK_MONOTONIC. Between hosts, the anchors in the rings' headers relate
it to the epoch, but the epoch clocks of two hosts differ by up to seconds. A synchronising
collective ends on all members within its transfer time. So the median difference of its ends on
two hosts, over many collectives, is the offset of their clocks, and a line through the medians of
stretches of the run is their drift. Hosts that share no group are linked through hosts that do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import (
    OP_NAMES,
    CollectiveTable,
    MessageTable,
    RankCollectives,
    Session,
    collective_table,
    columns_of,
    present,
    sessions_of,
    split_by_group,
)
from rankcall.record import SYNCHRONISING
from rankcall.ring.layout import Header
from rankcall.ring.tables import Group
from rankcall.run.load import Run

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SYNC = np.array([name in SYNCHRONISING for name in OP_NAMES])
_SAMPLE = 2048  # collectives read of a group: the median's error falls with the square root
# The run is cut into stretches, and the drift is the slope through their medians. A few late ends
# do not move a median of 16, and 24 stretches give 276 slopes, of which the median counts.
_STRETCHES, _PER_STRETCH = 24, 16
_LATEST_S, _LATEST_EPOCH = 1 << 60, 1 << 62  # ns: 36 years of uptime, the year 2116
_LARGEST_DRIFT = 5e-4  # 500 ppm; no quartz clock drifts more


@dataclass
class HostClock:
    """Translates a host's monotonic ns to ns since the run's origin: ``t + shift + slope * t``."""

    host: str
    base: int  # added first: the anchors' epoch less the run's origin
    shift: float = 0.0
    slope: float = 0.0
    linked: bool = True  # False: no collective links it to the first host; only the epoch does
    error_ns: float = 0.0  # median distance of single collectives from the fit
    ranks: int = 0

    def align(self, mono: Ints) -> Ints:
        """Translate this host's monotonic ns; relative to the run's origin."""
        times: Ints = mono + np.int64(self.base)
        if self.slope:
            times += (times * self.slope + self.shift).astype(np.int64)
        else:
            times += np.int64(round(self.shift))
        return times


class RowClocks:
    """The clocks of several ranks, for times with one column for each rank."""

    def __init__(self, clocks: Sequence[HostClock]) -> None:
        self._base = np.array([clock.base for clock in clocks], np.int64)
        self._shift = np.array([clock.shift for clock in clocks])
        self._slope = np.array([clock.slope for clock in clocks])

    def align(self, mono: Ints) -> Ints:
        """Translate ``[..., rank]``; see ``HostClock.align``."""
        times: Ints = mono + self._base
        if self._slope.any():
            times += (times * self._slope + self._shift).astype(np.int64)
        else:
            times += np.rint(self._shift).astype(np.int64)
        return times


def align_messages(messages: MessageTable, name: str, clocks: Sequence[HostClock]) -> Ints:
    """Return one of a table's columns of times, aligned; ``MISSING`` times have no meaning."""
    times: Ints = messages.columns[name].copy()
    for host in np.unique(messages.columns["host"]).tolist():
        rows = messages.columns["host"] == host
        times[rows] = clocks[host].align(times[rows])
    return times


@dataclass(frozen=True)
class ClockLink:
    """Host ``other``'s clock against ``ref``'s: it reads ``t + offset + slope * t``."""

    ref: int
    other: int
    count: int
    offset: float
    slope: float
    error: float


@dataclass
class RunClocks:
    """The clocks of a run's hosts, and the clock of each ring."""

    hosts: list[HostClock]
    of: dict[tuple[str, str], int]  # by host and boot
    origin_epoch_ns: int  # the epoch at aligned 0, by the first host's clock

    def of_ring(self, header: Header) -> int:
        """Return the index of a ring's clock."""
        return self.of[header.host, header.boot_id]

    def epoch_ns(self, header: Header, mono: Ints) -> Ints:
        """Translate a ring's monotonic ns to epoch ns of the one clock; 0 stays 0.

        A damaged ring's times are clipped to the range of a date.
        """
        known = np.clip(mono, 0, _LATEST_S)
        times = self.hosts[self.of_ring(header)].align(known)
        times += max(0, min(self.origin_epoch_ns, 1 << 61))
        np.clip(times, 0, _LATEST_EPOCH, out=times)
        times[known == 0] = 0
        return times


def anchored(headers: Iterable[Header]) -> RunClocks:
    """Return the clocks of all hosts from the rings' anchors alone."""
    anchors: dict[tuple[str, str], list[int]] = {}
    for header in headers:
        anchor = header.anchor_epoch_ns - header.anchor_mono_ns
        anchors.setdefault((header.host, header.boot_id), []).append(anchor)
    middles = [sorted(values)[len(values) // 2] for values in anchors.values()]
    # Sums stay near 0, where floats are exact: a base maps monotonic ns to ns since the first
    # host's boot.
    origin = middles[0] if middles else 0
    clocks = [
        HostClock(key[0], _within(middle - origin), ranks=len(values))
        for (key, values), middle in zip(anchors.items(), middles, strict=True)
    ]
    return RunClocks(clocks, {key: index for index, key in enumerate(anchors)}, origin)


def _within(value: int) -> int:
    return max(-(1 << 61), min(1 << 61, value))


def align_hosts(clocks: list[HostClock], tables: Iterable[CollectiveTable]) -> None:
    """Set shift and slope of every clock but the first from the collectives that hosts share."""
    best: dict[tuple[int, int], ClockLink] = {}
    if len(clocks) < 2:
        return
    for table in tables:
        for link in _links(table, clocks):
            key = min(link.ref, link.other), max(link.ref, link.other)
            if key not in best or link.count > best[key].count:
                best[key] = link
    _follow_links(clocks, list(best.values()))


def _follow_links(clocks: list[HostClock], links: Sequence[ClockLink]) -> None:
    """Set all clocks by the first host's, over the links, best links first."""
    around: dict[int, list[tuple[int, ClockLink]]] = {}
    for link in sorted(links, key=lambda link: -link.count):
        around.setdefault(link.ref, []).append((link.other, link))
        around.setdefault(link.other, []).append((link.ref, link))
    done, queue = {0}, deque([0])
    while queue:
        here = queue.popleft()
        for there, link in around.get(here, []):
            if there not in done:
                done.add(there)
                queue.append(there)
                _set_clock(clocks[here], clocks[there], link, forward=link.ref == here)
    for index, clock in enumerate(clocks):
        clock.linked = index in done


def _set_clock(here: HostClock, there: HostClock, link: ClockLink, *, forward: bool) -> None:
    """Set ``there`` so that its aligned times agree with those of ``here``."""
    if forward:  # there reads t + offset + slope * t: undo that
        slope = -link.slope / (1 + link.slope)
        shift = -link.offset / (1 + link.slope)
    else:
        slope, shift = link.slope, link.offset
    there.slope = slope + here.slope + slope * here.slope
    there.shift = shift + here.shift + here.slope * shift
    there.error_ns = here.error_ns + link.error


def _links(table: CollectiveTable, clocks: Sequence[HostClock]) -> Iterable[ClockLink]:
    """Compare every host of a group with the one that has most of its members."""
    hosts, counts = np.unique(table.hosts, return_counts=True)
    if len(hosts) < 2:
        return
    columns = np.flatnonzero(_SYNC[table.op])
    columns = columns[:: max(1, len(columns) // _SAMPLE)]
    ends = table.completed[:, columns]
    ends = ends[:, np.flatnonzero(present(ends).all(axis=0))]
    if not ends.size:
        return
    ref = int(hosts[np.argmax(counts)])
    reference = _host_ends(table, ends, ref, clocks)
    for host in hosts:
        if host != ref:
            theirs = _host_ends(table, ends, int(host), clocks)
            yield _fit(ref, int(host), reference, theirs - reference)


def _host_ends(
    table: CollectiveTable, ends: Ints, host: int, clocks: Sequence[HostClock]
) -> Floats:
    """Return when each collective ended on a host: the median of its ranks."""
    base = np.int64(clocks[host].base)
    middle: Floats = np.median(ends[table.hosts == host] + base, axis=0)
    return middle


def _fit(ref: int, other: int, times: Floats, apart: Floats) -> ClockLink:
    """Fit a line through the medians of stretches; a constant if no drift is visible."""
    slope, offset = 0.0, float(np.median(apart))
    stretches = min(_STRETCHES, len(times) // _PER_STRETCH)
    if stretches >= 4:
        order = np.argsort(times, kind="stable")
        pieces = np.array_split(order, stretches)
        x = np.array([np.median(times[piece]) for piece in pieces])
        y = np.array([np.median(apart[piece]) for piece in pieces])
        steep = _theil_sen(x, y)
        # A drift counts if over the whole run it is clearly more than the medians scatter: else the
        # slope would be that of noise, and move the ends of the run apart.
        noise = float(np.median(np.abs(y - steep * x - np.median(y - steep * x))))
        if 4 * noise < abs(steep) * (x[-1] - x[0]) and abs(steep) < _LARGEST_DRIFT:
            slope, offset = steep, float(np.median(apart - steep * times))
    error = float(np.median(np.abs(apart - offset - slope * times)))
    return ClockLink(ref, other, len(times), offset, slope, error)


def _theil_sen(x: Floats, y: Floats) -> float:
    """Return the median slope between any two points: half of them may be wrong."""
    i, j = np.triu_indices(len(x), 1)
    run = x[j] - x[i]
    usable = run > 0
    return float(np.median((y[j] - y[i])[usable] / run[usable])) if usable.any() else 0.0


def align(run: Run) -> RunClocks:
    """Return one clock for all hosts of a run. Only groups that span hosts are read for it."""
    clocks, sessions = anchored(head.header for head in run.heads), sessions_of(run)
    if len(clocks.hosts) < 2:
        return clocks
    members: dict[tuple[Session, Group], list[RankCollectives]] = {}
    for ring in run.iter_rings():
        host, session = clocks.of_ring(ring.header), sessions[ring.path.name]
        by_group = split_by_group(ring, columns_of(ring), host)
        for group, member in by_group.collectives.items():
            known = run.run_groups.get(group)
            if known is None or known.cross_host:
                members.setdefault((session, group), []).append(member)
    align_hosts(
        clocks.hosts,
        (collective_table(*key, group_members) for key, group_members in members.items()),
    )
    return clocks

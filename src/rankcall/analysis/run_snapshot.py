"""From a run's rings to a ``Snapshot``, once or again and again.

If a run holds several rings of one rank, or rings of several jobs, the ones of the last attempt of
one job are chosen. Rings are read one after the other, and only a window of each is kept: its
newest calls, the newest of each group and channel, and all calls that have not ended or have
failed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import (
    CALL,
    COMPLETED,
    GONE,
    OUTSIDE,
    P2P,
    PEER_CLOSED,
    START_SEEN,
    UNKNOWN,
    Calls,
    RankState,
    Snapshot,
    labels_of,
    no_calls,
)
from rankcall.problems import Problem, ProblemKind
from rankcall.process import Viewpoint
from rankcall.ranks import format_ranks
from rankcall.record import FLAG_DEVICE
from rankcall.ring.layout import FOREVER_NS, Header
from rankcall.ring.reader import Head, Ring
from rankcall.ring.tables import CallSite, Group
from rankcall.run.exits import LAUNCHER, Exit, Noted, read_exits, read_states
from rankcall.run.load import Progress, Run

Ints = npt.NDArray[np.int64]

_WINDOW, _ALL_WINDOWS = (64, 1024), 1 << 20  # calls kept of a rank: bounds, and of all ranks
_PER_GROUP = 16  # calls kept of each group, however long ago
_LARGEST = 1 << 62  # a larger count or size is damage
_BEATS_S = 2.0  # two heartbeats: signs of life this close together may be of one moment
_TERMINATED = (-2, -15)  # signals with which a launcher that is stopped ends its workers at once
_AT_ONCE_NS = 500_000_000  # Ctrl-C reaches a launcher and its workers in any order
# Processes of one job live at the same time, but their hosts' clocks may differ by so much.
_APART_S = 60.0
_MOST_WITHOUT_RING = 1 << 16  # ranks of a job without a ring; a larger number is damage
_S = 1e9
# How Gloo and sockets say that the process at the other end is gone.
_CLOSED = re.compile(r"closed by peer|reset by peer|Broken pipe")

ProcessState = Callable[[Header], str]


def snapshot_of_run(
    run: Run,
    progress: Progress | None = None,
    *,
    window: int | None = None,
    newest: int | None = None,
    state_of: ProcessState | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Snapshot:
    """Read where the ranks of a run's last attempt stand.

    Rings that cannot be read, or that do not belong together, are noted in ``Snapshot.problems``.

    Args:
        run: The run to read.
        progress: Called with the number of rings read and the number of all rings.
        window: The number of each rank's newest calls to keep.
        newest: Read only so many records of each ring, for a quick look.
        state_of: Returns the state of a ring's process; by default this host's ``/proc`` tells it.
        now_ns: This host's monotonic clock.
    """
    builder = SnapshotBuilder(run, window=window, state_of=state_of, now_ns=now_ns)
    for ring in run.iter_rings(progress, newest):
        builder.add(ring)
    return builder.finish()


class SnapshotBuilder:
    """Makes a snapshot from rings that its caller reads, so that one reading can serve others, too.

    The arguments are those of ``snapshot_of_run``; ``memo``, of the same run, saves work for rings
    that ``read_ring`` has found unchanged.
    """

    def __init__(
        self,
        run: Run,
        *,
        window: int | None = None,
        state_of: ProcessState | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        memo: WindowMemo | None = None,
    ) -> None:
        self._run, self._now_ns = run, now_ns
        self._state_of = state_of or partial(Header.process_state, here=Viewpoint.current())
        self._problems = list(run.problems)
        self._heads = select_rings(run.heads, self._problems)
        self._mixed = lived_apart(self._heads, self._problems)
        self._chosen = {head.path.name for head in self._heads}
        if window is None:
            window = min(max(_ALL_WINDOWS // max(1, len(self._chosen)), _WINDOW[0]), _WINDOW[1])
        self._windows = _RingWindows(window, has_launcher="nproc_per_node" in run.about)
        if memo is not None:
            memo.begin(self._chosen)
            self._windows.memo, self._windows.groups = memo, memo.groups
            self._windows.sites = memo.sites
        self._noted = read_states(run.path) if run.path.is_dir() else {}

    def add(self, ring: Ring) -> None:
        """Keep the window of one ring, if the ring belongs to the last attempt."""
        if ring.path.name not in self._chosen:
            return
        header = ring.header
        state, moment = self._state_of(header), self._now_ns()
        if state == UNKNOWN:
            noted = self._noted.get((header.boot_id, header.pid, header.process_start))
            if noted is not None and _is_outdated(noted, header):
                noted = None
            state, moment = (noted.state, noted.mono_ns) if noted else (UNKNOWN, moment)
        self._windows.add(ring, state, moment)

    def finish(self) -> Snapshot:
        """Return the snapshot, once all rings have been added."""
        run, problems = self._run, list(self._problems)
        problems += [problem for problem in run.problems if problem not in problems]
        exits = read_exits(run.path) if run.path.is_dir() else []
        world = max((head.header.world_size for head in self._heads), default=_world_of(exits))
        with_ring = {(head.header.rank, head.header.pid) for head in run.heads}
        early = [noted for noted in exits if (noted.rank, noted.pid) not in with_ring]
        snapshot = self._windows.finish(world, exits, early, problems)
        return replace(snapshot, mixed=self._mixed, dumped="evidence" in run.about)


def _world_of(exits: Sequence[Exit]) -> int:
    """Return the number of ranks of a job that left no ring, as far as its launchers noted it."""
    highest = max((noted.rank for noted in exits), default=-1)
    return highest + 1 if highest < _MOST_WITHOUT_RING else 0


def _is_outdated(noted: Noted, header: Header) -> bool:
    """Return whether a process has ended, or has gone on for long, since its state was noted."""
    later = max(_beats(header)) - noted.mono_ns > _APART_S * _S
    return noted.state != GONE and (later or header.closed_ns > noted.mono_ns)


class _Window(NamedTuple):
    """The kept calls of one ring, with their times in ns of its host's clock."""

    calls: Calls
    issued: Ints
    ended: Ints
    last_ns: int  # when the newest call of the ring was issued, or a call ended


@dataclass
class WindowMemo:
    """The windows of an earlier snapshot of the same run, by the ring's name."""

    groups: dict[Group, int] = field(default_factory=dict)
    sites: dict[CallSite, int] = field(default_factory=lambda: {CallSite("", 0, "", ""): 0})
    _rings: frozenset[str] = frozenset()
    _windows: dict[str, tuple[object, object, int, _Window]] = field(default_factory=dict)

    def begin(self, rings: set[str]) -> None:
        """Forget everything if the run has other rings than before: groups may have gone."""
        if rings != self._rings:
            self._rings = frozenset(rings)
            self._windows.clear()
            self.groups.clear()
            for site in list(self.sites)[1:]:
                del self.sites[site]

    def get(self, ring: Ring, most: int) -> _Window | None:
        """Return the window of a ring whose records have not changed."""
        records, tables, size, window = self._windows.get(ring.path.name, (None, None, 0, None))
        same = records is ring.records and tables is ring.tables and size == most
        return window if same else None

    def put(self, ring: Ring, most: int, window: _Window) -> None:
        """Keep a window."""
        self._windows[ring.path.name] = ring.records, ring.tables, most, window


@dataclass(frozen=True)
class _Known:
    """A group with its index, and its members as a set and by group rank."""

    group: Group
    number: int
    members: frozenset[int]
    ranks: npt.NDArray[np.int32]


class _End(NamedTuple):
    """How a process ended, and when by its host's monotonic clock."""

    noted: Exit
    mono_ns: int
    launcher_signal: int  # 0: its launcher was not told to stop, or the process ended before


@dataclass
class _RingWindows:
    """The windows of all rings, in their hosts' own times."""

    window: int
    headers: dict[int, Header] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)  # sign of life
    groups_made: dict[int, int] = field(default_factory=dict)
    now_ns: dict[int, int] = field(default_factory=dict)  # of ranks whose process runs here
    calls: list[Calls] = field(default_factory=list)
    issued: list[Ints] = field(default_factory=list)
    ended: list[Ints] = field(default_factory=list)
    groups: dict[Group, int] = field(default_factory=dict)
    sites: dict[CallSite, int] = field(default_factory=lambda: {CallSite("", 0, "", ""): 0})
    stops: dict[str, Exit] = field(default_factory=dict)  # launchers told to stop, by host
    memo: WindowMemo | None = None
    has_launcher: bool = False  # a launcher of rankcall's notes the ends of the processes
    _of_object: dict[int, _Known] = field(default_factory=dict)

    def add(self, ring: Ring, state: str, now_ns: int) -> None:
        """Keep a window of one ring; the ring itself is not kept."""
        head, records = ring.header, ring.records
        window = self.memo.get(ring, self.window) if self.memo else None
        if window is None:
            window = self._window_of(ring, records[_kept(records, self.window)])
            if self.memo is not None:
                self.memo.put(ring, self.window, window)
        here = state != UNKNOWN
        self.headers[head.rank], self.states[head.rank] = head, state
        self.dropped[head.rank] = ring.dropped + head.inflight_lost
        self.last_ns[head.rank] = max(*_beats(head), window.last_ns)
        self.groups_made[head.rank] = len(ring.tables.groups)
        if here:
            self.now_ns[head.rank] = now_ns
        self.calls.append(window.calls)
        self.issued.append(window.issued)
        self.ended.append(window.ended)

    def _window_of(self, ring: Ring, kept: Calls) -> _Window:
        rank = ring.header.rank
        calls = np.zeros(len(kept), CALL)
        calls["rank"], calls["group"], calls["site"] = rank, -1, 0
        calls["index"] = (kept["commit"] >> 2).astype(np.int64) - 1
        for name in (
            *("kind", "op", "dtype", "reduce_op", "status", "flags", "shape_hash", "tag"),
            "thread",
        ):
            calls[name] = kept[name]
        for name in ("seq", "step", "message_bytes", "in_bytes", "out_bytes"):
            calls[name] = np.minimum(kept[name], np.uint64(_LARGEST))
        calls["root"] = calls["peer"] = -1
        for key in np.unique(kept["group"]):
            group = ring.tables.groups.get(int(key))
            if group is None:
                continue
            known = self._known(group)
            if rank not in known.members:
                continue
            rows = kept["group"] == key
            calls["group"][rows] = known.number
            ranks = known.ranks
            for name in ("root", "peer"):
                local = kept[name][rows]
                sound = (local >= 0) & (local < len(ranks))
                named = ranks[np.where(sound, local, 0)]
                calls[name][rows] = np.where(sound, named, np.where(local < 0, -1, OUTSIDE))
        for key in np.unique(kept["call_site"]):
            site = ring.tables.sites.get(int(key))
            if site is not None:
                number = self.sites.setdefault(site, len(self.sites))
                calls["site"][kept["call_site"] == key] = number
        for key in np.unique(kept["error"][kept["error"] != 0]):
            if _CLOSED.search(ring.tables.strings.get(int(key), "")):
                calls["flags"][kept["error"] == key] |= PEER_CLOSED
        placed = calls["group"] >= 0
        on_device = kept["flags"] & FLAG_DEVICE != 0
        calls["flags"][on_device & (kept["started_ns"] > 0)] |= START_SEEN
        calls["took_s"] = np.where(on_device, kept["device_ms"] / 1e3, np.nan)
        over = np.where(kept["status"] >= COMPLETED, kept["completed_ns"], 0)
        last_ns = 0
        if len(ring.records):
            issued, left = ring.records["enqueued_ns"][-1], ring.records["completed_ns"].max()
            last_ns = max(int(issued), int(left))
        return _Window(
            calls[placed],
            np.ascontiguousarray(kept["enqueued_ns"][placed]),
            np.ascontiguousarray(over[placed]),
            last_ns,
        )

    def _known(self, group: Group) -> _Known:
        """Return a group's index and members; rings that share the object share the look-up."""
        known = self._of_object.get(id(group))
        if known is None or known.group is not group:
            number = self.groups.setdefault(group, len(self.groups))
            ranks = np.array(group.ranks, np.int32)
            known = _Known(group, number, frozenset(group.ranks), ranks)
            self._of_object[id(group)] = known
        return known

    def finish(
        self,
        world_size: int,
        exits: list[Exit],
        early: Sequence[Exit],
        problems: list[Problem],
    ) -> Snapshot:
        """Turn times into ages, and overlay the states with the noted ends of processes.

        ``early`` are the exits of processes that left no ring in any attempt.
        """
        self.stops = {stop.host: stop for stop in exits if stop.rank == LAUNCHER}
        ends = self._ends(exits)
        now = self._now(ends)
        count = max(world_size, 1 + max(self.headers, default=-1))
        without_ring = self._ended_without_ring(early, now)
        ranks = [
            self._state(rank, now, ends.get(rank))
            if rank in self.headers
            else without_ring.get(rank) or RankState(rank, blind=True)
            for rank in range(count)
        ]
        calls = _concatenated([no_calls(), *self.calls])
        nothing = np.zeros(0, np.int64)
        issued, ended = (np.concatenate([nothing, *times]) for times in (self.issued, self.ended))
        times_now = [min(max(now.get(rank, 0), 0), _LARGEST) for rank in range(count)]
        moment = np.array(times_now, np.int64)[calls["rank"]]
        calls["age_s"] = np.maximum(moment - issued, 0) / _S
        calls["ended_s"] = np.where(ended > 0, np.maximum(moment - ended, 0) / _S, np.nan)
        groups = list(self.groups)
        moments = {self.headers[rank].boot_id: moment for rank, moment in now.items()}
        return Snapshot(
            ranks,
            calls,
            groups,
            labels_of(groups, ranks),
            list(self.sites),
            problems,
            moments=moments,
        )

    def _ends(self, exits: list[Exit]) -> dict[int, _End]:
        """Match noted ends to the processes."""
        ends = {}
        for ended in exits:
            head = self.headers.get(ended.rank)
            if head and head.pid == ended.pid:
                moment = ended.epoch_ns - head.anchor_epoch_ns + head.anchor_mono_ns
                ends[ended.rank] = _End(ended, moment, _with_launcher(ended, self.stops))
        return ends

    def _ended_without_ring(
        self, early: Sequence[Exit], now: dict[int, int]
    ) -> dict[int, RankState]:
        """Return the ranks that ended before they had made a ring, as their launcher noted it.

        A process makes its ring when it makes its process group. Its exit counts only if it came
        after the other ranks of this attempt were started: earlier attempts of the run, and other
        jobs in the same directory, have left exits as well.
        """
        states: dict[int, RankState] = {}
        started = min((_started_epoch_ns(head) for head in self.headers.values()), default=0)
        moments = [noted.epoch_ns for noted in early]
        for rank, moment in now.items():
            head = self.headers[rank]
            moments.append(moment - head.anchor_mono_ns + head.anchor_epoch_ns)
        for noted in sorted(early, key=lambda noted: noted.epoch_ns):
            if noted.rank < 0 or noted.code is None or noted.epoch_ns < started:
                continue
            gone_s = (max(moments) - noted.epoch_ns) / _S
            signal_number = _with_launcher(noted, self.stops)
            states[noted.rank] = RankState(
                noted.rank,
                noted.host,
                noted.pid,
                noted.attempt,
                GONE,
                exit=noted.code,
                gone_s=gone_s,
                ended_by_launcher=noted.by_launcher or bool(signal_number),
                launcher_signal=signal_number,
                silent_s=gone_s,
                blind=True,
            )
        return states

    def _now(self, ends: dict[int, _End]) -> dict[int, int]:
        """Return each rank's moment: when its host's rings were read, or the last sign of life.

        All ranks of a host have the same moment, so that their times compare.
        """
        running = {
            self._host(rank)
            for rank, state in self.states.items()
            if rank in self.now_ns and state != GONE
        }
        last: dict[tuple[str, str], int] = {}
        for rank, moment in self.last_ns.items():
            host = self._host(rank)
            if host in running:
                moment = self.now_ns.get(rank, moment)
            elif rank in ends:
                moment = max(moment, ends[rank].mono_ns)
            last[host] = max(last.get(host, 0), moment)
        return {rank: last[self._host(rank)] for rank in self.headers}

    def _host(self, rank: int) -> tuple[str, str]:
        return self.headers[rank].host, self.headers[rank].boot_id

    def _state(self, rank: int, now: dict[int, int], ended: _End | None) -> RankState:
        head, state = self.headers[rank], self.states[rank]
        moment = now[rank]
        # The heartbeat goes on while other rings are read.
        seen = self.now_ns.get(rank, moment) if state not in (GONE, UNKNOWN) else moment
        silent = (seen - self.last_ns[rank]) / _S
        rank_state = RankState(
            rank,
            head.host,
            head.pid,
            head.attempt,
            state,
            silent_s=max(0.0, silent),
            gil_s=max(0.0, (seen - head.python_heartbeat_ns) / _S),
            needs_gil=head.capture == "python",
            closed=head.closed_ns != 0,
            leaving=head.left_ns != 0,
            failure=head.failure,
            told_s=self._told_s(head, moment),
            aborted=head.aborted_ns != 0,
            expects=(head.expect_what or "a long phase") if moment < head.expect_until_ns else "",
            waits_for_work=head.expect_until_ns >= FOREVER_NS,
            expected_s=(moment - head.expect_until_ns) / _S if head.expect_until_ns else None,
            steps=min(head.step, _LARGEST),
            started_s=max(0.0, (moment - head.anchor_mono_ns) / _S),
            groups=self.groups_made[rank],
            dropped=self.dropped[rank],
            tables_lost=min(head.tables_lost, _LARGEST),
        )
        if ended is not None:
            return replace(
                rank_state,
                state=GONE,
                exit=ended.noted.code,
                gone_s=max(0.0, (moment - ended.mono_ns) / _S),
                ended_by_launcher=ended.noted.by_launcher or bool(ended.launcher_signal),
                launcher_signal=ended.launcher_signal,
            )
        if state != GONE:
            return rank_state
        # Its launcher would have noted an earlier end. A launcher lives as long as its ranks.
        host = self._host(rank)
        last = max(
            self.last_ns[host_rank] for host_rank in self.headers if self._host(host_rank) == host
        )
        existed = self.has_launcher and last - self.last_ns[rank] > _BEATS_S * _S
        return replace(rank_state, gone_s=(moment - last) / _S if existed else rank_state.silent_s)

    def _told_s(self, head: Header, moment: int) -> float | None:
        """Return the age of the signal that told a process's launcher to stop, in seconds."""
        stop = self.stops.get(head.host)
        if stop is None or stop.epoch_ns < head.anchor_epoch_ns:
            return None
        told_ns = stop.epoch_ns - head.anchor_epoch_ns + head.anchor_mono_ns
        return max(0.0, (moment - told_ns) / _S)


def _concatenated(parts: list[Calls]) -> Calls:
    """Return calls as one array. By bytes: numpy would compare the fields of each two parts."""
    as_bytes = np.dtype((np.void, CALL.itemsize))
    return np.concatenate([part.view(as_bytes) for part in parts]).view(CALL)


def _with_launcher(ended: Exit, stops: dict[str, Exit]) -> int:
    """Return the signal that stopped a process's launcher, if the process ended because of it."""
    launcher = stops.get(ended.host)
    if launcher is None:
        return 0
    after = ended.epoch_ns >= launcher.epoch_ns - _AT_ONCE_NS
    return -(launcher.code or 0) if after or ended.code in _TERMINATED else 0


def _beats(head: Header) -> tuple[int, ...]:
    """Return the times of a ring's own signs of life, ns."""
    return (
        head.native_heartbeat_ns,
        head.python_heartbeat_ns,
        head.closed_ns,
        head.anchor_mono_ns,
    )


def _kept(records: Calls, window: int) -> npt.NDArray[np.bool_]:
    """Return which of a ring's records to keep."""
    wanted: npt.NDArray[np.bool_] = records["status"] != COMPLETED
    wanted[-window:] = True
    older = slice(0, max(0, len(records) - window))
    for group in np.unique(records["group"]):
        rows = np.flatnonzero((records["group"] == group) & (records["kind"] != P2P))
        wanted[rows[-_PER_GROUP:]] = True
    messages = np.flatnonzero(records["kind"][older] == P2P)
    if len(messages):
        columns = [records[name][messages] for name in ("group", "peer", "tag", "op")]
        keys = np.stack([column.astype(np.int64) for column in columns])
        _, first = np.unique(keys[:, ::-1], axis=1, return_index=True)
        wanted[messages[len(messages) - 1 - first]] = True
    return wanted


def select_rings(heads: Iterable[Head], problems: list[Problem]) -> list[Head]:
    """Choose one ring for each rank: in the last attempt of one job, the one that began last."""
    by_start = sorted(heads, key=lambda head: head.header.anchor_epoch_ns)
    attempt = max((head.header.attempt for head in by_start), default=0)
    by_start = [head for head in by_start if head.header.attempt == attempt]
    ranked = [head for head in by_start if head.header.rank >= 0]
    if len(ranked) < len(by_start):
        left = len(by_start) - len(ranked)
        text = f"{left} processes left a ring without a rank: they are left out"
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    newest: dict[int, Head] = {}
    copies = set()
    for head in _of_one_size(ranked, problems):
        known = newest.get(head.header.rank)
        if known is not None and _process(known.header) != _process(head.header):
            copies.add(head.header.rank)
        newest[head.header.rank] = head
    if copies:
        text = (
            f"several processes left a ring as rank {format_ranks(sorted(copies))}: "
            "the one that started last counts"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    return list(newest.values())


def _of_one_size(heads: Sequence[Head], problems: list[Problem]) -> list[Head]:
    """Keep the rings of the job that started last, if others are of a job of another size.

    An elastic job that grew or shrank leaves such rings. So do files that were mixed up.
    """
    size = next(
        (head.header.world_size for head in reversed(heads) if head.header.world_size > 0), 0
    )
    others = [head for head in heads if head.header.world_size not in (size, 0, -1)]
    if others:
        sizes = format_ranks(sorted({head.header.world_size for head in others}))
        ranks = format_ranks(sorted({head.header.rank for head in others}))
        text = (
            f"rings of a job of {sizes} ranks (rank {ranks}) lie beside those of one of {size}, "
            "which started last: they are left out"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    return [head for head in heads if head not in others]


def lived_apart(heads: Sequence[Head], problems: list[Problem]) -> bool:
    """Tell whether some rings are of different jobs, most likely: their processes never met."""
    if not heads:
        return False
    began = max(head.header.anchor_epoch_ns for head in heads)
    gone = [
        head.header.rank for head in heads if (began - _last_seen_ns(head.header)) / 1e9 > _APART_S
    ]
    if gone:
        text = (
            f"rank {format_ranks(sorted(gone))} was last seen before others began: these files "
            "may be of several jobs, mixed up"
        )
        problems.append(Problem(ProblemKind.MIXED_JOBS, text))
    return bool(gone)


def _process(header: Header) -> tuple[object, ...]:
    return header.host, header.boot_id, header.pid, header.process_start


def _started_epoch_ns(header: Header) -> int:
    """Return when a process was started, as epoch ns of its host.

    The kernel counts that from the boot, in ticks, and goes on counting while a laptop sleeps. The
    monotonic clock does not, so the start is bounded by the making of the ring.
    """
    ticks = os.sysconf("SC_CLK_TCK")
    started_ns = header.process_start * 1_000_000_000 // ticks if header.process_start else 0
    lived_ns = header.anchor_mono_ns - started_ns if started_ns else int(_APART_S * _S)
    return header.anchor_epoch_ns - max(0, lived_ns)


def _last_seen_ns(header: Header) -> int:
    """Return when a process last gave a sign of life, as epoch ns of its host."""
    beats = header.native_heartbeat_ns, header.python_heartbeat_ns, header.closed_ns
    return header.anchor_epoch_ns + max(0, max(beats) - header.anchor_mono_ns)

"""From a run's rings to a ``Snapshot``: where each rank stands.

Rings are read one after the other and only a window of each is kept: its newest calls, the newest
of each group and channel, and whatever has not ended or has failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.chosen import choose, strangers
from rankcall.analysis.state.snapshot import (
    ALIVE,
    CALL,
    GONE,
    UNKNOWN,
    Calls,
    RankState,
    Snapshot,
    labels_of,
    no_calls,
)
from rankcall.processes import LAUNCHER, Exit, process_state, read_exits, read_states
from rankcall.record import FLAG_DEVICE, KINDS, STATUSES
from rankcall.ring.header import Header
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite, Group
from rankcall.run import Progress, Run

Ints = npt.NDArray[np.int64]

_P2P = KINDS.index("p2p")
_COMPLETED = STATUSES.index("completed")
_WINDOW, _ALL_WINDOWS = (64, 1024), 1 << 20  # calls kept of a rank: bounds, and of all ranks
_PER_GROUP = 16  # calls kept of each group, however long ago
_LARGEST = 1 << 62  # no count or size beyond this is believed
_BEATS_S = 2.0  # a process that gave a sign of life so recently is not gone, whatever /proc says
_TERMINATED = (-2, -9, -15)  # what a launcher that is told to stop ends its workers with
_AT_ONCE_NS = 500_000_000  # Ctrl-C reaches a launcher and its workers in any order
_S = 1e9

ProcessState = Callable[[Header], str]


def stand(
    run: Run,
    progress: Progress | None = None,
    *,
    window: int | None = None,
    newest: int | None = None,
    state_of: ProcessState = process_state,
    now_ns: Callable[[], int] = time.monotonic_ns,
) -> Snapshot:
    """Read where the ranks of a run's last attempt stand. ``progress``: (rings read, in all).

    ``window`` is how many of its newest calls are kept of each rank; ``newest`` reads only so many
    records of each ring, for a quick look. ``state_of`` tells what a
    ring's process is doing, and ``now_ns`` is this host's monotonic clock. What cannot be read, or
    does not belong together, is noted in ``Snapshot.problems``.
    """
    problems = list(run.problems)
    heads = choose(run.heads, problems)
    mixed = strangers(heads, problems)
    chosen = {head.path.name for head in heads}
    if window is None:
        window = min(max(_ALL_WINDOWS // max(1, len(chosen)), _WINDOW[0]), _WINDOW[1])
    gathered, noted = _Gathered(window), read_states(run.path) if run.path.is_dir() else {}
    for ring in run.iter_rings(progress, newest):
        if ring.path.name in chosen:
            state, moment = state_of(ring.header), now_ns()
            if state == UNKNOWN:
                head = ring.header
                then = noted.get((head.boot_id, head.pid, head.process_start))
                state, moment = (then.state, then.mono_ns) if then else (UNKNOWN, moment)
            gathered.add(ring, state, moment)
    problems += [text for text in run.problems if text not in problems]
    world = max((head.header.world_size for head in heads), default=0)
    exits = read_exits(run.path) if run.path.is_dir() else []
    return replace(gathered.finish(world, exits, problems), mixed=mixed)


@dataclass(frozen=True)
class _Known:
    """A group: its index, and its members, to look them up and by group rank."""

    group: Group
    number: int
    members: frozenset[int]
    ranks: npt.NDArray[np.int32]


class _End(NamedTuple):
    """How a process ended, by its host's monotonic ns."""

    noted: Exit
    mono_ns: int
    launcher_signal: int  # 0: its launcher was not told to stop, or it ended before that


@dataclass
class _Gathered:
    """What the rings held, in their hosts' own times."""

    window: int
    headers: dict[int, Header] = field(default_factory=dict)
    states: dict[int, str] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)  # sign of life
    now_ns: dict[int, int] = field(default_factory=dict)  # of ranks whose process runs here
    calls: list[Calls] = field(default_factory=list)
    issued: list[Ints] = field(default_factory=list)
    came: list[Ints] = field(default_factory=list)
    ended: list[Ints] = field(default_factory=list)
    groups: dict[Group, int] = field(default_factory=dict)
    sites: dict[CallSite, int] = field(default_factory=lambda: {CallSite("", 0, "", ""): 0})
    _of_object: dict[int, _Known] = field(default_factory=dict)

    def add(self, ring: Ring, state: str, now_ns: int) -> None:
        """Take what matters of one ring; the ring itself is not kept."""
        head, records = ring.header, ring.records
        last = max(_beats(head))
        if len(records):
            last = max(last, int(records["enqueued_ns"][-1]), int(records["completed_ns"].max()))
        here = state != UNKNOWN
        if state == GONE and not head.closed_ns and now_ns - last < _BEATS_S * _S:
            state = ALIVE  # in another pid namespace
        self.headers[head.rank], self.states[head.rank] = head, state
        self.dropped[head.rank] = ring.dropped + head.inflight_lost
        self.last_ns[head.rank] = last
        if here:
            self.now_ns[head.rank] = now_ns
        kept = records[_kept(records, self.window)]
        self._keep(ring, kept)

    def _keep(self, ring: Ring, kept: Calls) -> None:
        rank = ring.header.rank
        calls = np.zeros(len(kept), CALL)
        calls["rank"], calls["group"], calls["site"] = rank, -1, 0
        calls["index"] = (kept["commit"] >> 2).astype(np.int64) - 1
        for name in ("kind", "op", "dtype", "reduce_op", "status", "flags", "shape_hash", "tag"):
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
                calls[name][rows] = np.where(sound, ranks[np.where(sound, local, 0)], -1)
        for key in np.unique(kept["call_site"]):
            site = ring.tables.sites.get(int(key))
            if site is not None:
                number = self.sites.setdefault(site, len(self.sites))
                calls["site"][kept["call_site"] == key] = number
        placed = calls["group"] >= 0
        self.calls.append(calls[placed])
        self.issued.append(np.ascontiguousarray(kept["enqueued_ns"][placed]))
        on_device = (kept["flags"] & FLAG_DEVICE != 0) & (kept["started_ns"] > 0)
        came = np.where(on_device, kept["started_ns"], kept["enqueued_ns"])
        self.came.append(came[placed])
        over = np.where(kept["status"] >= _COMPLETED, kept["completed_ns"], 0)
        self.ended.append(np.ascontiguousarray(over[placed]))

    def _known(self, group: Group) -> _Known:
        """Return a group's index and members; rings that share the object share the look-up."""
        known = self._of_object.get(id(group))
        if known is None or known.group is not group:
            number = self.groups.setdefault(group, len(self.groups))
            ranks = np.array(group.ranks, np.int32)
            known = _Known(group, number, frozenset(group.ranks), ranks)
            self._of_object[id(group)] = known
        return known

    def finish(self, world_size: int, exits: list[Exit], problems: list[str]) -> Snapshot:
        """Turn times into ages, and lay the noted ends over the states."""
        ends = self._ends(exits)
        now = self._now(ends)
        count = max(world_size, 1 + max(self.headers, default=-1))
        ranks = [
            self._state(rank, now, ends.get(rank))
            if rank in self.headers
            else RankState(rank, blind=True)
            for rank in range(count)
        ]
        calls = np.concatenate([no_calls(), *self.calls])
        nothing = np.zeros(0, np.int64)
        issued, came, ended = (
            np.concatenate([nothing, *each]) for each in (self.issued, self.came, self.ended)
        )
        moment = np.array([now.get(rank, 0) for rank in range(count)], np.int64)[calls["rank"]]
        calls["age_s"] = np.maximum(moment - issued, 0) / _S
        calls["came_s"] = np.maximum(moment - came, 0) / _S
        calls["ended_s"] = np.where(ended > 0, np.maximum(moment - ended, 0) / _S, np.nan)
        groups = list(self.groups)
        return Snapshot(ranks, calls, groups, labels_of(groups, ranks), list(self.sites), problems)

    def _ends(self, exits: list[Exit]) -> dict[int, _End]:
        """Match noted ends to the processes."""
        found = {}
        told = {ended.host: ended for ended in exits if ended.rank == LAUNCHER}
        for ended in exits:
            head = self.headers.get(ended.rank)
            if head and (head.pid, head.attempt) == (ended.pid, ended.attempt):
                moment = ended.epoch_ns - head.anchor_epoch_ns + head.anchor_mono_ns
                found[ended.rank] = _End(ended, moment, _with_launcher(ended, told))
        return found

    def _now(self, ends: dict[int, _End]) -> dict[int, int]:
        """Return each rank's moment: when its host's rings were read, or the last life sign there.

        It is one for all ranks of a host, so that their times compare.
        """
        running = {self._host(r) for r, s in self.states.items() if r in self.now_ns and s != GONE}
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
        # A heart beats on while other rings are read.
        seen = self.now_ns.get(rank, moment) if state not in (GONE, UNKNOWN) else moment
        silent = (seen - self.last_ns[rank]) / _S
        found = RankState(
            rank, head.host, head.pid, head.attempt, state,
            silent_s=max(0.0, silent),
            gil_s=max(0.0, (seen - head.python_heartbeat_ns) / _S),
            closed=head.closed_ns != 0,
            leaving=head.left_ns != 0,
            aborted=head.aborted_ns != 0,
            expects=(head.expect_what or "a long phase") if moment < head.expect_until_ns else "",
            expected_s=(moment - head.expect_until_ns) / _S if head.expect_until_ns else None,
            steps=min(head.step, _LARGEST),
            dropped=self.dropped[rank],
            tables_lost=min(head.tables_lost, _LARGEST),
        )  # fmt: skip
        if ended is not None:
            return replace(
                found, state=GONE, exit=ended.noted.code,
                gone_s=max(0.0, (moment - ended.mono_ns) / _S),
                ended_by_launcher=ended.noted.by_launcher or bool(ended.launcher_signal),
                launcher_signal=ended.launcher_signal,
            )  # fmt: skip
        return replace(found, gone_s=found.silent_s) if state == GONE else found


def _with_launcher(ended: Exit, told: dict[str, Exit]) -> int:
    """Return the signal that told a process's launcher to stop, where it ended because of that."""
    launcher = told.get(ended.host)
    if launcher is None:
        return 0
    after = ended.epoch_ns >= launcher.epoch_ns - _AT_ONCE_NS
    return -launcher.code if after or ended.code in _TERMINATED else 0


def _beats(head: Header) -> tuple[int, ...]:
    """Return the times of a ring's own signs of life, ns."""
    return (
        head.native_heartbeat_ns, head.python_heartbeat_ns, head.closed_ns, head.anchor_mono_ns,
    )  # fmt: skip


def _kept(records: Calls, window: int) -> npt.NDArray[np.bool_]:
    """Choose what to keep of one ring's records."""
    wanted: npt.NDArray[np.bool_] = records["status"] != _COMPLETED
    wanted[-window:] = True
    older = slice(0, max(0, len(records) - window))
    for group in np.unique(records["group"]):
        rows = np.flatnonzero((records["group"] == group) & (records["kind"] != _P2P))
        wanted[rows[-_PER_GROUP:]] = True
    messages = np.flatnonzero(records["kind"][older] == _P2P)
    if len(messages):
        columns = [records[name][messages] for name in ("group", "peer", "tag", "op")]
        keys = np.stack([column.astype(np.int64) for column in columns])
        _, first = np.unique(keys[:, ::-1], axis=1, return_index=True)
        wanted[messages[len(messages) - 1 - first]] = True
    return wanted

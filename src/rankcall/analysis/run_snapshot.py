"""From a run's rings to a ``Snapshot``, once or again and again.

``last_attempt`` chooses the rings, ``windows`` keeps some calls of each, ``process_ends`` and
``rank_states`` tell the state of each process. Here, the rings are read one after the other, and
times become ages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rankcall.analysis.last_attempt import lived_apart, select_rings
from rankcall.analysis.last_words import failed_first, with_last_words
from rankcall.analysis.process_ends import ProcessEnds
from rankcall.analysis.rank_states import SeenRing, beats, is_outdated, moments_of, states_of
from rankcall.analysis.snapshot import (
    ALIVE,
    CALL,
    COLLECTIVE,
    GONE,
    LACKS,
    LONGEST_UNNOTICED_S,
    NOTICED_S,
    UNKNOWN,
    Bools,
    Calls,
    RankState,
    Snapshot,
    labels_of,
    no_calls,
    unfinished,
    within_world,
)
from rankcall.analysis.spent import RankSamples, Spending
from rankcall.analysis.windows import LARGEST, Ints, Window, Windows, window_size
from rankcall.process import Viewpoint
from rankcall.record import FLAG_DEVICE, OPS, SYNCHRONISING
from rankcall.ring.layout import Header
from rankcall.ring.reader import Ring
from rankcall.run.exits import Exit, read_exits, read_states
from rankcall.run.load import Progress, Run
from rankcall.run.stderr_tails import tails_of

_MOST_WITHOUT_RING = 1 << 16  # ranks of a job without a ring; a larger number is damage
_S = 1e9
_FRESH_S = 2.0  # four heartbeats: a ring with one so young is what its rank writes into now
_SYNCHRONISING = [OPS.index(name) for name in SYNCHRONISING]

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

    The arguments are those of ``snapshot_of_run``; ``windows`` of earlier snapshots of the same run
    save work for rings that ``read_ring`` has found unchanged.
    """

    def __init__(
        self,
        run: Run,
        *,
        window: int | None = None,
        state_of: ProcessState | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
        windows: Windows | None = None,
    ) -> None:
        self._run, self._now_ns = run, now_ns
        self._state_of = state_of or partial(Header.process_state, here=Viewpoint.current())
        self._problems = list(run.problems)
        self._heads = select_rings(run.heads, self._problems)
        self._mixed = lived_apart(self._heads, self._problems)
        self._chosen = {head.path.name for head in self._heads}
        over = all(head.header.closed_ns for head in self._heads)
        self._size = window_size(len(self._chosen), over=over) if window is None else window
        self._windows = windows or Windows()
        self._windows.begin(self._chosen)
        self._noted = read_states(run.path) if run.path.is_dir() else {}
        self._seen: dict[int, SeenRing] = {}
        self._kept: list[Window] = []
        self._samples: list[RankSamples] = []

    def add(self, ring: Ring) -> None:
        """Keep the window of one ring, if the ring belongs to the last attempt."""
        if ring.path.name not in self._chosen:
            return
        head = ring.header
        state, moment = self._state_of(head), self._now_ns()
        if state == UNKNOWN:
            noted = self._noted.get((head.boot_id, head.pid, head.process_start))
            if noted is not None and not is_outdated(noted, head):
                state, moment = noted.state, noted.mono_ns
        window = self._windows.of(ring, self._size)
        self._kept.append(window)
        runs_until = max(beats(head)) if state in (GONE, UNKNOWN) else moment
        times = window.first_ns, window.last_ns, head.gc_since_ns, runs_until
        self._samples.append(RankSamples(head.rank, ring.samples, *times, head.phase_names))
        self._seen[head.rank] = SeenRing(
            head,
            state,
            last_ns=max(*beats(head), window.last_ns),
            read_ns=None if state == UNKNOWN else moment,
            groups=len(ring.tables.groups),
            dropped=ring.dropped + head.inflight_lost,
        )

    def finish(self) -> Snapshot:
        """Return the snapshot, once all rings have been added."""
        run, problems = self._run, list(self._problems)
        problems += [problem for problem in run.problems if problem not in problems]
        exits = read_exits(run.path) if run.path.is_dir() else []
        ends = ProcessEnds(exits, {rank: ring.header for rank, ring in self._seen.items()})
        moments = moments_of(self._seen, ends)
        ranks = self._ranks(exits, ends, moments)
        groups = list(self._windows.groups)
        snapshot = Snapshot(
            ranks,
            self._calls([moments.get(state.rank, 0) for state in ranks]),
            groups,
            labels_of(groups, ranks),
            list(self._windows.sites),
            problems,
            mixed=self._mixed,
            dumped="evidence" in run.about,
            spending=Spending(sampled=self._samples),
            moments={self._seen[rank].header.boot_id: moment for rank, moment in moments.items()},
        )
        return within_world(snapshot)

    def _ranks(
        self, exits: Sequence[Exit], ends: ProcessEnds, moments: dict[int, int]
    ) -> list[RankState]:
        """Return the states of all ranks of the world; those that left nothing are blind."""
        has_launcher = "nproc_per_node" in self._run.about
        states = states_of(self._seen, ends, moments, has_launcher=has_launcher)
        with_ring = {(head.header.rank, head.header.pid) for head in self._run.heads}
        early = [noted for noted in exits if (noted.rank, noted.pid) not in with_ring]
        without_ring = ends.without_ring(early, moments)
        world = max((head.header.world_size for head in self._heads), default=_world_of(exits))
        ranks = [
            states.get(rank) or without_ring.get(rank) or RankState(rank, blind=True)
            for rank in range(max(world, 1 + max(states, default=-1)))
        ]
        return self._with_words(ranks, exits)

    def _with_words(self, ranks: list[RankState], exits: Sequence[Exit]) -> list[RankState]:
        """Return the states with what the ranks that failed first said last on stderr."""
        failed = [state.rank for state in failed_first(ranks)]
        tails = tails_of(self._run.path, failed) if failed else []
        if not tails:
            return ranks
        began_ns = {noted.rank: noted.epoch_ns for noted in exits}
        began_ns |= {rank: ring.header.anchor_epoch_ns for rank, ring in self._seen.items()}
        return with_last_words(ranks, tails, began_ns)

    def _calls(self, moments: Sequence[int]) -> Calls:
        """Return the calls of all windows, with their ages at the moments of their ranks."""
        calls = _concatenated([no_calls(), *(window.calls for window in self._kept)])
        nothing: Ints = np.zeros(0, np.int64)
        issued = np.concatenate([nothing, *(window.issued for window in self._kept)])
        ended = np.concatenate([nothing, *(window.ended for window in self._kept)])
        bounded = [min(max(moment, 0), LARGEST) for moment in moments]
        moment = np.array(bounded, np.int64)[calls["rank"]]
        calls["age_s"] = np.maximum(moment - issued, 0) / _S
        calls["ended_s"] = np.where(ended > 0, np.maximum(moment - ended, 0) / _S, np.nan)
        known = np.zeros(len(moments), np.int64)
        longest_s = np.full(len(moments), LONGEST_UNNOTICED_S)
        for rank, ring in self._seen.items():
            known[rank] = min(max(ring.header.devices_known_ns, 0), LARGEST)
            if ring.state != ALIVE:  # a process that is stopped or gone does not look
                longest_s[rank] += max(0, bounded[rank] - ring.last_ns) / _S
        known, longest_s = known[calls["rank"]], longest_s[calls["rank"]]
        ago_s = np.clip((moment - known) / _S, 0.0, longest_s)
        calls["noticed_s"] = np.where(known > 0, ago_s, NOTICED_S)
        going_on = [
            rank
            for rank, ring in self._seen.items()
            if ring.state == ALIVE and bounded[rank] - ring.last_ns < _FRESH_S * _S
        ]
        calls["flags"][_lack_a_member(calls, going_on)] |= LACKS
        return calls


def _lack_a_member(calls: Calls, going_on: Sequence[int]) -> Bools:
    """Return which calls in flight on devices cannot be over: a rank that goes on is yet to come.

    Nobody leaves these collectives before the last member has issued them. That is on record at
    once, while nobody may have looked at the devices for long: the look needs the GIL. A rank whose
    own device may be in an earlier call proves nothing: that call may be what hangs.
    """
    in_flight = unfinished(calls) & (calls["flags"] & FLAG_DEVICE != 0)
    held = calls["rank"][in_flight & (calls["age_s"] < calls["noticed_s"])]
    lacking = in_flight & np.isin(calls["op"], _SYNCHRONISING) & (calls["group"] >= 0)
    free = np.isin(calls["rank"], np.setdiff1d(going_on, held)) & (calls["group"] >= 0)
    rows = np.flatnonzero((calls["kind"] == COLLECTIVE) & free)
    if not lacking.any() or not len(rows):
        return np.zeros(len(calls), bool)
    rows = rows[np.lexsort((calls["rank"][rows], calls["group"][rows]))]
    group, rank = calls["group"][rows], calls["rank"][rows]
    changes = (group[1:] != group[:-1]) | (rank[1:] != rank[:-1])
    first = np.flatnonzero(np.concatenate([[True], changes]))
    newest = np.maximum.reduceat(calls["seq"][rows], first)
    all_came = np.full(int(calls["group"].max()) + 1, LARGEST)  # by group: the newest call of all
    np.minimum.at(all_came, group[first], newest)
    return np.asarray(lacking & (calls["seq"] > all_came[calls["group"]]))


def _world_of(exits: Sequence[Exit]) -> int:
    """Return the number of ranks of a job that left no ring, as far as its launchers noted it."""
    highest = max((noted.rank for noted in exits), default=-1)
    return highest + 1 if highest < _MOST_WITHOUT_RING else 0


def _concatenated(parts: list[Calls]) -> Calls:
    """Return calls as one array. By bytes: numpy would compare the fields of each two parts."""
    as_bytes = np.dtype((np.void, CALL.itemsize))
    return np.concatenate([part.view(as_bytes) for part in parts]).view(CALL)

"""Where every rank of a job stands at one moment: the input of a diagnosis.

``run_snapshot`` makes a snapshot from ring files, and ``merge`` joins what several nodes report
about their own ranks. Times are ages in s before the moment, by each host's own clock, so
that differences between hosts' clocks do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.spent import Spending
from rankcall.problems import Problem, ProblemKind
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE, FLAG_NOT_STARTED, KINDS, OPS, STATUSES
from rankcall.ring.tables import CallSite, Group, both_lines
from rankcall.run.load import label_groups
from rankcall.run.stack_text import AWAITED, IN_CALL

# States of a rank's process. Unknown: it is on another host, or left no ring.
ALIVE, STOPPED, GONE, UNKNOWN = "alive", "stopped", "gone", "unknown"

COLLECTIVE, P2P = KINDS.index("collective"), KINDS.index("p2p")
COMPLETED, FAILED = STATUSES.index("completed"), STATUSES.index("failed")
OUTSIDE = -2  # a root or peer outside the group
# How a rank stands with its call; the values are those of JSON.
IN, LEFT, FAILED_IN, END_UNKNOWN = "in", "left", "failed", "end_unknown"
# The end of an op on a device is noticed up to so many s late, if the rank's threads are not kept
# from running. Rings of older versions do not say when their ranks have looked.
NOTICED_S = 2.0
# No busy machine keeps a rank from looking for so long. Its look itself hangs then, as a back end's
# may do with its device, and a verdict must not wait for it.
LONGEST_UNNOTICED_S = 30.0
SEND, RECV = OPS.index("send"), OPS.index("recv")

# In the ``flags`` of a call, beside those of its record.
PEER_CLOSED = 128  # of a failed call: a peer's connection was closed
START_SEEN = 64  # of a call on a device: the back end has said that the device started it
# The caller waits in the function that issued it (``async_op`` is false). On a device, the caller's
# stream waits, and its thread goes on.
BLOCKS = 32
LACKS = 16  # of a collective on devices: a member that goes on is yet to come, so it is not over

Bools = npt.NDArray[np.bool_]
Calls = npt.NDArray[Any]
CALL = np.dtype(
    [
        ("rank", "<i4"),
        ("group", "<i4"),  # index into Snapshot.groups
        ("site", "<i4"),  # index into Snapshot.sites; 0: not known
        ("root", "<i4"),  # global rank; -1: none; -2: not in the group
        ("peer", "<i4"),  # global rank; -1: none, or any source in flight; -2: not in the group
        ("thread", "<u4"),  # kernel's id of the issuing thread; 0: not known
        ("shape_hash", "<u4"),
        ("seq", "<i8"),
        ("tag", "<i8"),
        ("step", "<i8"),
        ("index", "<i8"),  # number of the record among its rank's, from 0
        ("message_bytes", "<i8"),
        ("in_bytes", "<i8"),
        ("out_bytes", "<i8"),
        ("age_s", "<f8"),  # since it was issued
        ("ended_s", "<f8"),  # since it ended, or its device's end was noticed; NaN: it has not
        ("took_s", "<f8"),  # on its device; NaN: not known, or on the CPU
        ("noticed_s", "<f8"),  # what ended on its rank's devices more than so long ago is on record
        ("kind", "u1"),
        ("op", "u1"),
        ("dtype", "u1"),
        ("reduce_op", "u1"),
        ("status", "u1"),
        ("flags", "u1"),
    ]
)


@dataclass(frozen=True)
class RankState:
    """One rank's process. Ages in s; None if there is nothing to measure."""

    rank: int
    host: str = ""
    pid: int = 0
    attempt: int = 0
    state: str = UNKNOWN
    exit: int | None = None  # exit code; negative: the signal that ended it
    gone_s: float | None = None  # since it was gone
    ended_by_launcher: bool = False  # the launcher ended it because another had failed
    launcher_signal: int = 0  # the signal that stopped its launcher, and so this process
    failure: str = ""  # the exception that ended its program
    words: str = ""  # what it said last on stderr, of ranks that failed first (``last_words``)
    told_s: float | None = None  # since its launcher got a signal to stop
    aborted: bool = False  # its own watcher ended it because the job hung
    silent_s: float = 0.0  # since its last sign of life
    gil_s: float = 0.0  # since a Python thread last ran
    in_store_s: float | None = None  # since the thread that trains waits for the job's store
    idle_s: float | None = None  # since its process has used hardly any CPU time
    needs_gil: bool = False  # only a Python thread can give a sign of life
    closed: bool = False  # it stopped recording itself, as at a normal exit
    closed_s: float | None = None  # since then
    leaving: bool = False  # its program has ended; the process may still be closing down
    expects: str = ""  # the phase that it declared to take long, while that phase lasts
    waits_for_work: bool = False  # that phase may last for ever
    expected_s: float | None = None  # since that phase ended; negative: until it ends
    steps: int = 0
    started_s: float | None = None  # since it began to record
    groups: int = 0  # process groups that it has made
    dropped: int = 0  # records overwritten or lost
    tables_lost: int = 0  # groups, lines and error texts that did not fit into its ring
    blind: bool = False  # it left no readable ring, so its calls are not known
    unheard: bool = False  # its node did not answer when asked for its state
    stack: str = ""  # of its Python threads, if it was dumped
    rpc: str = ""  # what its RPC agent waits for and runs (``rpc_calls``), with ages as times

    @property
    def mute_s(self) -> float:
        """Seconds since its last sign of life; for a process that is gone, before its end."""
        return self.silent_s - (self.gone_s or 0.0)

    @property
    def gil_held_s(self) -> float:
        """Seconds in which no Python thread has run; for a process that is gone, before its end."""
        return self.gil_s - (self.gone_s or 0.0)

    @property
    def vanished(self) -> bool:
        """Whether its process is gone, without a note of how, and was not on its way to its end."""
        on_its_way = self.closed or self.leaving or self.aborted
        return self.state == GONE and self.exit is None and not on_its_way

    def may_be_silent(self, hang_after: float) -> bool:
        """Tell whether it is in a declared phase, or left one less than ``hang_after`` s ago.

        Ranks that waited for it meanwhile have the usual patience, from the end of the phase.
        """
        return bool(self.expects) or (self.expected_s is not None and self.expected_s < hang_after)


@dataclass
class Snapshot:
    """A job at one moment. ``ranks`` holds one state for each rank of the world, in order.

    ``calls`` holds each rank's newest calls, and all calls that have not ended or have failed.
    ``spending`` says what each rank spent its time on, if its ring has samples.
    """

    ranks: list[RankState]
    calls: Calls
    groups: list[Group] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of the groups, unique
    sites: list[CallSite] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    mixed: bool = False  # the records may be of several jobs
    # By line: the longest hang there, in s, that the watcher saw pass.
    waited_before: dict[str, float] = field(default_factory=dict)
    dumped: bool = False  # made of dumps: the processes lived when they wrote them
    spending: Spending = field(default_factory=Spending)
    # By boot id: the moment, in ns of that host's monotonic clock.
    moments: dict[str, int] = field(default_factory=dict)

    @property
    def live(self) -> bool:
        """Whether any of the job's processes still exists."""
        return any(state.state in (ALIVE, STOPPED) for state in self.ranks)

    def op(self, row: int) -> str:
        """Return the name of a call's op."""
        return OPS[int(self.calls["op"][row])]

    def site(self, number: int) -> str:
        """Return a call site as ``file:line``; empty if it is not known."""
        return str(self.sites[number]) if 0 < number < len(self.sites) else ""

    def api(self, number: int) -> str:
        """Return the public function that a call site called; empty if it is not known."""
        return self.sites[number].api if 0 < number < len(self.sites) else ""

    def user_line(self, number: int) -> str:
        """Return the user's line behind a framework's call site, or an empty string."""
        return self.sites[number].user_line if 0 < number < len(self.sites) else ""

    def shown_site(self, number: int) -> str:
        """Return a call site for a text: the user's line first, and the framework's beside it."""
        return both_lines(self.site(number), self.user_line(number))


def within_world(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose groups and calls name only ranks that the job has.

    Others are left out, with a line that says so. A file may be damaged or forged, and a process
    that has made a smaller world since keeps the groups of the larger one.
    """
    world, calls = len(snapshot.ranks), snapshot.calls
    known = (calls["peer"] < world) & (calls["root"] < world)
    groups = [
        replace(group, ranks=tuple(rank for rank in group.ranks if rank < world))
        if max(group.ranks, default=-1) >= world
        else group
        for group in snapshot.groups
    ]
    if known.all() and groups == snapshot.groups:
        return snapshot
    text = f"records name ranks that are not among the job's {world:,}: these are left out"
    problems = [*snapshot.problems, Problem(ProblemKind.UNREADABLE, text)]
    return replace(snapshot, calls=calls[known], groups=groups, problems=problems)


def no_calls() -> Calls:
    """Return an empty table."""
    return np.zeros(0, CALL)


def labels_of(groups: Sequence[Group], ranks: Iterable[RankState]) -> list[str]:
    """Return a label for each group, different from all others."""
    known = label_groups(groups, {state.rank: state.host for state in ranks})
    return [known[group].label for group in groups]


def unfinished(calls: Calls) -> Bools:
    """Return which calls are in flight: not ended, and still of interest to their rank."""
    in_flight: Bools = (calls["status"] < COMPLETED) & (calls["flags"] & FLAG_ABANDONED == 0)
    return in_flight


def end_unknown(calls: Calls) -> Bools:
    """Return which calls may have ended or not: they were issued, and nothing more is known.

    Their end cannot be known (``FLAG_ABANDONED``), or their device may have ended them since their
    rank looked.
    """
    new = (calls["flags"] & (FLAG_DEVICE | LACKS) == FLAG_DEVICE) & (
        calls["age_s"] < calls["noticed_s"]
    )
    unknown: Bools = (calls["status"] < COMPLETED) & (new | (calls["flags"] & FLAG_ABANDONED != 0))
    return unknown


def after_first(calls: Calls, rows: Bools) -> Bools:
    """Return which calls their rank has issued after the first of its calls in ``rows``."""
    first = np.full(int(calls["rank"].max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, calls["rank"][rows], calls["index"][rows])
    after: Bools = calls["index"] > first[calls["rank"]]
    return after


def telling_threads(snapshot: Snapshot) -> dict[int, dict[int, str]]:
    """Return by rank the threads whose stacks tell something, each with its mark (``stack_text``).

    First the thread that others wait for, if there is one: it issued the rank's last call in a
    group in which others have issued more. Then those with a call that has not ended, that of the
    oldest call first; not of calls on devices: their threads go on as soon as they have issued.
    """
    calls = snapshot.calls
    threads = {rank: {thread: AWAITED} for rank, thread in _awaited_threads(calls).items()}
    on_host = calls["flags"] & FLAG_DEVICE == 0
    rows = np.flatnonzero(unfinished(calls) & on_host & (calls["thread"] > 0))
    for row in rows[np.argsort(-calls["age_s"][rows], kind="stable")].tolist():
        threads.setdefault(int(calls["rank"][row]), {})[int(calls["thread"][row])] = IN_CALL
    return threads


def _awaited_threads(calls: Calls) -> dict[int, int]:
    """Return by rank the thread of its last call in each group in which it is behind.

    A rank is left out if these are several threads: which of them is waited for is not known.
    """
    known = (calls["group"] >= 0) & (calls["thread"] > 0)
    shared = calls[(calls["kind"] == COLLECTIVE) & known]
    shared = shared[np.lexsort((shared["seq"], shared["rank"], shared["group"]))]
    if not len(shared):
        return {}
    group, rank = shared["group"], shared["rank"]
    is_last = np.append((group[1:] != group[:-1]) | (rank[1:] != rank[:-1]), True)
    last = shared[is_last]  # of each rank in each group
    newest = np.zeros(int(group.max()) + 1, last["seq"].dtype)
    np.maximum.at(newest, last["group"], last["seq"])
    behind = last[last["seq"] < newest[last["group"]]]
    awaited: dict[int, set[int]] = {}
    for of_rank, thread in zip(behind["rank"].tolist(), behind["thread"].tolist(), strict=True):
        awaited.setdefault(of_rank, set()).add(thread)
    return {of_rank: threads.pop() for of_rank, threads in awaited.items() if len(threads) == 1}


def not_started(calls: Calls) -> Bools:
    """Return which calls in flight their device is known not to have started.

    Back ends tell starts only if they are asked to (``TORCH_NCCL_ENABLE_TIMING=1``).
    """
    starts = calls["flags"] & (FLAG_NOT_STARTED | START_SEEN)
    waiting: Bools = (starts == FLAG_NOT_STARTED) & (calls["status"] < COMPLETED)
    return waiting


def failed_for_good(calls: Calls) -> Bools:
    """Return which calls failed, and neither their group nor their thread went on there.

    A rank goes on in a group with a later call of that group that completes. A thread that caught
    the error goes on with a later call that completes, for example in a group that it has made
    anew. Calls of other threads show nothing: they go on beside one that failed.
    """
    failed: Bools = calls["status"] == FAILED
    if not failed.any():
        return failed
    for column in ("group", "thread"):
        failed = failed & ~_went_on(calls, column)
    return failed


def _went_on(calls: Calls, column: str) -> Bools:
    """Return after which calls a later one has completed, of the same rank and ``column``."""
    # One number for both: NumPy takes twenty times as long to tell a million pairs apart.
    keys = calls["rank"].astype(np.int64) << 32 | calls[column].astype(np.int64) & 0xFFFFFFFF
    distinct, which = np.unique(keys, return_inverse=True)
    newest = np.full(len(distinct), -1, np.int64)
    done = calls["status"] == COMPLETED
    np.maximum.at(newest, which[done], calls["index"][done])
    went_on: Bools = calls["index"] < newest[which]
    return went_on


def _left_behind(calls: Calls) -> Bools:
    """Return which sends in flight are not where their rank is: their thread has gone past them.

    A send from the host that does not block is noted as ended when its caller waits for it, and
    that may be many calls later.
    """
    sends: Bools = unfinished(calls) & (calls["op"] == SEND) & (calls["flags"] & FLAG_DEVICE == 0)
    return sends & _went_on(calls, "thread") if sends.any() else sends


def invalid_calls(calls: Calls) -> Bools:
    """Return which calls failed by their own arguments: no other rank has a part in that.

    Their root or peer is not in the group, or their tag is negative.
    """
    outside = (calls["root"] == OUTSIDE) | (calls["peer"] == OUTSIDE)
    invalid: Bools = (calls["status"] == FAILED) & (outside | (calls["tag"] < 0))
    return invalid


class Standings(NamedTuple):
    """Where the ranks stand that have issued calls, in rank order.

    Attributes:
        rows: The row of each rank's call.
        how: How the rank stands with it: ``IN``, ``LEFT``, ``FAILED_IN`` or ``END_UNKNOWN``.
    """

    rows: npt.NDArray[np.int64]
    how: list[str]


def standings(calls: Calls) -> Standings:
    """Return where each rank stands. Whatever shows a rank's place takes it from here.

    A rank is in the oldest call that it is stuck in. Otherwise it stands with its newest call, but
    for sends that it has left behind: it has left that call, or the end is not known. The end is
    not known, either, if its device may still be in a call that it issued before.
    """
    unknown, failed, behind = end_unknown(calls), failed_for_good(calls), _left_behind(calls)
    on_device = unfinished(calls) & (calls["flags"] & FLAG_DEVICE != 0)
    unknown |= on_device & after_first(calls, unknown & on_device)
    stuck = (unfinished(calls) & ~unknown & ~behind) | failed
    order = np.lexsort((calls["index"], ~behind, ~stuck, calls["rank"]))
    _, first = np.unique(calls["rank"][order], return_index=True)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    rows = np.where(stuck[order[first]], order[first], order[last])
    choices = [failed[rows], stuck[rows], unknown[rows]]
    how = np.select(choices, [FAILED_IN, IN, END_UNKNOWN], LEFT)
    return Standings(rows, how.tolist())


@dataclass(frozen=True)
class RankPosition:
    """A rank's process, and the call that the rank stands with.

    ``how``: ``IN``, ``LEFT``, ``FAILED_IN`` or ``END_UNKNOWN``; empty without any call.
    ``age_s``: since it left the call, or, if it is not known to have left it, since it issued it.
    """

    process: RankState
    how: str = ""
    group: str = ""
    group_size: int = 0  # 0: not known
    seq: int = 0
    op: str = ""
    call_site: str = ""
    user_line: str = ""  # the user's own, if the call site is a framework's
    age_s: float = 0.0

    @property
    def in_call(self) -> bool:
        """Whether the rank has not left the call."""
        return self.how in (IN, FAILED_IN)

    @property
    def failed(self) -> bool:
        """Whether the call failed."""
        return self.how == FAILED_IN

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.process.rank

    @property
    def blind(self) -> bool:
        """Whether its calls are not known."""
        return self.process.blind

    @property
    def shown_line(self) -> str:
        """The line of the call: the user's first, if there are two."""
        return both_lines(self.call_site, self.user_line)

    @property
    def shown_state(self) -> str:
        """How the process ended, if it has; else its state."""
        process = self.process
        if process.exit is not None:
            return f"exit {process.exit}" if process.exit >= 0 else f"signal {-process.exit}"
        return "ended" if process.closed and process.state in (GONE, UNKNOWN) else process.state


def rank_positions(snapshot: Snapshot) -> list[RankPosition]:
    """Return the position of every rank, in rank order."""
    rows, how = standings(snapshot.calls)
    calls = snapshot.calls[rows]
    numbers = (calls[name].tolist() for name in ("rank", "group", "seq", "op", "site"))
    since_end = (np.array(how) == LEFT) & ~np.isnan(calls["ended_s"])
    age = np.where(since_end, calls["ended_s"], calls["age_s"])
    at = {call[0]: call for call in zip(*numbers, how, age.tolist(), strict=True)}
    return [_position(snapshot, state, at.get(state.rank)) for state in snapshot.ranks]


# Rank, group, seq, op and site of a call, how the rank stands with it, and the age in s.
_Call = tuple[int, int, int, int, int, str, float]


def _position(snapshot: Snapshot, state: RankState, call: _Call | None) -> RankPosition:
    if call is None:
        return RankPosition(state)
    _, group, seq, op, site, how, age = call
    return RankPosition(
        state,
        how,
        snapshot.labels[group],
        len(snapshot.groups[group].ranks),
        seq,
        OPS[op],
        snapshot.site(site),
        snapshot.user_line(site),
        age,
    )

"""What a finding states: facts in a closed vocabulary, of which ``sentences`` makes its sentences.

A fact has a subject (ranks), a relation, and an object: a call, other ranks, or named values; and a
number with its unit if it states one. Kinds of verdict choose facts, and write no text. Tests
compare facts with the fault that was planted, which cannot be done with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from rankcall.analysis.snapshot import (
    END_UNKNOWN,
    FAILED_IN,
    IN,
    LEFT,
    P2P,
    RECV,
    SEND,
    Snapshot,
    standings,
)
from rankcall.analysis.verdicts.wait import Wait
from rankcall.ring.tables import JOIN
from rankcall.run.frames import CodePlace


class Relation(str, Enum):
    """All that a finding can state. The comment behind each says what must be true for it."""

    # How a process ended, or that it does not run. ``number``: since when, in s.
    KILLED_BY = "killed_by"  # the noted end is this signal. values: signal
    EXITED_WITH = "exited_with"  # the noted end is this exit code. values: code
    FAILED_WITH = "failed_with"  # the process recorded the exception that ended it. values: error
    ENDED_WITH_LAUNCHER = "ended_with_launcher"  # its launcher noted the signal. values: signal
    GONE = "gone"  # the process does not exist, and no end of it was noted
    ENDED_BADLY = "ended_badly"  # ended, each in another one of the ways above
    CONNECTIONS_CLOSED = "connections_closed"  # calls of others failed by that. values: why
    # And nobody noted how. others: the ranks that left no records. values: copied, early
    ENDED_TOGETHER = "ended_together"
    STOPPED = "stopped"  # the kernel says that the process is stopped
    NO_PYTHON_THREAD = "no_python_thread"  # its only heartbeat, which needs the GIL, is so old
    NO_SIGN_OF_LIFE = "no_sign_of_life"  # its heartbeat, which needs no GIL, is so old
    HOLDS_GIL = "holds_gil"  # the native heartbeat goes on, and that of Python is so old
    # It ended, and then others failed with an error that says that a peer was gone. values: error
    ENDED_FIRST = "ended_first"
    ENDED_WITHOUT_RECORDS = "ended_without_records"  # its end was noted, and it left no ring
    HAD_NO_GROUP = "had_no_group"  # the ranks have a ring, and no process group in it
    LEFT_LOOP = "left_loop"  # the program has ended well, or is ending. values: end

    # A rank that others wait for, and that runs.
    DOES_NOT_ANSWER = "does_not_answer"  # its node was asked, and has not answered
    LEFT_NO_RECORDS = "left_no_records"  # there is no ring, or no dump. values: kind
    STOPPED_RECORDING = "stopped_recording"  # its ring was closed long before its process ended
    STILL_IN = "still_in"  # its device has not left an earlier call
    # It issued the call so many s ago, its device has not started it, and the others' have.
    NOT_STARTED = "not_started"
    ALONE_IN = "alone_in"  # no other member has issued the call, and these wait for nothing
    LEFT_BEHIND = "left_behind"  # its device has not left the call, and those of others have
    DUMP_ENDS_BEFORE = "dump_ends_before"  # the newest call in its dump is an earlier one
    # It has not issued the call, and nothing else for so many s. values: a place, if its stack
    # shows one; seen_s: how long before the end its watcher saw it there
    NOT_COME = "not_come"
    GOES_ON = "goes_on"  # it has not issued the call, and goes on with others: its newest one
    NOT_COME_AS_BEFORE = "not_come_as_before"  # an earlier wait at the same line passed
    WAITS_FOR_WORK = "waits_for_work"  # it declared the wait. values: what. others: wait with it
    EARLIER_WAIT_PASSED = "earlier_wait_passed"  # a hang at the line was over. values: line

    # Ranks that wait, and calls on record. ``number``: for how long or how long ago, in s.
    HELD_UP = "held_up"  # ranks issued the call, it has not ended, and others did not issue it
    HELD_UP_ELSEWHERE = "held_up_elsewhere"  # in another call, behind the same ranks
    WAITS_IN = "waits_in"  # ranks issued the call, and it has not ended
    WAITS_IN_TURN = "waits_in_turn"  # for ranks that are held up
    WAITS_FOR = "waits_for"  # ranks are in the call, and others have not come to it
    LAST_LEFT = "last_left"  # the rank's newest call, which has ended
    # The call that the rank is in: its oldest that has not ended. No send that it left behind.
    LAST_IS_IN = "last_is_in"
    LAST_ISSUED = "last_issued"  # the rank's newest call, whose end is not known
    LAST_FAILED = "last_failed"  # the call that failed on the rank
    ISSUED_NOTHING = "issued_nothing"  # the rank has no call on record

    # Members that do not issue the same call.
    ISSUED = "issued"  # the ranks issued this op from this line, under the number
    # The ranks made so many turns of a loop more, which begins with the call, and then issued what
    # the others had issued in place of it
    LOOPED_AGAIN = "looped_again"
    TWO_THREADS = "two_threads"  # of each rank, calls in the group have not ended. values: group
    IN_JOIN = "in_join"  # the call of the ranks is one of their Join's, and that of the others not
    # The ranks had issued this call, before, from another line than others. values: line, theirs
    OTHER_LINE = "other_line"
    SHIFTED = "shifted"  # at least 3 calls equal those of the others this number of calls on
    PASSED = "passed"  # the ranks passed these values to the call. values: by field
    SENDS = "sends"  # the sending end of a message. values: by field
    RECEIVES = "receives"  # the receiving end of a message. values: by field
    UNEQUAL_SPLITS = "unequal_splits"  # the sums over all members differ. values: sent, received
    WENT_THROUGH = "went_through"  # all these calls have ended all the same
    TAGS_DIFFER = "tags_differ"  # two ends of one channel use two tags. values: tags
    # The rank has sent (or received) this number of the channel's messages, and the other rank
    # waits with the next one. values: way ("sent" or "received"), tag, group
    MESSAGES_SO_FAR = "messages_so_far"
    WAIT_FOR_EACH_OTHER = "wait_for_each_other"  # each rank of the circle waits for the next one

    # A job in which nothing moves. ``number``: for how long, in s.
    WAITS_IN_FUNCTION = "waits_in_function"  # their stacks say so. others: which have not come
    ALL_WAIT_IN_FUNCTION = "all_wait_in_function"  # the stacks of all ranks say so
    # The kernel says that their threads sleep on the store's connection. values: line.
    # others: ranks that use no CPU and sleep in their own code; None: not all do.
    WAITS_IN_STORE = "waits_in_store"
    ALL_WAIT_IN_STORE = "all_wait_in_store"  # of all ranks
    NO_GROUP_YET = "no_group_yet"  # the ranks have no process group on record, and others have
    NONE_STARTED = "none_started"  # no rank has a process group
    # No call is known to be in flight, and no rank has issued one. others: those whose newest call
    # may not have ended.
    NONE_ISSUES = "none_issues"
    STANDS_AT = "stands_at"  # the stack shows the line. values: a place

    # Remote procedure calls. ``number``: for how long that has been seen, in s.
    # A thread is in rpc_sync. others: from whom it needs the answer. values: worker, function, line
    RPC_WAITS = "rpc_waits"
    RPC_RUNS = "rpc_runs"  # a thread runs it, and waits for no answer. values: function, line
    RPC_NOT_RUN = (
        "rpc_not_run"  # no thread of the rank was seen to run it. values: worker, function
    )
    RPC_CIRCLE = "rpc_circle"  # each function waits for another one of the circle to return
    # So many of its calls have no answer; to which workers is not known. values: worker, calls
    RPC_UNANSWERED = "rpc_unanswered"

    # A job that goes on, and is slow.
    MAKES_WAIT = "makes_wait"  # the cost for each other rank, in %. values: since_step
    COMES_LATE = "comes_late"  # to this call, by the median of so many s
    # Of all waiting, in %. values: span_s, of ("newest": the job has issued calls before), along,
    # slow_start_s, times ("device": durations there)
    CAUSED_WAITING = "caused_waiting"
    CAME_LAST = "came_last"  # in so many % of the group's collectives. values: collectives
    SLOW_TRANSFER = "slow_transfer"  # once all have come, s. values: op, usual_s, compared, message
    TRANSFERS = "transfers"  # how many were measured. values: most_bytes
    STUCK_TRANSFER = "stuck_transfer"  # all ranks have come, and others do not leave
    STARTED_NOWHERE = "started_nowhere"  # all ranks issued the call, and no device has started it
    START_UNKNOWN = "start_unknown"  # all ranks issued it, others do not leave; who started it?
    STILL_IN_TRANSFER = "still_in_transfer"  # the ranks that do not leave

    # Why: what the ranks spent at least half of that time on, in % of it. values: cause, seconds,
    # of_s (the time that was looked at), full (most of the collections were full ones),
    # without_cpu_s (of the seconds, for a CPU after a wait for a disk), also and also_s (a wait
    # that the cause contains), name (of the phase)
    ABSENT_BECAUSE = "absent_because"  # since their last call
    LATE_BECAUSE = "late_because"  # all along, and more than the others

    # Of the ranks that failed, the one that was first, and those that failed later.
    SAID_LAST = "said_last"  # on stderr: lines that say why it ended. values: text
    # others: the ranks that failed after it. values: at_once, if the order is not known
    FAILED_LATER = "failed_later"

    # The evidence, and its gaps.
    SEEN_AT = "seen_at"  # the watcher kept that stack so long before the end. values: a place
    NOT_KNOWN = "not_known"  # nothing is known of the ranks. values: why
    OVERWRITTEN = "overwritten"  # so many records of the rank are gone, and all of this group

    # What logs say. Their ranks have seldom a host, and their times are those in the text.
    # A launcher wrote so. values: signal, time (torchrun has it: no rank of the node ended before),
    # why (if a line says it of this process)
    ENDED_BY_SIGNAL = "ended_by_signal"
    OWN_ERROR = "own_error"  # its device or process failed, by its own words. values: error
    OWN_EXCEPTION = "own_exception"  # an exception that follows from no other rank. values: error
    CALLED = "called"  # the DETAIL mode of torch wrote so. values: seq, shape, dtype
    # NCCL wrote so when it enqueued them on one communicator, under one number. values: number (its
    # opCount), arguments, size, and pids and host if the ranks are not known
    ENQUEUED = "enqueued"
    LAST_ENQUEUED = "last_enqueued"  # the last such call that the log has, which need not be last
    MODELS_DIFFER = "models_differ"  # DDP compared them. values: has, which others have not
    NOT_AT_BARRIER = "not_at_barrier"  # a monitored barrier missed them so long. values: line
    NOT_AT_SETUP = "not_at_setup"  # nor while a group was made. values: joined, world_size
    # Horovod wrote that others had submitted ops so long before. values: ops, more
    NOT_SUBMITTED = "not_submitted"
    REPORTED_MISSING = "reported_missing"  # by TORCH_NCCL_DESYNC_DEBUG
    # Its last call in the group, which number gives, is before the one that others timed out in.
    BEHIND = "behind"
    MAY_BE_BEHIND = "may_be_behind"  # the same, and it may have waited in another group
    TIMED_OUT_IN = "timed_out_in"  # its watchdog wrote so. values: sizes
    # The ranks waited for others. If their ranks are not known: values: in_group, pid
    TIMED_OUT = "timed_out"
    RANK_NOT_SAID = "rank_not_said"  # there was a failure, and no line says which rank is at fault
    # Something that is no rank did. values: what, and at_start if it kept the job from starting
    ENDED_FROM_OUTSIDE = "ended_from_outside"
    INTERRUPTED_AT = "interrupted_at"  # the traceback of its KeyboardInterrupt. call: op, line
    PROCESS_FAILED = "process_failed"  # whose rank is not known. values: error, pid, host
    # An exception of a process whose rank is not known. values: error, pid, host, worker
    PROCESS_RAISED = "process_raised"
    PROCESS_GONE = "process_gone"  # a framework misses it. values: by, pid, host
    WAITED_FOR = "waited_for"  # a library names whom it waited for. values: peer, pid
    KERNEL_REPORTS = "kernel_reports"  # a device, a port or the processor. values: error, host
    LINK_ERRORS = "link_errors"  # of a host. values: host, end (host or peer), all
    SPAWNED_ENDED = "spawned_ended"  # of torch.multiprocessing. values: process, signal
    # A launcher of a node says so. values: local_rank (or else pid), host, code
    WORKER_ENDED = "worker_ended"
    SAID = "said"  # this line tells most of what is known. values: text, pid, host
    FAILED_FIRST = "failed_first"  # of the ranks that torchrun saw, which can follow from another
    NO_FAILURE_SEEN = "no_failure_seen"  # in so many lines


@dataclass(frozen=True)
class Ranks:
    """Ranks, with their hosts, each once. ``pid``: of a single rank; 0 if it is not known."""

    numbers: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    pid: int = 0


@dataclass(frozen=True)
class CallFact:
    """A call that a fact is about.

    ``function``: the function of torch that issues it among others, such as ``gather_object``.
    ``peer``: the other end of a message that is waited in, -1 for any rank; else None.
    """

    op: str
    seq: int = 0
    group: str = ""
    description: str = ""  # of the group, if it says more than the name
    function: str = ""
    peer: int | None = None
    tag: int = 0
    line: str = ""


@dataclass(frozen=True)
class Fact:
    """One statement. ``ranks`` is its subject; the object is a call, others, or values."""

    relation: Relation
    ranks: Ranks | None = None
    call: CallFact | None = None
    others: Ranks | None = None
    values: tuple[tuple[str, str], ...] = ()  # by name, each name once
    number: float | None = None
    unit: str = ""  # s, %, calls, records, transfers, lines
    confidence: str = "certain"

    def value(self, name: str) -> str:
        """Return a named value; empty if the fact has none."""
        return dict(self.values).get(name, "")


_NO_DESCRIPTIONS = ("default_pg", "undefined")  # torch's own descriptions


def ranks_of(snapshot: Snapshot, ranks: Iterable[int]) -> Ranks:
    """Return ranks with their hosts and, of a single rank, its pid."""
    numbers = tuple(ranks)
    hosts = tuple(host for host in dict.fromkeys(snapshot.ranks[n].host for n in numbers) if host)
    return Ranks(numbers, hosts, snapshot.ranks[numbers[0]].pid if len(numbers) == 1 else 0)


def group_of(snapshot: Snapshot, number: int) -> tuple[str, str]:
    """Return a group's label, and its description if that says more than the label."""
    label, description = snapshot.labels[number], snapshot.groups[number].description
    if description in (*_NO_DESCRIPTIONS, "") or description in label:
        return label, ""
    return label, description


def call_of(snapshot: Snapshot, row: int, site: int | None = None) -> CallFact:
    """Return the call in a row, at its own call site or at another one."""
    call = snapshot.calls[row]
    number = int(call["site"]) if site is None else site
    api = snapshot.sites[int(call["site"])].api if snapshot.sites else ""
    return CallFact(
        snapshot.op(row),
        int(call["seq"]),
        *group_of(snapshot, int(call["group"])),
        function=api if "object" in api or api == JOIN else "",  # it issues several ops
        line=snapshot.shown_site(number),
    )


def call_of_wait(snapshot: Snapshot, wait: Wait) -> CallFact:
    """Return the call that ranks wait in: a collective, or one end of a message."""
    row = int(wait.rows[0])
    if wait.channel is None:
        return call_of(snapshot, row, common_site(snapshot, wait))
    source, target, tag = wait.channel
    call = snapshot.calls[row]
    is_send = int(call["op"]) == SEND
    return CallFact(
        "send" if is_send else "recv",
        wait.seq,
        *group_of(snapshot, int(call["group"])),
        peer=target if is_send else source,
        tag=tag,
        line=snapshot.shown_site(common_site(snapshot, wait)),
    )


def common_site(snapshot: Snapshot, wait: Wait) -> int:
    """Return the call site of most of the waiting ranks, as an index into the snapshot's."""
    sites, counts = np.unique(snapshot.calls["site"][wait.rows], return_counts=True)
    return int(sites[np.argmax(counts)])


def lines_of_site(snapshot: Snapshot, number: int) -> dict[str, str]:
    """Return the fields of a finding that name the line of a call."""
    return {"call_site": snapshot.site(number), "user_line": snapshot.user_line(number)}


def fields_of_wait(snapshot: Snapshot, wait: Wait) -> dict[str, Any]:
    """Return the fields of a finding that name the call that ranks wait in, and since when."""
    return {
        "group": snapshot.labels[wait.group],
        "seq": wait.seq,
        "op": snapshot.op(int(wait.rows[0])),
        **lines_of_site(snapshot, common_site(snapshot, wait)),
        "since_s": wait.age_s,
    }


def place_of(place: CodePlace) -> tuple[tuple[str, str], ...]:
    """Return the values that name a place: ``line``, ``function``, and ``inside`` what of torch."""
    values = ("line", place.line), ("function", place.function), ("inside", place.inside)
    return tuple((name, value) for name, value in values if value)


def hosts_of(snapshot: Snapshot, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return the hosts of some ranks, each once."""
    return ranks_of(snapshot, ranks).hosts


def last_call(snapshot: Snapshot, rank: int) -> Fact:
    """Return the call that a rank stands with, and since when it is in it or has left it."""
    rows = np.flatnonzero(snapshot.calls["rank"] == rank)
    ranks = ranks_of(snapshot, (rank,))
    if not len(rows):
        return Fact(Relation.ISSUED_NOTHING, ranks)
    own = standings(snapshot.calls[rows])
    row, how = int(rows[own.rows[0]]), own.how[0]
    ended, age = (float(snapshot.calls[name][row]) for name in ("ended_s", "age_s"))
    seconds: float | None = age if how in (IN, END_UNKNOWN) else ended
    gone_s = snapshot.ranks[rank].gone_s
    if how == IN and gone_s is not None:  # it was in the call until it ended
        seconds = max(0.0, age - gone_s)
    if how == LEFT and np.isnan(ended):  # a device's call can have ended without a time
        seconds = None
    return Fact(_LAST[how], ranks, _with_peer(snapshot, row), number=seconds, unit="s")


def _with_peer(snapshot: Snapshot, row: int) -> CallFact:
    """Return the call in a row; of a message with its other end, on which its number depends."""
    call, recorded = call_of(snapshot, row), snapshot.calls[row]
    is_known = recorded["peer"] >= (-1 if recorded["op"] == RECV else 0)  # -1: from any rank
    if recorded["kind"] != P2P or not is_known:
        return call
    return replace(call, peer=int(recorded["peer"]), tag=int(recorded["tag"]))


_LAST = {
    IN: Relation.LAST_IS_IN,
    LEFT: Relation.LAST_LEFT,
    FAILED_IN: Relation.LAST_FAILED,
    END_UNKNOWN: Relation.LAST_ISSUED,
}


def not_known(snapshot: Snapshot, ranks: Sequence[int], why: str = "no records") -> Fact:
    """Return that nothing is known of some ranks."""
    return Fact(Relation.NOT_KNOWN, ranks_of(snapshot, ranks), values=(("why", why),))

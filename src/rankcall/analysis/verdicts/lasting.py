"""How long calls have lasted, as far as is known, and how long they may.

On the CPU, a call has lasted since it was issued. On a device, it begins when the device comes to
it, and what is known of it is known from the looks of its rank: what was in flight at the last one
may be over by now.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import BLOCKING
from rankcall.analysis.pace import usual_step_s
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    COMPLETED,
    LACKS,
    LONGEST_UNNOTICED_S,
    P2P,
    SEND,
    Bools,
    Calls,
    Snapshot,
    after_first,
    not_started,
    unfinished,
)
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE

HANG_AFTER_S = 60.0
FIRST_STEP = 5.0  # the first step may take so many times longer
LONG_STEPS = 10.0  # a later call may take so many times the median step
# A call in flight for this part of the threshold is followed to the ranks that it waits for. It
# began with the trouble, or somewhat later; a shorter call may be on its way.
FOLLOWED = 0.1

Floats = npt.NDArray[np.float64]


def patience(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call may be in flight, in s.

    A rank is in its first step while it has finished no step and the call in flight is the first
    one of its kind from its line. A device is in it for longer than its host, which runs ahead. A
    rank may take any time in a phase that it declared to take long.
    """
    calls = snapshot.calls
    later = max(float(hang_after), LONG_STEPS * usual_step_s(snapshot))
    allowed = np.full(len(calls), later)
    stepless = _in_first_step(snapshot)
    kind = _kinds_of_calls(calls)
    done = calls["status"] == COMPLETED
    seen = np.isin(kind, kind[done]) & (calls["site"] > 0)
    allowed[stepless & ~seen] = FIRST_STEP * hang_after
    declared = np.array([state.may_be_silent(hang_after) for state in snapshot.ranks], bool)
    allowed[declared[calls["rank"]]] = np.inf
    return allowed


def _in_first_step(snapshot: Snapshot) -> Bools:
    """Return which calls are of ranks that have finished no step; on devices, of such devices.

    The device of a rank has not finished the first step while a call issued in it is in flight.
    """
    calls = snapshot.calls
    stepless = np.array([state.steps == 0 for state in snapshot.ranks], bool)
    on_device = calls["flags"] & FLAG_DEVICE != 0
    behind = stepless.copy()
    behind[calls["rank"][unfinished(calls) & on_device & (calls["step"] == 0)]] = True
    in_first: Bools = np.where(on_device, behind[calls["rank"]], stepless[calls["rank"]])
    return in_first


def _kinds_of_calls(calls: Calls) -> npt.NDArray[np.int64]:
    """Return a number for each call, the same for calls of one rank, line and kind.

    A line of a program is not enough: a pipeline's step is one line, and its first gradient comes
    long after its first activation, from a rank that does its first backward pass meanwhile.
    """
    kind = np.zeros(len(calls), np.int64)
    for name in ("rank", "site", "group", "op", "dtype", "peer"):
        values = calls[name].astype(np.int64)
        low = values.min(initial=0)
        kind = kind * (values.max(initial=0) - low + 1) + values - low
    return kind


def followed_after(snapshot: Snapshot, hang_after: float) -> Floats:
    """Return how long each call must be in flight before it is followed, in s."""
    return np.minimum(patience(snapshot, hang_after), hang_after) * FOLLOWED


def held_for(snapshot: Snapshot) -> Floats:
    """Return how long each call has held its rank or its device up, in s.

    A message on the CPU that was issued to be waited for later does not hold a rank up while the
    rank goes on.

    Hosts run ahead of their devices, so a call on a device may have been issued long before the
    device comes to it, and what the host has issued since is no sign that the device goes on. A
    collective has held the device up for no longer than since the last end of a collective of its
    group was noticed: those end in order. Messages keep no order, so one has held the device up for
    no longer than since the last end of any call on it. Nor has it for longer than until its rank
    last looked: what was in flight then may be over by now, unless a member is yet to come.
    """
    calls, lasted = snapshot.calls, _in_flight_for(snapshot)
    if snapshot.live:
        lasted -= np.where(calls["flags"] & LACKS != 0, 0.0, since_look(calls))
    return np.maximum(lasted, 0.0)


def idle_calls(snapshot: Snapshot, unseen: Bools, allowed: Floats) -> Bools:
    """Return which calls their devices had not started when their rank looked, after a while.

    If a call before may be over since, this one may have been started since.
    """
    idle = not_started(snapshot.calls) & ~unseen
    if snapshot.live and idle.any():
        idle &= ~after_first(snapshot.calls, unseen & (snapshot.calls["flags"] & LACKS == 0))
        lasted = _in_flight_for(snapshot) - since_look(snapshot.calls)
        idle &= lasted >= allowed * FOLLOWED
    return idle


def _in_flight_for(snapshot: Snapshot) -> Floats:
    """Return how long each call has held its rank or its device up, if it goes on until now."""
    calls, ranks = snapshot.calls, len(snapshot.ranks)
    lasted: Floats = calls["age_s"].copy()
    if not snapshot.live:
        return lasted
    rank = calls["rank"].astype(np.int64)
    on_device, messages = calls["flags"] & FLAG_DEVICE != 0, calls["kind"] == P2P
    blocking = [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]
    loose = messages & ~np.isin(calls["site"], blocking)
    host_went_on = np.fmin(calls["age_s"], calls["ended_s"])
    # If the end of a call cannot be known, its issue is all that tells when the device went on.
    is_unknown = on_device & (calls["flags"] & FLAG_ABANDONED != 0)
    device_went_on = np.where(is_unknown, calls["age_s"], np.inf)
    is_over = on_device & (calls["status"] == COMPLETED)
    device_went_on[is_over] = calls["ended_s"][is_over]
    rows = loose & ~on_device
    _limit(lasted, rows, host_went_on, rank, ranks)
    rows = messages & on_device
    _limit(lasted, rows & loose, np.where(on_device, device_went_on, host_went_on), rank, ranks)
    _limit(lasted, rows & ~loose, device_went_on, rank, ranks)
    rows = on_device & (calls["kind"] == COLLECTIVE)
    ended = np.where(is_over & rows, calls["ended_s"], np.inf)
    groups = len(snapshot.groups) + 1
    _limit(lasted, rows, ended, rank * groups + calls["group"], ranks * groups)
    in_flight = unfinished(calls) & on_device
    if in_flight.any():
        # Those that came first waited for the last one, and nothing was amiss.
        may_end_s, complete = _may_end(snapshot, in_flight)
        lasted[complete] = np.minimum(lasted, may_end_s)[complete]
    return lasted


def since_look(calls: Calls) -> Floats:
    """Return how long ago the rank of each call on a device has looked there, in s.

    0 on the CPU. A rank that has not for very long does look: its look hangs, with the device.
    """
    noticed = (calls["flags"] & FLAG_DEVICE != 0) & (calls["noticed_s"] < LONGEST_UNNOTICED_S)
    since: Floats = np.where(noticed, calls["noticed_s"], 0.0)
    return since


def _limit(
    lasted: Floats, rows: Bools, went_on: Floats, queue: npt.NDArray[np.int64], queues: int
) -> None:
    """Let calls in ``rows`` have lasted no longer than since their queue last went on.

    Args:
        lasted: The seconds that each call has lasted; changed in place.
        rows: The calls that a sign of their queue's progress concerns.
        went_on: How long ago each call showed that its queue went on, in s; infinity: not at all.
        queue: The queue of each call.
        queues: How many there are.
    """
    if rows.any():
        since = np.full(queues, np.inf)
        np.fmin.at(since, queue, went_on)
        lasted[rows] = np.minimum(lasted[rows], since[queue[rows]])


def unseen_calls(snapshot: Snapshot) -> Bools:
    """Return which calls in flight may have ended since their rank looked at its devices.

    No view says of a rank that it is in a call whose end may not have been noticed yet, so no
    verdict may say so either. A collective may end for all once its last member has issued it.
    Whether that member has looked since does not matter: one that is stopped never does, and the
    others hang.
    """
    calls = snapshot.calls
    in_flight: Bools = unfinished(calls) & (calls["flags"] & FLAG_DEVICE != 0)
    if not in_flight.any():
        return in_flight
    may_end_s, _ = _may_end(snapshot, in_flight)
    over: Bools = in_flight & (may_end_s < calls["noticed_s"])
    return over


def _may_end(snapshot: Snapshot, in_flight: Bools) -> tuple[Floats, Bools]:
    """Return since when each call may have ended for all, in s ago, and whether all have come.

    A call on devices may end once its last member, or its other end, has issued it, and may have
    ended for all, at the latest, when its end was noticed on one rank. A receive from any rank may
    end since its issue, and so may calls on the CPU.

    Args:
        snapshot: The calls.
        in_flight: The calls of which it is asked. The calls of other members are read as far back
            as the oldest look of the ranks of these.
    """
    calls = snapshot.calls
    since, complete = calls["age_s"].copy(), np.zeros(len(calls), bool)
    oldest_s = calls["noticed_s"][in_flight].max(initial=0.0)
    collective = calls["kind"] == COLLECTIVE
    between = (calls["flags"] & FLAG_DEVICE != 0) & (
        collective | ((calls["kind"] == P2P) & (calls["peer"] >= 0))
    )
    newer = (calls["age_s"] < oldest_s) | (calls["ended_s"] < oldest_s)
    rows = np.flatnonzero(between & (in_flight | newer))
    if len(rows):
        _, which, count = np.unique(
            _places(calls[rows]), axis=1, return_inverse=True, return_counts=True
        )
        which = which.ravel()
        last_came = np.full(len(count), np.inf)
        np.fmin.at(last_came, which, since[rows])
        noticed = np.full(len(count), -np.inf)
        np.fmax.at(noticed, which, calls["ended_s"][rows])
        has_ended = noticed >= 0
        may_end = np.where(has_ended, np.minimum(last_came, noticed), last_came)
        sizes = np.array([*(len(group.ranks) for group in snapshot.groups), 0])
        members = np.where(collective[rows], sizes[calls["group"][rows]], 2)
        since[rows] = may_end[which]
        complete[rows] = has_ended[which] | (count[which] == members)
    return since, complete


def _places(calls: Calls) -> npt.NDArray[np.int64]:
    """Return a column for each call, the same for the members of a collective and for both ends."""
    rank, peer = calls["rank"].astype(np.int64), calls["peer"].astype(np.int64)
    is_message, sends = calls["kind"] == P2P, calls["op"] == SEND
    source, target = np.where(sends, [rank, peer], [peer, rank])
    places = [calls["group"], calls["seq"], source, target, calls["tag"]]
    return np.stack([*places[:2], *(np.where(is_message, place, -1) for place in places[2:])])

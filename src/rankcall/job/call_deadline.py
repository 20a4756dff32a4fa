"""``within``: a deadline for the calls of one block, and an error that names the absent ranks.

Only torch can end a call that waits. Gloo's collectives end by the timeout that their group had
when they were issued, so the block gives the groups a shorter one. If a call ends by it, the rings
of this node say which ranks have not come.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import COLLECTIVE, COMPLETED, GONE, STOPPED, Snapshot
from rankcall.analysis.verdicts.facts import call_of, last_call, ranks_of
from rankcall.analysis.verdicts.naming import name_call, name_ranks
from rankcall.analysis.verdicts.sentences import evidence
from rankcall.analysis.verdicts.wording import count_of
from rankcall.background import BackgroundCall
from rankcall.capture import session
from rankcall.capture.recording import Recording
from rankcall.durations import Duration, seconds
from rankcall.errors import CallTimeout
from rankcall.run.load import load

_WINDOW = 64  # calls kept of each rank
_READ_S = 5.0  # for the rings of the node, which are small and in memory
_STATES = {GONE: "; its process has ended", STOPPED: "; its process is stopped"}
_SHOWN = 8  # absent ranks whose last call the error shows
_EXPIRED = re.compile(r"timed out", re.IGNORECASE)
# The rank whose deadline expires first closes its connections, which ends the calls of the others.
_CLOSED = re.compile(r"closed by peer|reset by peer|broken pipe", re.IGNORECASE)


@contextlib.contextmanager
def within(seconds: Duration) -> Iterator[None]:
    """Give each collective of a block a deadline: ``with rankcall.within(30): dist.barrier()``.

    If one does not end in time, the error names the ranks that have not come to it, and what they
    do instead. Ranks of other nodes, and jobs without recording, leave no records here; the error
    says so.

    Torch itself ends the call, by the timeout that its group has in the block. So this works for
    Gloo's collectives, those of DistributedDataParallel included. Gloo's sends, receives and
    monitored barriers have timeouts of their own, and NCCL's calls return before they end: for
    these, use ``work.wait(timeout)`` or ``init_process_group(timeout=...)``. As after any timeout
    of torch's, the group cannot be used afterwards. A collective that another thread issues during
    the block gets the deadline as well.

    Args:
        seconds: How long a collective may take, in seconds or as a ``timedelta``.

    Raises:
        CallTimeout: A collective did not end in time.
        ValueError: ``seconds`` is not positive and finite, or no process group is Gloo's.
        TypeError: ``seconds`` is neither a number nor a ``timedelta``.
    """
    timeout_s = _seconds(seconds)
    began = time.monotonic()
    try:
        with _timeouts.of(timeout_s):
            yield
    except RuntimeError as error:
        late = _explained(error, timeout_s, began)
        if late is None:
            raise
        raise late from error


def _seconds(given: Duration) -> float:
    timeout_s = seconds(given, "seconds")
    if timeout_s == math.inf:
        raise ValueError("seconds must be finite: leave within() out for no deadline")
    return timeout_s


class _Timeouts:
    """The timeouts of this process's Gloo groups while blocks run, in any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: list[timedelta] = []  # of each block that runs
        self._usual: dict[str, timedelta] = {}  # of each group, before the first of the blocks

    @contextlib.contextmanager
    def of(self, timeout_s: float) -> Iterator[None]:
        """Shorten the timeouts of all groups for a block."""
        timeout = timedelta(seconds=timeout_s)
        if not _gloo_backends():
            raise ValueError(
                "within() ends calls of Gloo groups, and this process has none: for NCCL, pass "
                "init_process_group(timeout=...)"
            )
        with self._lock:
            self._active.append(timeout)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._active.remove(timeout)
                self._set()
                if not self._active:
                    self._usual.clear()

    def _set(self) -> None:
        """Set each group's timeout to the shortest that applies."""
        # By name, because a reference to a group would keep its store's server listening.
        for name, backend in _gloo_backends():
            usual = self._usual.setdefault(name, backend.options._timeout)
            backend._set_default_timeout(min([usual, *self._active]))


_timeouts = _Timeouts()


def _gloo_backends() -> list[tuple[str, Any]]:
    """Return the Gloo back ends of this process's groups, each with its name."""
    if not dist.is_available() or not dist.is_initialized() or not dist.is_gloo_available():
        return []
    backends: dict[int, tuple[str, Any]] = {}  # one back end may serve several devices
    for group in list(dist.distributed_c10d._world.pg_map):
        for device in getattr(group, "_device_types", ()):
            with contextlib.suppress(RuntimeError):  # the group has no back end for this device
                backend = group._get_backend(device)
                if isinstance(backend, dist.ProcessGroupGloo):
                    backends.setdefault(id(backend), (f"{group.group_name} {device.type}", backend))
    return list(backends.values())


@dataclass(frozen=True)
class _Absence:
    """A collective that did not end, and which members have not come to it."""

    call: str
    members: int
    missing: tuple[int, ...]
    unknown: tuple[int, ...]  # they left no records here
    text: str  # names the missing
    lines: tuple[str, ...]  # what they do instead


def _explained(error: RuntimeError, timeout_s: float, began: float) -> CallTimeout | None:
    """Return the error to raise instead of torch's; None if no deadline ended the call."""
    text = str(error)
    has_expired = _EXPIRED.search(text) is not None and time.monotonic() - began >= timeout_s
    if not has_expired and not _CLOSED.search(text):
        return None
    recording = session.current()
    absence, why = None, "this job is not recorded: start it by rankcall run"
    if recording is not None and recording.run_dir is not None:
        absence, why = _read(recording, began)
    if not has_expired and (absence is None or not absence.missing):
        return None
    return _error(absence, why, timeout_s, text)


def _read(recording: Recording, began: float) -> tuple[_Absence | None, str]:
    """Return who is absent, or why that is not known."""
    call = BackgroundCall(lambda: _absence(recording, began), "rankcall-within")
    if not call.ended(_READ_S):
        call.give_up()
        return None, f"the records of this node could not be read in {_READ_S:g} s"
    try:
        return call.outcome(), "its record is not there"
    except Exception as error:
        return None, f"the records of this node cannot be read: {type(error).__name__}: {error}"


def _absence(recording: Recording, began: float) -> _Absence | None:
    """Find the collective of this rank that did not end, and its members, in the node's rings."""
    assert recording.run_dir is not None
    run = load(recording.run_dir).only(recording.identity.attempt, tails_of=())
    snapshot = snapshot_of_run(run, window=_WINDOW)
    calls = snapshot.calls
    mine = (calls["rank"] == recording.rank()) & (calls["kind"] == COLLECTIVE)
    # The end of the call may not be in its record yet: another thread writes it.
    open_or_failed = calls["status"] != COMPLETED
    in_block = calls["age_s"] <= time.monotonic() - began
    rows = np.flatnonzero(mine & open_or_failed & in_block)
    if not len(rows):
        return None
    row = int(rows[np.argmin(calls["index"][rows])])
    members = snapshot.groups[int(calls["group"][row])].ranks
    here = calls["group"] == calls["group"][row]
    came = here & (calls["kind"] == COLLECTIVE) & (calls["seq"] >= calls["seq"][row])
    absent = sorted(set(members) - set(calls["rank"][came].tolist()))
    unknown = tuple(rank for rank in absent if snapshot.ranks[rank].blind)
    missing = tuple(rank for rank in absent if rank not in unknown)
    text = name_ranks(ranks_of(snapshot, missing)) if missing else ""
    lines = tuple(_doing(snapshot, rank) for rank in missing[:_SHOWN])
    return _Absence(name_call(call_of(snapshot, row)), len(members), missing, unknown, text, lines)


def _doing(snapshot: Snapshot, rank: int) -> str:
    """Say what a rank that has not come does instead."""
    (line,) = evidence([last_call(snapshot, rank)])
    return line + _STATES.get(snapshot.ranks[rank].state, "")


def _error(absence: _Absence | None, why: str, timeout_s: float, cause: str) -> CallTimeout:
    if absence is None:
        text = f"a collective did not end within {timeout_s:g} s; which ranks are missing is not "
        return CallTimeout(f"{text}known: {why}. torch: {cause}", timeout_s=timeout_s)
    arrived = absence.members - len(absence.missing) - len(absence.unknown)
    text = f"{absence.call} did not end within {timeout_s:g} s: {arrived:,} of "
    text += f"{count_of(absence.members, 'rank')} came"
    if absence.missing:
        text += f"; missing {absence.text}"
    if absence.unknown:
        text += f"; {count_of(len(absence.unknown), 'rank')} left no records on this node"
    lines = "".join(f"\n  {line}" for line in absence.lines)
    return CallTimeout(
        f"{text}. torch: {cause}{lines}",
        missing_ranks=absence.missing,
        unknown_ranks=absence.unknown,
        timeout_s=timeout_s,
    )

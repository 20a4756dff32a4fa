"""What to do when an attempt of a job has failed: one table, and the first row that fits decides.

A failure of the *program* comes back: an exception at a line, ranks that issue different calls. To
restart once is worth it, because the machine may be at fault all the same. A failure of the
*machine* does not come back at the same step, so the job is restarted as long as it gets further.

The table ends every job of one node:

* If the program tells which steps it has saved, four failures in a row end the job of which none
  is at a later step than all before. So a job that is restarted for ever would have no last step.
* If it does not tell, steps are counted from 0 in each attempt, and a count proves no progress of
  the job. Then the job is restarted at most ``max_recoveries`` times, however long that takes.

A test tries both for all orders of failures (``tests/unit/recovery/test_policy_model.py``). On
several nodes, the program may tell on one node only, which lets the others know before each
attempt. If it tells on no node, a window of time is the only limit of restarts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankcall.run.recoveries import Signature

PROGRAM, MACHINE, UNCLEAR = "program", "machine", "unclear"
UNKNOWN = "unknown"  # the kind of a failure that could not be looked at
MAX_RECOVERIES = 10
WINDOW_S = 3600.0
# A node that is short of memory or whose network is down for a moment is often well again after
# seconds. A longer pause than a minute costs more than an attempt that fails at its start.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
# Recoveries in a row. The pauses before them are 2, 4 and 8 s: what is not well by then, such as a
# full disk or a host without a network, is hardly ever mended by one more restart.
_MOST_WITHOUT_PROGRESS = 3

# Ranks that disagree about their calls do so because of their code or their data.
_PROGRAM_KINDS = frozenset({"desync", "mismatch", "exhausted", "deadlock", "alone"})
_MACHINE_KINDS = frozenset({"stopped", "slow_link", "stuck"})
# A process gets these from outside. Other signals come of what its code did.
_MACHINE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGBUS, signal.SIGSTOP})
# Errors of a device, and of connections: the network, or the process at the other end is gone. The
# node of that process decides as well, and may know more.
_PEER_GONE = (
    *("closed by peer", "reset by peer", "Broken pipe", "Connection refused"),
    # torch's store: "Failed to recv, got 0 bytes. Connection was likely closed.", "The client
    # socket has failed to connect to any network address"
    *("Connection was likely closed", "failed to connect to any network address"),
)
_DEVICE_ERRORS = "CUDA error", "NCCL error", "ECC", "device-side", "DistBackendError", "Xid"


@dataclass(frozen=True)
class Failure:
    """How one attempt ended.

    ``step`` is the step of the job as far as it is known, -1 if it is not. ``progressed`` says that
    the job got further since the failure before. ``by_window`` says that only the
    recoveries within the window count against the limit: the program has told of a checkpoint, so
    ``step`` is one of the whole job. Otherwise it counts the steps of this attempt alone, each
    attempt that takes a step seems to get further, and all recoveries count.
    """

    signature: Signature
    family: str
    step: int = -1
    progressed: bool = False
    seconds: float = 0.0  # when, on a clock that all failures of a job share
    by_window: bool = False


@dataclass(frozen=True)
class Limits:
    """The most recoveries in a time window, in s."""

    max_recoveries: int = MAX_RECOVERIES
    window_s: float = WINDOW_S


@dataclass(frozen=True)
class Case:
    """A failure, and the failures before it that the job was restarted after, oldest first."""

    failure: Failure
    earlier: Sequence[Failure] = ()
    limits: Limits = Limits()

    @property
    def recent(self) -> int:
        """The number of recoveries that count against the limit.

        Those are the ones in the window that ends now; all of them if nothing proves that the job
        gets further between them.
        """
        if not self.failure.by_window:
            return len(self.earlier)
        since = self.failure.seconds - self.limits.window_s
        return sum(failure.seconds > since for failure in self.earlier)

    @property
    def repeats(self) -> int:
        """How often this failure has come before, at the same step.

        Failures of which nothing is known are not the same ones. Two at the start of an attempt are
        not, either, if the job got further between them: all starts look alike.
        """
        if self.failure.signature.kind == UNKNOWN:
            return 0
        earlier = self.earlier
        if self.failure.step <= 0:
            count = self.without_progress - 1  # this failure is the last of them
            earlier = earlier[len(earlier) - count :] if count > 0 else ()
        return sum(
            (failure.signature, failure.step) == (self.failure.signature, self.failure.step)
            for failure in earlier
        )

    @property
    def without_progress(self) -> int:
        """How many attempts in a row, this one included, got no further."""
        count = 0
        for failure in (self.failure, *reversed(self.earlier)):
            if failure.progressed:
                break
            count += 1
        return count


@dataclass(frozen=True)
class Decision:
    """What to do: restart after a pause, or stop."""

    rule: str
    stops: bool
    reason: str
    delay_s: float = 0.0


@dataclass(frozen=True)
class Row:
    """A row of the policy. ``when`` and ``then`` say for people what the functions do."""

    rule: str
    when: str
    then: str
    fits: Callable[[Case], bool]
    stops: bool
    reason: Callable[[Case], str]
    delay_s: Callable[[Case], float] = lambda case: 0.0


def _where(case: Case) -> str:
    step = case.failure.step
    if step == 0:
        return "before an optimizer step was seen"
    return f"at step {step:,}" if step >= 0 else "at a step that is not known"


def _repeated(case: Case) -> str:
    return f"this failure repeats {_where(case)}: restarting will not help"


def _pause_s(case: Case) -> float:
    return min(_FIRST_PAUSE_S * 2.0 ** (case.without_progress - 1), _LONGEST_PAUSE_S)


def _too_many(case: Case) -> str:
    times = f"the job was restarted {case.recent} time{'' if case.recent == 1 else 's'}"
    if case.failure.by_window:
        window = f"{case.limits.window_s:g} s"
        return f"{times} within {window}, which is the limit (--max-recoveries, --recovery-window)"
    return (
        f"{times}, which is the limit (--max-recoveries) for a program that does not tell of its "
        "progress by rankcall.checkpointed"
    )


_UNSEEN = " (if they did get further: rankcall.checkpointed tells rankcall so)"

# The rows that stop come first, so that no row which restarts can keep one of them from its case.
POLICY: tuple[Row, ...] = (
    Row(
        "too_many",
        "the job was restarted --max-recoveries times: within --recovery-window if it tells of its "
        "checkpoints or has several nodes, otherwise since it began",
        "stop",
        lambda case: case.recent >= case.limits.max_recoveries,
        stops=True,
        reason=_too_many,
    ),
    Row(
        "repeats",
        "the program is at fault, and has failed in the same way at the same step before",
        "stop",
        lambda case: case.failure.family == PROGRAM and case.repeats >= 1,
        stops=True,
        reason=_repeated,
    ),
    Row(
        "repeats_twice",
        "it is not clear what is at fault, and the job has failed so at the same step twice before",
        "stop",
        lambda case: case.failure.family == UNCLEAR and case.repeats >= 2,
        stops=True,
        reason=_repeated,
    ),
    Row(
        "no_progress",
        f"more than {_MOST_WITHOUT_PROGRESS} attempts in a row got no further, whatever failed",
        "stop",
        lambda case: case.without_progress > _MOST_WITHOUT_PROGRESS,
        stops=True,
        reason=lambda case: (
            f"{case.without_progress} attempts in a row got no further: something is wrong that a "
            f"restart does not mend{'' if case.failure.by_window else _UNSEEN}"
        ),
    ),
    Row(
        "try_again",
        "the program is at fault or it is not clear what is, and this failure is new",
        "restart",
        lambda case: case.failure.family != MACHINE,
        stops=False,
        reason=lambda case: "this failure is new at this step",
    ),
    Row(
        "goes_on",
        "the machine is at fault, and the attempt got further than those before it",
        "restart",
        lambda case: case.without_progress == 0,
        stops=False,
        reason=lambda case: "the machine is at fault, and the job makes progress",
    ),
    Row(
        "backs_off",
        "the machine is at fault, and the attempt got no further",
        f"restart after a pause, from {_FIRST_PAUSE_S:g} s on and twice as long each time",
        lambda case: True,
        stops=False,
        reason=lambda case: "the machine is at fault, and this attempt got no further",
        delay_s=_pause_s,
    ),
)


def decide(case: Case) -> Decision:
    """Return what the first row that fits says. The last row fits always."""
    row = next(row for row in POLICY if row.fits(case))
    return Decision(row.rule, row.stops, row.reason(case), row.delay_s(case))


def is_of_peer(error: str) -> bool:
    """Return whether an error says that a connection broke: another rank may have failed."""
    return any(words in error for words in _PEER_GONE)


def family_of(kind: str, code: int | None, error: str, *, certain: bool = True) -> str:
    """Return what is at fault, the program or the machine, if that is clear.

    Args:
        kind: The kind of the verdict's finding; empty without one.
        code: How the culprit ended: its exit status, or the negative number of a signal. None if it
            was not the first to end, for example because it hung.
        error: The exception that ended it; empty without one.
        certain: Whether the finding is. A signal has certainly stopped a process. One that only
            gives no sign of life may be held by its program, for example by a thread with the GIL.
    """
    if kind in _PROGRAM_KINDS:
        return PROGRAM
    if kind == "stopped" and not certain:
        return UNCLEAR
    if kind in _MACHINE_KINDS:
        return MACHINE
    if is_of_peer(error) or any(words in error for words in _DEVICE_ERRORS):
        return MACHINE
    if kind not in ("", "dead"):
        return UNCLEAR
    if code is None:
        return PROGRAM if error else UNCLEAR
    return MACHINE if -code in _MACHINE_SIGNALS or code == 128 + signal.SIGKILL else PROGRAM

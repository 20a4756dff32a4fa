"""What to do when an attempt of a job has failed: one table, and the first row that fits decides.

A failure of the *program* comes back: an exception at a line, ranks that issue different calls. To
restart once is worth it, because the machine may be at fault all the same. A failure of the
*machine* does not come back at the same step, so the job is restarted as long as it gets further.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankcall.run.recoveries import Signature

PROGRAM, MACHINE, UNCLEAR = "program", "machine", "unclear"
MAX_RECOVERIES = 10
WINDOW_S = 3600.0
EXIT_STATUS = 65  # EX_DATAERR of sysexits.h: the same input will fail again
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 60.0
_MOST_WITHOUT_PROGRESS = 3  # recoveries in a row

# Ranks that disagree about their calls do so because of their code or their data.
_PROGRAM_KINDS = frozenset({"desync", "mismatch", "exhausted", "deadlock", "alone"})
_MACHINE_KINDS = frozenset({"stopped", "slow_link", "stuck"})
# A process gets these from outside. Other signals come of what its code did.
_MACHINE_SIGNALS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGBUS, signal.SIGSTOP})
_DEVICE_ERRORS = ("CUDA error", "NCCL error", "ECC", "device-side", "DistBackendError", "Xid")


@dataclass(frozen=True)
class Failure:
    """How one attempt ended.

    ``step`` is the step of the job as far as it is known, -1 if it is not. ``progressed`` says that
    the attempt got further than those before it.
    """

    signature: Signature
    family: str
    step: int = -1
    progressed: bool = False
    seconds: float = 0.0  # when, on a clock that all failures of a job share


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
        """The number of recoveries in the window that ends now."""
        since = self.failure.seconds - self.limits.window_s
        return sum(failure.seconds > since for failure in self.earlier)

    @property
    def repeats(self) -> int:
        """How often this failure has come before, at the same step."""
        return sum(
            (failure.signature, failure.step) == (self.failure.signature, self.failure.step)
            for failure in self.earlier
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
        return "before the first optimizer step"
    return f"at step {step:,}" if step >= 0 else "at a step that is not known"


def _repeated(case: Case) -> str:
    return f"this failure repeats {_where(case)}: restarting will not help"


def _pause_s(case: Case) -> float:
    return min(_FIRST_PAUSE_S * 2.0 ** (case.without_progress - 1), _LONGEST_PAUSE_S)


POLICY: tuple[Row, ...] = (
    Row(
        "too_many",
        "the job was restarted --max-recoveries times within --recovery-window",
        "stop",
        lambda case: case.recent >= case.limits.max_recoveries,
        stops=True,
        reason=lambda case: (
            f"the job was restarted {case.recent} times within {case.limits.window_s:g} s, "
            "which is the limit (--max-recoveries, --recovery-window)"
        ),
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
        f"the machine is at fault, and {_MOST_WITHOUT_PROGRESS} attempts in a row or fewer got no "
        "further",
        f"restart after a pause, from {_FIRST_PAUSE_S:g} s on and twice as long each time",
        lambda case: case.without_progress <= _MOST_WITHOUT_PROGRESS,
        stops=False,
        reason=lambda case: "the machine is at fault, and this attempt got no further",
        delay_s=_pause_s,
    ),
    Row(
        "no_progress",
        "the machine is at fault, and more attempts in a row got no further",
        "stop",
        lambda case: True,
        stops=True,
        reason=lambda case: (
            f"{case.without_progress} attempts in a row got no further: something is wrong that a "
            "restart does not mend"
        ),
    ),
)


def decide(case: Case) -> Decision:
    """Return what the first row that fits says. The last row fits always."""
    row = next(row for row in POLICY if row.fits(case))
    return Decision(row.rule, row.stops, row.reason(case), row.delay_s(case))


def family_of(kind: str, code: int | None, error: str) -> str:
    """Return what is at fault, the program or the machine, if that is clear.

    Args:
        kind: The kind of the verdict's finding; empty without one.
        code: How the culprit ended: its exit status, or the negative number of a signal. None if it
            was not the first to end, for example because it hung.
        error: The exception that ended it; empty without one.
    """
    if kind in _PROGRAM_KINDS:
        return PROGRAM
    if kind in _MACHINE_KINDS:
        return MACHINE
    if any(words in error for words in _DEVICE_ERRORS):
        return MACHINE
    if kind not in ("", "dead"):
        return UNCLEAR
    if code is None:
        return PROGRAM if error else UNCLEAR
    return MACHINE if -code in _MACHINE_SIGNALS or code == 128 + signal.SIGKILL else PROGRAM

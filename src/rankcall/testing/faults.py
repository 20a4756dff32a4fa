"""Faults as a plan: which rank does what, at which collective, and how it strikes.

The Python capture applies a plan to an op before it records and issues the op. So no function of
torch is wrapped, and faults strike however a collective is issued (by DDP's reducer, FSDP, DTensor
or a pipeline). Without a plan nothing is installed.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from rankcall import durations
from rankcall.durations import Duration
from rankcall.testing.injection import Fault, Injection

T = TypeVar("T")
CHANGES = ("shape", "dtype", "root", "reduce_op", "tag")
FOR_EVER = float("inf")


@dataclass(frozen=True)
class FaultPlan:
    """Faults to plant. Each method returns a new plan with one more fault; a plan never changes.

    For example, ``FaultPlan().stop(rank=2, at="all_reduce", seq=17)`` stops rank 2 before it issues
    its 17th collective, or the first all_reduce after that. Every method that plants a fault at an
    op takes these arguments:

    * ``rank``: the rank at which the fault strikes.
    * ``at``: the op, a name of ``rankcall.record.OPS``. By default any op.
    * ``seq``: the lowest sequence number, as the record has it in its group.
    * ``group``: a group's name or description. By default any group.

    A fault strikes once, or ``times`` times. The Python capture applies the faults, so it does the
    recording; the native capture passes each op on in C++. Apply a plan with
    ``spawn_ranks(..., faults=plan)``, or call ``plan.arm()`` in each rank.
    """

    faults: tuple[Fault, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.faults + other.faults)

    # Faults of the process.

    def stop(
        self, rank: int, at: str | None = None, seq: int = 1, *, group: str | None = None
    ) -> FaultPlan:
        """Stop the process (SIGSTOP) before the op is issued."""
        return self._with(Fault("signal", rank, at, seq, group, number=signals.SIGSTOP))

    def kill(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        signal: int = signals.SIGKILL,
    ) -> FaultPlan:
        """Kill the process by a signal before the op is issued."""
        return self._with(Fault("signal", rank, at, seq, group, number=int(signal)))

    def exit(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        code: int = 0,
    ) -> FaultPlan:
        """Raise ``SystemExit`` instead of issuing the op; ``code`` is the exit status."""
        return self._with(Fault("exit", rank, at, seq, group, number=code))

    def fail(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        message: str = "injected",
    ) -> FaultPlan:
        """Raise ``InjectedFault`` instead of issuing the op."""
        return self._with(Fault("fail", rank, at, seq, group, text=message))

    def hang(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        hold_gil: bool = False,
    ) -> FaultPlan:
        """Hang before the op is issued, in Python, or in C with the GIL held."""
        kind = "hold_gil" if hold_gil else "delay"
        return self._with(Fault(kind, rank, at, seq, group, seconds=FOR_EVER))

    def delay(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        seconds: Duration,
        times: int = 1,
    ) -> FaultPlan:
        """Sleep before the op is issued. With a large ``times`` the rank is a straggler."""
        return self._with(
            Fault(
                "delay",
                rank,
                at,
                seq,
                group,
                times,
                seconds=durations.seconds(seconds, "seconds", zero=True),
            )
        )

    # Faults in what it issues.

    def skip(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        times: int = 1,
    ) -> FaultPlan:
        """Do not issue the op; the program goes on as if it had completed.

        A skipped send leaves an unmatched receive on its peer.
        """
        return self._with(Fault("skip", rank, at, seq, group, times))

    def swap(
        self, rank: int, at: str | None = None, seq: int = 1, *, group: str | None = None
    ) -> FaultPlan:
        """Issue the op after the next one of any group, which is the wrong order."""
        return self._with(Fault("swap", rank, at, seq, group))

    def change(
        self,
        rank: int,
        what: str,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
    ) -> FaultPlan:
        """Issue the op with another ``shape``, ``dtype``, ``root``, ``reduce_op`` or ``tag``.

        ``what`` names the argument to change. Tensors become twice as long. The dtype becomes
        float64, or float32 if it is float64. The root and the tag increase by one. The reduce op
        becomes max, or min if it is max. The op works on copies, so the program's own tensors keep
        their contents.
        """
        if what not in CHANGES:
            raise ValueError(f"cannot change {what!r}; choose one of {', '.join(CHANGES)}")
        return self._with(Fault("change", rank, at, seq, group, text=what))

    def slow_link(self, src: int, dst: int, *, seconds: Duration) -> FaultPlan:
        """Make every receive of ``dst`` from ``src`` take ``seconds`` longer."""
        return self._with(
            Fault(
                "slow_link",
                dst,
                "recv",
                times=1 << 62,
                number=src,
                seconds=durations.seconds(seconds, "seconds", zero=True),
            )
        )

    # Faults in its data.

    def exhaust(self, rank: int, after: int) -> FaultPlan:
        """End the rank's data after ``after`` batches of ``FaultPlan.batches``."""
        if after < 0:
            raise ValueError(f"after must be 0 or more batches; got {after}")
        return self._with(Fault("exhaust", rank, number=after))

    def batches(self, data: Iterable[T], rank: int) -> Iterator[T]:
        """Yield the batches that this rank gets under the plan."""
        limits = [
            fault.number for fault in self.faults if (fault.kind, fault.rank) == ("exhaust", rank)
        ]
        for done, batch in enumerate(data):
            if limits and done >= min(limits):
                return
            yield batch

    # The plan at work.

    def arm(self, rank: int | None = None) -> Injection:
        """Plant this rank's faults in this process; ``stop()`` of the result removes them.

        ``rank`` is by default the rank that the environment or torch says. This starts recording
        with the Python capture if nothing is recording. Raises ``CaptureUnavailableError`` if the
        native capture is recording (set ``RANKCALL_CAPTURE=python``) or another plan is armed.
        """
        return Injection(self.faults, rank)

    def _with(self, fault: Fault) -> FaultPlan:
        return FaultPlan((*self.faults, fault))

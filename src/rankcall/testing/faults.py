"""Faults as a plan: which rank does what, at which collective.

A plan is applied where the Python capture records: before an op is numbered and issued. So no
function of torch is wrapped, every way to issue a collective is reached (DDP's reducer, FSDP,
DTensor, pipelines), and without a plan nothing is there.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from rankcall.record import OPS

if TYPE_CHECKING:
    from rankcall.testing._inject import Injection

T = TypeVar("T")
CHANGES = ("shape", "dtype", "root", "reduce_op", "tag")
FOR_EVER = float("inf")


class InjectedFault(RuntimeError):
    """Raised on a rank by ``FaultPlan.fail``."""


@dataclass(frozen=True)
class Fault:
    """One entry of a plan. ``at``, ``seq`` and ``group`` say at which op; None: at any."""

    kind: str
    rank: int
    at: str | None = None
    seq: int = 1
    group: str | None = None
    times: int = 1
    number: int = 0  # what the kind needs: a signal, an exit code, batches, a peer
    seconds: float = 0.0
    text: str = ""

    def __post_init__(self) -> None:
        """Check what can be checked without a job."""
        if self.rank < 0:
            raise ValueError(f"a fault needs a rank from 0 on; got {self.rank}")
        if self.at is not None and self.at not in OPS[1:]:
            raise ValueError(f"unknown op {self.at!r}; there are {', '.join(OPS[1:])}")
        if self.seq < 1:
            raise ValueError(f"sequence numbers count from 1; got {self.seq}")
        if self.times < 1:
            raise ValueError(f"a fault happens once or more often; got times={self.times}")
        if not self.seconds >= 0:
            raise ValueError(f"seconds must not be negative; got {self.seconds}")


@dataclass(frozen=True)
class FaultPlan:
    """Faults to plant. Each method returns a plan with one more; a plan never changes.

    ``FaultPlan().stop(rank=2, at="all_reduce", seq=17)``: rank 2 stops itself where it would
    issue its 17th collective, at the first all_reduce from there on. ``at`` is a name of
    ``rankcall.record.OPS`` (any op without it), ``seq`` the number that the record has in its
    group (the first that is as large), ``group`` a group's name or description. Each happens
    once, or ``times``.

    Faults are planted where the Python capture records, so that is what records; the native one
    hands each op on in C++. Apply a plan by ``spawn_ranks(..., faults=plan)``, or in each rank by
    ``plan.arm()``.
    """

    faults: tuple[Fault, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __add__(self, other: FaultPlan) -> FaultPlan:
        return FaultPlan(self.faults + other.faults)

    # --- the process ---

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
        """Leave the program by ``SystemExit`` where the op would be issued."""
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
        """Raise ``InjectedFault`` where the op would be issued."""
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
        """Hang before the op is issued: in Python, or in C with the GIL held."""
        kind = "hold_gil" if hold_gil else "delay"
        return self._with(Fault(kind, rank, at, seq, group, seconds=FOR_EVER))

    def delay(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        seconds: float,
        times: int = 1,
    ) -> FaultPlan:
        """Sleep before the op is issued: with many ``times`` the rank is a straggler."""
        return self._with(Fault("delay", rank, at, seq, group, times, seconds=seconds))

    # --- what is issued ---

    def skip(
        self,
        rank: int,
        at: str | None = None,
        seq: int = 1,
        *,
        group: str | None = None,
        times: int = 1,
    ) -> FaultPlan:
        """Leave the op out; the program goes on as if it had completed.

        A send left out is an unmatched receive on its peer.
        """
        return self._with(Fault("skip", rank, at, seq, group, times))

    def swap(
        self, rank: int, at: str | None = None, seq: int = 1, *, group: str | None = None
    ) -> FaultPlan:
        """Issue the op after the next one, of whatever group: the wrong order."""
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

        Tensors become twice as long; float64 takes the place of another dtype (float32 that of
        float64); root and tag count one further; max takes the place of another reduce op (min
        that of max). The op works on copies: the program's own tensors keep what they hold.
        """
        if what not in CHANGES:
            raise ValueError(f"{what!r} cannot be changed; there are {', '.join(CHANGES)}")
        return self._with(Fault("change", rank, at, seq, group, text=what))

    def slow_link(self, src: int, dst: int, *, seconds: float) -> FaultPlan:
        """Have every receive of ``dst`` from ``src`` take ``seconds`` longer."""
        return self._with(
            Fault("slow_link", dst, "recv", times=1 << 62, number=src, seconds=seconds)
        )

    # --- its data ---

    def exhaust(self, rank: int, after: int) -> FaultPlan:
        """Let the rank's data run out ``after`` so many batches of ``FaultPlan.batches``."""
        if after < 0:
            raise ValueError(f"a rank has no fewer than 0 batches; got {after}")
        return self._with(Fault("exhaust", rank, number=after))

    def batches(self, data: Iterable[T], rank: int) -> Iterator[T]:
        """Yield the data as this rank gets them under the plan."""
        most = [each.number for each in self.faults if (each.kind, each.rank) == ("exhaust", rank)]
        for done, batch in enumerate(data):
            if most and done >= min(most):
                return
            yield batch

    # --- applying it ---

    def arm(self, rank: int | None = None) -> Injection:
        """Plant this rank's faults in this process, from now on; ``remove()`` takes them out.

        ``rank`` is found out where the environment or torch says it. Recording goes on with the
        Python capture, which is started where there is none. Raises ``CaptureUnavailable`` where
        the native one is recording (set ``RANKCALL_CAPTURE=python``) or another plan is armed.
        """
        from rankcall.testing._inject import Injection

        return Injection(self, rank)

    def _with(self, fault: Fault) -> FaultPlan:
        return FaultPlan((*self.faults, fault))

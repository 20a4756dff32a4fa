"""The model of a synthetic run: a job in lock step, its true times, and faults that hang it.

Before each op every rank computes for some time, with a jitter, and longer on a straggler. Then
the op synchronises its members. All times are in ns of one true clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.record import FROM_ROOT, SYNCHRONISING, TO_ROOT

Times = npt.NDArray[np.int64]
OPEN = -2  # as an end: the op has not ended
NEVER = -1  # as an arrival: the rank never issued the op

# Faults that keep their ranks from issuing the op. With the other kinds, all ranks issue it and
# hang in it.
_HALTING = ("missing", "dead", "stopped", "exhausted")
FAULT_KINDS = (*_HALTING, "desync", "mismatch", "deadlock")


@dataclass(frozen=True)
class Op:
    """One line of a synthetic program.

    Attributes:
        op: A name of ``record.OPS``, or ``exchange``: each member sends to the next member and
            receives from the previous one.
        message_bytes: The size of one rank's tensor; for all_gather, of the whole output.
        family: The name of a set of disjoint groups. Each group runs the op among its members.
        root: The root's rank within its group.
        line: The number of the source line.
        function: The function around it.
        transfer_ms: The time that the op takes; by default it follows from ``Pace``.
        code: The text of the source line.
    """

    op: str = "all_reduce"
    message_bytes: int = 1 << 20
    family: str = "world"
    root: int = 0
    line: int = 10
    function: str = "train_step"
    transfer_ms: float | None = None
    code: str = ""


@dataclass(frozen=True)
class Pace:
    """How long computing and transfers take."""

    compute_ms: float = 2.0
    jitter_ms: float = 0.05
    end_jitter_ms: float = 0.02
    gbps: float = 10.0
    latency_ms: float = 0.05

    def transfer_ns(self, op: Op) -> float:
        """Return the time that an op takes after all members have arrived."""
        if op.transfer_ms is not None:
            return op.transfer_ms * 1e6
        return self.latency_ms * 1e6 + op.message_bytes / self.gbps


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        kind: The kind of the finding that the fault must lead to.
        ranks: The culprits. In a deadlock, each of them waits to receive from the next one.
        at: The index of the op at which the fault strikes.
    """

    kind: str
    ranks: tuple[int, ...]
    at: int

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ValueError(f"a fault is one of {', '.join(FAULT_KINDS)}; got {self.kind!r}")
        if not self.ranks or self.at < 0:
            raise ValueError(
                f"a fault needs ranks, and an op's index from 0 on; got {self.ranks} and {self.at}"
            )


def simulate(
    issued: Sequence[Op],
    families: Mapping[str, list[list[int]]],
    slow: npt.NDArray[np.float64],
    pace: Pace,
    rng: np.random.Generator,
) -> tuple[Times, Times]:
    """Return when each rank arrived at each op and when it left, in true ns."""
    arrivals = np.full((len(issued), len(slow)), -1, np.int64)
    ends = np.full_like(arrivals, -1)
    now = rng.uniform(0, 1e6, len(slow))
    members = {key: [np.array(g) for g in value] for key, value in families.items()}
    for row, op in enumerate(issued):
        for ranks in members[op.family]:
            compute = pace.compute_ms * 1e6 + slow[ranks]
            arrived = now[ranks] + compute + rng.exponential(pace.jitter_ms * 1e6, len(ranks))
            left = _leave(op, arrived, pace.transfer_ns(op))
            left = left + rng.exponential(pace.end_jitter_ms * 1e6 + 1e-9, len(ranks))
            arrivals[row, ranks], ends[row, ranks] = arrived, left
            now[ranks] = left
    return arrivals, ends


def _leave(op: Op, arrived: npt.NDArray[np.float64], transfer: float) -> npt.NDArray[np.float64]:
    """Return when each member leaves, from the arrivals of the members that it waits for."""
    if op.op in FROM_ROOT:
        return np.asarray(np.maximum(arrived, arrived[op.root]) + transfer)
    left: npt.NDArray[np.float64]
    if op.op in TO_ROOT:
        left = arrived + transfer
        left[op.root] = arrived.max() + transfer
        return left
    if op.op == "exchange":
        return np.maximum(arrived, np.roll(arrived, 1)) + transfer
    if op.op not in SYNCHRONISING:
        raise ValueError(f"a synthetic run has no op {op.op!r}")
    together: npt.NDArray[np.float64] = np.full(len(arrived), float(arrived.max()) + transfer)
    return together


def plant(
    issued: Sequence[Op],
    families: Mapping[str, Sequence[Sequence[int]]],
    arrivals: Times,
    ends: Times,
    faults: Sequence[Planted],
) -> int:
    """Remove the arrivals and ends that the faults prevent; return the time of the last event.

    Args:
        issued: The ops of the program, in order.
        families: The groups of each family.
        arrivals: When each rank arrived at each op, ``[op, rank]``; changed in place.
        ends: When each rank left each op, ``[op, rank]``; changed in place.
        faults: The faults.
    """
    stuck = np.zeros(arrivals.shape[1], bool)
    for row, op in enumerate(issued):
        changed = np.zeros_like(stuck)
        for fault in faults:
            if fault.kind in _HALTING and row >= fault.at:
                stuck[list(fault.ranks)] = True
            elif row == fault.at:
                changed[list(fault.ranks)] = True
        for group in families[op.family]:
            members = np.array(group)
            arrivals[row, members[stuck[members]]] = ends[row, members[stuck[members]]] = NEVER
            if stuck[members].any() or changed[members].any():
                fresh = members[~stuck[members]]
                ends[row, fresh] = OPEN
                stuck[fresh] = True
    return int(max(arrivals.max(), ends.max()))

"""Faults planted in a synthetic run: where each one strikes, and which ranks hang because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rankcall.testing.synthetic import Op

Times = npt.NDArray[np.int64]
OPEN = -2  # as an end: the op has not ended
NEVER = -1  # as an arrival: the rank never issued the op

# Faults that keep their ranks from issuing the op. With the other kinds, all ranks issue it and
# hang in it.
_HALTING = ("missing", "dead", "stopped", "exhausted")
KINDS = (*_HALTING, "desync", "mismatch", "deadlock")


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
        if self.kind not in KINDS:
            raise ValueError(f"a fault is one of {', '.join(KINDS)}; got {self.kind!r}")
        if not self.ranks or self.at < 0:
            raise ValueError(
                f"a fault needs ranks, and an op's index from 0 on; got {self.ranks} and {self.at}"
            )


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

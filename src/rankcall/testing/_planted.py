"""Faults planted in a run that never ran: who stops where, and who hangs because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rankcall.testing.synthetic import Op

Times = npt.NDArray[np.int64]
OPEN = -2  # as an end: there is none
NEVER = -1  # as an arrival: it was never issued

# Those that keep their ranks from issuing the call; with the others all issue it and hang in it.
_HALTING = ("missing", "dead", "stopped", "exhausted")
KINDS = (*_HALTING, "desync", "mismatch", "deadlock")


@dataclass(frozen=True)
class Planted:
    """A fault: its kind, as a finding has it, its culprits, and the so-manieth op it is at.

    A deadlock's ranks wait, in the world, to receive each from the next.
    """

    kind: str
    ranks: tuple[int, ...]
    at: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a fault is one of {', '.join(KINDS)}; got {self.kind!r}")
        if not self.ranks or self.at < 0:
            raise ValueError("a fault has ranks, and a place that is not negative")


def plant(
    issued: Sequence[Op],
    families: Mapping[str, Sequence[Sequence[int]]],
    arrivals: Times,
    ends: Times,
    faults: Sequence[Planted],
) -> int:
    """Cut the truth down to what happens with the faults; return when the last thing happened."""
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

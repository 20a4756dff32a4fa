"""Who came last, who waited, and whose fault it was.

Each moment that members spend waiting is shared equally by those who have not come yet. So one
straggler bears all it causes beyond the second-latest, two that come late together bear half each,
and what all ranks are charged adds up to what all ranks waited.

A member that waits for one collective already does not wait twice for the next of its group: an
async burst behind one late rank counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass
class Arrivals:
    """When members came to some collectives: ``[collective, member]``, aligned ns.

    ``order`` sorts each row; absent members come first.
    """

    times: npt.NDArray[np.int64]
    here: Bools
    order: npt.NDArray[np.intp] = field(init=False)
    sorted: npt.NDArray[np.int64] = field(init=False)
    absent: npt.NDArray[np.intp] = field(init=False)  # of each collective

    def __post_init__(self) -> None:
        self.absent = self.times.shape[1] - np.count_nonzero(self.here, axis=1)
        if self.absent.any():
            self.times = np.where(self.here, self.times, np.iinfo(np.int64).min)
        self.order = np.argsort(self.times, axis=1)
        self.sorted = np.take_along_axis(self.times, self.order, axis=1)

    @property
    def last(self) -> npt.NDArray[np.int64]:
        """When the last member came."""
        return self.sorted[:, -1]

    @property
    def last_member(self) -> npt.NDArray[np.intp]:
        """Who came last."""
        return self.order[:, -1]

    @property
    def behind(self) -> Floats:
        """How long after the second-latest the last came; 0 where it was alone."""
        count = self.times.shape[1] - self.absent
        if self.times.shape[1] < 2:
            return np.zeros(len(self.times))
        gap = (self.sorted[:, -1] - self.sorted[:, -2]).astype(np.float64)
        return np.where(count > 1, gap, 0.0)


@dataclass
class Waits:
    """Waiting caused and suffered, ns, by member (summed over the collectives)."""

    caused: Floats
    suffered: Floats
    by_collective: Floats


def _by_member(who: npt.NDArray[np.intp], what: Floats, members: int) -> Floats:
    """Sum ``what`` by member."""
    sums = np.bincount(who.ravel(), weights=what.ravel(), minlength=members)
    return sums.astype(np.float64, copy=False)


def wait_for_all(came: Arrivals, not_before: npt.NDArray[np.int64]) -> Waits:
    """Share out the waiting of collectives that no member can leave before the last has come.

    ``not_before``: per collective, until when members wait for an earlier one anyway.
    """
    collectives, members = came.times.shape
    start = _first_moment(came, not_before)
    clipped = np.maximum(came.sorted, start[:, None])
    gaps = np.diff(clipped, axis=1).astype(np.float64)
    # After the k-th of the sorted has come, k less the absent wait for the others.
    waiting = np.maximum(np.arange(1, members) - came.absent[:, None], 0)
    shares = gaps * (waiting / np.arange(members - 1, 0, -1))
    charge = np.zeros((collectives, members))
    np.cumsum(shares, axis=1, out=charge[:, 1:])
    caused = _by_member(came.order, charge, members)
    waited = (clipped[:, -1:] - clipped).astype(np.float64)
    if came.absent.any():
        waited[np.arange(members) < came.absent[:, None]] = 0.0
    suffered = _by_member(came.order, waited, members)
    return Waits(caused, suffered, waited.sum(axis=1))


def _first_moment(came: Arrivals, not_before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return when waiting can begin: at the first arrival, or when earlier waiting is over."""
    first = np.take_along_axis(
        came.sorted, np.minimum(came.absent, came.times.shape[1] - 1)[:, None], axis=1
    )
    return np.maximum(first[:, 0], not_before)


def already_waiting(last: npt.NDArray[np.int64], before: int) -> npt.NDArray[np.int64]:
    """Return, for each collective in order, when the last came to any earlier one."""
    return np.maximum.accumulate(np.concatenate([[np.int64(before)], last]))[:-1]


def wait_for_root(came: Arrivals, root: npt.NDArray[np.intp]) -> Waits:
    """Charge the root what the others wait for it (broadcast, scatter); its row is ``root``."""
    collectives, members = came.times.shape
    rows = np.arange(collectives)
    at = came.times[rows, root]
    waited = np.where(came.here, np.maximum(at[:, None] - came.times, 0), 0).astype(np.float64)
    by_collective = waited.sum(axis=1)
    caused = _by_member(root, by_collective, members)
    return Waits(caused, waited.sum(axis=0), by_collective)


def root_waits(came: Arrivals, root: npt.NDArray[np.intp]) -> Waits:
    """Share out what the root waits for the others (reduce, gather); its row is ``root``."""
    collectives, members = came.times.shape
    at = came.times[np.arange(collectives), root]
    clipped = np.maximum(came.sorted, at[:, None])
    gaps = np.diff(clipped, axis=1).astype(np.float64)
    charge = np.zeros((collectives, members))
    np.cumsum(gaps / np.arange(members - 1, 0, -1), axis=1, out=charge[:, 1:])
    caused = _by_member(came.order, charge, members)
    waited = (clipped[:, -1] - at).astype(np.float64)
    return Waits(caused, _by_member(root, waited, members), waited)


def wait_for_sender(
    sent: npt.NDArray[np.int64], received: npt.NDArray[np.int64], longest: Floats
) -> Floats:
    """Return how long each receiver waited for its sender to begin, ``longest`` at most."""
    return np.clip((sent - received).astype(np.float64), 0.0, longest)

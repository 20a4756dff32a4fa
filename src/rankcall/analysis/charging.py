"""Which ranks each wait is charged to: those that came late.

Each moment that a member waits is shared equally by the ranks that it waits for at that moment. So
one straggler bears all the waiting that it causes beyond the second-latest rank, two that come late
together bear half each, and the waiting that all ranks cause is the waiting that all ranks suffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from rankcall.analysis.arrivals import Arrivals, Bools, Floats, Indices, Ints


def shares(came: Arrivals, waited: Ints) -> Floats:
    """Share out the waiting in some collectives: ``[collective, member]``, what each caused.

    ``waited``: ``[collective, member]``, how long each member waited before the last came.
    """
    full = np.where(came.here, came.last[:, None] - came.times, 0)
    simple = (waited == full).all(axis=1)
    caused = np.zeros(waited.shape)
    if simple.any():
        caused[simple] = _shares_of_all(came, simple)
    rest = ~simple & waited.any(axis=1)
    if rest.any():
        caused[rest] = _shares_of_some(
            came.times[rest], came.here[rest], came.last[rest], waited[rest]
        )
    return caused


def _shares_of_all(came: Arrivals, rows: Bools) -> Floats:
    """Share out the waiting of collectives in which all members wait from their arrival on."""
    members = came.times.shape[1]
    absent, times = came.absent[rows], came.sorted[rows]
    if absent.any():
        first = np.minimum(absent, members - 1)[:, None]
        times = np.maximum(times, np.take_along_axis(times, first, axis=1))
    gaps = np.diff(times, axis=1).astype(np.float64)
    # After arrival k, the k ranks that have come, less the absent ones, wait for the others.
    waiting = np.maximum(np.arange(1, members) - absent[:, None], 0)
    sums = np.zeros((len(times), members))
    np.cumsum(gaps * (waiting / np.arange(members - 1, 0, -1)), axis=1, out=sums[:, 1:])
    caused = np.empty_like(sums)
    np.put_along_axis(caused, came.order[rows], sums, axis=1)
    return caused


def _shares_of_some(times: Ints, here: Bools, last: Ints, waited: Ints) -> Floats:
    """Share out waits that begin later than their members' arrivals.

    Between two events (a wait begins, a member arrives) the members that wait and the members that
    have not arrived stay the same.
    """
    rows, members = times.shape
    arrivals = np.where(here, times, last[:, None])
    events = np.concatenate([last[:, None] - waited, arrivals], axis=1)
    order = np.argsort(events, axis=1)  # the order of events at one time makes no difference
    counts = np.concatenate([waited > 0, here], axis=1)
    counts = np.take_along_axis(counts, order, axis=1)
    is_arrival = order >= members
    waiting = np.cumsum(counts & ~is_arrival, axis=1)
    to_come = np.count_nonzero(here, axis=1)[:, None] - np.cumsum(counts & is_arrival, axis=1)
    spans = np.diff(np.take_along_axis(events, order, axis=1), axis=1)
    sums = np.zeros((rows, 2 * members))
    rates = waiting[:, :-1] / np.maximum(to_come[:, :-1], 1)
    np.cumsum(spans * rates, axis=1, out=sums[:, 1:])
    by_event = np.empty_like(sums)
    np.put_along_axis(by_event, order, sums, axis=1)
    return np.where(here, by_event[:, members:], 0.0)


@dataclass
class LastComers:
    """How often each rank came last to a collective, by global rank."""

    ranks: int
    times: Ints = field(init=False)
    late_by: Floats = field(init=False)  # ns after the second-latest, summed over those
    took_part: Ints = field(init=False)  # in collectives with a last arrival

    def __post_init__(self) -> None:
        self.late_by = np.zeros(self.ranks)
        self.times, self.took_part = (np.zeros(self.ranks, np.int64) for _ in range(2))

    def add(self, ranks: Indices, came: Arrivals, rows: Bools) -> None:
        """Count who came last in some rows, and by how much, if two or more came."""
        together = rows & (came.times.shape[1] - came.absent > 1)
        last, behind = came.last_member[together], came.behind[together]
        members = len(ranks)
        self.times[ranks] += np.bincount(last, minlength=members)
        self.late_by[ranks] += np.bincount(last, weights=behind, minlength=members)
        self.took_part[ranks] += np.count_nonzero(came.here[together], axis=0)

    def late_by_ms(self, rank: int) -> float | None:
        """Return by how much a rank that came last was late, on average; None if it never did."""
        times = int(self.times[rank])
        return float(self.late_by[rank]) / times / 1e6 if times else None


@dataclass
class WaitTotals:
    """Waiting by global rank, summed over all that was measured.

    ``edges``: aligned times that cut the run into parts, ascending; ``by_part`` has the waiting
    that each rank caused in each of the ``len(edges) + 1`` parts, and ``suffered_by_part`` the
    waiting that it suffered. ``lasts``: who came last. ``issue_lasts``: who issued last, of ops
    on devices of which it is not known when anybody came.
    """

    ranks: int
    edges: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    by_part: Floats = field(init=False)
    suffered_by_part: Floats = field(init=False)
    lasts: LastComers = field(init=False)
    issue_lasts: LastComers = field(init=False)

    def __post_init__(self) -> None:
        shape = len(self.edges) + 1, self.ranks
        self.by_part, self.suffered_by_part = np.zeros(shape), np.zeros(shape)
        self.lasts, self.issue_lasts = LastComers(self.ranks), LastComers(self.ranks)

    @property
    def caused(self) -> Floats:
        """The waiting that each rank caused, ns."""
        caused: Floats = self.by_part.sum(axis=0)
        return caused

    @property
    def suffered(self) -> Floats:
        """The waiting that each rank suffered, ns."""
        suffered: Floats = self.suffered_by_part.sum(axis=0)
        return suffered

    def charge(self, ranks: Indices, until: Ints, caused: Floats, waited: Floats) -> None:
        """Add ``[collective, member]`` of some members; waiting ended at ``until``."""
        parts = np.searchsorted(self.edges, until, side="right")
        for part in np.unique(parts).tolist():
            rows = parts == part
            self.by_part[part, ranks] += caused[rows].sum(axis=0)
            self.suffered_by_part[part, ranks] += waited[rows].sum(axis=0)

    def charge_messages(
        self,
        waiters: Indices,
        until: Ints,
        waited: Ints,
        causes: Iterable[tuple[Indices, int, Ints]],
    ) -> None:
        """Add waits in messages; ``causes`` are those of ``WaitChains.causes`` for these waits."""
        parts = np.searchsorted(self.edges, until, side="right")
        np.add.at(self.suffered_by_part, (parts, waiters), waited)
        for waits, rank, caused in causes:
            np.add.at(self.by_part[:, rank], parts[waits], caused)

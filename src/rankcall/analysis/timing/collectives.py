"""All members' records of one group as dense matrices, one column a collective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.extract import MISSING, Ints, Part, Session
from rankcall.ring.tables import Group

# Beyond this many columns for each that is used, sequence numbers are numbered anew: a damaged
# one must not cost memory.
_SPARSE = 4


@dataclass
class Lane:
    """One group's collectives in one session: ``[member, collective]``, times in host ns.

    Only members that left records have a row; ``MISSING`` stands where one has no record of a
    collective, or has not finished it.
    """

    session: Session
    group: Group
    ranks: npt.NDArray[np.intp]
    hosts: npt.NDArray[np.intp]
    seq: Ints
    arrival: Ints
    started: Ints
    completed: Ints
    op: npt.NDArray[np.uint8]
    root: npt.NDArray[np.intp]  # row of the root; -1: none, or it left no records
    size: npt.NDArray[np.float64]  # S
    bytes: Ints

    @property
    def members(self) -> int:
        """The group's size, with those that left no records."""
        return len(self.group.ranks)


def assemble(session: Session, group: Group, parts: list[Part]) -> Lane:
    """Line up the members' parts by sequence number; ``parts`` is emptied as it goes."""
    seq = _columns([part.seq for part in parts])
    shape = len(parts), len(seq)
    places = [_place(part.seq, seq) for part in parts]
    whole = all(isinstance(at, slice) and at == slice(0, shape[1]) for at in places)
    make = np.empty if whole else np.zeros
    arrival, started, completed = (make(shape, np.int64) for _ in range(3))
    agreed = _agreed(parts, places, shape[1])
    ranks = np.array([part.rank for part in parts], np.intp)
    hosts = np.array([part.host for part in parts], np.intp)
    for row, at in enumerate(places):
        part = parts[row]
        arrival[row, at], started[row, at] = part.arrival, part.started
        completed[row, at] = part.completed
        part.arrival = part.started = part.completed = _NOTHING
    parts.clear()
    root = _rows_of_roots(agreed.pop("root"), group, ranks)
    return Lane(session, group, ranks, hosts, seq, arrival, started, completed, root=root, **agreed)


_NOTHING = np.zeros(0, np.int64)


def _columns(seqs: Sequence[Ints]) -> Ints:
    """Return the sequence numbers that any member has, ascending."""
    first, last = min(int(s[0]) for s in seqs), max(int(s[-1]) for s in seqs)
    if last - first + 1 <= _SPARSE * max(len(s) for s in seqs) + 1024:
        return np.arange(first, last + 1)
    return np.unique(np.concatenate(seqs))


def _place(own: Ints, seq: Ints) -> slice | npt.NDArray[np.intp]:
    """Return which columns a part fills: a slice where it has no gaps."""
    start = int(np.searchsorted(seq, own[0]))
    end = start + len(own)
    if end <= len(seq) and seq[end - 1] == own[-1] and np.array_equal(seq[start:end], own):
        return slice(start, end)
    return np.searchsorted(seq, own)


def _agreed(
    parts: Sequence[Part], places: Sequence[slice | npt.NDArray[np.intp]], width: int
) -> dict[str, npt.NDArray[Any]]:
    """Return what members agree on, by column: the largest value where they do not."""
    result: dict[str, npt.NDArray[Any]] = {}
    for name, like in parts[0].agreed.items():
        lowest = -1 if name == "root" else 0
        merged = result[name] = np.full(width, lowest, like.dtype)
        seen: set[int] = set()
        for part, at in zip(parts, places, strict=True):
            column = part.agreed[name]
            if id(column) not in seen:
                seen.add(id(column))
                merged[at] = np.maximum(merged[at], column)
    return result


def _rows_of_roots(
    root: npt.NDArray[Any], group: Group, ranks: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    """Translate roots from ranks in the group to rows of the matrices."""
    row_of = {int(rank): row for row, rank in enumerate(ranks)}
    table = np.array([row_of.get(rank, -1) for rank in group.ranks] + [-1], np.intp)
    known = (root >= 0) & (root < len(group.ranks))
    return table[np.where(known, root, len(group.ranks))]


def present(times: Ints) -> npt.NDArray[np.bool_]:
    """Return where there is a record (of ``arrival``) or an end (of ``completed``)."""
    found: npt.NDArray[np.bool_] = times != MISSING
    return found

"""Which rank a wait for a message is due to: the one at the end of the chain of waits.

The first stage of a pipeline waits for the second one, which waits for the third: the third is to
blame, at each moment at which the second one waits for it. Chains are followed through messages,
not through collectives: there, a rank may wait for many others at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import Indices, Ints
from rankcall.analysis.clocks import HostClock, align_messages
from rankcall.analysis.collectives import ISSUE, MessageTable, present

# Links of a chain. At one moment, no rank occurs twice in a chain, unless clocks disagree; and a
# pipeline with more stages than this is not known.
_LONGEST = 256
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True)
class MessageWaits:
    """The rows of a table that wait for others, and those rows.

    ``until``: when the wait ended, in aligned ns: the other rank came, or the op had ended before,
    as clocks that disagree can have it.
    """

    rows: Indices
    others: Indices
    until: Ints


def message_waits(messages: MessageTable, clocks: Sequence[HostClock]) -> MessageWaits:
    """Return which ends of messages may wait for the other end to begin.

    A receiver waits for its sender. A sender waits if it blocks and its message went when the
    receiver had come; a back end may also take a short message into its buffers before.
    """
    columns = messages.columns
    arrival = align_messages(messages, "arrival", clocks)
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    known = (columns["source"][sent] != ISSUE) & (columns["source"][received] != ISSUE)
    sent, received = sent[known], received[known]
    ended = np.where(
        present(columns["completed"]), align_messages(messages, "completed", clocks), _NEVER
    )
    in_time = ended[sent] >= arrival[received]
    blocks = np.asarray(columns["blocking"], bool)[sent] & in_time
    rows = np.concatenate([received, sent[blocks]])
    others = np.concatenate([sent, received[blocks]])
    return MessageWaits(rows, others, np.minimum(arrival[others], ended[rows]))


@dataclass(frozen=True)
class _Spans:
    """When one rank waited, ascending and disjoint, and for which rank each time."""

    begin: Ints
    end: Ints
    other: npt.NDArray[Any]


class WaitChains:
    """When each rank waited for which other one, in messages.

    Args:
        tables: The messages of all groups.
        waited: How long each row of each table waited, without what overlaps an earlier wait.
        clocks: The clocks of all hosts.
    """

    def __init__(
        self, tables: Sequence[MessageTable], waited: Sequence[Ints], clocks: Sequence[HostClock]
    ) -> None:
        parts: list[list[npt.NDArray[Any]]] = []
        for table, of_table in zip(tables, waited, strict=True):
            waits = message_waits(table, clocks)
            lasted, rank = of_table[waits.rows], table.columns["rank"]
            columns = (rank[waits.rows], waits.until - lasted, waits.until, rank[waits.others])
            parts.append([column[lasted > 0] for column in columns])
        self._spans: dict[int, _Spans] = {}
        if not parts:
            return
        rank, begin, end, other = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((begin, rank))
        rank, begin, end, other = (column[order] for column in (rank, begin, end, other))
        for rows in np.split(np.arange(len(rank)), np.flatnonzero(np.diff(rank)) + 1):
            if len(rows):
                self._spans[int(rank[rows[0]])] = _Spans(begin[rows], end[rows], other[rows])

    def causes(
        self, waiters: npt.NDArray[Any], others: npt.NDArray[Any], begin: Ints, end: Ints
    ) -> Iterator[tuple[Indices, int, Ints]]:
        """Yield who is to blame for some waits: indexes of these waits, a rank, and how many ns.

        A wait is of ``waiters`` for ``others``, from ``begin`` to ``end``.
        """
        item = np.arange(len(begin))
        for _ in range(_LONGEST):
            onward: list[tuple[Indices, npt.NDArray[Any], Ints, Ints]] = []
            for rank in np.unique(others).tolist():
                mine = others == rank
                link = item[mine], begin[mine], end[mine]
                passed, further = self._further(rank, waiters, *link)
                yield link[0], rank, link[2] - link[1] - passed
                onward += further
            if not onward:
                return
            item, others, begin, end = (
                np.concatenate(column) for column in zip(*onward, strict=True)
            )
        for rank in np.unique(others).tolist():
            mine = others == rank
            yield item[mine], rank, end[mine] - begin[mine]

    def _further(
        self, rank: int, waiters: npt.NDArray[Any], item: Indices, begin: Ints, end: Ints
    ) -> tuple[Ints, list[tuple[Indices, npt.NDArray[Any], Ints, Ints]]]:
        """Return how much of some times a rank waited itself, and these waits as further links."""
        spans = self._spans.get(rank)
        if spans is None:
            return np.zeros(len(item), np.int64), []
        first = np.searchsorted(spans.end, begin, side="right")
        count = np.maximum(np.searchsorted(spans.begin, end, side="left") - first, 0)
        which = np.repeat(np.arange(len(item)), count)
        within = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
        at = first[which] + within
        low = np.maximum(spans.begin[at], begin[which])
        high = np.minimum(spans.end[at], end[which])
        # Clocks that disagree can make a rank wait for its own lateness.
        counts = (high > low) & (spans.other[at] != waiters[item[which]])
        which, at, low, high = which[counts], at[counts], low[counts], high[counts]
        passed = np.zeros(len(item), np.int64)
        np.add.at(passed, which, high - low)
        return passed, [(item[which], spans.other[at], low, high)] if len(which) else []

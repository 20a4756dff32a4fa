"""When ops ran on devices, as far as the durations of the ops tell.

A host issues ops ahead of its device. So the time at which an op was issued says nothing of when
its rank came to it, and the time at which its end was noticed little of when it ended. A duration
is measured on the device itself, and holds two facts:

* A device runs the collectives of a group in order, and none before it was issued.
* No member leaves a collective before the last has come, and then all leave within the transfer.
  So the member with the shortest duration came last, and each other one waited as much longer as
  it took.

The times that follow are consistent with all durations, but may be earlier than the true ones by
as much as the host is ahead. Waiting, transfers and who came last do not depend on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import HostClock, align_messages
from rankcall.analysis.collectives import (
    DEVICE,
    ISSUE,
    CollectiveTable,
    MessageTable,
    in_order,
    present,
)

_LONG_AGO = -(1 << 62)  # of a member without a time: before all others, and safe to subtract


@dataclass(frozen=True)
class TimeSources:
    """How many of a run's collectives and messages have times of which source.

    Attributes:
        host: Ops on the CPU: they begin when they are issued, and the host notes their ends.
        device: Ops on devices, by the devices' own times.
        unknown: Ops on devices without such times: only when they were issued is known.
    """

    host: int
    device: int
    unknown: int

    @property
    def is_waiting_known(self) -> bool:
        """Whether any op shows how long ranks waited for each other."""
        return self.host + self.device > 0 or not self.unknown


def sources_of(tables: Iterable[CollectiveTable], messages: Iterable[MessageTable]) -> TimeSources:
    """Count the ops of all groups by the source of their times."""
    counts = np.zeros(ISSUE + 1, np.int64)
    for table in tables:
        recorded = present(table.arrival).any(axis=0)
        counts += np.bincount(table.source[recorded], minlength=len(counts))
    for message_table in messages:
        counts += np.bincount(message_table.columns["source"], minlength=len(counts))
    return TimeSources(*counts.tolist())


def end_together(
    tables: Iterable[CollectiveTable],
    messages: Iterable[MessageTable],
    clocks: Sequence[HostClock],
) -> None:
    """Move each op on a device so that all its members end at one moment, in place.

    The clocks of the hosts must have been aligned, because the ends are equal afterwards.
    """
    for table in tables:
        _end_collectives(table, clocks)
    for message_table in messages:
        _end_messages(message_table, clocks)


def _end_collectives(table: CollectiveTable, clocks: Sequence[HostClock]) -> None:
    columns = np.flatnonzero((table.source == DEVICE) & _all_ended(table))
    if not len(columns):
        return
    here = present(table.arrival[:, columns])
    took = np.where(here, table.completed[:, columns] - table.arrival[:, columns], 0)
    own = np.full(here.shape, _LONG_AGO)
    for row, host in enumerate(table.hosts):
        ended = clocks[host].align(table.completed[row, columns])
        own[row] = np.where(here[row], ended, _LONG_AGO)
    # A member that ended later than the others delays all their later collectives, too.
    most = took.max(axis=0)
    ends = in_order(own.max(axis=0) - most, most)
    for row in range(len(table.hosts)):
        mine = columns[here[row]]
        later = (ends - own[row])[here[row]]
        for times in (table.arrival, table.started, table.completed):
            times[row, mine] += later


def _all_ended(table: CollectiveTable) -> npt.NDArray[np.bool_]:
    ended: npt.NDArray[np.bool_] = present(table.completed) | ~present(table.arrival)
    return np.asarray(ended.all(axis=0))


def _end_messages(messages: MessageTable, clocks: Sequence[HostClock]) -> None:
    columns = messages.columns
    both = (messages.sent >= 0) & (messages.received >= 0)
    sent, received = messages.sent[both], messages.received[both]
    timed = (columns["source"] == DEVICE) & present(columns["completed"])
    pairs = timed[sent] & timed[received]
    sent, received = sent[pairs], received[pairs]
    if not len(sent):
        return
    ended = align_messages(messages, "completed", clocks)
    last = np.maximum(ended[sent], ended[received])
    for rows in (sent, received):
        later = last - ended[rows]
        for name in ("arrival", "started", "completed"):
            columns[name][rows] += later

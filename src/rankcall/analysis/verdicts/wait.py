"""A wait: the ranks that are in a call which does not end, and those that have not come to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.intp]


class Channel(NamedTuple):
    """One direction between two ranks of a group; -1: any source."""

    source: int
    target: int
    tag: int


Place = tuple[int, Channel | None, int]  # a collective of a group, or both ends of a message


@dataclass
class Wait:
    """Ranks that have not left one collective, or one end of a message."""

    group: int
    seq: int
    rows: Rows  # the waiting calls, by rank
    waiters: list[int]
    absent: list[int]  # ranks that have not arrived and are waited for
    present: list[int]  # ranks that have arrived, the waiters included
    age_s: float  # of the longest waiting call
    hung: bool  # one of its calls has lasted long enough to count
    channel: Channel | None = None
    soft: bool = False  # an isend: its rank need not be waiting for it
    any_source: bool = False  # any one of the absent ranks can end it
    presumed: list[int] = field(default_factory=list)  # ranks without records, probably in it
    unstarted: list[int] = field(default_factory=list)  # absent: issued, not started on the device
    left: list[int] = field(default_factory=list)  # members whose devices have left the collective
    behind: bool = False  # all have come, since others have left: nothing holds the waiters
    queued: bool = False  # no device has come to it: each is held in a call before it
    # Of waiters and unstarted, by rank. All messages of a batch have the number of the first one.
    records: dict[int, int] = field(default_factory=dict)
    idle_rows: Sequence[int] = ()  # the calls of the unstarted, as far as the back end tells

    @property
    def place(self) -> Place:
        """The call that it is about; both ends of a message have the same."""
        return self.group, self.channel, self.seq

"""Note when an attempt that follows another one was at work again.

Whoever asks later where the time of a recovery went cannot read it from the rings: they keep their
newest records only. So one rank of each node notes these moments while it has its first records.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import numpy as np

from rankcall.analysis.recoveries import first_after
from rankcall.background import BackgroundCall
from rankcall.ring.follower import RingView, index_of
from rankcall.ring.layout import Header
from rankcall.run.recoveries import AttemptResumed, note, own_file, previous_end
from rankcall.whole_numbers import whole_number


class Resumption:
    """Looks for these moments until all are known. One thread uses it.

    Args:
        records: The records of this rank.
    """

    def __init__(self, records: RingView) -> None:
        self._records = records
        restart = whole_number(os.environ.get("TORCHELASTIC_RESTART_COUNT", "")) or 0
        self._file = own_file() if restart else None  # without an agent, nobody asks
        self._known = AttemptResumed(restart, 0)
        # What is not known yet: the steps that come before the call which is looked for.
        self._wanted = {"call_ns": 0, "step_ns": 1}
        self._head = 0  # of the records that were looked at
        end = previous_end()
        if end is not None and end.lost > 0:
            self._wanted["caught_up_ns"] = end.lost

    def look(self, header: Header) -> None:
        """Note what has become known; ``header`` is that of this rank."""
        file = self._file
        due = {name: steps for name, steps in self._wanted.items() if steps <= header.step}
        if file is None or not due or header.head == self._head:
            return
        self._head = header.head
        calls = self._records.all_until(header.head)
        if not len(calls):
            return
        is_whole = index_of(calls[:1])[0] == 0
        first = first_after(calls["enqueued_ns"].astype(np.int64), calls["step"], due.values())
        shift = header.anchor_epoch_ns - header.anchor_mono_ns
        moments = {}
        for name, steps in due.items():
            if steps in first:
                del self._wanted[name]
                if is_whole or calls["step"][0] < steps:  # else the call was overwritten already
                    moments[name] = first[steps] + shift
        if moments:
            self._known = known = replace(self._known, **moments)
            # The run's disk may not answer, and the watcher must go on.
            BackgroundCall(partial(note, file, known), "rankcall-resumed").give_up()

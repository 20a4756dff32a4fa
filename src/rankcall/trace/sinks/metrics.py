"""Histograms and counts by op and group, added up one batch at a time, for metrics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.trace.descriptions import Descriptions

# Upper bounds of the buckets: 10 us to 50 s, and 16 B to 4 GiB, which is the range of collectives.
# Each bucket is a series for every op and group, so there are not more.
SECONDS = tuple(base * 10.0**power for power in range(-5, 2) for base in (1.0, 2.5, 5.0))
BYTES = tuple(4.0**power for power in range(2, 17))
OTHER = "other"


class MetricKey(NamedTuple):
    """The labels by which metrics are counted."""

    op: str
    group: str


class Added(NamedTuple):
    """The figures that one batch adds to one key. ``seconds`` leaves out unknown durations."""

    calls: int
    failed: int
    sizes: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]


@dataclass
class Histogram:
    """Counts of values by upper bound, and the sum of the values."""

    bounds: tuple[float, ...]
    counts: npt.NDArray[np.int64] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.bounds) + 1, np.int64)

    def add(self, values: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
        """Count values; a value that equals a bound counts as below it."""
        buckets = np.searchsorted(self.bounds, values, side="left")
        self.counts += np.bincount(buckets, minlength=len(self.counts))
        self.total += float(values.sum())


class MetricKeys:
    """Makes a bounded number of keys: groups after the first ``most`` share the name ``other``."""

    # 64: every op has a series for each group, and a program may make groups without end.
    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._groups: set[str] = set()

    def of(self, op: str, group: str) -> MetricKey:
        """Return the key of an op on a group."""
        if group not in self._groups:
            if len(self._groups) >= self._most:
                return MetricKey(op, OTHER)
            self._groups.add(group)
        return MetricKey(op, group)

    def split(self, descriptions: Descriptions) -> Iterator[tuple[MetricKey, Added]]:
        """Yield the figures that a batch adds to each key, without ops in flight."""
        columns = descriptions.columns
        keys = [self.of(call.op, call.group) for call in descriptions.calls]
        different = sorted(set(keys))
        code = np.array([different.index(key) for key in keys], np.int64)[columns["call"]]
        done = ~columns["in_flight"]
        for number, key in enumerate(different):
            of_key = done & (code == number)
            whole = of_key & columns["first"]  # count the time of a coalesced op once
            took = columns["duration_ms"][whole] / 1e3
            calls = int(np.count_nonzero(whole))
            if calls:
                yield (
                    key,
                    Added(
                        calls,
                        int(np.count_nonzero(columns["failed"] & whole)),
                        columns["message_bytes"][of_key],
                        took[~np.isnan(took)],
                    ),
                )

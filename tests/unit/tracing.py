"""Helpers for the tests of trace sinks: descriptions, their origin, a clock set by hand."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from rankcall.trace import Origin
from rankcall.trace.descriptions import Columns, DescribedCall, Descriptions, Teller

COUNT = 500
HOSTILE = 'a "quoted" </script>\n\\ \u2028 \x07 é.py:1'


def some(count: int = 3, first: int = 0, **columns: Any) -> Descriptions:
    """Make descriptions with every kind of value in them."""
    at = np.arange(first, first + count)
    known: dict[str, Any] = {
        "call": at % 2,
        "message_bytes": at * 1000,
        "device_index": np.where(at % 3 == 0, -1, at % 3).astype(np.int16),
        "enqueued_epoch_ns": 1_700_000_000_000_000_000 + at * 400_000_000,
        "peer": np.where(at % 4 == 1, at % 5, -1),
        "root": np.where(at % 4 == 2, at % 5, -1),
        "correlation": np.where(at % 4 == 3, at + 7, 0),
        "seq": at + 1,
        "dtype": (at % 26).astype(np.uint8),
        "duration_ms": np.where(at % 7 == 6, np.nan, at * 1e-6),
        "algbw_gbps": np.where(at % 7 == 6, np.nan, 1 / (at + 1e-9)),
        "busbw_gbps": np.where(at % 7 >= 5, np.nan, 1e-12 * at),
        "step": at // 10,
        "end_unknown": (at % 7 == 6) | (at % 11 == 4),
        "in_flight": at % 7 == 6,
        "failed": np.zeros(count, np.bool_),
        "prints": at % 2 == 0,
        "first": np.ones(count, np.bool_),
    }
    calls = (
        DescribedCall("all_reduce", HOSTILE, "0", (0, 1, 2)),
        DescribedCall("send", "b.py:2", HOSTILE, tuple(range(100))),
    )
    return Descriptions(Teller(3, 'g"p', "vm"), calls, Columns({**known, **columns}))


def origin(tmp_path: Path | None = None, rank: int = 3) -> Origin:
    """Return the origin of the descriptions."""
    return Origin(rank, 4, rank, 1, "node/a", tmp_path, lambda: some(0))


def finished(batch: Any) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    """Yield (op, group) and the description of each that is not in flight."""
    for description, flying in zip(batch, batch.columns["in_flight"].tolist(), strict=True):
        if not flying:
            yield (description["name"], description["group"]), description


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes: a disk that fills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

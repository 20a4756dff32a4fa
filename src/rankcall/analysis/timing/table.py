"""The table by op, group and size bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.bandwidth import BYTES_PER_GB, bus_factor
from rankcall.analysis.timing.measure import Measured
from rankcall.record import OPS

_BUCKETS = 64
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


@dataclass(frozen=True)
class Row:
    """All collectives of one op, group and size bucket. None: there is nothing to measure."""

    op: str
    group: str
    bucket: int  # its smallest size, bytes: a power of two, or 0
    count: int
    unfinished: int  # of them, that no member finished
    bytes: int
    total_ms: float  # what one member spent in them, on average over the members
    median_ms: float | None  # of the members' mean durations
    p95_ms: float | None
    transfer_ms: float | None  # median t
    algbw_gbps: float | None  # median; GB/s, 1 GB = 1e9 bytes
    busbw_gbps: float | None
    waiting_share: float | None  # of the time that all members spent


def size_name(size: int) -> str:
    """Return a bucket's human name: ``4 KiB``."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size >> (10 * power)} {_UNITS[power]}"


@dataclass(frozen=True)
class Source:
    """Measured collectives of one group, with its label and size."""

    label: str
    members: int
    measured: Measured


def rows(sources: Sequence[Source]) -> list[Row]:
    """Group what was measured; the rows that took longest come first."""
    found: dict[tuple[str, int], list[tuple[Source, npt.NDArray[np.intp]]]] = {}
    for source in sources:
        key = source.measured.op.astype(np.intp) * _BUCKETS + _bucket(source.measured.bytes)
        order = np.argsort(key, kind="stable")
        edges = np.flatnonzero(np.diff(key[order])) + 1
        for part in np.split(order, edges) if len(order) else []:
            found.setdefault((source.label, int(key[part[0]])), []).append((source, part))
    table = [_row(label, key, parts) for (label, key), parts in found.items()]
    return sorted(table, key=lambda row: (-row.total_ms, row.group, row.op, row.bucket))


def _bucket(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.intp]:
    """Return 0 for no bytes, else 1 + the power of two at or below."""
    # frexp is exact up to 2**53, beyond which no message goes.
    return np.frexp(np.maximum(sizes, 0).astype(np.float64))[1].astype(np.intp)


def _row(label: str, key: int, parts: list[tuple[Source, npt.NDArray[np.intp]]]) -> Row:
    op, power = OPS[key // _BUCKETS], key % _BUCKETS
    mean, transfer, size, spent, waited, count_bytes = (
        np.concatenate([getattr(source.measured, name)[part] for source, part in parts])
        for name in ("mean", "transfer", "size", "spent", "waited", "bytes")
    )
    finished = mean[~np.isnan(mean)]
    usable = (transfer > 0) & (size > 0)
    rates = size[usable] / transfer[usable] * (1e9 / BYTES_PER_GB)
    algbw = float(np.median(rates)) if len(rates) else None
    factor = bus_factor(op, parts[0][0].members)
    total = float(spent.sum())
    return Row(
        op,
        label,
        1 << (power - 1) if power else 0,
        len(mean),
        len(mean) - len(finished),
        sum(count_bytes.tolist()),
        float(finished.sum()) / 1e6,
        _ms(finished, 50),
        _ms(finished, 95),
        _ms(transfer[~np.isnan(transfer)], 50),
        algbw,
        None if algbw is None else algbw * factor,
        min(1.0, float(waited.sum()) / total) if total > 0 else None,
    )


def _ms(times: npt.NDArray[np.float64], percent: float) -> float | None:
    return float(np.percentile(times, percent)) / 1e6 if len(times) else None

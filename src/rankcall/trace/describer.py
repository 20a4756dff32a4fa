"""Turn records into descriptions: names, sizes, bandwidths, and the rank that prints each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.capture.marks import Span
from rankcall.record import (
    BATCH,
    BYTES_PER_GB,
    FLAG_ABANDONED,
    FLAG_ANY_SOURCE,
    KINDS,
    OBJECT_CALLS,
    OPS,
    PICKLE_DTYPE,
    ROOT_DESCRIBES,
    STATUSES,
    Rows,
    bandwidth_sizes,
    bus_factor,
    has_duration,
    public_name,
    take_rows,
)
from rankcall.ring.follower import Flags
from rankcall.ring.reader import Ring
from rankcall.ring.tables import UNKNOWN_GROUP, Group, Tables
from rankcall.trace.descriptions import Columns, DescribedCall, Descriptions, Teller
from rankcall.trace.order import Order
from rankcall.trace.switches import Mode, mode_of

Column = npt.NDArray[Any]

_FAILED = STATUSES.index("failed")
_P2P = KINDS.index("p2p")
_MANY = 1 << 15  # ids up to this are multiplied; the product of three must fit 64 bits
_SIZED = ("op", "message_bytes", "in_bytes", "out_bytes")


class _Known(NamedTuple):
    """The fields that all records of one (variant, call site, group) share."""

    call: DescribedCall
    group: Group
    is_object: bool
    correlates: bool
    coalesced: bool


@dataclass(frozen=True)
class Describer:
    """Describes the records of one ring. ``span`` is used only if the mode is ``CROSSNODE``."""

    teller: Teller
    epoch_ns: int  # when the monotonic clock read zero
    mode: Mode = Mode.ALL
    span: Span | None = None

    def describe(self, rows: Rows, issued: Flags, tables: Tables, dropped: int = 0) -> Descriptions:
        """Describe records in their order; ``issued`` marks those that are still in flight.

        The result has no descriptions of ops that another rank describes or that the mode excludes.
        """
        rank = self.teller.rank
        known, which = _known(rows, tables)
        place = _by(known, which, lambda meaning: _place(meaning.group.ranks, rank))
        wanted = ~np.isin(rows["op"], ROOT_DESCRIBES) | (rows["root"] == place) | (place < 0)
        if self.mode is Mode.CROSSNODE and self.span is not None:
            wanted &= self._crossing(rows, known, which)
        if not wanted.all():
            rows, issued = take_rows(rows, wanted), issued[wanted]
            which, place = which[wanted], place[wanted]
        return self._columns(rows, issued, tables, known, which, place, dropped)

    def _crossing(self, rows: Rows, known: list[_Known], which: Column) -> Flags:
        """Mark the ops that cross hosts: by their peer, or by their group if no peer is known."""
        assert self.span is not None
        span = self.span
        crosses = _by(known, which, lambda meaning: span.crosses(meaning.group.ranks))
        wanted = crosses.astype(np.bool_)
        named = (rows["kind"] == _P2P) & (rows["peer"] >= 0)
        named &= rows["flags"] & FLAG_ANY_SOURCE == 0
        for at in np.flatnonzero(named).tolist():
            ranks, peer = known[which[at]].group.ranks, int(rows["peer"][at])
            wanted[at] = span.is_elsewhere(ranks[peer]) if peer < len(ranks) else True
        return wanted

    def _columns(
        self,
        rows: Rows,
        issued: Flags,
        tables: Tables,
        known: list[_Known],
        which: Column,
        place: Column,
        dropped: int,
    ) -> Descriptions:
        objects = _by(known, which, lambda meaning: meaning.is_object).astype(np.bool_)
        # An object function first sends the lengths of its pickles. The caller sent no such bytes.
        lengths = objects & (rows["dtype"] != PICKLE_DTYPE)
        duration = _durations(rows, issued)
        moved, factor = _moved(rows, known, which, lengths)
        with np.errstate(divide="ignore", invalid="ignore"):
            algbw = np.where((duration > 0) & (moved > 0), moved / duration / 1e-3, np.nan)
        algbw /= BYTES_PER_GB
        coalesced = _by(known, which, lambda meaning: meaning.coalesced).astype(np.bool_)
        together = (coalesced & (rows["tensors"] > 1)) | _by(
            known, which, lambda meaning: meaning.correlates
        ).astype(np.bool_)
        p2p, root = rows["kind"] == _P2P, rows["root"]
        columns: dict[str, Column] = {
            "call": which,
            "message_bytes": np.where(lengths, 0, rows["message_bytes"]).astype(np.int64),
            "device_index": rows["device_index"].copy(),
            "enqueued_epoch_ns": rows["enqueued_ns"] + self.epoch_ns,
            "peer": _global(rows["peer"], known, which),
            "root": _global(root, known, which),
            "correlation": np.where(together, rows["correlation"], 0).astype(np.int64),
            "seq": rows["seq"].astype(np.int64),
            "dtype": rows["dtype"].copy(),
            "duration_ms": duration,
            "algbw_gbps": algbw,
            "busbw_gbps": algbw * factor,
            "step": rows["step"].astype(np.int64),
            "end_unknown": issued | (rows["flags"] & FLAG_ABANDONED != 0),
            "in_flight": issued,
            "failed": rows["status"] == _FAILED,
            "prints": p2p | np.where(root >= 0, root == place, place <= 0),
            "first": np.ones(len(rows), np.bool_),
        }
        calls = tuple(meaning.call for meaning in known)
        if (coalesced & (rows["tensors"] > 1)).any():
            columns = _each_tensor(columns, rows, coalesced, tables)
        return Descriptions(self.teller, calls, Columns(columns), dropped)


def describe(ring: Ring, mode: str | Mode = Mode.ALL, span: Span | None = None) -> Descriptions:
    """Describe all records of a ring that was read (``rankcall.load(...).rings``).

    Args:
        ring: The ring.
        mode: ``ALL``, ``CROSSNODE`` (only ops between hosts) or ``NONE``.
        span: Knows which ranks are on other hosts; ``CROSSNODE`` needs it.

    Returns:
        The descriptions, in issue order per group. Their ``gpu_serial`` and ``vm_id`` are
        ``unknown``, because records do not have them.

    Raises:
        ValueError: The mode is unknown, or it is ``CROSSNODE`` and ``span`` is missing.
    """
    chosen = mode_of(mode)
    if chosen is Mode.CROSSNODE and span is None:
        raise ValueError("the mode CROSSNODE needs span=, which knows each rank's host")
    header = ring.header
    rows = ring.records[:0] if chosen is Mode.NONE else ring.records
    over = rows["status"] >= STATUSES.index("completed")
    over |= (rows["completed_ns"] != 0) | (rows["flags"] & FLAG_ABANDONED != 0)
    ended, awaited = take_rows(rows, over), take_rows(rows, ~over)
    ordered, issued = Order().take(ended, awaited, ring.tables, 0, last=True)
    epoch_ns = header.anchor_epoch_ns - header.anchor_mono_ns
    describer = Describer(Teller(header.rank), epoch_ns, chosen, span)
    return describer.describe(ordered, issued, ring.tables, ring.dropped)


def _known(rows: Rows, tables: Tables) -> tuple[list[_Known], Column]:
    """Return the meaning of each distinct (variant, call site, group), and each row's index."""
    code = rows["variant"].astype(np.int64)
    for name in ("call_site", "group"):
        ids = rows[name]
        if ids.max(initial=0) > _MANY:  # ids count up from 1, so this file is damaged
            ids = np.unique(ids, return_inverse=True)[1]
        code = code * (int(ids.max(initial=0)) + 1) + ids
    _, first, which = np.unique(code, return_index=True, return_inverse=True)
    return [_meaning(rows[at], tables) for at in first.tolist()], which


def _meaning(row: Rows, tables: Tables) -> _Known:
    variant = tables.strings.get(int(row["variant"]), "")
    group = tables.groups.get(int(row["group"]), UNKNOWN_GROUP)
    site = tables.sites.get(int(row["call_site"]))
    api = site.api if site is not None else ""
    is_object = api in OBJECT_CALLS
    name = api if is_object else public_name(variant) or "unknown"
    call = DescribedCall(
        name, str(site) if site is not None else "unknown", group.label, group.ranks
    )
    return _Known(call, group, is_object, api == BATCH, "coalesced" in variant)


def _by(known: list[_Known], which: Column, value: object) -> Column:
    """Return a value for each row that depends only on the row's meaning."""
    assert callable(value)
    return np.array([value(meaning) for meaning in known], np.int64)[which]


def _place(ranks: tuple[int, ...], rank: int) -> int:
    return ranks.index(rank) if rank in ranks else -1


def _durations(rows: Rows, issued: Flags) -> npt.NDArray[np.float64]:
    """Return each op's duration in ms: the device's time if it was measured, NaN if unknown."""
    started = np.where(rows["started_ns"] == 0, rows["enqueued_ns"], rows["started_ns"])
    took = np.round((rows["completed_ns"] - started) / 1e6, 6)
    took = np.where(np.isnan(rows["device_ms"]), took, rows["device_ms"])
    unknown = issued | (rows["completed_ns"] == 0) | (rows["status"] == _FAILED)
    unknown |= ~has_duration(rows["flags"], rows["device_ms"])
    return np.where(unknown, np.nan, took)


def _moved(
    rows: Rows, known: list[_Known], which: Column, lengths: Flags
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return S (in bytes) and f of each row, as nccl-tests defines them."""
    moved, factor = np.zeros(len(rows)), np.zeros(len(rows))
    members = _by(known, which, lambda meaning: len(meaning.group.ranks))
    for n in np.unique(members).tolist():
        of_size = members == n
        part = {name: np.ascontiguousarray(rows[name][of_size]) for name in _SIZED}
        moved[of_size] = bandwidth_sizes(part, n)
        for op in np.unique(part["op"]).tolist():
            factor[of_size & (rows["op"] == op)] = bus_factor(OPS[op], n)
    moved[lengths] = 0
    return moved, factor


def _global(local: Column, known: list[_Known], which: Column) -> Column:
    """Translate ranks within their groups to global ranks; -1 stays -1 (no such rank)."""
    result = np.full(len(local), -1, np.int64)
    if (local < 0).all():
        return result
    for number, meaning in enumerate(known):
        ranks = np.array(meaning.group.ranks, np.int64)
        rows = (which == number) & (local >= 0) & (local < len(ranks))
        result[rows] = ranks[local[rows]]
    return result


def _each_tensor(
    columns: dict[str, Column], rows: Rows, coalesced: Column, tables: Tables
) -> dict[str, Column]:
    """Make one description for each tensor of a coalesced op; split the bytes by element counts."""
    times = np.ones(len(rows), np.int64)
    shares: dict[int, list[int]] = {}
    for at in np.flatnonzero(coalesced & (rows["tensors"] > 1)).tolist():
        numels = tables.numels.get(int(rows["shape_hash"][at]), ())
        total = sum(numels)
        if len(numels) == int(rows["tensors"][at]) and total:
            size = int(columns["message_bytes"][at])
            shares[at] = [size * numel // total for numel in numels]
            times[at] = len(numels)
    place = np.repeat(np.arange(len(rows)), times)
    spread = {name: column[place] for name, column in columns.items()}
    begins = np.cumsum(times) - times
    for at, parts in shares.items():
        here = slice(int(begins[at]), int(begins[at]) + len(parts))
        spread["message_bytes"][here] = parts
        spread["first"][here][1:] = False
    return spread

"""One record as plain Python values: what ``Run.records`` has in its columns, for a single row."""

from __future__ import annotations

from typing import Any

from rankcall.record import (
    DEVICE_TYPES,
    DTYPES,
    FLAG_ABANDONED,
    KINDS,
    OPS,
    REDUCE_OPS,
    STATUSES,
)
from rankcall.ring.tables import Tables

_PLAIN = (
    "seq", "message_bytes", "in_bytes", "out_bytes", "tag", "thread", "step", "tensors",
    "shape_hash", "correlation", "enqueued_ns",
)  # fmt: skip


def decode_row(row: Any, tables: Tables) -> dict[str, Any]:
    """Return a record's columns by name; None where a column does not apply."""
    group = tables.groups.get(int(row["group"]))
    site = tables.sites.get(int(row["call_site"]))
    ranks = group.ranks if group is not None else ()
    reduce_op = int(row["reduce_op"])
    device_ms = float(row["device_ms"])
    return {
        "index": int(row["commit"] >> 2) - 1,
        "group": group.label if group is not None else None,
        "group_ranks": list(ranks),
        "kind": KINDS[row["kind"]],
        "op": OPS[row["op"]],
        "dtype": DTYPES[row["dtype"]],
        "reduce_op": REDUCE_OPS[reduce_op] if reduce_op else None,
        "status": STATUSES[row["status"]],
        "variant": tables.strings.get(int(row["variant"])),
        **{name: int(row[name]) for name in _PLAIN},
        "shape": [int(size) for size in row["shape"][: row["ndim"]]],
        "root": _global(ranks, int(row["root"])),
        "peer": _global(ranks, int(row["peer"])),
        "async_op": {0: False, 1: True}.get(int(row["async_op"])),
        "device": _device(int(row["device_type"]), int(row["device_index"])),
        "call_site": str(site) if site is not None else None,
        "function": site.function if site is not None else None,
        "api": site.api if site is not None else None,
        "error": tables.strings.get(int(row["error"])) if row["error"] else None,
        "abandoned": bool(row["flags"] & FLAG_ABANDONED),
        "started_ns": int(row["started_ns"]) or None,
        "completed_ns": int(row["completed_ns"]) or None,
        "device_ms": device_ms if device_ms == device_ms else None,
    }


def _global(ranks: tuple[int, ...], local: int) -> int | None:
    return ranks[local] if 0 <= local < len(ranks) else None


def _device(kind: int, index: int) -> str:
    name = DEVICE_TYPES[kind] if kind < len(DEVICE_TYPES) else f"device{kind}"
    return name if index < 0 else f"{name}:{index}"

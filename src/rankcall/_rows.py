"""One record as plain Python values: what ``Run.records`` has in its columns, for a single row."""

from __future__ import annotations

from typing import Any

from rankcall.record import (
    CODED,
    FLAG_ABANDONED,
    GROUP_RANKS,
    LATE_TIMES,
    PLAIN,
    RECORD,
    device_name,
)
from rankcall.ring.tables import Tables

_FIELDS = RECORD.names or ()


def decode_row(row: Any, tables: Tables) -> dict[str, Any]:
    """Return a record's columns by name; None where a column does not apply."""
    raw = dict(zip(_FIELDS, row.item(), strict=True))  # Python's own numbers, all at once
    group = tables.groups.get(raw["group"])
    site = tables.sites.get(raw["call_site"])
    ranks = group.ranks if group is not None else ()
    device_ms = raw["device_ms"]
    return {
        "index": (raw["commit"] >> 2) - 1,
        "group": group.label if group is not None else None,
        "group_ranks": list(ranks),
        **{name: names[raw[name]] for name, names in CODED.items()},
        "variant": tables.strings.get(raw["variant"]),
        **{name: raw[name] for name in PLAIN},
        "shape": raw["shape"][: raw["ndim"]].tolist(),
        **{name: _global(ranks, raw[name]) for name in GROUP_RANKS},
        "async_op": {0: False, 1: True}.get(raw["async_op"]),
        "device": device_name(raw["device_type"], raw["device_index"]),
        "call_site": str(site) if site is not None else None,
        "function": site.function if site is not None else None,
        "api": site.api if site is not None else None,
        "correlation": raw["correlation"],
        "error": tables.strings.get(raw["error"]) if raw["error"] else None,
        "abandoned": bool(raw["flags"] & FLAG_ABANDONED),
        **{name: raw[name] or None for name in LATE_TIMES},
        "device_ms": device_ms if device_ms == device_ms else None,
    }


def _global(ranks: tuple[int, ...], local: int) -> int | None:
    return ranks[local] if 0 <= local < len(ranks) else None

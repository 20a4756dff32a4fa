"""PyTorch's own Flight Recorder as an independent witness of what was issued, and in what order.

On Gloo it sees no send or receive and no monitored_barrier, and a reduce_scatter as the all_reduces
that Gloo makes of it; its sequence numbers have gaps. So entries are compared by their order within
each group, after the records are written out in its terms.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

ARMED = {"TORCH_FR_BUFFER_SIZE": "8192"}
_BYTES = {
    "Float": 4,
    "Double": 8,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Int": 4,
    "Long": 8,
}


class Seen(NamedTuple):
    """An op as the witness tells it: bytes of its inputs (None: it does not tell)."""

    op: str
    in_bytes: int | None


def torch_saw() -> list[dict[str, Any]]:
    """Return the Flight Recorder's entries of this process, oldest first."""
    from torch._C._distributed_c10d import _dump_fr_trace_json

    entries: list[dict[str, Any]] = json.loads(_dump_fr_trace_json())["entries"]
    return sorted(entries, key=lambda entry: entry["record_id"])


def by_group(entries: Iterable[dict[str, Any]]) -> dict[str, list[Seen]]:
    """Return the entries of each group, in order."""
    groups: dict[str, list[Seen]] = defaultdict(list)
    for entry in entries:
        name = entry["profiling_name"].removeprefix("gloo:")
        # It has no sizes of a scatter's inputs, and only the dense size of a sparse tensor.
        silent = name in ("scatter", "sparse_all_reduce")
        pairs = zip(entry["input_sizes"], entry["input_dtypes"], strict=True)
        size = None if silent else sum(math.prod(shape) * _BYTES[dtype] for shape, dtype in pairs)
        groups[entry["process_group"][0]].append(Seen(name.removeprefix("sparse_"), size))
    return dict(groups)


def expanded(rows: Iterable[dict[str, Any]]) -> dict[str, list[Seen]]:
    """Return recorded collectives of one rank in the witness's terms, by group and in order."""
    groups: dict[str, list[Seen]] = defaultdict(list)
    for row in rows:
        if row["kind"] == "collective" and row["variant"] != "monitored_barrier_":
            groups[row["group"]] += _expand(row)
    return dict(groups)


def _expand(row: dict[str, Any]) -> list[Seen]:
    variant = row["variant"]
    if variant == "reduce_scatter_":
        return [Seen("all_reduce", row["out_bytes"])] * len(row["group_ranks"])
    if variant == "reduce_scatter_tensor_coalesced_":
        size = row["in_bytes"] if row["tensors"] == 1 else None
        return [Seen("all_reduce", size)] * row["tensors"]
    if variant == "_reduce_scatter_base_":
        return [Seen("all_reduce", row["in_bytes"])]
    return [Seen(row["op"], row["in_bytes"])]


def differences(rows: Iterable[dict[str, Any]], saw: dict[str, list[Seen]]) -> list[str]:
    """Return where the records of one rank and the witness's account differ."""
    recorded, wrong = expanded(rows), []
    for group in sorted(recorded.keys() | saw.keys()):
        ours, theirs = recorded.get(group, []), saw.get(group, [])
        for at, (our_op, their_op) in enumerate(zip(ours, theirs, strict=False)):
            silent = None in (our_op.in_bytes, their_op.in_bytes)
            if our_op.op != their_op.op or (our_op.in_bytes != their_op.in_bytes and not silent):
                wrong.append(f"group {group}, entry {at}: {our_op} recorded, torch saw {their_op}")
                break
        if len(ours) != len(theirs):
            wrong.append(f"group {group}: {len(ours)} recorded, torch saw {len(theirs)}")
    return wrong

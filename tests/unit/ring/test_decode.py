"""Both ways to decode a record give the same values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankcall.ranks import format_ranks
from rankcall.record import CODED, MAX_DIMS, RECORD
from rankcall.ring.decode import decode_record, decode_ring
from rankcall.ring.layout import Geometry, make_header, parse_header
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite, Group, Tables, UserLine

TABLES = Tables(
    strings={4: "_allgather_base_", 7: "it failed"},
    groups={2: Group("9", 0, "gloo", "", (3, 5, 4)), 3: Group("9", 1, "nccl", "", (0, 3))},
    sites={
        5: CallSite("train.py", 12, "step", "all_reduce"),
        6: CallSite("fit.py", 9, "fit", "broadcast", UserLine("train.py", 13, "main")),
    },
)


def any_ring(seed: int, count: int) -> Ring:
    """Return a ring of records with random values in all fields; ids are often unknown."""
    random = np.random.default_rng(seed)
    rows = np.frombuffer(random.bytes(count * RECORD.itemsize), RECORD).copy()
    for name, names in CODED.items():
        rows[name] = random.integers(0, len(names), count)
    for name, bound in (("ndim", MAX_DIMS + 1), ("async_op", 3), ("device_type", 30), ("flags", 8)):
        rows[name] = random.integers(0, bound, count)
    for name in ("group", "call_site", "variant", "error"):
        rows[name] = random.integers(0, 9, count)
    for name in ("root", "peer", "device_index"):
        rows[name] = random.integers(-1, 4, count)
    rows["shape"] = random.integers(0, 3, (count, MAX_DIMS))
    for name in ("started_ns", "completed_ns"):
        rows[name] = random.integers(0, 3, count)
    rows["device_ms"] = np.where(random.random(count) < 0.5, np.nan, 1.5)
    rows["commit"] = (np.arange(count, dtype=np.uint64) + 1) << 2
    header = parse_header(make_header(Geometry(), {"rank": 3, "host": b"node-a"}), "")
    return Ring(Path("x.ring"), header, rows, TABLES, 0)


@pytest.mark.parametrize("count", [0, 1, 200])
def test_a_table_has_what_each_record_has(count: int) -> None:
    """Every column of the table equals the same column of the records, decoded one by one."""
    ring = any_ring(count, count)
    labels = {group: f"<{group.label}>" for group in TABLES.groups.values()}
    columns = decode_ring(ring, labels)
    frame = pl.DataFrame({name: column.series() for name, column in columns.items()})
    assert frame.height == count
    for row, got in zip(ring.records, frame.to_dicts(), strict=True):
        want: dict[str, Any] = {"rank": 3, "attempt": 0, "host": "node-a"}
        want |= decode_record(row, TABLES)
        want["shape"] = str(want["shape"])
        want["group_ranks"] = format_ranks(want["group_ranks"]) if want["group"] else None
        want["group"] = want["group"] and f"<{want['group']}>"
        if row["error"] == 0:
            want["error"] = None
        assert got == want


def test_without_any_names() -> None:
    """A ring whose side tables are lost still gives all its records, without names."""
    ring = dataclasses.replace(any_ring(1, 20), tables=Tables())
    columns = decode_ring(ring, {})
    lines = ("call_site", "user_line", "function", "api")
    for name in ("group", "group_ranks", "variant", *lines, "error"):
        assert columns[name].series().to_list() == [None] * 20
    assert columns["seq"].series().to_list() == ring.records["seq"].tolist()


@given(st.lists(st.integers(0, 60), max_size=40))
def test_ranks_as_text(ranks: list[int]) -> None:
    """The text names exactly the ranks, in ascending order."""
    named: list[int] = []
    for part in filter(None, format_ranks(ranks).split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(set(ranks))

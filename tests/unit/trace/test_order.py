"""The order of descriptions, by made-up records: per group, in calls of several ops, overdue."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rankcall.record import COMMIT_DONE, COMMIT_OPEN, DTYPES, OPS, RECORD, STATUSES
from rankcall.ring.follower import index_of
from rankcall.ring.tables import CallSite, Group, Tables
from rankcall.trace.order import OVERDUE_NS, Order

S = 1_000_000_000
TABLES = Tables(
    strings={1: "allreduce_"},
    groups={2: Group("0", 0, "gloo", "", (0, 1)), 3: Group("1", 0, "gloo", "", (0, 1))},
    sites={
        4: CallSite("a.py", 1, "f", "all_reduce"),
        5: CallSite("a.py", 2, "f", "broadcast_object_list"),
    },
)


def rows(*records: dict[str, Any]) -> np.ndarray:
    """Make records; ``index`` counts from 0, times are in ns."""
    array = np.zeros(len(records), RECORD)
    for row, record in zip(array, records, strict=True):
        known = {"group": 2, "call_site": 4, "status": STATUSES.index("completed"), **record}
        index, over = known.pop("index"), known.pop("over", True)
        row["commit"] = (index + 1) << 2 | (COMMIT_DONE if over else COMMIT_OPEN)
        row["variant"], row["op"] = 1, OPS.index("all_reduce")
        row["completed_ns"] = known.pop("ended", 1) if over else 0
        row["dtype"] = DTYPES.index(known.pop("dtype", "float32"))
        row["device_ms"] = math.nan
        for name, value in known.items():
            row[name] = value
    return array


def flight(index: int, **more: Any) -> dict[str, Any]:
    """Return an op in flight."""
    return {"index": index, "over": False, "status": STATUSES.index("started"), **more}


def taken(order: Order, ended: Any, awaited: Any = (), now: int = 10, **more: Any) -> list[Any]:
    """Return (index, whether in flight) of what comes out."""
    due_rows, issued = order.take(rows(*ended), rows(*awaited), TABLES, now, **more)
    return list(zip(index_of(due_rows).tolist(), issued.tolist(), strict=True))


def test_an_earlier_op_of_the_same_group_is_waited_for() -> None:
    """The later one comes out after it, one of another group at once."""
    order = Order()
    ended = [{"index": 1}, {"index": 2, "group": 3}, {"index": 3}]
    assert taken(order, ended, [flight(0)]) == [(2, False)]
    assert order.waiting == 2
    assert taken(order, [{"index": 0}]) == [(0, False), (1, False), (3, False)]
    assert order.waiting == 0


def test_what_is_overdue_is_told_once_and_blocks_no_more() -> None:
    """After five seconds it is described as issued; the others go on; then its end is described."""
    order = Order()
    stuck = flight(0, enqueued_ns=1)
    assert taken(order, [{"index": 1}], [stuck], now=OVERDUE_NS) == []
    assert taken(order, [], [stuck], now=OVERDUE_NS + 2) == [(0, True), (1, False)]
    assert taken(order, [{"index": 2}], [stuck], now=OVERDUE_NS + 3) == [(2, False)]
    assert taken(order, [{"index": 0}], now=OVERDUE_NS + 4) == [(0, False)]


def test_what_ends_during_a_look_is_put_in_its_place() -> None:
    """A look takes several readings: an earlier op may come with a later one of them."""
    order = Order()
    assert taken(order, [{"index": 1}, {"index": 2}, {"index": 0}]) == [
        (0, False),
        (1, False),
        (2, False),
    ]


def test_the_ops_of_one_call_are_one() -> None:
    """The row of the pickles, from the first start to the last end; later ops wait for it."""
    order = Order()
    call = {"call_site": 5, "correlation": 1}
    lengths = {"index": 0, **call, "dtype": "int64", "started_ns": 3, "ended": 4}
    pickles = {"index": 1, **call, "dtype": "uint8", "started_ns": 5, "ended": 9}
    assert taken(order, [lengths, {"index": 2}]) == []
    due_rows, _ = order.take(rows(pickles), rows(), TABLES, 10)
    assert index_of(due_rows).tolist() == [1, 2]
    assert (due_rows["started_ns"][0], due_rows["completed_ns"][0]) == (3, 9)


def test_two_calls_at_once_stay_apart() -> None:
    """Two threads' calls on two groups are put together by their correlation."""
    order = Order()
    ended = [
        {"index": at, "group": group, "call_site": 5, "correlation": group, "dtype": dtype}
        for at, (group, dtype) in enumerate(
            [(2, "int64"), (3, "int64"), (3, "uint8"), (2, "uint8")]
        )
    ]
    assert taken(order, ended) == [(2, False), (3, False)]


def test_a_call_that_failed_or_grows_no_more_is_told() -> None:
    """The rest of a failed call never comes; nor does one that this torch makes of fewer ops."""
    order = Order()
    failed = {"index": 0, "call_site": 5, "correlation": 1, "status": STATUSES.index("failed")}
    assert taken(order, [failed]) == [(0, False)]
    alone = {"index": 1, "call_site": 5, "correlation": 2, "ended": 5 * S}
    assert taken(order, [alone], now=5 * S) == []
    assert taken(order, [], now=6 * S + 1) == [(1, False)]


def test_at_the_end_nothing_stays() -> None:
    """An op that never ended is described as issued, and those that wait for it as ended."""
    order = Order()
    assert taken(order, [{"index": 1}], [flight(0)]) == []
    assert taken(order, [], [flight(0)], last=True) == [(0, True), (1, False)]
    assert order.waiting == 0


def test_what_was_described_as_issued_is_not_described_so_again_at_the_end() -> None:
    """An op that has been in flight for long has one description as issued."""
    order = Order()
    stuck = flight(0, enqueued_ns=1)
    assert taken(order, [], [stuck], now=OVERDUE_NS + 2) == [(0, True)]
    assert taken(order, [], [stuck, flight(1)], now=OVERDUE_NS + 3, last=True) == [(1, True)]


def test_any_order_of_ends_comes_out_in_issue_order() -> None:
    """Random ends on two groups, looked at after each: sorted in each group, none lost."""
    random = np.random.default_rng(7)
    for _ in range(50):
        order, out = Order(), []
        groups = random.choice([2, 3], 30).tolist()
        ends = random.permutation(30).tolist()
        for at, index in enumerate(ends):
            awaited = [flight(i, group=groups[i]) for i in sorted(ends[at + 1 :])]
            out += [i for i, _ in taken(order, [{"index": index, "group": groups[index]}], awaited)]
        for group in (2, 3):
            assert [i for i in out if groups[i] == group] == [
                i for i in range(30) if groups[i] == group
            ]

"""When a leader looks for calls that never end, and the numbers by which it tells calls apart."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from worlds import MS, group_of, together, write_world

from rankcall.job.endless import CallNumbers, EndlessCalls
from rankcall.process import boot_id, pid_namespace, process_start
from rankcall.record import KINDS, OPS, RECORD
from rankcall.ring.layout import Header, read_header
from rankcall.ring.tables import Group, Tables

S = 1_000_000_000


@pytest.fixture
def headers(tmp_path: Path) -> dict[int, Header]:
    """Return the headers of two ranks of this process, which are in no call."""
    run = write_world(tmp_path / "run", together(1, [0, 0], MS, group_of(2)))
    me = os.getpid()
    found = [read_header(path) for path in sorted((run / "rings").iterdir())]
    return {
        header.rank: replace(
            header,
            pid=me,
            process_start=process_start(me) or 0,
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            closed_ns=0,
        )
        for header in found
        if header is not None
    }


def in_call(header: Header, number: int, seconds: float) -> Header:
    """Return the header of a rank that has been in a call for so many s."""
    return replace(header, in_call=number, in_call_ns=time.monotonic_ns() - int(seconds * S))


def test_ranks_in_one_call_cause_no_look(headers: dict[int, Header]) -> None:
    """Nor do ranks that have come to different calls just now, or that compute."""
    calls = EndlessCalls()
    assert not calls.is_due(headers, 0.0)
    assert not calls.is_due({0: headers[0], 1: in_call(headers[1], 7, 60)}, 0.0)
    both = {rank: in_call(header, 7, 60) for rank, header in headers.items()}
    assert not calls.is_due(both, 0.0)
    assert not calls.is_due({**both, 1: in_call(headers[1], 8, 0.05)}, 0.0)


def test_different_calls_cause_a_look(headers: dict[int, Header]) -> None:
    """And so does an exception, a process that is gone, and one whose ring has moved."""
    waits = in_call(headers[0], 7, 1)
    assert EndlessCalls().is_due({0: waits, 1: in_call(headers[1], 8, 1)}, 0.0)
    assert EndlessCalls().is_due({0: waits, 1: replace(headers[1], failure="ValueError")}, 0.0)
    assert EndlessCalls().is_due({0: waits, 1: replace(headers[1], process_start=1)}, 0.0)
    calls = EndlessCalls()
    assert not calls.is_due({0: waits, 1: headers[1]}, 0.0)
    assert calls.is_due({0: waits}, 0.0)


def test_other_nodes_are_not_asked(headers: dict[int, Header]) -> None:
    """A job with ranks elsewhere waits for the threshold."""
    elsewhere = {
        rank: replace(in_call(header, rank, 1), world_size=4) for rank, header in headers.items()
    }
    assert not EndlessCalls().is_due(elsewhere, 0.0)


def test_looks_that_find_nothing_are_rare(headers: dict[int, Header]) -> None:
    """They take 1 % of a core; one that must be confirmed is followed by another one soon."""
    different = {rank: in_call(header, rank, 1) for rank, header in headers.items()}
    for suspects, expected in ((False, 1.0), (True, 0.05)):
        calls = EndlessCalls()

        def takes_10_ms(*_: Any) -> bool:
            until = time.thread_time() + 0.01
            while time.thread_time() < until:
                pass
            return False

        judge: Any = SimpleNamespace(look_for_endless=takes_10_ms, suspects_endless=suspects)
        assert calls.is_due(different, time.monotonic())
        assert not calls.look(judge, different)
        now = calls._next - expected
        assert not calls.is_due(different, now)
        assert calls.pause_s(now, 0.25) == pytest.approx(min(0.25, expected) if suspects else 0.25)
        assert calls.pause_s(now + expected + 0.01, 0.25) == 0.25
        if suspects:
            assert calls.is_due(different, now + expected + 0.01)
        else:
            assert not calls.is_due(different, now + 0.9)


def number(**fields: Any) -> int:
    """Return the number of a call of a rank whose ring has its group under some id."""
    group_id = fields.pop("group_id", 3)
    group = fields.pop("known", Group("0", 0, "gloo", "", (0, 1)))
    row = np.zeros(1, RECORD)[0]
    values = {"op": OPS.index("all_reduce"), "seq": 4, "root": -1, "message_bytes": 64}
    for name, value in {**values, "group": 3, **fields}.items():
        row[name] = value
    tables: Any = SimpleNamespace(now=lambda: Tables(groups={group_id: group}))
    return CallNumbers(tables).number_of(row)


def test_members_of_one_call_have_one_number() -> None:
    """Whatever the ids are under which their rings have the group."""
    usual = number()
    assert usual == number(group=9, group_id=9)
    assert number(op=OPS.index("all_gather"), message_bytes=8) != usual
    others = [
        number(seq=5),
        number(message_bytes=65),
        number(root=1),
        number(op=OPS.index("barrier")),
        number(known=Group("1", 0, "gloo", "", (0, 1))),
        number(known=Group("0", 1000, "gloo", "", (0, 1))),
        number(known=Group("0", 0, "gloo", "", (0, 2))),
        number(kind=KINDS.index("p2p"), peer=1),
    ]
    assert len({usual, *others}) == len(others) + 1
    assert number(group=8) == 0  # a group that its ring does not have

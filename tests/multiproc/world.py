"""The records that a rank expects: written down beside each call, and compared afterwards.

A case issues ops on one process group, and calculates each op's expected record by formulas of its
own. ``World`` adds what follows from the order alone: sequence numbers and which ops share
a call. ``differences`` compares one rank's expectations with the records that were read back.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

Case = Callable[["World", "Members"], None]
SUBGROUPS = {"odd": [1, 3], "some": [0, 2, 3]}


def here() -> int:
    """Return the number of the line after the caller's."""
    return sys._getframe(1).f_lineno + 1


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait until another thread or process has done something; fail at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


@dataclass
class Members:
    """A process group this rank is in."""

    label: str
    ranks: list[int]
    pg: Any
    me: int  # this rank's place in it

    @property
    def n(self) -> int:
        """How many members it has."""
        return len(self.ranks)

    def after(self, steps: int) -> int:
        """Return the global rank that stands ``steps`` further round the ring of members."""
        return self.ranks[(self.me + steps) % self.n]


@dataclass
class World:
    """One rank's view: its groups, and what it expects of the case that runs."""

    rank: int
    groups: list[Members]
    expected: list[dict[str, Any]] = field(default_factory=list)
    _seqs: Counter[Any] = field(default_factory=Counter)
    _calls: int = 0

    @classmethod
    def of(cls, rank: int, subgroups: dict[str, list[int]] = SUBGROUPS) -> World:
        """Make the sub-groups (a collective call) and return this rank's world."""
        groups = {"0": dist.group.WORLD}
        members = {"0": list(range(dist.get_world_size()))}
        for number, ranks in enumerate(subgroups.values(), 1):
            groups[str(number)], members[str(number)] = dist.new_group(ranks), ranks
        mine = [
            Members(label, ranks, groups[label], ranks.index(rank))
            for label, ranks in members.items()
            if rank in ranks
        ]
        return cls(rank, mine)

    def new_call(self) -> int:
        """Return a number for the ops of one public call."""
        self._calls += 1
        return self._calls

    def saw(
        self,
        g: Members,
        op: str,
        variant: str,
        *,
        api: str,
        line: int,
        call: int | None = None,
        both: int | None = None,
        **columns: Any,
    ) -> None:
        """Expect one record. ``both`` is the message, in and out bytes, if they are the same."""
        sizes = (
            {} if both is None else dict.fromkeys(("message_bytes", "in_bytes", "out_bytes"), both)
        )
        row = {
            "kind": "p2p" if op in ("send", "recv") else "collective",
            "op": op,
            "variant": variant,
            "api": api,
            "line": line,
            "group": g.label,
            "group_ranks": g.ranks,
            "root": None,
            "peer": None,
            "tag": 0,
            "reduce_op": None,
            "dtype": "float32",
            "async_op": False,
            "tensors": 1,
            "status": "completed",
            "error": None,
            "abandoned": False,
            "device": "cpu",
            "call": call or self.new_call(),
            **sizes,
            **columns,
        }
        row["seq"] = self._next_seq(row)
        self.expected.append(row)

    def sent(self, g: Members, to: int, size: int, **columns: Any) -> None:
        """Expect a send of ``size`` bytes to a global rank."""
        sizes = {"message_bytes": size, "in_bytes": size, "out_bytes": 0, "async_op": None}
        self.saw(g, "send", "send", peer=to, **{**sizes, **columns})

    def received(self, g: Members, source: int, size: int, **columns: Any) -> None:
        """Expect a receive of ``size`` bytes from a global rank."""
        sizes = {"message_bytes": size, "in_bytes": 0, "out_bytes": size, "async_op": None}
        known = {"variant": "recv_", **sizes, **columns}
        self.saw(g, "recv", known.pop("variant"), peer=source, **known)

    def _next_seq(self, row: dict[str, Any]) -> int:
        key: tuple[Any, ...] = (row["group"],)
        if row["kind"] == "p2p":
            ends = (self.rank, row["peer"]) if row["op"] == "send" else (row["peer"], self.rank)
            key = (row["group"], *ends, row["tag"])
        self._seqs[key] += 1
        return self._seqs[key]


def run_cases(
    world: World, cases: Iterable[Case], issued: Callable[[], int]
) -> list[dict[str, Any]]:
    """Run every case on every group of this rank, in the same order on all ranks.

    Returns a part for each: its name, the records it issued (``first`` up to ``last``), what it
    expects of them, and what it found wrong with the results.
    """
    parts = []
    for case in cases:
        for group in world.groups:
            world.expected, first, problem = [], issued(), None
            try:
                case(world, group)
            except AssertionError as error:  # after the ops: the other ranks are not left waiting
                problem = f"{type(error).__name__} {error} in {case.__name__} on {group.label}"
            parts.append(
                {
                    "case": case.__name__,
                    "group": group.label,
                    "first": first,
                    "last": issued(),
                    "expected": world.expected,
                    "problem": problem,
                }
            )
    return parts


def differences(expected: list[dict[str, Any]], rows: list[dict[str, Any]], file: str) -> list[str]:
    """Return how the records of one case differ from what was expected of them."""
    if len(rows) != len(expected):
        recorded = [(row["variant"], row["call_site"]) for row in rows]
        return [f"{len(expected)} records expected, {len(rows)} found: {recorded}"]
    wrong, calls = [], {}  # type: list[str], dict[int, int]
    for want, row in zip(expected, rows, strict=True):
        want = dict(want)
        call = want.pop("call")
        if calls.setdefault(call, row["correlation"]) != row["correlation"]:
            wrong.append(f"{row['variant']}: not the correlation of its call")
        want["call_site"] = f"{file}:{want.pop('line')}"
        wrong += [
            f"{want['variant']} seq {want['seq']}: {name} is {row[name]!r}, not {value!r}"
            for name, value in want.items()
            if row[name] != value
        ]
        if row["completed_ns"] is None or not (
            row["enqueued_ns"] <= row["started_ns"] <= row["completed_ns"]
        ):
            wrong.append(f"{want['variant']}: its times are out of order")
    if len(set(calls.values())) != len(calls):
        wrong.append(f"calls share a correlation: {calls}")
    return wrong


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of ``Run.records`` with its ranks and shape as lists."""
    ranks: list[int] = []
    for part in row["group_ranks"].split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    shape = [int(size) for size in row["shape"].strip("[]").split(",") if size.strip()]
    return {**row, "group_ranks": ranks, "shape": shape}

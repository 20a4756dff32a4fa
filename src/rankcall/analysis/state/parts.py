"""What each node knows of a job: sent to the others as bytes, and put together.

What this costs grows with the ranks, not with ranks times nodes: a part is of a node's own ranks.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.snapshot import (
    CALL,
    Calls,
    RankState,
    Snapshot,
    labels_of,
    no_calls,
)
from rankcall.record import KINDS, OPS, STATUSES
from rankcall.ring.tables import CallSite, Group, compress_ranks, expand_ranks

SCHEMA = 2
_MOST_BYTES = 1 << 28  # once it is decoded
_MOST_RANKS = 1 << 20


@dataclass
class Part:
    """What one node knows: where its own ranks stand, of a world of so many."""

    world: int
    ranks: list[RankState]
    calls: Calls
    groups: list[Group] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def part_of(snapshot: Snapshot) -> Part:
    """Return what is known of a snapshot's ranks, without those of which nothing is."""
    return Part(
        len(snapshot.ranks), [each for each in snapshot.ranks if not each.blind], snapshot.calls,
        snapshot.groups, snapshot.sites, snapshot.problems,
    )  # fmt: skip


def encode(part: Part) -> bytes:
    """Return what a node knows as bytes: some 1 KiB a rank where calls are few."""
    return zlib.compress(
        json.dumps(
            {
                "schema": SCHEMA,
                "ranks": [vars(each) for each in part.ranks],
                "world": part.world,
                "groups": [
                    {**vars(group), "ranks": compress_ranks(list(group.ranks))}
                    for group in part.groups
                ],
                "sites": [vars(site) for site in part.sites],
                "calls": base64.b64encode(part.calls.tobytes()).decode(),
                "problems": part.problems,
            }
        ).encode()
    )


def decode(data: bytes) -> Part:
    """Undo ``encode``. Raises ``ValueError`` where the bytes are none of this version's."""
    try:
        unpacker = zlib.decompressobj()
        found = json.loads(unpacker.decompress(data, _MOST_BYTES))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, this rankcall reads schema {SCHEMA}")
        return _part(found)
    except (KeyError, TypeError, AttributeError, zlib.error, RecursionError) as error:
        raise ValueError(f"not what a node knows: {type(error).__name__}: {error}") from error


def _part(found: dict[str, Any]) -> Part:
    names = {each.name for each in fields(RankState)}
    known = {}
    for each in found["ranks"]:
        told = {key: value for key, value in each.items() if key in names}
        rank = told["rank"] = int(told["rank"])
        known[rank] = RankState(**told)
    world = max([int(found["world"]), *(rank + 1 for rank in known)])
    if world > _MOST_RANKS or min(known, default=0) < 0:
        raise ValueError("impossible ranks")
    groups = [
        Group(
            str(each["name"]), int(each["epoch"]), str(each["backend"]), str(each["description"]),
            _expanded(json.dumps(each["ranks"])),
        )
        for each in found["groups"]
    ]  # fmt: skip
    sites = [
        CallSite(str(s["file"]), int(s["line"]), str(s["function"]), str(s["api"]))
        for s in found["sites"]
    ]
    calls = np.frombuffer(base64.b64decode(found["calls"]), CALL).copy()
    limits = {
        "rank": world, "group": len(groups), "site": max(1, len(sites)), "kind": len(KINDS),
        "op": len(OPS), "status": len(STATUSES),
    }  # fmt: skip
    if any(np.any((calls[name] < 0) | (calls[name] >= most)) for name, most in limits.items()):
        raise ValueError("a call refers to what is not there")
    problems = [str(text) for text in found["problems"]]
    return Part(world, list(known.values()), calls, groups, sites, problems)


@lru_cache(maxsize=64)
def _expanded(runs: str) -> tuple[int, ...]:
    """Return a group's ranks: every node tells of the world, and of few groups besides."""
    return expand_ranks(json.loads(runs))


def merge(parts: Sequence[Part]) -> Snapshot:
    """Make one snapshot of what several nodes know.

    A rank that two parts know is taken from the one that knows more of it; of one that none knows,
    nothing is known.
    """
    world = max((part.world for part in parts), default=0)
    best: dict[int, RankState] = {}
    owner = np.full(world, -1)
    for number, part in enumerate(parts):
        for state in part.ranks:
            known = best.get(state.rank)
            if known is None or _worth(state) > _worth(known):
                best[state.rank], owner[state.rank] = state, number
    groups = _Table(group for part in parts for group in part.groups)
    sites = _Table(site for part in parts for site in part.sites)
    calls = [no_calls()]
    for number, part in enumerate(parts):
        mine = part.calls[owner[part.calls["rank"]] == number]
        mine["group"] = groups.translate(part.groups, mine["group"])
        mine["site"] = sites.translate(part.sites, mine["site"])
        calls.append(mine)
    problems = list(dict.fromkeys(text for part in parts for text in part.problems))
    ranks = [best.get(rank) or RankState(rank, blind=True) for rank in range(world)]
    return Snapshot(
        ranks, np.concatenate(calls), groups.items, labels_of(groups.items, ranks), sites.items,
        problems,
    )  # fmt: skip


def _worth(state: RankState) -> tuple[int, float]:
    return state.attempt, -state.silent_s


class _Table:
    """Distinct things in order of appearance."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._at: dict[Any, int] = {}
        for thing in things:
            self._at.setdefault(thing, len(self._at))

    @property
    def items(self) -> list[Any]:
        return list(self._at)

    def translate(self, things: Sequence[Any], column: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Replace indices into ``things`` by ours."""
        table = np.array([self._at[thing] for thing in things] or [0], column.dtype)
        translated: npt.NDArray[Any] = table[column]
        return translated

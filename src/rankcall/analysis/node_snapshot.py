"""The snapshot of one node's own ranks: sent to other nodes as bytes, and merged into one.

The cost grows with the ranks, not with ranks times nodes, because a node sends only its own.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import (
    CALL,
    RankState,
    Snapshot,
    labels_of,
    no_calls,
    within_world,
)
from rankcall.analysis.spent import SPENT, TIMES, Spending
from rankcall.packed_json import load, pack
from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import MAX_RANKS, compress_ranks, count_ranks, expand_ranks
from rankcall.record import KINDS, OPS, STATUSES
from rankcall.ring.tables import CallSite, Group, site_from, site_object

Calls = npt.NDArray[Any]

SCHEMA = 9
_MOST_MEMBERS = 1 << 17  # of all groups, and 64 more for each rank: a short run stands for many
_MOST_NUMBER = 1 << 62
_LONGEST_S = 1e9


@dataclass
class NodeSnapshot:
    """Where the ranks of one node stand. ``world``: the number of ranks of the job."""

    world: int
    ranks: list[RankState]
    calls: Calls
    groups: list[Group] = field(default_factory=list)
    sites: list[CallSite] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    spending: Spending = field(default_factory=Spending)


def node_snapshot_of(snapshot: Snapshot) -> NodeSnapshot:
    """Return the part of a snapshot that is known.

    It has no blind ranks, except those whose end was noted: other nodes do not know it.
    """
    return NodeSnapshot(
        len(snapshot.ranks),
        [state for state in snapshot.ranks if not state.blind or state.exit is not None],
        snapshot.calls,
        snapshot.groups,
        snapshot.sites,
        snapshot.problems,
        snapshot.spending,
    )


def encode(node: NodeSnapshot) -> bytes:
    """Return a node's snapshot as bytes: some 1 KiB a rank if calls are few."""
    return pack(
        json.dumps(
            {
                "schema": SCHEMA,
                "ranks": [vars(state) for state in node.ranks],
                "world": node.world,
                "groups": [
                    {**vars(group), "ranks": compress_ranks(list(group.ranks))}
                    for group in node.groups
                ],
                "sites": [site_object(site) for site in node.sites],
                "calls": base64.b64encode(node.calls.tobytes()).decode(),
                "spent": base64.b64encode(node.spending.table.tobytes()).decode(),
                "problems": [(problem.kind, problem.text) for problem in node.problems],
            }
        ).encode()
    )


def decode(data: bytes, most_ranks: int = MAX_RANKS) -> NodeSnapshot:
    """Undo ``encode``. Any process may have written the bytes.

    Args:
        data: What ``encode`` returned.
        most_ranks: The number of ranks of the job.

    Raises:
        ValueError: The bytes are not of this version, are damaged, or tell of more ranks.
    """
    try:
        document = load(data, most_ranks)
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, this rankcall reads schema {SCHEMA}")
        return _decoded(document, most_ranks)
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"not a node's snapshot: {type(error).__name__}: {error}") from error


_TYPES = {
    name: kind | int if kind in (float, float | None) else kind  # JSON has one kind of number
    for name, kind in get_type_hints(RankState).items()
}


def _state(entry: dict[str, Any]) -> RankState:
    """Return a rank's state; raises ``ValueError`` if a field has another type than its own."""
    arguments = {name: entry[name] for name in _TYPES if name in entry}
    for name, value in arguments.items():
        is_number = isinstance(value, int | float)
        if not isinstance(value, _TYPES[name]) or (is_number and not abs(value) < _MOST_NUMBER):
            raise ValueError(f"{name} of a rank is {value!r:.60}")
    return RankState(**arguments)


def _decoded(document: dict[str, Any], most_ranks: int) -> NodeSnapshot:
    states = list(map(_state, document["ranks"]))
    known = {state.rank: state for state in states}
    world = max([int(document["world"]), *(rank + 1 for rank in known)])
    if world > most_ranks or min(known, default=0) < 0:
        raise ValueError(f"a rank that is not one of {most_ranks:,}")
    if len(known) < len(states):
        raise ValueError("a rank is there more than once")
    members = sum(count_ranks(entry["ranks"]) for entry in document["groups"])
    if members > _MOST_MEMBERS + 64 * world:
        raise ValueError(f"groups of {members:,} members")
    groups = [
        Group(
            str(entry["name"]),
            int(entry["epoch"]),
            str(entry["backend"]),
            str(entry["description"]),
            _expanded(json.dumps(entry["ranks"])),
        )
        for entry in document["groups"]
    ]
    sites = [site_from(entry) for entry in document["sites"]]
    calls = np.frombuffer(base64.b64decode(document["calls"]), CALL).copy()
    limits = {
        "rank": world,
        "group": len(groups),
        "site": max(1, len(sites)),
        "kind": len(KINDS),
        "op": len(OPS),
        "status": len(STATUSES),
    }
    if any(np.any((calls[name] < 0) | (calls[name] >= most)) for name, most in limits.items()):
        raise ValueError("a call refers to what is not there")
    spent = np.frombuffer(base64.b64decode(document["spent"]), SPENT)
    if np.any((spent["rank"] < 0) | (spent["rank"] >= world)):
        raise ValueError("times of a rank that is not there")
    figures = [spent[name] for name in TIMES]
    if not np.all(spent["seconds"] > 0) or any(np.any((s < 0) | (s > _LONGEST_S)) for s in figures):
        raise ValueError("impossible times of a rank")
    problems = [Problem(ProblemKind(kind), str(text)) for kind, text in document["problems"]]
    return NodeSnapshot(
        world, list(known.values()), calls, groups, sites, problems, Spending((spent,))
    )


@lru_cache(maxsize=64)
def _expanded(runs: str) -> tuple[int, ...]:
    """Return a group's ranks. Cached, because all nodes send the world and few other groups."""
    return expand_ranks(json.loads(runs))


def merge(nodes: Sequence[NodeSnapshot]) -> Snapshot:
    """Merge the snapshots of several nodes into one.

    If two nodes report on one rank, the newer state is taken. A rank that no node reports on is
    blind.
    """
    world = max((node.world for node in nodes), default=0)
    best: dict[int, RankState] = {}
    owner = np.full(world, -1)
    for number, node in enumerate(nodes):
        for state in node.ranks:
            known = best.get(state.rank)
            if known is None or _worth(state) > _worth(known):
                best[state.rank], owner[state.rank] = state, number
    groups = _Table(group for node in nodes for group in node.groups)
    sites = _Table(site for node in nodes for site in node.sites)
    calls, spent = [no_calls()], []
    for number, node in enumerate(nodes):
        theirs = node.spending.table
        spent.append(theirs[owner[theirs["rank"]] == number])
        mine = node.calls[owner[node.calls["rank"]] == number]
        mine["group"] = groups.translate(node.groups, mine["group"])
        mine["site"] = sites.translate(node.sites, mine["site"])
        calls.append(mine)
    problems = list(dict.fromkeys(problem for node in nodes for problem in node.problems))
    ranks = [best.get(rank) or RankState(rank, blind=True) for rank in range(world)]
    snapshot = Snapshot(
        ranks,
        np.concatenate(calls),
        groups.items,
        labels_of(groups.items, ranks),
        sites.items,
        problems,
        spending=Spending(spent),
    )
    return within_world(snapshot)


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

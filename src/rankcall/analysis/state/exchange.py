"""A snapshot as bytes, for nodes to tell each other where their ranks stand."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import fields
from typing import Any

import numpy as np

from rankcall.analysis.state.snapshot import CALL, RankState, Snapshot, labels_of
from rankcall.record import KINDS, OPS, STATUSES
from rankcall.ring.tables import CallSite, Group, compress_ranks, expand_ranks

SCHEMA = 1
_MOST_BYTES = 1 << 28  # of a decoded snapshot
_MOST_RANKS = 1 << 20


def encode(snapshot: Snapshot) -> bytes:
    """Return a snapshot as bytes: some 1 KiB a rank where calls are few."""
    return zlib.compress(
        json.dumps(
            {
                "schema": SCHEMA,
                "ranks": [vars(each) for each in snapshot.ranks if not each.blind],
                "world": len(snapshot.ranks),
                "groups": [
                    {**vars(group), "ranks": compress_ranks(list(group.ranks))}
                    for group in snapshot.groups
                ],
                "sites": [vars(site) for site in snapshot.sites],
                "calls": base64.b85encode(snapshot.calls.tobytes()).decode(),
                "problems": snapshot.problems,
            }
        ).encode()
    )


def decode(data: bytes) -> Snapshot:
    """Undo ``encode``. Raises ``ValueError`` where the bytes are no snapshot of this version."""
    try:
        unpacker = zlib.decompressobj()
        found = json.loads(unpacker.decompress(data, _MOST_BYTES))
        if found["schema"] != SCHEMA:
            raise ValueError(f"schema {found['schema']}, this rankcall reads schema {SCHEMA}")
        return _snapshot(found)
    except (KeyError, TypeError, AttributeError, zlib.error, RecursionError) as error:
        raise ValueError(f"not a snapshot: {type(error).__name__}: {error}") from error


def _snapshot(found: dict[str, Any]) -> Snapshot:
    names = {each.name for each in fields(RankState)}
    known = {}
    for each in found["ranks"]:
        state = RankState(**{key: value for key, value in each.items() if key in names})
        known[int(state.rank)] = state
    world = max([int(found["world"]), *(rank + 1 for rank in known)])
    if world > _MOST_RANKS or min(known, default=0) < 0:
        raise ValueError("impossible ranks")
    ranks = [known.get(rank) or RankState(rank, blind=True) for rank in range(world)]
    groups = [
        Group(
            str(each["name"]), int(each["epoch"]), str(each["backend"]), str(each["description"]),
            expand_ranks(each["ranks"]),
        )
        for each in found["groups"]
    ]  # fmt: skip
    sites = [
        CallSite(str(s["file"]), int(s["line"]), str(s["function"]), str(s["api"]))
        for s in found["sites"]
    ]
    calls = np.frombuffer(base64.b85decode(found["calls"]), CALL).copy()
    limits = {
        "rank": world, "group": len(groups), "site": max(1, len(sites)), "kind": len(KINDS),
        "op": len(OPS), "status": len(STATUSES),
    }  # fmt: skip
    if any(np.any((calls[name] < 0) | (calls[name] >= most)) for name, most in limits.items()):
        raise ValueError("a call refers to what is not there")
    problems = [str(text) for text in found["problems"]]
    return Snapshot(ranks, calls, groups, labels_of(groups, ranks), sites, problems)

"""A node's snapshot as bytes, for the store: where its ranks stand, not what its rings hold."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.snapshot import CALL, RankState, Snapshot, labels_of
from rankcall.record import STATUSES
from rankcall.ring.reader import CallSite, Group, compress_ranks, expand_ranks

_NEWEST = 48  # calls kept of each rank, beside what has not ended, has failed, or is the newest
_PER_GROUP = 4  # of each of its groups
_MOST_STACK = 4000  # characters of a rank's stacks
_COMPLETED = STATUSES.index("completed")
_MOST_BYTES = 1 << 28


def encode(snapshot: Snapshot) -> bytes:
    """Write what this node knows: the states and newest calls of ranks that left a ring here."""
    ours = [state for state in snapshot.ranks if not state.blind]
    calls = snapshot.calls[_worth_sending(snapshot.calls)]
    about = {
        "ranks": [{**asdict(state), "stack": state.stack[:_MOST_STACK]} for state in ours],
        "groups": [{**asdict(g), "ranks": compress_ranks(list(g.ranks))} for g in snapshot.groups],
        "sites": [asdict(site) for site in snapshot.sites],
        "problems": snapshot.problems[:8],
    }
    head = json.dumps(about).encode()
    return zlib.compress(len(head).to_bytes(8, "little") + head + calls.tobytes(), 1)


def decode(raw: bytes) -> Snapshot:
    """Read what ``encode`` wrote; raises ``ValueError`` where it is not that."""
    try:
        inflate = zlib.decompressobj()
        plain = inflate.decompress(raw, _MOST_BYTES)
        size = int.from_bytes(plain[:8], "little")
        about = json.loads(plain[8 : 8 + size])
        calls = np.frombuffer(plain[8 + size :], CALL).copy()
        known = {field.name for field in fields(RankState)}
        ranks = [
            RankState(**{key: value for key, value in each.items() if key in known})
            for each in about["ranks"]
        ]
        groups = [Group(**{**g, "ranks": expand_ranks(g["ranks"])}) for g in about["groups"]]
        sites = [CallSite(**site) for site in about["sites"]]
        problems = [str(text) for text in about["problems"]]
    except (zlib.error, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no summary of a node: {error!r}") from error
    if len(calls) and not (
        0 <= calls["group"].min() <= calls["group"].max() < len(groups)
        and 0 <= calls["site"].min() <= calls["site"].max() < max(1, len(sites))
        and set(np.unique(calls["rank"]).tolist()) <= {each.rank for each in ranks}
    ):
        raise ValueError("no summary of a node: calls of ranks or groups that it does not name")
    return Snapshot(ranks, calls, groups, labels_of(groups, ranks), sites, problems)


def _worth_sending(calls: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    wanted: npt.NDArray[np.bool_] = calls["status"] != _COMPLETED
    order = np.lexsort((calls["index"], calls["rank"]))
    wanted[order[_from_end(calls["rank"][order]) < _NEWEST]] = True
    order = np.lexsort((calls["index"], calls["group"], calls["rank"]))
    place = calls["rank"][order].astype(np.int64) << 32 | calls["group"][order]
    wanted[order[_from_end(place) < _PER_GROUP]] = True
    return wanted


def _from_end(keys: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return, of sorted keys, how many of the same key follow each."""
    if not len(keys):
        return np.zeros(0, np.int64)
    last = np.flatnonzero(np.append(keys[1:] != keys[:-1], True))
    return last[np.searchsorted(last, np.arange(len(keys)))] - np.arange(len(keys))

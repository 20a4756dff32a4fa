"""Where each rank stands, one line a rank: the call it is in, or its last one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankcall.analysis.hang.waits import failed_for_good, unfinished
from rankcall.analysis.state.snapshot import Snapshot
from rankcall.record import OPS


@dataclass(frozen=True)
class Place:
    """One rank. ``in_call``: it has not left ``op`` yet; else that is the last one it left.

    ``age_s``: since it came to the call (or left it); 0 with no call at all.
    """

    rank: int
    host: str
    pid: int
    state: str
    exit: int | None
    blind: bool = False  # nothing is known of its calls
    in_call: bool = False
    failed: bool = False
    group: str = ""
    seq: int = 0
    op: str = ""
    call_site: str = ""
    age_s: float = 0.0


def places(snapshot: Snapshot) -> list[Place]:
    """Return where every rank stands, in rank order."""
    calls = snapshot.calls
    at: dict[int, int] = {}
    stuck = unfinished(calls) | failed_for_good(calls)
    order = np.lexsort((calls["index"], ~stuck, calls["rank"]))
    # Of a rank's calls: the oldest that it is stuck in, else its newest.
    ranks, first = np.unique(calls["rank"][order], return_index=True)
    if not len(order):
        return [_place(snapshot, rank, None, stuck) for rank in range(len(snapshot.ranks))]
    last = np.concatenate([first[1:], [len(order)]]) - 1
    for rank, head, tail in zip(ranks.tolist(), order[first], order[last], strict=True):
        at[rank] = int(head) if stuck[head] else int(tail)
    return [_place(snapshot, rank, at.get(rank), stuck) for rank in range(len(snapshot.ranks))]


def _place(snapshot: Snapshot, rank: int, row: int | None, stuck: object) -> Place:
    state = snapshot.ranks[rank]
    about = (rank, state.host, state.pid, state.state, state.exit, state.blind)
    if row is None:
        return Place(*about)
    call = snapshot.calls[row]
    in_call = bool(stuck[row])  # type: ignore[index]
    age = call["age_s"] if in_call or np.isnan(call["ended_s"]) else call["ended_s"]
    return Place(
        *about,
        in_call,
        in_call and bool(call["status"] == 3),
        snapshot.labels[int(call["group"])],
        int(call["seq"]),
        OPS[int(call["op"])],
        snapshot.site(int(call["site"])),
        float(age),
    )

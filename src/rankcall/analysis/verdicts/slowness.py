"""The newest calls of a job that goes on, lined up: evidence of slow ranks and slow links."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankcall.analysis.state.snapshot import COLLECTIVE, Calls, Snapshot
from rankcall.analysis.timing.bandwidth import sizes
from rankcall.analysis.timing.clocks import HostClock, align_hosts
from rankcall.analysis.timing.collectives import (
    CollectiveTable,
    Columns,
    RankCollectives,
    Session,
    collective_table,
)
from rankcall.record import OPS, SYNCHRONISING

SYNC = np.array([name in SYNCHRONISING for name in OPS])
_RECENT = 384  # calls of a rank
_S = 1e9
_ONE_LIFE = Session(0, 0)


@dataclass
class RecentCalls:
    """Each rank's newest calls, as a snapshot and by group, on clocks that agree."""

    snapshot: Snapshot
    tables: list[CollectiveTable]
    clocks: list[HostClock]


def recent_calls(snapshot: Snapshot) -> RecentCalls:
    """Line up each rank's newest calls. Older ones say nothing about what is slow now."""
    calls = snapshot.calls
    if len(calls):
        newest = np.zeros(int(calls["rank"].max()) + 1, np.int64)
        np.maximum.at(newest, calls["rank"], calls["index"])
        calls = calls[calls["index"] > newest[calls["rank"]] - _RECENT]
    recent = replace(snapshot, calls=calls)
    return RecentCalls(recent, *_line_up(recent))


def _line_up(snapshot: Snapshot) -> tuple[list[CollectiveTable], list[HostClock]]:
    """Line up all collectives by group, with clocks that make hosts' times comparable.

    Ages become ns since the oldest call of all, by each host's own moment. The offset between two
    hosts' moments follows from the ends of the collectives that they share.
    """
    calls = snapshot.calls[snapshot.calls["kind"] == COLLECTIVE]
    host_of, clocks = _clocks(snapshot)
    if not len(calls):
        return [], clocks
    oldest = float(calls["age_s"].max()) + 1.0
    calls = calls[np.lexsort((calls["seq"], calls["rank"], calls["group"]))]
    keys = np.stack([calls["group"], calls["rank"]])
    cuts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    parts: dict[int, list[RankCollectives]] = {}
    for piece in np.split(calls, cuts):
        group = int(piece["group"][0])
        ranks = snapshot.groups[group].ranks
        parts.setdefault(group, []).append(_part(piece, ranks, host_of, oldest))
    tables = [
        collective_table(_ONE_LIFE, snapshot.groups[key], each) for key, each in parts.items()
    ]
    align_hosts(clocks, tables)
    return tables, clocks


def _clocks(snapshot: Snapshot) -> tuple[list[int], list[HostClock]]:
    numbers: dict[str, int] = {}
    host_of = [numbers.setdefault(each.host, len(numbers)) for each in snapshot.ranks]
    return host_of, [HostClock(name, 0) for name in numbers]


def _part(
    calls: Calls, ranks: tuple[int, ...], host_of: list[int], oldest: float
) -> RankCollectives:
    """Return one rank's calls in one group. A seq that occurs twice is damage, and left out."""
    calls = calls[np.concatenate([[True], calls["seq"][1:] > calls["seq"][:-1]])]
    rank = int(calls["rank"][0])
    came = np.rint((oldest - calls["came_s"]) * _S).astype(np.int64)
    ended = np.nan_to_num((oldest - calls["ended_s"]) * _S).round().astype(np.int64)
    columns: Columns = {name: calls[name] for name in ("op", "in_bytes", "out_bytes")}
    columns["message_bytes"] = calls["message_bytes"]
    local = {each: number for number, each in enumerate(ranks)}
    roots = {root: local.get(root, -1) for root in np.unique(calls["root"]).tolist()}
    agreed = {
        "op": calls["op"],
        "root": np.array([roots[root] for root in calls["root"].tolist()], np.int32),
        "size": sizes(columns, len(ranks)),
        "bytes": calls["message_bytes"],
    }
    return RankCollectives(rank, host_of[rank], calls["seq"], came, came, ended, agreed)

"""Links that are persistently slow: transfers, not waiting, against others of the same kind.

A transfer begins when both ends (all members) have come. Even the quick ones of a slow link are
slow, so the lower quartile is compared: a busy moment says nothing of a link.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.state.snapshot import P2P, SEND, Snapshot
from rankcall.analysis.timing.clocks import HostClock, RowClocks
from rankcall.analysis.timing.collectives import CollectiveTable, present
from rankcall.record import OPS, SYNCHRONISING

_TIMES = 2.5  # slower than the median link of the kind
_LEAST_S = 1e-3  # and by so much: less is not worth a finding
_ENOUGH = 12  # transfers of a link
_PEERS = 2  # other links of the kind, at least

_SYNC = np.array([name in SYNCHRONISING for name in OPS])
Key = tuple[int, ...]


@dataclass(frozen=True)
class SlowLink:
    """``ranks`` are the ends (all members of a group); times in s."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    op: str
    bytes: int
    seconds: float
    usual: float
    count: int
    compared: int


def slow_links(
    snapshot: Snapshot, tables: list[CollectiveTable], clocks: list[HostClock]
) -> list[SlowLink]:
    """Return the links that are slow against others of the same op, size class and member count."""
    kinds: dict[Key, dict[tuple[int, ...], list[float]]] = defaultdict(dict)
    for table in tables:
        for kind, times in _transfers(table, clocks).items():
            kinds[kind].setdefault(tuple(table.ranks.tolist()), []).extend(times)
    for pair, by_kind in _messages(snapshot, clocks).items():
        for kind, times in by_kind.items():
            kinds[kind].setdefault(pair, []).extend(times)
    found = [each for kind, links in kinds.items() for each in _outliers(snapshot, kind, links)]
    best: dict[tuple[int, ...], SlowLink] = {}
    for each in sorted(found, key=lambda each: -each.seconds / each.usual):
        best.setdefault(each.ranks, each)
    return list(best.values())


def _outliers(
    snapshot: Snapshot, kind: Key, links: dict[tuple[int, ...], list[float]]
) -> list[SlowLink]:
    typical = {
        ranks: float(np.quantile(times, 0.25))
        for ranks, times in links.items()
        if len(times) >= _ENOUGH
    }
    found = []
    for ranks, seconds in typical.items():
        others = [value for other, value in typical.items() if other != ranks]
        if len(others) < _PEERS:
            continue
        usual = float(np.median(others))
        if seconds > _TIMES * max(usual, 1e-9) and seconds - usual > _LEAST_S:
            hosts = dict.fromkeys(snapshot.ranks[rank].host for rank in ranks)
            found.append(
                SlowLink(
                    ranks, tuple(host for host in hosts if host), OPS[kind[0]], 1 << kind[1],
                    seconds, usual, len(links[ranks]), len(others),
                )
            )  # fmt: skip
    return found


def _transfers(table: CollectiveTable, clocks: list[HostClock]) -> dict[Key, list[float]]:
    """Return how long a group's collectives took once all had come, by op and size class."""
    columns = np.flatnonzero(
        _SYNC[table.op] & present(table.arrival).all(axis=0) & present(table.completed).all(axis=0)
    )
    if not len(columns) or len(table.ranks) < 2:
        return {}
    clock = RowClocks([clocks[host] for host in table.hosts])
    came = clock.align(np.ascontiguousarray(table.arrival[:, columns].T))
    ended = clock.align(np.ascontiguousarray(table.completed[:, columns].T))
    lasted = (np.median(ended, axis=1) - came.max(axis=1)) / 1e9
    found: dict[Key, list[float]] = defaultdict(list)
    for column, seconds in zip(columns.tolist(), lasted.tolist(), strict=True):
        size = int(table.bytes[column]).bit_length()
        found[int(table.op[column]), size, len(table.ranks)].append(max(seconds, 0.0))
    return found


def _messages(
    snapshot: Snapshot, clocks: list[HostClock]
) -> dict[tuple[int, int], dict[Key, list[float]]]:
    """Return how long messages took once both ends had come, by pair and size class."""
    calls = snapshot.calls[(snapshot.calls["kind"] == P2P) & (snapshot.calls["peer"] >= 0)]
    found: dict[tuple[int, int], dict[Key, list[float]]] = defaultdict(lambda: defaultdict(list))
    if not len(calls):
        return found
    came, ended = _aligned(snapshot, calls, clocks)
    is_send = calls["op"] == SEND
    source = np.where(is_send, calls["rank"], calls["peer"])
    target = np.where(is_send, calls["peer"], calls["rank"])
    keys = [calls["seq"], calls["tag"], target, source, calls["group"]]
    order = np.lexsort((is_send, *keys))
    first, second = order[:-1], order[1:]
    pairs = ~is_send[first] & is_send[second] & ~np.isnan(ended[first])
    for key in keys:
        pairs &= key[first] == key[second]
    recv, send = first[pairs], second[pairs]
    lasted = np.maximum(ended[recv] - np.maximum(came[recv], came[send]), 0.0)
    size = [int(count).bit_length() for count in calls["message_bytes"][recv].tolist()]
    ends = zip(source[recv].tolist(), target[recv].tolist(), strict=True)
    for pair, power, seconds in zip(ends, size, lasted.tolist(), strict=True):
        found[pair][SEND, power, 2].append(seconds)
    return found


def _aligned(
    snapshot: Snapshot, calls: npt.NDArray[np.void], clocks: list[HostClock]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return arrivals and ends in s of one clock."""
    at = {clock.host: clock for clock in clocks}
    shift = np.array([at[each.host].shift for each in snapshot.ranks]) / 1e9
    there = shift[calls["rank"]]
    return there - calls["came_s"], there - calls["ended_s"]

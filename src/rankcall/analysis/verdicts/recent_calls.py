"""The newest calls of all ranks, lined up by group on clocks that agree.

They are those of one stretch of time, the same for all ranks. A number of calls of each rank would
be different times: the middle stages of a pipeline issue twice as many as the first and the last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import HostClock, align_hosts
from rankcall.analysis.collectives import (
    BLOCKING,
    DEVICE,
    HOST,
    ISSUE,
    MISSING,
    CollectiveTable,
    Columns,
    Ints,
    MessageTable,
    RankCollectives,
    RankMessages,
    Session,
    collective_table,
    in_order,
    message_table,
)
from rankcall.analysis.device_times import end_together
from rankcall.analysis.snapshot import (
    COLLECTIVE,
    P2P,
    Calls,
    Snapshot,
)
from rankcall.analysis.stragglers import turns_of
from rankcall.analysis.windows import known_since_s
from rankcall.record import FLAG_DEVICE, bandwidth_sizes

# The time of a job that goes on: in which the ranks issued so many calls (at the median), and at
# least so many s.
_RECENT, _RECENT_S = 384, 2.0
_S = 1e9
_ONE_LIFE = Session(0, 0)


@dataclass
class RecentCalls:
    """The newest calls of all ranks, as a snapshot and by group, on clocks that agree."""

    snapshot: Snapshot
    tables: list[CollectiveTable]
    messages: list[MessageTable]
    clocks: list[HostClock]
    step_begins: list[Ints]  # by rank, aligned ns
    turns: list[Ints]  # by rank, aligned ns: ``stragglers.turns_of`` its calls
    span: tuple[int, int]  # the first arrival and the last end, aligned ns
    is_cut: bool = False  # the job has issued calls before

    @property
    def seconds(self) -> float:
        """The time on record."""
        return (self.span[1] - self.span[0]) / _S


def recent_calls(snapshot: Snapshot) -> RecentCalls:
    """Line up the newest calls. Of a job that goes on, older ones say nothing about it now.

    Of one that is over, all calls count that are on record of all ranks, as in a report.
    """
    calls = snapshot.calls
    if not len(calls):
        return _line_up(snapshot)
    known_s = known_since_s(calls)
    since_s = min(known_s, _recent_s(calls)) if snapshot.live else known_s
    is_recent = calls["age_s"] <= since_s
    lined_up = _line_up(replace(snapshot, calls=calls[is_recent]))
    return replace(lined_up, is_cut=bool(known_s < np.inf or not is_recent.all()))


def _recent_s(calls: Calls) -> float:
    """Return the age at which the newest calls of a job that goes on begin."""
    order = np.lexsort((calls["index"], calls["rank"]))
    rank, age = calls["rank"][order], calls["age_s"][order]
    ends = np.append(np.flatnonzero(np.diff(rank)), len(rank) - 1)
    begins = np.concatenate([[0], ends[:-1] + 1])
    oldest = age[np.maximum(ends - (_RECENT - 1), begins)]
    return max(float(np.median(oldest)), float(age[ends].min()) + _RECENT_S)


def _line_up(snapshot: Snapshot) -> RecentCalls:
    """Line up all calls by group, with clocks that make hosts' times comparable.

    Ages become ns since the oldest call of all, by each host's own moment. The offset between two
    hosts' moments follows from the ends of the collectives that they share.
    """
    calls = snapshot.calls
    host_of, clocks = _clocks(snapshot)
    if not len(calls):
        return RecentCalls(snapshot, [], [], clocks, [], [], (0, 0))
    oldest = float(calls["age_s"].max()) + 1.0
    parts: dict[int, list[RankCollectives]] = {}
    for piece in _by_group(calls[calls["kind"] == COLLECTIVE]):
        group = int(piece["group"][0])
        ranks = snapshot.groups[group].ranks
        parts.setdefault(group, []).append(_part(piece, ranks, host_of, oldest))
    tables = [
        collective_table(_ONE_LIFE, snapshot.groups[key], group_parts)
        for key, group_parts in parts.items()
    ]
    align_hosts(clocks, tables)
    message_parts: dict[int, list[RankMessages]] = {}
    blocking = [number for number, site in enumerate(snapshot.sites) if site.api in BLOCKING]
    for piece in _by_group(calls[calls["kind"] == P2P]):
        group = int(piece["group"][0])
        ranks = snapshot.groups[group].ranks
        part = _messages(piece, ranks, host_of, oldest)
        part.columns["blocking"] = np.isin(piece["site"], blocking)
        message_parts.setdefault(group, []).append(part)
    messages = [
        message_table(_ONE_LIFE, snapshot.groups[key], group_parts)
        for key, group_parts in message_parts.items()
    ]
    end_together(tables, messages, clocks)
    return RecentCalls(
        snapshot, tables, messages, clocks, *_times(snapshot, host_of, clocks, oldest)
    )


def _by_group(calls: Calls) -> list[Calls]:
    """Return calls by group and rank, each by ascending seq."""
    if not len(calls):
        return []
    calls = calls[np.lexsort((calls["seq"], calls["rank"], calls["group"]))]
    keys = np.stack([calls["group"], calls["rank"]])
    cuts = np.flatnonzero(np.any(keys[:, 1:] != keys[:, :-1], axis=0)) + 1
    return list(np.split(calls, cuts))


def _times(
    snapshot: Snapshot, host_of: list[int], clocks: list[HostClock], oldest: float
) -> tuple[list[Ints], list[Ints], tuple[int, int]]:
    """Return each rank's steps and turns, and the first arrival and the last end of all."""
    begins, turns, first, last = [], [], [], []
    calls = snapshot.calls[np.lexsort((snapshot.calls["index"], snapshot.calls["rank"]))]
    for rank in np.unique(calls["rank"]).tolist():
        mine = calls[calls["rank"] == rank]
        clock = clocks[host_of[rank]]
        came = clock.align(_ns(oldest - mine["age_s"]))
        new = np.concatenate([[True], mine["step"][1:] > mine["step"][:-1]])
        begins.append(came[new])
        turns.append(turns_of(came))
        ended = mine["ended_s"][~np.isnan(mine["ended_s"])]
        first.append(int(came.min()))
        last.append(int(clock.align(_ns(oldest - ended)).max()) if len(ended) else int(came.max()))
    return begins, turns, (min(first), max(last))


def _ns(seconds: npt.NDArray[np.float64]) -> Ints:
    return np.rint(seconds * _S).astype(np.int64)


def _messages(
    calls: Calls, ranks: tuple[int, ...], host_of: list[int], oldest: float
) -> RankMessages:
    """Return one rank's messages in one group."""
    rank = int(calls["rank"][0])
    local = {member: number for number, member in enumerate(ranks)}
    columns: Columns = {name: calls[name] for name in ("seq", "tag", "op")}
    columns["peer"] = np.array([local.get(peer, -1) for peer in calls["peer"].tolist()], np.int32)
    columns["arrival"], columns["completed"], columns["source"] = _spans(calls, oldest)
    columns["started"] = columns["arrival"]
    columns["bytes"], columns["size"] = calls["message_bytes"], calls["message_bytes"] * 1.0
    columns["own"] = np.full(len(calls), local[rank], np.int32)
    return RankMessages(rank, host_of[rank], columns)


def _spans(calls: Calls, oldest: float) -> tuple[Ints, Ints, npt.NDArray[np.uint8]]:
    """Return when calls of one rank and group came and ended, and the source of these times."""
    came, ended = _ns(oldest - calls["age_s"]), _ns(np.nan_to_num(oldest - calls["ended_s"]))
    on_device = calls["flags"] & FLAG_DEVICE != 0
    timed = on_device & (ended != MISSING) & ~np.isnan(calls["took_s"])
    took = _ns(np.where(timed, calls["took_s"], 0.0))[timed]
    is_message = calls["kind"][:1] == P2P  # those of a batch run at once
    ended[timed] = came[timed] + took if is_message.all() else in_order(came[timed], took)
    came[timed] = ended[timed] - took
    ended[on_device & ~timed] = MISSING
    source = np.where(timed, DEVICE, np.where(on_device, ISSUE, HOST)).astype(np.uint8)
    return came, ended, source


def _clocks(snapshot: Snapshot) -> tuple[list[int], list[HostClock]]:
    numbers: dict[str, int] = {}
    host_of = [numbers.setdefault(state.host, len(numbers)) for state in snapshot.ranks]
    return host_of, [HostClock(name, 0) for name in numbers]


def _part(
    calls: Calls, ranks: tuple[int, ...], host_of: list[int], oldest: float
) -> RankCollectives:
    """Return one rank's calls in one group. A seq that occurs twice is damage, and left out."""
    calls = calls[np.concatenate([[True], calls["seq"][1:] > calls["seq"][:-1]])]
    rank = int(calls["rank"][0])
    came, ended, source = _spans(calls, oldest)
    columns: Columns = {name: calls[name] for name in ("op", "in_bytes", "out_bytes")}
    columns["message_bytes"] = calls["message_bytes"]
    local = {member: number for number, member in enumerate(ranks)}
    roots = {root: local.get(root, -1) for root in np.unique(calls["root"]).tolist()}
    agreed = {
        "op": calls["op"],
        "root": np.array([roots[root] for root in calls["root"].tolist()], np.int32),
        "size": bandwidth_sizes(columns, len(ranks)),
        "bytes": calls["message_bytes"],
        "source": source,
    }
    return RankCollectives(rank, host_of[rank], calls["seq"], came, came, ended, agreed)

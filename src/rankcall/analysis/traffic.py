"""The bytes that a run sent from each host to each other one.

A message's two hosts are recorded. The bytes that a collective sends between two hosts are not:
they depend on the back end. The figures here are those of the plainest algorithm, in the group's
order: a ring for all_reduce, all_gather and reduce_scatter (each member sends S * f to the next,
with S and f of nccl-tests), a chain from or to the root for broadcast and reduce, one message a
member for gather and scatter, an equal slice to each for all_to_all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import OP_NAMES, CollectiveTable, MessageTable, present
from rankcall.analysis.run_tables import RunTables
from rankcall.record import OPS, bus_factor

Floats = npt.NDArray[np.float64]

_SEND = OPS.index("send")


@dataclass
class Traffic:
    """Bytes from host i to host j, as ``sent[i, j]``; i and j may be equal."""

    hosts: list[str]
    sent: Floats


def traffic(run_tables: RunTables, host_of: dict[int, str]) -> Traffic:
    """Add up what all finished collectives and messages sent."""
    hosts = list(dict.fromkeys(host_of[rank] for rank in sorted(host_of)))
    index = {host: number for number, host in enumerate(hosts)}
    host_traffic = Traffic(hosts, np.zeros((len(hosts), len(hosts))))
    for table in run_tables.tables:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in table.group.ranks]
        _add_collectives(table, np.array(places, np.intp), host_traffic.sent)
    for messages in run_tables.messages:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in messages.group.ranks]
        _add_messages(messages, np.array(places, np.intp), host_traffic.sent)
    return host_traffic


def _add_collectives(table: CollectiveTable, place: npt.NDArray[np.intp], sent: Floats) -> None:
    members = len(place)
    done = present(table.completed).any(axis=0)
    for code in np.unique(table.op[done]):
        op, rows = OP_NAMES[code], done & (table.op == code)
        size = table.size[rows]
        if op in ("all_reduce", "all_gather", "reduce_scatter"):
            ring = float(size.sum()) * bus_factor(op, members)
            if members > 1:
                _hops(place, np.roll(place, -1), ring, sent)
        elif op == "all_to_all":
            _to_all(place, float(size.sum()) / members, sent)
        elif op in ("broadcast", "reduce", "gather", "scatter"):
            _add_rooted(op, table, rows, place, sent)


def _hops(
    source: npt.NDArray[np.intp], target: npt.NDArray[np.intp], amount: float, sent: Floats
) -> None:
    """Add an amount for each pair of members; leave out members on unknown hosts."""
    known = (source >= 0) & (target >= 0)
    np.add.at(sent, (source[known], target[known]), amount)


def _to_all(place: npt.NDArray[np.intp], amount: float, sent: Floats) -> None:
    on_host = np.bincount(place[place >= 0], minlength=len(sent)).astype(np.float64)
    pairs = np.outer(on_host, on_host)
    np.fill_diagonal(pairs, on_host * (on_host - 1))
    sent += pairs * amount


def _add_rooted(
    op: str,
    table: CollectiveTable,
    rows: npt.NDArray[np.bool_],
    place: npt.NDArray[np.intp],
    sent: Floats,
) -> None:
    rank_of = table.ranks.tolist()
    for row in np.unique(table.root[rows]):
        if row < 0:
            continue
        at = table.group.ranks.index(rank_of[row])
        amount = float(table.size[rows & (table.root == row)].sum())
        from_root = np.roll(place, -at)
        root = np.full(len(from_root) - 1, from_root[0])
        if op in ("broadcast", "reduce"):
            ends = from_root[:-1], from_root[1:]
        else:
            ends, amount = (root, from_root[1:]), amount / len(place)
        _hops(*(ends if op in ("broadcast", "scatter") else ends[::-1]), amount, sent)


def _add_messages(messages: MessageTable, place: npt.NDArray[np.intp], sent: Floats) -> None:
    """Count each message once: as sent, or as received if its sender left no record."""
    columns = messages.columns
    rows = np.where(messages.sent >= 0, messages.sent, messages.received)
    rows = rows[present(columns["completed"][rows]) & (columns["peer"][rows] >= 0)]
    rows = rows[columns["peer"][rows] < len(place)]
    is_send = columns["op"][rows] == _SEND
    own, peer = place[columns["own"][rows]], place[columns["peer"][rows]]
    source, target = np.where(is_send, own, peer), np.where(is_send, peer, own)
    known = (source >= 0) & (target >= 0)
    np.add.at(
        sent, (source[known], target[known]), columns["bytes"][rows][known].astype(np.float64)
    )

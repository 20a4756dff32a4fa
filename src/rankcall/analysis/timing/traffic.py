"""Bytes between hosts.

Messages go where they say. What a collective sends between any two hosts is the back end's own
affair and is not recorded; here it is what the plainest algorithm sends, in the group's order: a
ring for all_reduce, all_gather and reduce_scatter (each member sends S * f to the next, with S and
f of nccl-tests), a chain from or to the root for broadcast and reduce, one message a member for
gather and scatter, an equal slice to each for all_to_all.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rankcall.analysis.timing.bandwidth import bus_factor
from rankcall.analysis.timing.collectives import Lane, present
from rankcall.analysis.timing.gather import Gathered
from rankcall.analysis.timing.p2p import Mail
from rankcall.record import OPS

Floats = npt.NDArray[np.float64]

_SEND = OPS.index("send")


@dataclass
class Traffic:
    """``sent[i, j]``: bytes from host i to host j, those on one host too."""

    hosts: list[str]
    sent: Floats


def traffic(gathered: Gathered, host_of: dict[int, str]) -> Traffic:
    """Add up what all finished collectives and messages sent."""
    hosts = list(dict.fromkeys(host_of[rank] for rank in sorted(host_of)))
    index = {host: number for number, host in enumerate(hosts)}
    found = Traffic(hosts, np.zeros((len(hosts), len(hosts))))
    for lane in gathered.lanes:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in lane.group.ranks]
        _add_lane(lane, np.array(places, np.intp), found.sent)
    for mail in gathered.mail:
        places = [index.get(host_of.get(rank, "\0"), -1) for rank in mail.group.ranks]
        _add_mail(mail, np.array(places, np.intp), found.sent)
    return found


def _add_lane(lane: Lane, place: npt.NDArray[np.intp], sent: Floats) -> None:
    members = len(place)
    done = present(lane.completed).any(axis=0)
    for code in np.unique(lane.op[done]):
        op, rows = OPS[code], done & (lane.op == code)
        size = lane.size[rows]
        if op in ("all_reduce", "all_gather", "reduce_scatter"):
            ring = float(size.sum()) * bus_factor(op, members)
            if members > 1:
                _hops(place, np.roll(place, -1), ring, sent)
        elif op == "all_to_all":
            _to_all(place, float(size.sum()) / members, sent)
        elif op in ("broadcast", "reduce", "gather", "scatter"):
            _rooted(op, lane, rows, place, sent)


def _hops(
    source: npt.NDArray[np.intp], target: npt.NDArray[np.intp], amount: float, sent: Floats
) -> None:
    """Add an amount for each pair of members; those whose host is not known are left out."""
    known = (source >= 0) & (target >= 0)
    np.add.at(sent, (source[known], target[known]), amount)


def _to_all(place: npt.NDArray[np.intp], amount: float, sent: Floats) -> None:
    on_host = np.bincount(place[place >= 0], minlength=len(sent)).astype(np.float64)
    pairs = np.outer(on_host, on_host)
    np.fill_diagonal(pairs, on_host * (on_host - 1))
    sent += pairs * amount


def _rooted(
    op: str, lane: Lane, rows: npt.NDArray[np.bool_], place: npt.NDArray[np.intp], sent: Floats
) -> None:
    rank_of = lane.ranks.tolist()
    for row in np.unique(lane.root[rows]):
        if row < 0:
            continue
        at = lane.group.ranks.index(rank_of[row])
        amount = float(lane.size[rows & (lane.root == row)].sum())
        others = np.roll(place, -at)
        root = np.full(len(others) - 1, others[0])
        if op in ("broadcast", "reduce"):
            ends = others[:-1], others[1:]
        else:
            ends, amount = (root, others[1:]), amount / len(place)
        _hops(*(ends if op in ("broadcast", "scatter") else ends[::-1]), amount, sent)


def _add_mail(mail: Mail, place: npt.NDArray[np.intp], sent: Floats) -> None:
    """Count each message once: as sent, or as received where its sender left no record."""
    columns = mail.columns
    rows = np.where(mail.sent >= 0, mail.sent, mail.received)
    rows = rows[present(columns["completed"][rows]) & (columns["peer"][rows] >= 0)]
    rows = rows[columns["peer"][rows] < len(place)]
    is_send = columns["op"][rows] == _SEND
    own, peer = place[columns["own"][rows]], place[columns["peer"][rows]]
    source, target = np.where(is_send, own, peer), np.where(is_send, peer, own)
    known = (source >= 0) & (target >= 0)
    np.add.at(
        sent, (source[known], target[known]), columns["bytes"][rows][known].astype(np.float64)
    )

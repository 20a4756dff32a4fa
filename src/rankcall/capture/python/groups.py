"""Process groups as the kernels meet them, and their ops' numbers: the twin of native/groups.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from rankcall.capture.python.ops import Op
from rankcall.record import NO_RANK
from rankcall.ring.tables import Group
from rankcall.ring.writer import PythonRing


@dataclass
class GroupState:
    """A process group, its side-table id and sequence counters."""

    group: Group
    id: int
    rank: int
    size: int
    collectives: int = 0
    p2p: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def next_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        """Return the next number for (source, destination, tag)."""
        key = (peer, tag, outgoing)
        self.p2p[key] = self.p2p.get(key, 0) + 1
        return self.p2p[key]


class Groups:
    """The groups of one ring, by the names torch gave them."""

    def __init__(self, ring: PythonRing) -> None:
        self._ring = ring
        self._announced: dict[str, tuple[Group, int]] = {}
        self._states: dict[str, GroupState] = {}

    def announce(self, group: Group) -> int:
        """Write a group down and return its id; the next new one of that name is it.

        Its counters start anew.
        """
        number = self._ring.group(group)
        self._announced[group.name] = group, number
        self._states.pop(group.name, None)
        return number

    def announced(self) -> list[Group]:
        """Return the groups that were announced, of those of one name the last."""
        return [group for group, _ in list(self._announced.values())]

    def state_of(self, group: dist.ProcessGroup) -> GroupState:
        """Return the state of a group that an op is issued on."""
        try:
            name = str(group.group_name)
        except RuntimeError:
            name = "unnamed"  # made by hand, not through torch.distributed
        state = self._states.get(name)
        if state is None:
            announced = self._announced.get(name)
            if announced is None:
                unknown = Group(name, 0, _backend_of(group), "", ())
                announced = unknown, self._ring.group(unknown)
            state = self._states[name] = GroupState(*announced, group.rank(), group.size())
        return state


def _backend_of(group: dist.ProcessGroup) -> str:
    try:
        return group.name()
    except RuntimeError:
        return "custom"


def number_p2p(op: Op, args: tuple[Any, ...], group: GroupState) -> tuple[int, int, int, bool]:
    """Return seq, peer and tag of a send or receive, and whether its source is yet to be known."""
    tag = args[op.positions["tag"]]
    if op.peer is None:
        return 0, NO_RANK, tag, True
    peer = args[op.peer]
    return group.next_p2p(peer, tag, op.outgoing), peer, tag, False


class Numbered(NamedTuple):
    """What an op that is about to be issued will be: for who stands between it and the record."""

    name: str  # of its group
    description: str
    size: int
    seq: int
    peer: int  # global rank, -1 without one


def number_ahead(op: Op, args: tuple[Any, ...], groups: Groups) -> Numbered:
    """Return the number that an op will get, without giving it away."""
    process_group = dist.ProcessGroup.unbox(args[op.process_group])
    group = groups.state_of(process_group)
    name, text = str(process_group.group_name), str(process_group.group_desc)
    if not op.p2p:
        return Numbered(name, text, group.size, group.collectives + 1, NO_RANK)
    local = NO_RANK if op.peer is None else args[op.peer]
    seq = group.p2p.get((local, args[op.positions["tag"]], op.outgoing), 0) + 1
    peer = NO_RANK if op.peer is None else dist.get_global_rank(process_group, local)
    return Numbered(name, text, group.size, seq, peer)

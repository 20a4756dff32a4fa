"""Number the ops of the Python capture: by group, and messages by their two ends and tag."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from rankcall.capture.fallback.schema import Op, in_and_out, sizes_at
from rankcall.record import NO_RANK
from rankcall.ring.tables import Group
from rankcall.ring.writer import PythonRing

_MOST_COUNTERS = 8192  # of sends and receives, in a group
_MOST_GROUPS = 16384  # that were announced and not met
_LOOK_EVERY = 256  # groups met between two looks for those that are gone


@dataclass
class GroupState:
    """A process group, its side-table id and sequence counters."""

    group: Group
    id: int
    rank: int
    size: int
    alive: Callable[[], dist.ProcessGroup | None]  # a weak reference to it
    collectives: int = 0
    is_met: bool = False  # an op was issued on it
    is_numbered: bool = True  # its back end on a device counts collectives, as far as is known
    on_host: GroupState | None = None  # as another back end has it, which runs what is on the CPU
    # Messages of each (peer, tag, whether this rank is the source). A program may use a new tag for
    # every message, so the counters are bounded: those that were not used for long start anew.
    _recent: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    _older: dict[tuple[int, int, bool], int] = field(default_factory=dict)

    def next_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        """Return the next number for (source, destination, tag)."""
        key = (peer, tag, outgoing)
        if key not in self._recent and len(self._recent) >= _MOST_COUNTERS:
            self._older, self._recent = self._recent, {}
        number = self.count_p2p(*key) + 1
        self._recent[key] = number
        return number

    def count_p2p(self, peer: int, tag: int, outgoing: bool) -> int:
        """Return the last number for (source, destination, tag)."""
        key = (peer, tag, outgoing)
        return self._recent.get(key) or self._older.get(key, 0)

    def ends_on_host(self, device: str) -> bool:
        """Tell whether ops on a kind of device are over when their Work says so.

        Such a back end copies to the host and back. Others only enqueue an op.
        """
        parts = self.group.backend.split(",")
        by_device = dict(part.split(":", 1) for part in parts if ":" in part)
        return by_device.get(device, parts[0]) in ("gloo", "mpi")


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
        if len(self._announced) >= _MOST_GROUPS:
            self._announced.clear()  # groups that no op was issued on
        self._announced[group.name] = group, number
        self._states.pop(group.name, None)
        return number

    def state_of(self, group: dist.ProcessGroup, device: str) -> GroupState:
        """Return the state of a group that an op is issued on, for a kind of device."""
        try:
            name = str(group.group_name)
        except RuntimeError:
            name = "unnamed"  # made by hand, not through torch.distributed
        state = self._states.get(name)
        if state is None:
            announced = self._announced.pop(name, None)
            if announced is None:
                unknown = Group(name, 0, _backend_of(group), "", ())
                announced = unknown, self._ring.group(unknown)
            if len(self._states) % _LOOK_EVERY == _LOOK_EVERY - 1:
                self._states = {
                    name: old_state for name, old_state in self._states.items() if old_state.alive()
                }
            rank, size, alive = group.rank(), group.size(), weakref.ref(group)
            state = GroupState(*announced, rank, size, alive)
            on_host = self._announced.pop(f"{name}/cpu", None)
            if on_host is not None:
                state.on_host = GroupState(*on_host, rank, size, alive)
            self._states[name] = state
        return state.on_host if state.on_host is not None and device == "cpu" else state


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
    """An op that is about to be issued, as its record will have it. For planted faults."""

    name: str  # of its group
    description: str
    size: int
    seq: int
    peer: int  # global rank, -1 without one


def device_of(op: Op, args: tuple[Any, ...]) -> str:
    """Return the kind of device that an op's tensors are on, such as ``cuda``."""
    ins, outs = in_and_out(op, args)
    tensors = ins.tensors or outs.tensors or sizes_at(args, op.other_tensor).tensors
    return str(tensors[0].device.type) if tensors else "cpu"


def number_ahead(op: Op, args: tuple[Any, ...], groups: Groups) -> Numbered:
    """Return the number that an op will get, without giving it away."""
    process_group = dist.ProcessGroup.unbox(args[op.process_group])
    group = groups.state_of(process_group, device_of(op, args))
    name, text = str(process_group.group_name), str(process_group.group_desc)
    if not op.p2p:
        return Numbered(name, text, group.size, group.collectives + 1, NO_RANK)
    local = NO_RANK if op.peer is None else args[op.peer]
    seq = group.count_p2p(local, args[op.positions["tag"]], op.outgoing) + 1
    peer = NO_RANK if op.peer is None else dist.get_global_rank(process_group, local)
    return Numbered(name, text, group.size, seq, peer)

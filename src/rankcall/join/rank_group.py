"""The ranks that a ``Join`` covers, and the small collectives through which they agree.

These are the job's own collectives: every rank of the group must issue them at the same point of
its program. The announcement of an iteration is the same collective as in torch's ``Join``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankcall.ranks import format_ranks

DETECTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
Table = list[list[int]]


@dataclass(frozen=True)
class RankGroup:
    """A process group, its ranks in the world, and a device for small tensors."""

    group: Any
    ranks: list[int]
    device: torch.device

    @classmethod
    def of(cls, group: Any, device: torch.device | None = None) -> RankGroup:
        """Describe a process group, or the group of a device mesh."""
        process_group = group_of(group)
        ranks = dist.get_process_group_ranks(process_group)
        return cls(process_group, ranks, device or device_of(process_group))

    def begin_exchange(self, numbers: Sequence[int]) -> Exchange:
        """Begin to exchange a few integers with the other ranks."""
        return Exchange(numbers, self)

    def announce(self, throws: bool) -> Any:
        """Count this rank as active in one iteration; see ``announce``."""
        return announce(self.device, self.group, throws)

    def add_up(self, number: int) -> int:
        """Return the sum of one small number over the ranks."""
        return add_up(number, self.device, self.group)


class Exchange:
    """An exchange in flight, of a few integers between all ranks of a group."""

    def __init__(self, numbers: Sequence[int], members: RankGroup) -> None:
        shape = (len(members.ranks), len(numbers))
        self._table = torch.zeros(shape, dtype=torch.int64, device=members.device)
        own_row = dist.get_rank(members.group)
        self._table[own_row] = torch.tensor(list(numbers), dtype=torch.int64)
        self._work = dist.all_reduce(self._table, group=members.group, async_op=True)

    def table(self) -> Table:
        """Wait for the exchange to end; return one row per rank, in group order."""
        self._work.wait()
        table: Table = self._table.tolist()
        return table


def announce(device: torch.device, group: Any, throws: bool) -> Any:
    """Count this rank as active in one iteration.

    Args:
        device: The device of the announcement's tensor.
        group: The group of the announcement.
        throws: Whether to raise if a rank has run dry.

    Returns:
        The Work of the announcement.

    Raises:
        RuntimeError: ``throws`` is true and a rank has run dry.
    """
    work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
    if throws and add_up(0, device, group):
        raise RuntimeError(DETECTED)
    return work


def add_up(number: int, device: torch.device, group: Any) -> int:
    """Return the sum of one small number over the ranks of a group.

    Args:
        number: This rank's summand.
        device: The device of the tensor to reduce.
        group: The group.
    """
    total = torch.full((1,), float(number), device=device)
    dist.all_reduce(total, group=group)
    return int(total.item())


def device_of(group: Any) -> torch.device:
    """Return a device whose tensors a group's collectives accept."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = sorted(kinds)[0]
    return torch.device(kind, getattr(torch, kind).current_device())


def group_of(group: Any) -> Any:
    """Return the process group itself, or the group of all ranks of a mesh."""
    if not isinstance(group, DeviceMesh):
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group must be a process group or a device mesh; got {type(group).__name__} "
                "(is this rank a member of it?)"
            )
        return group
    if group.ndim == 1:
        return group.get_group()
    if sorted(group.mesh.flatten().tolist()) == list(range(dist.get_world_size())):
        return dist.distributed_c10d._get_default_group()
    return group._flatten().get_group()


def covering(groups: Sequence[Any]) -> Any:
    """Return the first group that contains every rank of all groups.

    Raises ``ValueError`` if no group does.
    """
    members = [set(dist.get_process_group_ranks(group)) for group in groups]
    every = set().union(*members)
    for group, ranks in zip(groups, members, strict=True):
        if ranks == every:
            return group
    listed = "; ".join(format_ranks(sorted(ranks)) for ranks in members)
    raise ValueError(
        f"no joinable's process group covers the others' (ranks {listed}): pass Join(..., group=a "
        "group with all of these ranks)"
    )

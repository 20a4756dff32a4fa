"""An exchange of a few integers between all ranks of a group, in one small all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Table = list[list[int]]


class Exchange:
    """An exchange in flight. Every rank must make it at the same point of its program."""

    def __init__(self, numbers: Sequence[int], group: Any, device: torch.device) -> None:
        self._table = torch.zeros(
            (dist.get_world_size(group), len(numbers)), dtype=torch.int64, device=device
        )
        self._table[dist.get_rank(group)] = torch.tensor(list(numbers), dtype=torch.int64)
        self._work = dist.all_reduce(self._table, group=group, async_op=True)

    def wait(self) -> Table:
        """Return one row per rank, in group order."""
        self._work.wait()
        table: Table = self._table.tolist()
        return table


def device_of(group: Any) -> torch.device:
    """Return a device whose tensors a group's collectives accept."""
    kinds = {device.type for device in group._device_types}
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = sorted(kinds)[0]
    return torch.device(kind, getattr(torch, kind).current_device())

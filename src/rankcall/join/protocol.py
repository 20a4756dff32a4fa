"""The join protocol: what a joinable is, and how it says that its rank is still at work.

The classes are torch's own, so that torch's joinables work under our ``Join`` and those written
for ours work under torch's. Notifications have torch's form on the wire as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable as Joinable
from torch.distributed.algorithms.join import JoinHook as JoinHook

DETECTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."


class Config(NamedTuple):
    """What a joinable is told while a ``Join`` is on; read by torch's own objects too.

    ``group`` is where notifications go where that is not the joinable's own group.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    group: Any = None


def notify(joinable: Any) -> Any:
    """Say that this rank begins an iteration; return the Work of doing so, or None.

    Only the first joinable of an enabled ``Join`` communicates. Raises ``ValueError`` for an object
    that is no joinable, and ``RuntimeError`` where a rank ran out of inputs and that is an error.
    """
    config = getattr(joinable, "_join_config", None)
    if config is None:
        raise ValueError(
            f"{type(joinable).__name__} is not set up as a joinable: "
            "its constructor must call Joinable.__init__(self)"
        )
    if not (config.enable and config.is_first_joinable):
        return None
    group = getattr(config, "group", None) or joinable.join_process_group
    return announce(joinable.join_device, group, config.throw_on_early_termination)


def announce(device: torch.device, group: Any, throw: bool) -> Any:
    """Count this rank as active in one round, as ``notify`` does."""
    work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
    if throw and tell(0, device, group):
        raise RuntimeError(DETECTED)
    return work


def tell(number: int, device: torch.device, group: Any) -> int:
    """Add up one small number over the ranks of a group and wait for the sum."""
    total = torch.full((1,), float(number), device=device)
    dist.all_reduce(total, group=group)
    return int(total.item())

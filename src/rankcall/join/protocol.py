"""The join protocol: the joinable classes, and the announcement that a rank still has inputs.

The classes are torch's own, so that torch's joinables work under rankcall's ``Join``, and joinables
written for rankcall work under torch's. An announcement is the same collective as in torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable as Joinable
from torch.distributed.algorithms.join import JoinHook as JoinHook

DETECTED = "Detected at least one rank that exhausted inputs. Throwing across all ranks."


class Config(NamedTuple):
    """The settings of a joinable inside a ``Join``. torch's own objects also read them.

    ``group`` is the group for announcements, if that is not the joinable's own group.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    group: Any = None


def notify(joinable: Any) -> Any:
    """Announce that this rank begins an iteration; return the Work of the announcement, or None.

    Only the first joinable of an enabled ``Join`` communicates. Raises ``ValueError`` for an object
    that is not a joinable, and ``RuntimeError`` if a rank ran out of inputs and the policy is
    ``raise``.
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
    """Count this rank as active in one iteration.

    Args:
        device: The device of the announcement's tensor.
        group: The group of the announcement.
        throw: Whether to find out if a rank has run dry.

    Returns:
        The Work of the announcement.

    Raises:
        RuntimeError: ``throw`` is true and a rank has run dry.
    """
    work = dist.all_reduce(torch.ones(1, device=device), group=group, async_op=True)
    if throw and add_up(0, device, group):
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

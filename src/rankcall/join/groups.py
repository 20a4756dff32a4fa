"""Find the ranks that a ``Join`` covers, and the group through which they communicate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rankcall.join.exchange import device_of
from rankcall.run import format_ranks


@dataclass(frozen=True)
class Span:
    """A process group, its ranks in the world, and a device for small tensors."""

    group: Any
    ranks: list[int]
    device: torch.device

    @classmethod
    def of(cls, group: Any, device: torch.device | None = None) -> Span:
        """Describe a group, or the group of a device mesh."""
        process_group = group_of(group)
        ranks = dist.get_process_group_ranks(process_group)
        return cls(process_group, ranks, device or device_of(process_group))


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


def is_fsdp(joinable: Any) -> bool:
    """Whether this is an FSDP2 module. If it is, the user has imported its package already."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(joinable, fsdp.FSDPModule)


def is_zero(joinable: Any) -> bool:
    """Whether this is a ZeroRedundancyOptimizer. Its package is slow to import and warns."""
    optim = sys.modules.get("torch.distributed.optim")
    return optim is not None and isinstance(joinable, optim.ZeroRedundancyOptimizer)


def fsdp_mesh(model: Any) -> tuple[DeviceMesh, Any]:
    """Return an FSDP2 model's data-parallel mesh, and the group of the ranks that share its data.

    Without a further mesh dimension, such as tensor parallelism, the second value is ``None``.
    """
    states = [module._get_fsdp_state() for module in model.modules() if is_fsdp(module)]
    groups: list[Any] = [state._fsdp_param_group for state in states]
    mesh = next(group for group in groups if group is not None).mesh_info.mesh
    whole = next(model.parameters()).device_mesh
    names = mesh.mesh_dim_names or ()
    others = [name for name in whole.mesh_dim_names or () if name not in names]
    if whole.ndim <= mesh.ndim or len(others) != whole.ndim - mesh.ndim:
        return mesh, None
    return mesh, group_of(whole[tuple(others)])

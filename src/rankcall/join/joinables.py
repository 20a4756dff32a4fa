"""The joinables of a ``Join``: checks, and the hook that each one gets.

``rank_group`` has the ranks that a ``Join`` covers, ``shadow`` the hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rankcall.join.rank_group import RankGroup, announce, covering, group_of
from rankcall.join.shadow import Config, ModelShadow, ShadowedIteration, StepShadow
from rankcall.ranks import format_ranks


@dataclass
class Joined:
    """The joinables of one ``Join``."""

    members: RankGroup
    same_data: RankGroup | None
    iteration: ShadowedIteration = field(default_factory=ShadowedIteration)
    joinables: list[Any] = field(default_factory=list)  # those with a join configuration
    hooks: list[JoinHook] = field(default_factory=list)
    notifier: Any = None  # the first joinable that announces its iterations
    saved: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def models(self) -> list[ModelShadow]:
        """The hooks that shadow a model."""
        return [hook for hook in self.hooks if isinstance(hook, ModelShadow)]

    def check_free(self) -> None:
        """Raise ``RuntimeError`` if a joinable is in another ``Join`` already."""
        for joinable in self.joinables:
            if getattr(joinable, "_rankcall_joined", False):
                raise RuntimeError(
                    f"this {type(joinable).__name__} is in a Join already: blocks can be nested "
                    "with different joinables, or with enable=False"
                )

    def attach(self, announce: Callable[[], Any]) -> None:
        """Save each joinable's configuration and start to observe the models."""
        self.saved = [(joinable, joinable._join_config) for joinable in self.joinables]
        for joinable in self.joinables:
            joinable._rankcall_joined = True
        for model in self.models:
            model.attach(announce, self.members.ranks)

    def switch(self, on: bool, throws: bool) -> None:
        """Switch announcements on or off; with ``throws`` they raise if a rank has run dry."""
        for joinable in self.joinables:
            first = joinable is self.notifier
            group = self.members.group if first else None
            joinable._join_config = Config(on, on and throws, on and first, group)
        for model in self.models:
            model.switch(on)

    def shadow_iteration(self) -> None:
        """Answer the collectives of one iteration of the other ranks."""
        self.iteration.begin()
        for hook in self.hooks:
            hook.main_hook()
        for model in self.models:
            model.drop_gradients()

    def detach(self) -> None:
        """Restore each joinable."""
        for model in self.models:
            model.detach()
        for joinable, config in self.saved:
            joinable._join_config = config
            del joinable._rankcall_joined
        self.saved = []


def prepare(
    given: Sequence[Any],
    group: Any,
    same_data: Any,
    policy: str,
    divide_by_active: bool,
    kwargs: dict[str, Any],
) -> Joined:
    """Check the arguments of ``Join`` and make its hooks.

    Args:
        given: The joinables.
        group: The caller's group or mesh, or None.
        same_data: The caller's group or mesh of ranks with the same batches, or None.
        policy: The policy for a rank without inputs.
        divide_by_active: Whether gradients are divided by the number of active ranks.
        kwargs: Passed to the ``join_hook`` of joinables that have their own.

    Returns:
        The joinables with their group and their hooks.

    Raises:
        ValueError: The arguments do not fit together; the message says how.
        TypeError: An argument has the wrong type.
    """
    listed = _checked(given)
    if not listed and group is None:
        raise ValueError("Join needs at least one joinable or a group")
    if not listed and policy == "shadow":
        raise ValueError(
            "Join needs at least one joinable: the policy 'shadow' answers their collectives"
        )
    # A step needs the gradients of its model's pass. So models come first, in any order of input.
    listed.sort(key=lambda joinable: isinstance(joinable, (Optimizer, LRScheduler)))
    groups = [] if group is None else [group_of(group)]
    shared_by = None if same_data is None else RankGroup.of(same_data)
    for joinable in listed:
        if _is_fsdp(joinable):
            mesh, others = _fsdp_mesh(joinable)
            groups.append(group_of(mesh))
            if others is not None and shared_by is None:
                shared_by = RankGroup.of(others)
        elif isinstance(joinable, Joinable):
            groups.append(joinable.join_process_group or _default_group())
    if not groups:
        raise ValueError("Join cannot tell the process group from these joinables: pass group=")
    common = covering(groups)
    if group is not None and common is not groups[0]:
        _check_covers(groups)
    with_device = [joinable for joinable in listed if isinstance(joinable, Joinable)]
    device = with_device[0].join_device if with_device else None
    joined = Joined(RankGroup.of(common, device), shared_by)
    if policy in ("shadow", "raise"):
        _make_hooks(joined, listed, divide_by_active, policy, kwargs)
    return joined


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


def _checked(given: Sequence[Any]) -> list[Any]:
    if isinstance(given, (torch.nn.Module, Optimizer, Joinable)) and not isinstance(
        given, Sequence
    ):
        raise TypeError(f"joinables is a list: Join([{type(given).__name__.lower()}])")
    listed = list(given)
    for joinable in listed:
        kind = type(joinable).__name__
        if isinstance(joinable, (DistributedDataParallel, LRScheduler)) or _is_fsdp(joinable):
            continue
        if isinstance(joinable, Joinable) and not hasattr(joinable, "_join_config"):
            raise ValueError(
                f"{kind} is not set up as a joinable: its constructor must call "
                "Joinable.__init__(self)"
            )
        if not isinstance(joinable, (Joinable, Optimizer)):
            raise TypeError(
                f"{kind} is not a joinable: a DistributedDataParallel or FSDP2 model, an "
                "optimizer, a scheduler or a subclass of rankcall.join.Joinable is"
            )
    if len({id(joinable) for joinable in listed}) < len(listed):
        raise ValueError("the same joinable is given twice")
    return listed


def _check_covers(groups: Sequence[Any]) -> None:
    """Raise ``ValueError`` if the caller's group, the first, lacks ranks of a joinable's group."""
    ranks = set(dist.get_process_group_ranks(groups[0]))
    for group in groups[1:]:
        lacking = set(dist.get_process_group_ranks(group)) - ranks
        if lacking:
            raise ValueError(
                f"group has ranks {format_ranks(sorted(ranks))}; a joinable's process group also "
                f"has {format_ranks(sorted(lacking))}: pass a group with all of them"
            )


def _make_hooks(
    joined: Joined, listed: Sequence[Any], divide_by_active: bool, policy: str, kwargs: Any
) -> None:
    iteration = joined.iteration
    iteration.keeps_gradients = any(isinstance(joinable, Optimizer) for joinable in listed)
    for joinable in listed:
        if _is_fsdp(joinable):
            if policy == "shadow":
                raise ValueError(
                    "an FSDP2 model's collectives cannot be shadowed: use on_exhausted='replay'"
                )
            continue
        if isinstance(joinable, Joinable):
            joined.joinables.append(joinable)
        joined.hooks.append(_hook(joinable, divide_by_active, not joined.hooks, iteration, kwargs))
    iteration.has_models = bool(joined.models)
    model = joined.hooks and isinstance(joined.hooks[0], ModelShadow)
    joined.notifier = None if model else next(iter(joined.joinables), None)
    if joined.notifier is None and not model and policy == "shadow":
        raise ValueError(
            "nothing here says when an iteration begins: give Join the model, not only its "
            "optimizer"
        )
    own = getattr(joined.notifier, "join_process_group", joined.members.group)
    if _is_zero(joined.notifier) and own is not joined.members.group:
        raise ValueError(
            "a ZeroRedundancyOptimizer notifies on its own group only: give Join the model, too"
        )


def _hook(
    joinable: Any,
    divide_by_active: bool,
    is_first: bool,
    iteration: ShadowedIteration,
    kwargs: dict[str, Any],
) -> JoinHook:
    own_hook = getattr(type(joinable), "join_hook", None)
    if own_hook is DistributedDataParallel.join_hook:
        return ModelShadow(joinable, divide_by_active, is_first, iteration)
    if _is_zero(joinable) and joinable._overlap_with_ddp:
        raise ValueError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp cannot be shadowed: use "
            "on_exhausted='replay'"
        )
    if isinstance(joinable, (Optimizer, LRScheduler)):
        return StepShadow(joinable.step, iteration)
    hook: JoinHook = joinable.join_hook(**kwargs)
    return hook


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group()


def _is_fsdp(joinable: Any) -> bool:
    """Whether this is an FSDP2 module. If it is, the user has imported its package already."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(joinable, fsdp.FSDPModule)


def _is_zero(joinable: Any) -> bool:
    """Whether this is a ZeroRedundancyOptimizer. Its package is slow to import and warns."""
    optim = sys.modules.get("torch.distributed.optim")
    return optim is not None and isinstance(joinable, optim.ZeroRedundancyOptimizer)


def _fsdp_mesh(model: Any) -> tuple[DeviceMesh, Any]:
    """Return an FSDP2 model's data-parallel mesh, and the group of the ranks that share its data.

    Without a further mesh dimension, such as tensor parallelism, the second value is ``None``.
    """
    states = [module._get_fsdp_state() for module in model.modules() if _is_fsdp(module)]
    groups: list[Any] = [state._fsdp_param_group for state in states]
    mesh = next(group for group in groups if group is not None).mesh_info.mesh
    whole = next(model.parameters()).device_mesh
    names = mesh.mesh_dim_names or ()
    others = [name for name in whole.mesh_dim_names or () if name not in names]
    if whole.ndim <= mesh.ndim or len(others) != whole.ndim - mesh.ndim:
        return mesh, None
    return mesh, group_of(whole[tuple(others)])

"""Check the joinables of a ``Join``: make their hooks, find their group, configure each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rankcall.join.groups import Span, covering, fsdp_mesh, group_of, is_fsdp, is_zero
from rankcall.join.protocol import Config, Joinable, JoinHook
from rankcall.join.shadow import ModelShadow, Round, StepShadow
from rankcall.run import format_ranks


@dataclass
class Joined:
    """The joinables of one ``Join``."""

    span: Span
    same_data: Span | None
    shared: Round = field(default_factory=Round)
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
            model.attach(announce, self.span.ranks)

    def switch(self, on: bool, throws: bool) -> None:
        """Switch announcements on or off; with ``throws`` they raise if a rank has run dry."""
        for joinable in self.joinables:
            first = joinable is self.notifier
            group = self.span.group if first else None
            joinable._join_config = Config(on, on and throws, on and first, group)
        for model in self.models:
            model.switch(on)

    def detach(self) -> None:
        """Restore each joinable."""
        for model in self.models:
            model.detach()
        for joinable, config in self.saved:
            joinable._join_config = config
            del joinable._rankcall_joined
        self.saved = []


def sort_out(
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
    if not listed and (group is None or policy == "shadow"):
        raise ValueError(
            "Join needs at least one joinable"
            + (": the policy 'shadow' answers their collectives" if group is not None else
               " or a group")
        )  # fmt: skip
    # A step needs the gradients of its model's pass. So models come first, in any order of input.
    listed.sort(key=lambda joinable: isinstance(joinable, (Optimizer, LRScheduler)))
    groups = [] if group is None else [group_of(group)]
    shared_by = None if same_data is None else Span.of(same_data)
    for joinable in listed:
        if is_fsdp(joinable):
            mesh, others = fsdp_mesh(joinable)
            groups.append(group_of(mesh))
            if others is not None and shared_by is None:
                shared_by = Span.of(others)
        elif isinstance(joinable, Joinable):
            groups.append(joinable.join_process_group or _default_group())
    if not groups:
        raise ValueError("Join cannot tell the process group from these joinables: pass group=")
    common = covering(groups)
    if group is not None and common is not groups[0]:
        _check_covers(groups)
    with_device = [joinable for joinable in listed if isinstance(joinable, Joinable)]
    device = with_device[0].join_device if with_device else None
    joined = Joined(Span.of(common, device), shared_by)
    if policy in ("shadow", "raise"):
        _make_hooks(joined, listed, divide_by_active, policy, kwargs)
    return joined


def _checked(given: Sequence[Any]) -> list[Any]:
    if isinstance(given, (torch.nn.Module, Optimizer, Joinable)) and not isinstance(
        given, Sequence
    ):
        raise TypeError(f"joinables is a list: Join([{type(given).__name__.lower()}])")
    listed = list(given)
    for joinable in listed:
        kind = type(joinable).__name__
        if isinstance(joinable, (DistributedDataParallel, LRScheduler)) or is_fsdp(joinable):
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
    shared = joined.shared
    shared.keeps_gradients = any(isinstance(joinable, Optimizer) for joinable in listed)
    for joinable in listed:
        if is_fsdp(joinable):
            if policy == "shadow":
                raise ValueError(
                    "an FSDP2 model's collectives cannot be shadowed: use on_exhausted='replay'"
                )
            continue
        if isinstance(joinable, Joinable):
            joined.joinables.append(joinable)
        joined.hooks.append(_hook(joinable, divide_by_active, not joined.hooks, shared, kwargs))
    shared.has_models = bool(joined.models)
    model = joined.hooks and isinstance(joined.hooks[0], ModelShadow)
    joined.notifier = None if model else next(iter(joined.joinables), None)
    if joined.notifier is None and not model and policy == "shadow":
        raise ValueError(
            "nothing here says when an iteration begins: give Join the model too, not only its "
            "optimizer"
        )
    own = getattr(joined.notifier, "join_process_group", joined.span.group)
    if is_zero(joined.notifier) and own is not joined.span.group:
        raise ValueError("a ZeroRedundancyOptimizer notifies on its own group only: give Join "
                         "the model too")  # fmt: skip


def _hook(
    joinable: Any, divide_by_active: bool, first: bool, shared: Round, kwargs: dict[str, Any]
) -> JoinHook:
    own_hook = getattr(type(joinable), "join_hook", None)
    if own_hook is DistributedDataParallel.join_hook:
        return ModelShadow(joinable, divide_by_active, first, shared)
    if is_zero(joinable) and joinable._overlap_with_ddp:
        raise ValueError(
            "a ZeroRedundancyOptimizer with overlap_with_ddp cannot be shadowed: use "
            "on_exhausted='replay'"
        )
    if isinstance(joinable, (Optimizer, LRScheduler)):
        return StepShadow(joinable.step, shared)
    hook: JoinHook = joinable.join_hook(**kwargs)
    return hook


def _default_group() -> Any:
    return dist.distributed_c10d._get_default_group()

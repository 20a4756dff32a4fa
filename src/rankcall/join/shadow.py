"""Shadow hooks: a rank without inputs runs them once for each iteration of the other ranks.

``ModelShadow`` answers the collectives of a DistributedDataParallel model. ``StepShadow`` steps
optimizers and schedulers. torch's own hooks are wrong in these cases, which these hooks get right:
stale gradients in ZeRO's shards, stale maps of used parameters, the first iteration of a static
graph, communication hooks that do not know the number of active ranks, and forward-only steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors


class Config(NamedTuple):
    """The settings of a joinable inside a ``Join``. torch's own objects also read them.

    ``group`` is the group for announcements, if that is not the joinable's own group.
    """

    enable: bool = False
    throw_on_early_termination: bool = False
    is_first_joinable: bool = False
    group: Any = None


_OFF = Config()


@dataclass
class ShadowedIteration:
    """What the hooks of one ``Join`` share about the iteration that they shadow."""

    has_models: bool = False
    keeps_gradients: bool = False  # an optimizer steps with them afterwards
    synced: bool = True  # gradients were reduced in this iteration; false under ``no_sync``

    def begin(self) -> None:
        """Begin an iteration. With models, a step follows only if one of them reduces gradients."""
        self.synced = not self.has_models


class StepShadow(JoinHook):
    """Step an optimizer or a scheduler in each iteration whose gradients were reduced.

    A rank without inputs also has the reduced gradients, because ``ModelShadow`` keeps them. So its
    optimizer state stays equal to that of the other ranks, and the shard of a sharded optimizer
    gets the right update.
    """

    def __init__(self, step: Callable[[], Any], iteration: ShadowedIteration) -> None:
        self._step = step
        self._iteration = iteration

    def main_hook(self) -> None:
        """Step, unless gradients were only accumulated."""
        if self._iteration.synced:
            self._step()


class ModelShadow(JoinHook):
    """Shadow the forward and backward pass of a DistributedDataParallel model.

    Between ``attach`` and ``detach`` it also observes the model's own passes. It announces them, if
    the model is the first joinable. It counts the active ranks, if gradients are divided by their
    number. It does not announce forward-only passes.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        divide_by_active: bool,
        announces: bool,
        iteration: ShadowedIteration,
    ) -> None:
        if getattr(ddp, "skip_all_reduce_unused_params", False):
            raise ValueError(
                "a DistributedDataParallel model with skip_all_reduce_unused_params cannot be "
                "shadowed: use on_exhausted='replay'"
            )
        self.ddp: Any = ddp
        self._divide_by_active = divide_by_active
        self._announces = announces
        self._iteration = iteration
        self._world = dist.get_world_size(ddp.process_group)
        self._counts = divide_by_active  # whether to count the active ranks in a collective
        self._shadowed = 0
        self._on = False
        self._muted: tuple[Any, bool] | None = None
        self._unsynced = False  # gradients were accumulated under no_sync and not yet reduced
        self._static_began = False
        self._kept = False  # the parameters hold reduced gradients
        self._count: torch.Tensor | None = None  # the active ranks, reduced in the forward pass
        self._pending: list[Any] = []  # Works of notifications, kept until the next pass
        self._order: dict[Any, int] = {}
        self._before: Any = None  # handles of the hooks on the model
        self._after: Any = None

    def attach(self, announce: Callable[[], Any], ranks: Sequence[int]) -> None:
        """Begin to observe the model. ``detach`` restores it.

        ``announce`` counts this rank as active among ``ranks``. If the model's own group has fewer
        ranks, all of these may have run dry while other ranks still have inputs.
        """
        ddp = self.ddp
        self._announce = announce
        own = dist.get_process_group_ranks(ddp.process_group)
        self._counts = self._divide_by_active or set(own) != set(ranks)
        ddp.logger._set_uneven_input_join()
        self._before = ddp.register_forward_pre_hook(self._before_forward, prepend=True)
        if ddp.find_unused_parameters or ddp.static_graph:
            parameters, _ = ddp._build_params_for_reducer()
            self._order = {parameter: at for at, parameter in enumerate(parameters)}

    def switch(self, on: bool) -> None:
        """Start or stop to announce the model's passes."""
        self._on = on
        self.ddp._join_config = Config(enable=on)
        if on and self._after is None:  # not before: the hook costs microseconds in each call
            self._after = self.ddp.register_forward_hook(
                self._after_forward, prepend=True, always_call=True
            )
        elif not on and self._after is not None:
            self._after.remove()
            self._after, self._pending = None, []
            if self._divide_by_active:
                self._divide_by_world()

    def detach(self) -> None:
        """Stop observing the model."""
        self.switch(False)
        self._before.remove()

    def _divide_by_world(self) -> None:
        """Replace the reducer's last Work, or the reducer would go on dividing by its result."""
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result([torch.tensor(float(self._world))])
        work = torch._C._distributed_c10d._create_work_from_future(done)  # type: ignore[attr-defined]
        self.ddp.reducer._set_forward_pass_work_handle(work, True)

    @property
    def _hooked(self) -> bool:
        """Whether a communication hook is registered. Such a hook divides the gradients itself."""
        return bool(self.ddp._comm_hooks or self.ddp._get_ddp_logging_data().get("comm_hook"))

    # On a rank that still has inputs.

    def _before_forward(self, module: Any, args: Any) -> None:
        ddp = self.ddp
        trains = torch.is_grad_enabled()
        if trains:
            self._unsynced = not ddp.require_backward_grad_sync
        if not self._on:
            return
        if not trains:
            # No rank shadows a forward-only pass, so it must not announce or exchange buffers.
            self._muted = (ddp._join_config, ddp.require_forward_param_sync)
            ddp._join_config, ddp.require_forward_param_sync = _OFF, False
            return
        self._pending = [self._announce()] if self._announces else []
        if self._counts:
            self._count = torch.ones(1, device=ddp.device)
            work = dist.all_reduce(self._count, group=ddp.process_group, async_op=True)
            self._pending.append(work)
            if self._divide_by_active:
                ddp.reducer._set_forward_pass_work_handle(work, False)

    def _after_forward(self, module: Any, args: Any, output: Any) -> None:
        ddp = self.ddp
        if self._muted is not None:
            ddp._join_config, ddp.require_forward_param_sync = self._muted
            self._muted = None
        elif torch.is_grad_enabled():
            divides = self._divide_by_active and not self._unsynced
            if divides and self._hooked:
                self._rescale_after_backward(output)

    def _rescale_after_backward(self, output: Any) -> None:
        """Divide by the active ranks the gradients that a communication hook divided by all."""
        engine, began = torch.autograd.Variable._execution_engine, False

        def begins(_: torch.Tensor) -> None:
            nonlocal began
            if not began:
                began = True
                # The second callback runs after the reducer's own, which ends the reduction.
                engine.queue_callback(lambda: engine.queue_callback(self._rescale))

        for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
            if tensor.requires_grad:
                tensor.register_hook(begins)

    def _rescale(self) -> None:
        assert self._count is not None
        factor = self._world / float(self._count.item())
        for parameter in self.ddp.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    # On a rank that has no inputs left.

    def main_hook(self) -> None:
        """Answer the collectives of one iteration of the other ranks."""
        ddp, active = self.ddp, self._world
        if self._counts:
            count = torch.zeros(1, device=ddp.device)
            dist.all_reduce(count, group=ddp.process_group)
            active = int(count.item())
            if not active:
                return
        self._shadowed += 1
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        synced = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = synced
        if synced:
            self._iteration.synced = True
            # The iteration in which the reducer learns a static graph reduces the map of used
            # parameters first, and keeps no order of buckets.
            learns = self._learns_static_graph()
            self._reduce(active if self._divide_by_active else self._world, learns)
            if not learns:
                ddp.reducer._push_all_rebuilt_params()

    def drop_gradients(self) -> None:
        """Drop the gradients of the last iteration, as the other ranks do before their next one."""
        if self._kept:
            self._kept = False
            for parameter in self.ddp.parameters():
                parameter.grad = None

    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the model of a rank that had inputs to the end."""
        # The last among the ranks of this model; other ranks of the Join may have had more inputs.
        self.ddp._sync_final_model(self._shadowed == 0)
        self._shadowed = 0

    def _reduce(self, active: int, learns: bool) -> None:
        """Take part in reducing the gradients, with zeros or with accumulated gradients."""
        ddp = self.ddp
        dynamic = ddp.find_unused_parameters and not ddp.static_graph
        used = ddp.reducer._get_local_used_map() if learns or dynamic else None
        if used is not None:
            self._mark_used(used)
        if used is not None and learns:
            dist.all_reduce(used, group=ddp.process_group)
        buckets = ddp.reducer._get_zeros_like_grad_buckets()
        if self._unsynced:
            self._fill(buckets, 1 if self._hooked else active)
        futures = [ddp.reducer._run_comm_hook(bucket) for bucket in buckets]
        results = [future.wait() for future in futures]
        if used is not None and not learns:
            dist.all_reduce(used, group=ddp.process_group)
        if self._unsynced or self._iteration.keeps_gradients:
            factor = self._world / active if self._hooked else 1.0
            self._keep(buckets, results, factor, used)
            self._kept = True
        if used is not None:
            used.zero_()
        self._unsynced = False

    def _learns_static_graph(self) -> bool:
        """Whether the reducers learn the static graph in this iteration."""
        ddp = self.ddp
        if not ddp.static_graph or ddp._static_graph_delay_allreduce_enqueued:
            return False
        began, self._static_began = self._static_began, True
        return not began

    def _mark_used(self, used: torch.Tensor) -> None:
        """Mark the parameters with gradients; the map holds the sums of the last iteration."""
        used.zero_()
        if self._unsynced:
            for parameter, at in self._order.items():
                used[at] = parameter.grad is not None

    @staticmethod
    def _fill(buckets: Sequence[Any], divisor: int) -> None:
        for bucket in buckets:
            for zeros, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                if parameter.grad is not None:
                    zeros.copy_(parameter.grad / divisor)

    def _keep(
        self, buckets: Sequence[Any], results: Sequence[Any], factor: float, used: Any
    ) -> None:
        """Store the reduced gradients as the backward pass would have stored them."""
        for bucket, result in zip(buckets, results, strict=True):
            reduced = result[0] if isinstance(result, (list, tuple)) else result
            if reduced.data_ptr() != bucket.buffer().data_ptr():
                bucket.buffer().copy_(reduced)
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                if used is not None and not used[self._order[parameter]]:
                    parameter.grad = None
                elif parameter.grad is None:
                    parameter.grad = gradient.detach().clone().mul_(factor)
                else:
                    parameter.grad.detach().copy_(gradient).mul_(factor)

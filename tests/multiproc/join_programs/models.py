"""Uneven training on several ranks, and the same on one process, for comparison.

The one process sums the gradients of the ranks that are active in a step, divides them by the
world or by their number, and steps. It knows nothing of Join, DDP or FSDP. Where replayed batches
leave a trace (statistics of BatchNorm, unused parameters), it replays them as well, at weight zero.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join

WIDTH = 6
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Case:
    """One way to train. ``pattern`` has the number of batches of each rank."""

    pattern: tuple[int, ...]
    policy: str = "shadow"
    divide_by: str = "world"
    model: str = "plain"  # plain, batchnorm, unused, static
    optimizer: str = "adam"  # adam, momentum
    accumulate: int = 1
    clip: bool = False
    forward_only: bool = False
    hook: bool = False  # a communication hook
    zero: bool = False
    views: bool = False  # gradient_as_bucket_view
    known: bool = True  # lengths
    parallel: str = "ddp"  # ddp, fsdp, hsdp, tp
    epochs: int = 1  # in one block


class Net(nn.Module):
    """A small network; with ``heads`` each pass uses only one of two."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "batchnorm" else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2 if kind == "unused" else 1))

    def forward(self, batch: Tensor, head: int = 0) -> Tensor:
        out: Tensor = self.heads[head](torch.tanh(self.norm(self.first(batch))))
        return out


def network(kind: str) -> Net:
    """Return the same network every time."""
    torch.manual_seed(3)
    return Net(kind).double()


def batch(rank: int, step: int) -> Tensor:
    """Return the batch that a rank has in a step, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)


def head(case: Case, rank: int, step: int) -> int:
    """Say which head a pass uses: some are used by no rank at all, and some by one only."""
    return int((rank + step) % 3 == 0) if case.model == "unused" else 0


def loss_of(out: Tensor) -> Tensor:
    """Return a loss whose gradient depends on the output."""
    return (out * out).sum()


def optimizer_of(case: Case) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return an optimizer's class and arguments."""
    if case.optimizer == "adam":
        return torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}
    return torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}


def syncs(case: Case, step: int) -> bool:
    """Whether gradients are reduced and applied in a step."""
    return (step + 1) % case.accumulate == 0


def alone(case: Case, here: int) -> tuple[Net, torch.optim.Optimizer]:
    """Train in this one process; buffers are those of rank ``here``."""
    model = network(case.model)
    kind, options = optimizer_of(case)
    optimizer = kind(model.parameters(), **options)
    world, fewest = len(case.pattern), min(case.pattern)
    buffers = [_buffers(model) for _ in range(world)]
    longest = [rank for rank in range(world) if case.pattern[rank] == max(case.pattern)]
    synced = True
    optimizer.zero_grad()
    for _ in range(case.epochs):
        for step in range(max(case.pattern)):
            active = [rank for rank in range(world) if step < case.pattern[rank]]
            passing = range(world) if _leaves_traces(case) else active
            # DDP sends rank 0's buffers; once a rank has run dry, those of the last active rank. It
            # does so after passes that reduced gradients only.
            source = 0 if step < fewest or case.policy == "replay" else active[-1]
            if synced:
                for rank in passing:
                    buffers[rank] = buffers[source]
            synced = syncs(case, step)
            divisor = world if case.divide_by == "world" else len(active)
            for rank in passing:
                _load(model, buffers[rank])
                out = model(_batch_at(case, rank, step), head(case, rank, step))
                # A weight is that of its step; a reducer divides when it reduces.
                share = 1 / divisor if case.policy == "replay" else 1.0
                (loss_of(out) * (share if rank in active else 0.0)).backward()
                buffers[rank] = _buffers(model)
            if syncs(case, step):
                _finish_step(case, model, optimizer, 1 if case.policy == "replay" else divisor)
        if case.policy == "shadow" and len(longest) < world:
            # There was a tail, at its end all take over one model.
            buffers, synced = [buffers[longest[-1]]] * world, True
    _load(model, buffers[longest[-1] if case.policy == "shadow" else here])
    return model, optimizer


def _leaves_traces(case: Case) -> bool:
    return case.policy == "replay" and case.model in ("batchnorm", "unused")


def _batch_at(case: Case, rank: int, step: int) -> Tensor:
    """Return a rank's batch, or the one that it replays."""
    mine = case.pattern[rank]
    return batch(rank, min(step, mine - 1)) if mine else batch(0, 0)


def _finish_step(
    case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, divisor: int
) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= divisor
    if case.clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _load(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def together(case: Case) -> list[str]:
    """Train on all ranks; return how this rank's result differs from that of one process."""
    build: Callable[[Case], tuple[nn.Module, torch.optim.Optimizer]] = {
        "ddp": _with_ddp,
        "fsdp": _with_fsdp,
        "hsdp": _with_fsdp,
        "tp": _with_tp,
    }[case.parallel]
    model, optimizer = build(case)
    here = dist.get_rank() // (2 if case.parallel == "tp" else 1)
    if case.clip and case.policy == "shadow":
        # So that a rank which shadows clips as well.
        optimizer.register_step_pre_hook(lambda *_: _clip(model))
    _train(case, model, optimizer, here)
    return compare(case, model, optimizer, here)


def _clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _with_ddp(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = DistributedDataParallel(
        network(case.model),
        find_unused_parameters=case.model == "unused",
        static_graph=case.model == "static",
        gradient_as_bucket_view=case.views,
    )
    if case.hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
    kind, options = optimizer_of(case)
    if case.zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), kind, **options)
    return model, kind(model.parameters(), **options)


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """Return a mesh, the same for all cases: each new one has connections of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _with_fsdp(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard

    world = len(case.pattern)
    if case.parallel == "hsdp":
        mesh = _mesh((2, world // 2), ("replicate", "shard"))
    else:
        mesh = _mesh((world,), ("dp",))
    model = network(case.model)
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    kind, options = optimizer_of(case)
    return model, kind(model.parameters(), **options)


def _with_tp(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = _mesh((len(case.pattern), 2), ("dp", "tp"))
    plan = {"first": ColwiseParallel(), "heads.0": RowwiseParallel()}
    model = parallelize_module(network(case.model), mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])
    kind, options = optimizer_of(case)
    return model, kind(model.parameters(), **options)


def _train(case: Case, model: Any, optimizer: torch.optim.Optimizer, here: int) -> None:
    mine = [batch(here, step) for step in range(case.pattern[here])]
    joinables = [model] if case.policy == "replay" else [model, optimizer]
    with Join(joinables, on_exhausted=case.policy, divide_by=case.divide_by) as join:
        for _ in range(case.epochs):
            loader = mine if case.known else iter(mine)
            batches = join.batches(loader, window=3, example=batch(0, 0))
            for step, data in enumerate(batches):
                assert join.active == (step < len(mine))
                if case.forward_only:
                    with torch.no_grad():
                        model(data)
                with _maybe_unsynced(model, syncs(case, step)):
                    out = (
                        model(data, head(case, here, step))
                        if case.model == "unused"
                        else model(data)
                    )
                    (loss_of(out) * join.weight).backward()
                if syncs(case, step):
                    if case.clip and case.policy == "replay":
                        _clip(model)
                    optimizer.step()
                    optimizer.zero_grad()


@contextlib.contextmanager
def _maybe_unsynced(model: Any, sync: bool) -> Any:
    if isinstance(model, DistributedDataParallel):
        with contextlib.nullcontext() if sync else model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(sync)
        yield


def compare(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, here: int) -> list[str]:
    """Return where parameters, buffers or optimizer state differ from the one process."""
    wanted, reference = alone(case, here)
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    wrong = []
    pairs = dict(wanted.named_parameters())
    for name, parameter in plain.named_parameters():
        wrong += _differ(f"parameter {name}", _whole(parameter), pairs[name])
    if not case.forward_only:
        for name, buffer in plain.named_buffers():
            wrong += _differ(f"buffer {name}", buffer, dict(wanted.named_buffers())[name])
    inner: Any = optimizer.optim if case.zero else optimizer
    for name, parameter in plain.named_parameters():
        mine, expected = inner.state.get(parameter), reference.state.get(pairs[name])
        if mine is None and case.zero:
            continue  # in another rank's shard
        if bool(mine) != bool(expected):
            wrong.append(f"state of {name}: {mine} here, {expected} alone")
            continue
        for key in expected or ():
            wrong += _differ(f"{key} of {name}", _whole(mine[key]), expected[key])
    return [f"{case}: {difference}" for difference in wrong]


def _whole(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def _differ(what: str, here: Any, alone_: Any) -> list[str]:
    if here is None or alone_ is None:
        return [] if here is alone_ else [f"{what}: {here} here, {alone_} alone"]
    scale = max(alone_.abs().max().item(), 1e-7)  # values that are zero but for rounding are equal
    distance = (here - alone_).abs().max().item() / scale
    return [] if distance <= TOLERANCE else [f"{what} off by {distance:.2e}"]


def sweep(rank: int, world_size: int, cases: Sequence[dict[str, Any]]) -> list[str]:
    """Train each case on the ranks that are up; return what differs on this rank."""
    torch.set_num_threads(1)
    return [difference for case in cases for difference in together(case_of(case))]


def case_of(fields: dict[str, Any]) -> Case:
    """Return the case that came as JSON."""
    return Case(**{**fields, "pattern": tuple(fields["pattern"])})

"""The join protocol on several ranks: together with torch's classes, and without its defects."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import join as torchs
from torch.nn.parallel import DistributedDataParallel

from rankcall import join as ours


def counter(base: Any, join: Any) -> type:
    """Return a counting joinable, as in torch's tutorial, over the given base and Join."""

    class Hook(base.JoinHook):  # type: ignore[misc]
        def __init__(self, counter: Any, sync: bool) -> None:
            self.counter, self.sync = counter, sync
            self.shadowed = 0

        def main_hook(self) -> None:
            self.shadowed += 1
            dist.all_reduce(torch.zeros(1), group=self.counter.join_process_group)

        def post_hook(self, is_last_joiner: bool) -> None:
            self.counter.posts.append(is_last_joiner)
            if self.sync:
                most = torch.tensor([self.counter.count])
                dist.all_reduce(most, op=dist.ReduceOp.MAX)
                self.counter.most = most.item()

    class Counter(base.Joinable):  # type: ignore[misc]
        def __init__(self, group: Any = None) -> None:
            super().__init__()
            self.count, self.most, self.posts = 0.0, 0.0, []  # type: ignore[var-annotated]
            self.group = group or dist.group.WORLD

        def __call__(self) -> None:
            join.Join.notify_join_context(self)
            total = torch.ones(1)
            dist.all_reduce(total, group=self.group)
            self.count += total.item()

        def join_hook(self, sync: bool = True) -> Any:
            return Hook(self, sync)

        @property
        def join_device(self) -> torch.device:
            return torch.device("cpu")

        @property
        def join_process_group(self) -> Any:
            return self.group

    return Counter


def both_ways(rank: int, world_size: int) -> list[Any]:
    """Count unevenly with every mixture of torch's classes and ours."""
    results = []
    for base, notifies, joins in (
        (ours, ours, torchs),
        (torchs, torchs, ours),
        (ours, ours, ours),
        (torchs, ours, ours),
    ):
        joinable = counter(base, notifies)()
        with joins.Join([joinable], sync=True):
            for _ in range(2 + rank):
                joinable()
        results.append([joinable.count, joinable.most, joinable.posts])
    return results


def last_joiners(rank: int, world_size: int) -> list[bool]:
    """Ranks 1 and 2 join in the last round."""
    joinable = counter(ours, ours)()
    with ours.Join([joinable]):
        for _ in range(1 if rank == 0 else 3):
            joinable()
    posts: list[bool] = joinable.posts
    return posts


def _ddp(buffers: bool = False, group: Any = None) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4)] if buffers else [nn.Linear(4, 4)]
    return DistributedDataParallel(nn.Sequential(*layers), process_group=group)


def defects(rank: int, world_size: int) -> dict[str, Any]:
    """Do what torch's Join gets wrong; return what this rank sees."""
    results: dict[str, Any] = {}
    data = torch.ones(2, 4)
    # 1. The configuration does not outlive the block, nor begin with the constructor.
    net = _ddp()
    unused = ours.Join([net])
    results["made"] = net._join_config.enable
    with ours.Join([net]) as entered:
        results["inside"] = net._join_config.enable
        for _ in range(1 + rank):
            net(data).sum().backward()
    results["after"] = net._join_config.enable
    if rank == 0:
        with torch.no_grad():
            net(data)
    total = torch.full((1,), 100.0 / world_size)
    dist.all_reduce(total)
    results["sum"] = total.item()
    # 2. Forward-only passes, by one rank alone, in the middle of training.
    net = _ddp(buffers=True)
    with ours.Join([net]):
        for _ in range(1 + 2 * rank):
            net(data).sum().backward()
            if rank == 1:
                net.eval()
                with torch.no_grad():
                    net(data)
                net.train()
    # 4. A block that is switched off does not switch its outer one off.
    with ours.Join([net]):
        with ours.Join([net], enable=False):
            results["inner"] = net._join_config.enable
        for _ in range(1 + rank):
            net(data).sum().backward()
    # 5. Filters of warnings stay as they are, and there is one warning for a long wait.
    filters = list(warnings.filters)
    joinable = counter(ours, ours)()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        with ours.Join([joinable]):
            for _ in range(1 if rank == 0 else 1005):
                joinable()
        results["filters"] = warnings.filters == inside
    results["filters"] = results["filters"] and warnings.filters == filters
    results["warnings"] = [str(warning.message) for warning in caught]
    # 6. ``with`` returns the Join.
    results["entered"] = isinstance(entered, ours.Join)
    results["unused"] = isinstance(unused, ours.Join)
    # Each joinable gets back what it had before the block.
    config = net._join_config
    with ours.Join([net]):
        pass
    results["restored"] = net._join_config is config and "_rankcall_joined" not in vars(net)
    results["hooks"] = [len(net._forward_pre_hooks), len(net._forward_hooks)]
    return results


def groups(rank: int, world_size: int) -> dict[str, Any]:
    """Use joinables on two groups, in each order, with a notifying group that covers both."""
    results: dict[str, Any] = {}
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[rank // 2]
    data = torch.ones(2, 4) * (rank + 1)
    for divide_by in ("world", "active"):
        small, large = _ddp(group=pair, buffers=True), _ddp()
        with ours.Join([small, large], divide_by=divide_by):
            for _ in range(rank + 1):
                for net in (small, large):
                    net.zero_grad()
                    net(data).sum().backward()
        last = [net.module[-1].bias.grad.tolist() for net in (small, large)]
        results[divide_by] = [gradient[0] for gradient in last]
        results[f"{divide_by} same"] = [float(net.module[0].weight.sum()) for net in (small, large)]
    first = counter(ours, ours)(pair)
    second = counter(ours, ours)()
    with ours.Join([first, second], group=dist.group.WORLD, sync=False) as join:
        for _ in range(rank + 1):
            first()
            second()
    results["counts"] = [first.count, second.count]
    assert join.summary is not None
    results["ranks"] = [row.rank for row in join.summary.ranks]
    try:
        ours.Join([first], group=pair, sync=False) if rank < 2 else None
        ours.Join([first, second], group=pair, sync=False)
    except ValueError as error:
        results["error"] = str(error)
    chain = dist.new_group([1, 2])
    if rank == 1:  # in two groups, of which neither has all ranks of the other
        with pytest.raises(ValueError, match=r"covers the others' \(ranks 0-1; 1-2\)"):
            ours.Join([first, counter(ours, ours)(chain)], sync=False)
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    with pytest.raises(ValueError, match="notifies on its own group only"):
        ours.Join(
            [Zero(_ddp(group=pair).parameters(), torch.optim.SGD, process_group=pair, lr=1)],
            group=dist.group.WORLD,
        )
    return results


def policies(rank: int, world_size: int) -> dict[str, Any]:
    """Stop and raise, with known and unknown lengths, with and without ``batches()``."""
    results: dict[str, Any] = {}
    for known in (True, False):
        for start, count in ((3, 3 + rank), (9, 9 + 2 * rank), (4, 4)):
            data = [torch.ones(2, 4) * at for at in range(count)]
            key = f"{start} {'known' if known else 'unknown'}"
            with ours.Join(group=dist.group.WORLD, on_exhausted="stop") as join:
                results[f"stop {key}"] = sum(
                    1 for _ in join.batches(data if known else iter(data), window=3)
                )
            steps = 0
            try:
                with ours.Join(group=dist.group.WORLD, on_exhausted="raise") as join:
                    for _ in join.batches(data if known else iter(data), window=3):
                        steps += 1
                error = ""
            except RuntimeError as caught:
                error = f"{type(caught).__name__}: {caught}"
            results[f"raise {key}"] = [steps, error]
    net, steps = _ddp(), 0
    try:
        with ours.Join([net], throw_on_early_termination=True):
            for _ in range(3 + rank):
                net(torch.ones(2, 4)).sum().backward()
                steps += 1
    except RuntimeError as caught:
        results["thrown"] = [steps, str(caught)]
    dist.barrier()  # nothing was broken
    return results


def replay(rank: int, world_size: int) -> dict[str, Any]:
    """Return the batches, states and weights of a replaying rank, and the effects of a weight."""
    results: dict[str, Any] = {}
    seen = []
    with ours.Join(group=dist.group.WORLD, on_exhausted="replay", divide_by="active") as join:
        same = join.weight_tensor
        for value in join.batches([10 * rank + at for at in range(2 + rank)]):
            assert join.weight_tensor is same
            seen.append([value, join.active, join.weight, float(same)])
    results["seen"] = seen
    results["summary"] = [
        [row.rank, row.batches, row.shadowed, row.replayed] for row in join.summary.ranks
    ]
    # A loss that is not finite, with a weight of zero.
    net = _ddp()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ours.Join([net], on_exhausted="replay") as join:
            for data in join.batches([torch.ones(2, 4)] * (1 + rank)):
                net.zero_grad()
                out = net(data)
                if not join.active:
                    out = out / torch.zeros(())
                (torch.log(out.abs()).sum() * join.weight).backward()
    finite = all(bool(torch.isfinite(parameter.grad).all()) for parameter in net.parameters())
    results["finite"], results["warned"] = finite, [str(warning.message) for warning in caught]
    # torch.compile: a weight that is a tensor does not compile anew.
    compiles = 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal compiles
        compiles += 1
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def loss(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return out.sum() * weight

    with ours.Join([net], on_exhausted="replay") as join:
        for data in join.batches([torch.ones(2, 4)] * (1 + rank)):
            loss(net(data), join.weight_tensor).backward()
    results["compiles"] = compiles
    return results


def capped(rank: int, world_size: int) -> list[int]:
    """Take a number of batches from loaders that never end."""
    net, seen = _ddp(), []
    with ours.Join([net]) as join:
        for data in join.batches(itertools.repeat(torch.ones(2, 4)), length=2 + 2 * rank):
            net(data).sum().backward()
            seen.append(len(seen))
    return seen


def off(rank: int, world_size: int) -> list[Any]:
    """A disabled Join sends nothing, and ``batches()`` yields what the loader has."""
    net = _ddp()
    with ours.Join([net], enable=False) as join:
        seen = [[value, join.active, join.weight] for value in join.batches(range(rank + 1))]
        began = net._join_config.enable
    return [seen, began, join.summary]


def recorded(rank: int, world_size: int, folder: str) -> list[Any]:
    """Leave a summary in the run."""
    import rankcall

    net = _ddp()
    with rankcall.enable(folder):
        with ours.Join([net]) as join:
            for data in join.batches([torch.ones(2, 4)] * (1 + rank)):
                net(data).sum().backward()
                time.sleep(0.001)
        dist.barrier()
    return str(join.summary).splitlines()


def last_steps(rank: int, world_size: int) -> dict[str, list[bool | None]]:
    """Return ``is_last`` in each step, by policy and by what is known of the lengths."""
    results: dict[str, list[bool | None]] = {}
    for policy in ("shadow", "replay", "stop"):
        for kind in ("known", "unknown", "unknown, whole windows"):
            counts = (4, 8) if kind == "unknown, whole windows" else (3, 6)
            loader: Any = [torch.ones(2, 4)] * counts[rank]
            model = DistributedDataParallel(torch.nn.Linear(4, 1))
            seen: list[bool | None] = []
            with ours.Join([model], on_exhausted=policy) as join:  # type: ignore[arg-type]
                source = loader if kind == "known" else iter(loader)
                for batch in join.batches(source, window=4):
                    seen.append(join.is_last)
                    (model(batch).sum() * join.weight).backward()
                assert join.is_last is False
            results[f"{policy}, {kind}"] = seen
    return results

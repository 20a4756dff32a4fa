"""What happens inside Join when something goes wrong: scenarios run one after the other.

Every scenario gets a process group of its own, because most of them end with a dead one; the ranks
stay up. A rank's outcome says what it caught, when, and what it had done by then; how long plain
training takes on the machine as busy as it is; and what of the user's settings is not as before.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join

Scenario = Callable[[int, "Log"], None]


class Log:
    """What one rank did, and when the failure began on this rank."""

    def __init__(self) -> None:
        self.steps = 0
        self.began = 0.0
        self.more: dict[str, Any] = {}
        self.nets: list[DistributedDataParallel] = []

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` and note when."""
        self.began = time.time()
        raise error

    def model(self) -> DistributedDataParallel:
        """Return a small DDP model."""
        torch.manual_seed(0)
        self.nets.append(DistributedDataParallel(nn.Linear(4, 4)))
        return self.nets[-1]

    def not_restored(self) -> list[str]:
        """Return what Join left behind on the models."""
        left = [net._join_config for net in self.nets if net._join_config.enable]
        left += [net for net in self.nets if net._forward_pre_hooks or net._forward_hooks]
        left += [net for net in self.nets if "_rankcall_joined" in vars(net)]
        return [str(each) for each in left]


def batches(count: int) -> list[torch.Tensor]:
    """Return some batches."""
    return [torch.ones(2, 4)] * count


def train(net: nn.Module, log: Log, batch: torch.Tensor, weight: float = 1.0) -> None:
    """Do one step."""
    (net(batch).sum() * weight).backward()
    log.steps += 1


def meet(rank: int, failing: int = 1) -> None:
    """Let the rank that is to fail wait until the others are past where they would hear of it."""
    store = dist.distributed_c10d._get_default_store()
    if rank == failing:
        store.wait([f"in/{other}" for other in range(dist.get_world_size()) if other != failing])
    else:
        store.set(f"in/{rank}", "")


def in_backward(rank: int, log: Log) -> None:
    """Rank 1 fails while the others wait in the backward pass."""
    net = log.model()
    with Join([net]) as join:
        for step, batch in enumerate(join.batches(batches(6))):
            if step == 3:
                meet(rank)
                if rank == 1:
                    log.fail(KeyError("no such sample"))
            train(net, log, batch)


def without_batches(rank: int, log: Log) -> None:
    """The same with a plain loop, as torch's Join is used."""
    net = log.model()
    with Join([net]):
        for step, batch in enumerate(batches(6)):
            if rank == 1 and step == 3:
                log.fail(KeyError("no such sample"))
            train(net, log, batch)


def in_shadow(rank: int, log: Log) -> None:
    """Rank 0 has run dry and shadows when rank 1 fails."""
    net = log.model()
    with Join([net]) as join:
        for step, batch in enumerate(join.batches(batches(2 if rank == 0 else 6))):
            if rank == 1 and step == 4:
                log.fail(KeyError("no such sample"))
            train(net, log, batch)


def in_fsdp(rank: int, log: Log) -> None:
    """The others wait in FSDP2's all-gather."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with Join([net], on_exhausted="replay") as join:
        for step, batch in enumerate(join.batches(batches(3 + rank))):
            if rank == 1 and step == 2:
                log.fail(KeyError("no such sample"))
            train(net, log, batch, join.weight)


def in_subgroup_and_receive(rank: int, log: Log) -> None:
    """Rank 0 waits in a group without the rank that fails, for rank 2, which waits to receive."""
    group = dist.new_group([0, 2])
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(batches(2)):
            train(net, log, batch)
        if rank == 0:
            dist.all_reduce(torch.ones(1), group=group)
        elif rank == 2:
            dist.recv(torch.ones(1), src=1)
        else:
            log.fail(KeyError("no such sample"))


def in_user_code(rank: int, log: Log) -> None:
    """The others are in code of their own, and learn of it at their next batch."""
    with Join(group=dist.group.WORLD, on_exhausted="replay") as join:
        for step, _ in enumerate(join.batches(batches(1000))):
            if rank == 1 and step == 3:
                log.fail(KeyError("no such sample"))
            time.sleep(0.01)
            log.steps += 1


def looks_like_torch(rank: int, log: Log) -> None:
    """What torch raises for wrong shapes is a plain RuntimeError, as are broken connections."""
    net = log.model()
    with Join([net]) as join:
        for step, batch in enumerate(join.batches(batches(6))):
            if rank == 1 and step == 3:
                log.fail(RuntimeError("shapes cannot be multiplied"))
            train(net, log, batch)


def interrupted(rank: int, log: Log) -> None:
    """Ctrl-C on one rank is news for the others too."""
    net = log.model()
    with Join([net]) as join:
        for step, batch in enumerate(join.batches(batches(6))):
            if rank == 1 and step == 3:
                log.fail(KeyboardInterrupt())
            train(net, log, batch)


class Lying(list):  # type: ignore[type-arg]
    """A loader whose length is not what it has, or which fails at the end."""

    said = 0
    fails: Callable[[], None] | None = None

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()
        if self.fails:
            self.fails()


def _lying(rank: int, log: Log, real: int, said: int, policy: str = "shadow") -> None:
    loader = Lying(batches(real if rank == 1 else 6))
    loader.said = said if rank == 1 else 6
    net = log.model()
    with Join([net], on_exhausted=policy) as join:  # type: ignore[arg-type]
        log.began = time.time()
        for batch in join.batches(loader):
            log.began = time.time()
            train(net, log, batch, join.weight)


def too_short(rank: int, log: Log) -> None:
    """Rank 1 promised 6 batches and has 3."""
    _lying(rank, log, 3, 6)


def too_short_replayed(rank: int, log: Log) -> None:
    """The same under replay."""
    _lying(rank, log, 3, 6, "replay")


def too_long(rank: int, log: Log) -> None:
    """Rank 1 promised 3 batches and has 6."""
    _lying(rank, log, 6, 3)


def too_long_replayed(rank: int, log: Log) -> None:
    """The same under replay: known once the last of all has been handed out."""
    _lying(rank, log, 6, 3, "replay")


def loader_raises(rank: int, log: Log) -> None:
    """The loader fails on rank 1, which does not know its length."""

    def loader() -> Iterator[torch.Tensor]:
        yield from batches(3)
        if rank == 1:
            log.fail(OSError("disk gone"))
        yield from batches(3)

    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(loader()):
            train(net, log, batch)


def long_loader_raises(rank: int, log: Log) -> None:
    """The loader of rank 1 has a length, and fails; ranks replay."""
    loader = Lying(batches(3 if rank == 1 else 6))
    loader.said = 6
    loader.fails = lambda: log.fail(OSError("disk gone")) if rank == 1 else None
    net = log.model()
    with Join([net], on_exhausted="replay") as join:
        for batch in join.batches(loader):
            train(net, log, batch, join.weight)


def short_in_the_tail(rank: int, log: Log) -> None:
    """Rank 1 promised 6 and has 4, when rank 0 has run dry already: nothing is wrong."""
    loader = Lying(batches({0: 2, 1: 4, 2: 6}[rank]))
    loader.said = {0: 2, 1: 6, 2: 6}[rank]
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(loader):
            train(net, log, batch)
    log.more["shadowed"] = [each.shadowed for each in join.summary.ranks]


def one_breaks(rank: int, log: Log) -> None:
    """Rank 1 leaves the loop early, alone."""
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(batches(6)):
            train(net, log, batch)
            if rank == 1 and log.steps == 3:
                log.began = time.time()
                break


def one_breaks_in_fsdp(rank: int, log: Log) -> None:
    """The same where ranks replay."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with Join([net], on_exhausted="replay") as join:
        for batch in join.batches(batches(6)):
            train(net, log, batch, join.weight)
            if rank == 1 and log.steps == 3:
                log.began = time.time()
                break


def all_break(rank: int, log: Log) -> None:
    """All leave at the same step, twice: what a limit on steps does."""
    net = log.model()
    with Join([net]) as join:
        for _ in range(2):
            for batch in join.batches(batches(6 + rank)):
                train(net, log, batch)
                if log.steps % 3 == 0:
                    break
    total = torch.ones(1)
    dist.all_reduce(total)
    log.more["sum"] = total.item()


def breaks_in_the_tail(rank: int, log: Log) -> None:
    """Rank 0 has run dry; rank 1 then leaves its loop and shadows, too."""
    net = log.model()
    with Join([net]) as join:
        for batch in join.batches(batches(2 if rank == 0 else 6)):
            train(net, log, batch)
            if rank == 1 and log.steps == 4:
                break
    log.more["shadowed"] = [each.shadowed for each in join.summary.ranks]


def all_fail_and_go_on(rank: int, log: Log) -> None:
    """All ranks fail at the same step: each keeps its own error, and the groups live on."""
    net = log.model()
    errors = 0
    for _ in range(3):
        try:
            with Join([net]) as join:
                for batch in join.batches(batches(2)):
                    train(net, log, batch)
                    dist.barrier()
                    raise KeyError("out of memory, say")
        except KeyError:
            errors += 1
    total = torch.ones(1)
    dist.all_reduce(total)
    log.more.update(sum=total.item(), errors=errors)


def nothing_to_replay(rank: int, log: Log) -> None:
    """Rank 1 has no batch and was given no example."""
    with Join(group=dist.group.WORLD, on_exhausted="replay") as join:
        for _ in join.batches(batches(0 if rank == 1 else 3)):
            log.steps += 1


def nothing_on_one_rank(rank: int, log: Log) -> None:
    """Rank 1 has no batch: stop ends before the first, raise raises before it."""
    for policy in ("stop", "raise"):
        for loader in (batches(0 if rank == 1 else 3), iter(batches(0 if rank == 1 else 3))):
            with Join(group=dist.group.WORLD, on_exhausted=policy) as join:  # type: ignore[arg-type]
                for _ in join.batches(loader):
                    log.steps += 1
            log.more["stopped"] = log.more.get("stopped", 0) + 1


def different_settings(rank: int, log: Log) -> None:
    """Rank 1 says stop, the others replay."""
    with Join(group=dist.group.WORLD, on_exhausted="stop" if rank == 1 else "replay") as join:
        for _ in join.batches(batches(3)):
            log.steps += 1


def different_shares(rank: int, log: Log) -> None:
    """Ranks 0 and 1 are said to have the same data, and have not."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    with Join(
        group=dist.group.WORLD, on_exhausted="replay", same_data=alone if rank == 2 else pair
    ) as join:
        log.began = time.time()
        for _ in join.batches(batches(3 + rank)):
            log.steps += 1
            dist.barrier()


SCENARIOS: dict[str, Scenario] = {
    each.__name__: each
    for each in (
        in_backward, without_batches, in_shadow, in_fsdp, in_subgroup_and_receive, in_user_code,
        looks_like_torch, interrupted, loader_raises, long_loader_raises, too_short,
        too_short_replayed, too_long, too_long_replayed, short_in_the_tail, one_breaks,
        one_breaks_in_fsdp, all_break, breaks_in_the_tail, all_fail_and_go_on, nothing_to_replay,
        nothing_on_one_rank, different_settings, different_shares,
    )
}  # fmt: skip


def run_scenarios(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """Run each scenario and return its outcome on this rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    outcomes = {}
    for name in names:
        own = dist.PrefixStore(name, store)
        dist.init_process_group(
            "gloo", store=own, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
        )
        plain_s = plain_training()
        log, caught, filters = Log(), None, list(warnings.filters)
        try:
            SCENARIOS[name](rank, log)
        except BaseException as error:
            caught = error
        outcomes[name] = {
            "error": type(caught).__name__ if caught else None,
            "text": str(caught),
            "rank": getattr(caught, "rank", None),
            "steps": log.steps,
            "began": log.began,
            "ended": time.time(),
            "plain_s": plain_s,
            "changed": log.not_restored() + ["filters"] * (filters != warnings.filters),
            **log.more,
        }
        del caught
        dist.destroy_process_group()
    return outcomes


def plain_training() -> float:
    """Train a few steps without Join; return the seconds, which say how busy the machine is."""
    began = time.time()
    net = Log().model()
    for batch in batches(5):
        net(batch).sum().backward()
    return time.time() - began


def killed(rank: int, world_size: int, where: str) -> dict[str, Any]:
    """Rank 1 is killed in its third step, with DDP or FSDP2, or while it shadows the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    log, policy = Log(), "replay" if where == "fsdp" else "shadow"
    if where == "fsdp":
        net: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    else:
        net = log.model()
    if where == "shadowing" and rank == 1:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), 9)

        net._check_and_sync_module_buffers = die  # what a shadowed iteration calls first
    try:
        with Join([net], on_exhausted=policy) as join:  # type: ignore[arg-type]
            for batch in join.batches(batches(2 if rank == 1 and where == "shadowing" else 6)):
                if rank == 1 and log.steps == 2:
                    os.kill(os.getpid(), 9)
                train(net, log, batch, join.weight)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error), "rank": error.rank}  # type: ignore[attr-defined]
    return {}


def store_host_fails(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Rank 0, whose process is also the store's, fails and is gone at once."""
    torch.set_num_threads(1)
    shared = dist.FileStore(f"{folder}/port", world_size)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    log = Log()
    net = log.model()
    try:
        with Join([net]) as join:
            for batch in join.batches(batches(6)):
                if rank == 0 and log.steps == 2:
                    raise KeyError("no such sample")
                train(net, log, batch)
    except KeyError:
        os._exit(7)
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {}

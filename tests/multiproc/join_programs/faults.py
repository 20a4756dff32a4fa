"""A rank fails inside Join: in its own code, in its loader, by a signal, or with all others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from join_programs.scenario import Log, Lying, Scenario, batches, sharded, train
from rankcall.join import Join


def meet(rank: int, failing: int = 1) -> None:
    """Make the failing rank wait until the others have passed their last look at the log."""
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
    """Rank 1 fails in a plain loop, without ``batches()``."""
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
    net = sharded()
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


def in_receive_from_one_that_left(rank: int, log: Log) -> None:
    """Rank 2 waits for rank 0, which has left the block by then, but whose process is alive."""
    pair = dist.new_group([0, 2])
    store = dist.distributed_c10d._get_default_store()
    try:
        with Join(group=dist.group.WORLD, on_exhausted="replay") as join:
            for step, _ in enumerate(join.batches(batches(100_000))):
                if rank == 2 and step == 3:
                    store.set("in/2", "")
                    dist.recv(torch.ones(1), src=0, group=pair)
                elif rank == 1 and step == 3:
                    store.wait(["in/2"])
                    log.fail(KeyError("no such sample"))
                time.sleep(0.01)
    finally:
        store.set(f"out/{rank}", "")
        if rank == 0:
            store.wait(["out/2"], timedelta(seconds=60))


def in_user_code(rank: int, log: Log) -> None:
    """The others are in code of their own, and learn of it at their next batch."""
    with Join(group=dist.group.WORLD, on_exhausted="replay") as join:
        for step, _ in enumerate(join.batches(batches(1000))):
            if rank == 1 and step == 3:
                log.fail(KeyError("no such sample"))
            time.sleep(0.01)
            log.steps += 1


def looks_like_torch(rank: int, log: Log) -> None:
    """Raise a RuntimeError of torch's own for wrong shapes; broken connections raise one, too."""
    _fails_with(RuntimeError("shapes cannot be multiplied"), rank, log)


def interrupted(rank: int, log: Log) -> None:
    """Ctrl-C on one rank is news for the others too."""
    _fails_with(KeyboardInterrupt(), rank, log)


def _fails_with(error: BaseException, rank: int, log: Log) -> None:
    net = log.model()
    with Join([net]) as join:
        for step, batch in enumerate(join.batches(batches(6))):
            if rank == 1 and step == 3:
                log.fail(error)
            train(net, log, batch)


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


def killed(rank: int, world_size: int, where: str) -> dict[str, Any]:
    """Rank 1 is killed in its third step, with DDP or FSDP2, or while it shadows the others."""
    torch.set_num_threads(1)
    log, policy = Log(), "replay" if where == "fsdp" else "shadow"
    net = sharded() if where == "fsdp" else log.model()
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
    """Rank 0 hosts the store; it fails and ends at once."""
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


SCENARIOS: list[Scenario] = [
    in_backward,
    without_batches,
    in_shadow,
    in_fsdp,
    in_subgroup_and_receive,
    in_receive_from_one_that_left,
    in_user_code,
    looks_like_torch,
    interrupted,
    loader_raises,
    long_loader_raises,
    all_fail_and_go_on,
]

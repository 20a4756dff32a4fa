"""Programs of the scoreboard as lists of calls, and the function with which a rank runs its list.

A program has a list for each rank. ``Call`` is one step of it: a collective, one end of a message,
or a wait for other calls. Each kind of step is issued from a line of its own, as in real programs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

INIT_S = 120.0


@dataclass(frozen=True)
class Call:
    """One step of a rank. Ranks are global.

    Attributes:
        op: The name of a function below that issues it, without the leading underscore.
        count: The number of elements of a tensor.
        group: ``world``, or the name of a group of the program.
        peer: The other end of a message; -1: any.
        splits: The input and the output splits of an all_to_all; empty: even ones.
        key: Of a step that waits for another rank, or is waited for.
        threads: The calls of a step in which each call has a thread of its own. Each thread begins
            after the call of the thread before it was issued.
    """

    op: str
    dtype: str = "float32"
    count: int = 8
    root: int = 0
    reduce_op: str = "SUM"
    group: str = "world"
    peer: int = -1
    tag: int = 0
    splits: tuple[tuple[int, ...], ...] = ()
    key: str = ""
    threads: tuple[Call, ...] = ()


class _Rank:
    """The state of one rank: its groups, and the work that it has not waited for."""

    def __init__(self, rank: int, world_size: int, groups: dict[str, Any]) -> None:
        self.rank, self.world_size, self.groups = rank, world_size, groups
        self.works: list[Any] = []

    def members(self, call: Call) -> int:
        import torch.distributed as dist

        return dist.get_world_size(self.groups[call.group])


Step = Callable[[_Rank, Call], None]
_STEPS: dict[str, Step] = {}


def _step(function: Step) -> Step:
    """Make a function the one that issues the calls with its name."""
    _STEPS[function.__name__[1:]] = function
    return function


def run_calls(
    rank: int,
    world_size: int,
    programs: Sequence[Sequence[dict[str, Any]]],
    groups: dict[str, list[int]],
    timeout_s: float,
) -> None:
    """Issue the calls of this rank, one after the other.

    Args:
        rank: This rank.
        world_size: The number of ranks.
        programs: The calls of each rank, as ``plain`` returns them.
        groups: The groups to create, by name, in this order.
        timeout_s: The time-out of all groups, in s.
    """
    import torch.distributed as dist

    if "TORCH_DISTRIBUTED_DEBUG" in os.environ:
        dist.set_debug_level_from_env()
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    process_groups = {"world": dist.group.WORLD}
    for name, ranks in groups.items():
        process_groups[name] = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s))
    state = _Rank(rank, world_size, process_groups)
    for step in programs[rank]:
        call = from_plain(step)
        _STEPS[call.op](state, call)
    dist.destroy_process_group()


def plain(call: Call) -> dict[str, Any]:
    """Return the fields of a call that differ from the usual ones, to be pickled or printed."""
    usual = Call(call.op)
    fields = {name: value for name, value in vars(call).items() if value != getattr(usual, name)}
    if call.threads:
        fields["threads"] = [plain(thread_call) for thread_call in call.threads]
    return {"op": call.op, **fields}


def from_plain(fields: dict[str, Any]) -> Call:
    """Return the call that ``plain`` has written."""
    threads = tuple(from_plain(thread_fields) for thread_fields in fields.get("threads", ()))
    return Call(**{**fields, "threads": threads})


def _tensor(state: _Rank, call: Call, parts: int = 1) -> Any:
    import torch

    values = torch.arange(1, call.count * parts + 1) % 7 + state.rank
    return values.to(getattr(torch, call.dtype))


def _parts(state: _Rank, call: Call) -> list[Any]:
    return list(_tensor(state, call, state.members(call)).chunk(state.members(call)))


def _reduce_op(call: Call) -> Any:
    import torch.distributed as dist

    return getattr(dist.ReduceOp, call.reduce_op)


@_step
def _all_reduce(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    dist.all_reduce(_tensor(state, call), _reduce_op(call), state.groups[call.group])


@_step
def _all_reduce_async(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    group = state.groups[call.group]
    work = dist.all_reduce(_tensor(state, call), _reduce_op(call), group, async_op=True)
    state.works.append(work)


@_step
def _all_reduce_written(state: _Rank, call: Call) -> None:
    """Write to the tensor while the op is in flight."""
    import torch.distributed as dist

    tensor = _tensor(state, call)
    work = dist.all_reduce(tensor, group=state.groups[call.group], async_op=True)
    tensor.fill_(0)
    work.wait()


@_step
def _broadcast(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    dist.broadcast(_tensor(state, call), call.root, state.groups[call.group])


@_step
def _broadcast_async(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    group = state.groups[call.group]
    state.works.append(dist.broadcast(_tensor(state, call), call.root, group, async_op=True))


@_step
def _broadcast_read(state: _Rank, call: Call) -> None:
    """Read the tensor while the op is in flight."""
    import torch.distributed as dist

    tensor = _tensor(state, call)
    work = dist.broadcast(tensor, call.root, state.groups[call.group], async_op=True)
    tensor.clone()
    work.wait()


@_step
def _reduce(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    tensor, group = _tensor(state, call), state.groups[call.group]
    dist.reduce(tensor, call.root, _reduce_op(call), group)


@_step
def _all_gather(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    dist.all_gather(_parts(state, call), _tensor(state, call), state.groups[call.group])


@_step
def _all_gather_short(state: _Rank, call: Call) -> None:
    """Pass a list that is one tensor short."""
    import torch.distributed as dist

    dist.all_gather(_parts(state, call)[1:], _tensor(state, call), state.groups[call.group])


@_step
def _gather(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    parts = _parts(state, call) if state.rank == call.root else None
    dist.gather(_tensor(state, call), parts, call.root, state.groups[call.group])


@_step
def _scatter(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    parts = _parts(state, call) if state.rank == call.root else None
    dist.scatter(_tensor(state, call), parts, call.root, state.groups[call.group])


@_step
def _reduce_scatter(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    output, group = _tensor(state, call), state.groups[call.group]
    dist.reduce_scatter(output, _parts(state, call), _reduce_op(call), group)


@_step
def _all_to_all(state: _Rank, call: Call) -> None:
    import torch
    import torch.distributed as dist

    ours, theirs = (list(splits) for splits in call.splits) if call.splits else ([], [])
    both = [
        sum(splits) if splits else call.count * state.members(call) for splits in (ours, theirs)
    ]
    source, target = (torch.ones(size, dtype=getattr(torch, call.dtype)) for size in both)
    dist.all_to_all_single(target, source, theirs, ours, group=state.groups[call.group])


@_step
def _barrier(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    dist.barrier(state.groups[call.group])


@_step
def _all_gather_object(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    objects: list[Any] = [None] * state.members(call)
    dist.all_gather_object(objects, "x" * (10 + 100 * state.rank), state.groups[call.group])


@_step
def _broadcast_object(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    objects = ["x" * 100] if state.rank == call.root else [None]
    dist.broadcast_object_list(objects, call.root, state.groups[call.group])


@_step
def _send(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    dist.send(_tensor(state, call), call.peer, state.groups[call.group], call.tag)


@_step
def _recv(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    source = call.peer if call.peer >= 0 else None
    dist.recv(_tensor(state, call), source, state.groups[call.group], call.tag)


@_step
def _isend(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    work = dist.isend(_tensor(state, call), call.peer, state.groups[call.group], call.tag)
    state.works.append(work)


@_step
def _irecv(state: _Rank, call: Call) -> None:
    import torch.distributed as dist

    work = dist.irecv(_tensor(state, call), call.peer, state.groups[call.group], call.tag)
    state.works.append(work)


@_step
def _batch(state: _Rank, call: Call) -> None:
    """Pass a tensor on to the next rank, in one batch."""
    import torch.distributed as dist

    after, before = (state.rank + 1) % state.world_size, (state.rank - 1) % state.world_size
    ops = [
        dist.P2POp(dist.isend, _tensor(state, call), after),
        dist.P2POp(dist.irecv, _tensor(state, call), before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


@_step
def _wait(state: _Rank, call: Call) -> None:
    """Wait for all work, the newest first."""
    while state.works:
        state.works.pop().wait()


@_step
def _announce(state: _Rank, call: Call) -> None:
    """Tell the ranks that wait for ``key`` that this rank has come here."""
    _store().set(call.key, "1")


@_step
def _await(state: _Rank, call: Call) -> None:
    """Wait until another rank has announced ``key``."""
    _store().wait([call.key], timedelta(seconds=INIT_S))


def _store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


@_step
def _threads(state: _Rank, call: Call) -> None:
    """Issue each call in a thread of its own, in the order of the list."""
    errors: list[BaseException] = []
    workers = []
    for thread_call in call.threads:
        issued = threading.Event()
        workers.append(
            threading.Thread(target=_in_thread, args=(state, thread_call, issued, errors))
        )
        workers[-1].start()
        assert issued.wait(INIT_S)
    for worker in workers:
        worker.join(INIT_S)
    if errors:
        raise errors[0]


def _in_thread(
    state: _Rank, call: Call, issued: threading.Event, errors: list[BaseException]
) -> None:
    mine = _Rank(state.rank, state.world_size, state.groups)
    try:
        _STEPS[f"{call.op}_async"](mine, call)
        issued.set()
        _wait(mine, call)
    except BaseException as error:
        errors.append(error)
        issued.set()


@_step
def _ddp(state: _Rank, call: Call) -> None:
    """Take one training step with DistributedDataParallel."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(nn.Linear(4, 4), process_group=state.groups[call.group])
    model(torch.ones(2, 4)).sum().backward()

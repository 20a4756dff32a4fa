"""Hooks on real Gloo ranks: ops that fail, hang or overtake each other, and forked children."""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from typing import Any

import pytest
from ranks import run_ranks
from seen import Seen

pytestmark = pytest.mark.multiproc


@pytest.fixture(params=["native", "python"])
def env(request: pytest.FixtureRequest) -> dict[str, str]:
    """Run on both captures."""
    return {"RANKCALL_CAPTURE": request.param}


def _every_kind(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks

    seen = Seen()
    peer = 1 - rank
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        dist.all_reduce(torch.ones(2))
        dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2), async_op=True).wait()
        tensor = torch.ones(4)
        if rank == 0:
            dist.send(tensor, peer, tag=3)
            dist.irecv(tensor, peer).wait()
        else:
            dist.recv(tensor, peer, tag=3)
            dist.isend(tensor, peer).wait()
        dist.barrier()
        statuses = seen.wait(lambda seen: len(seen) == 10)
    return [
        (
            status.operation,
            status.sequence_number,
            status.status,
            status.record["peer"],
            status.record["tag"],
        )
        for status in statuses
    ]


def test_collectives_and_p2p(env: dict[str, str]) -> None:
    """Sync, async, send and receive: a start and an end each, in order; both ends number alike."""
    first, second = run_ranks(_every_kind, 2, env=env)
    for rank, events in enumerate((first, second)):
        away, back = ("send", "recv") if rank == 0 else ("recv", "send")
        expected = [
            ("all_reduce", 1, None, 0),
            ("all_gather", 2, None, 0),
            (away, 1, 1 - rank, 3),
            (back, 1, 1 - rank, 0),
            ("barrier", 3, None, 0),
        ]
        assert [tuple(event) for event in events] == [
            (op, seq, status, peer, tag)
            for op, seq, peer, tag in expected
            for status in ("started", "completed")
        ]


def _time_out(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks

    hasty = dist.new_group([0, 1], timeout=timedelta(milliseconds=300))
    starts, ends = Seen(), Seen()
    with hooks.register_collective_start_hook(starts), hooks.register_collective_end_hook(ends):
        if rank == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(2), group=hasty)
            with pytest.raises(RuntimeError):
                dist.recv(torch.ones(2), 1, group=hasty)
            ends.wait(lambda seen: len(seen) == 2)
        dist.barrier()
        ends.wait(lambda seen: seen[-1:] and seen[-1].operation == "barrier")
    return [
        (status.operation, status.status, bool(status.error), bool(status.duration))
        for status in ends.statuses
    ]


def test_failed_ops_end_too(env: dict[str, str]) -> None:
    """An op that timed out has failed, with its error and duration."""
    failed, other_events = run_ranks(_time_out, 2, env=env)
    assert [tuple(event) for event in failed[:2]] == [
        ("all_reduce", "failed", True, True),
        ("recv", "failed", True, True),
    ]
    assert [event[0] for event in other_events] == ["barrier"]


def _never_ending(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks

    seen, pending = Seen(), []
    start = hooks.register_collective_start_hook(seen)
    end = hooks.register_collective_end_hook(seen)
    group = dist.new_group([0, 1])
    if rank == 0:
        late = dist.irecv(torch.ones(2), 1)
        for _ in range(500):  # the ring of 64 laps; the receive stays known
            dist.all_reduce(torch.ones(1), group=group)
        seen.wait(lambda seen: bool(seen) and seen[0].operation == "recv")
        pending = [
            (status.operation, status.status, status.record["peer"]) for status in hooks.pending()
        ]
        dist.barrier()
        late.wait()
        seen.wait(lambda seen: "completed" in [s.status for s in seen if s.operation == "recv"])
        assert not any(status.operation == "recv" for status in hooks.pending())
    else:
        for _ in range(500):
            dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
        dist.send(torch.ones(2), 0)
    dist.barrier()
    start.remove()
    end.remove()
    return pending


def test_an_op_that_does_not_end_is_pending(env: dict[str, str]) -> None:
    """Hooks get its start, pending() has it, laps of the ring do not lose it, nor its end."""
    pending, _ = run_ranks(_never_ending, 2, env={**env, "RANKCALL_CAPACITY": "64"})
    assert [tuple(op) for op in pending] == [("recv", "started", 1)]


def _overtake(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks
    from rankcall.ring import follower

    normally, follower.HOLD_NS = follower.HOLD_NS, 60_000_000_000  # a busy machine is slow
    seen = Seen()
    big, small = torch.ones(1 << 20), torch.ones(1)
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        for _ in range(10):
            works = [dist.all_reduce(tensor, async_op=True) for tensor in (big, small, small)]
            for work in works:
                work.wait()
        statuses = seen.wait(lambda seen: len(seen) == 60)
    follower.HOLD_NS = normally
    ends = [status for status in statuses if status.status == "completed"]
    starts = [status.sequence_number for status in statuses if status.status == "started"]
    return [
        starts == list(range(1, 31)),
        [status.sequence_number for status in ends],
        [status.timestamp for status in ends],
    ]


def test_ends_come_in_order_though_small_ops_overtake_large_ones(env: dict[str, str]) -> None:
    """Gloo's two threads end a small all_reduce first; hooks get the ends in the order of issue."""
    for starts_in_order, numbers, _ in run_ranks(_overtake, 2, env=env):
        assert starts_in_order
        assert numbers == list(range(1, 31))


def _fork(rank: int, world_size: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks
    from rankcall.capture import session

    seen = Seen()
    named = []
    group_handle = hooks.register_process_group_hook(lambda pg, name: named.append(name))
    handle = hooks.register_collective_end_hook(seen)
    dist.all_reduce(torch.ones(1))
    seen.wait(lambda seen: len(seen) == 1)
    issued = session.current().capture.counts()[0]
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            tasks = os.listdir("/proc/self/task")
            lone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
            lone.allreduce([torch.ones(1)]).wait()
            message = repr((len(tasks), session.current() is None, hooks.pending()))
            later = Seen()
            with hooks.register_collective_end_hook(later):
                pass
            os.write(write, f"{message} {len(seen.statuses)} {len(later.statuses)}".encode())
        except BaseException:
            os.write(write, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        child_report = pipe.read()
    os.waitpid(child, 0)
    assert session.current().capture.counts()[0] == issued
    dist.all_reduce(torch.ones(1))  # the parent goes on
    seen.wait(lambda seen: len(seen) == 2)
    handle.remove()
    group_handle.remove()
    return [child_report, [status.sequence_number for status in seen.statuses]]


def test_a_forked_child_delivers_nothing(env: dict[str, str]) -> None:
    """No thread, no recording, no call of the parent's hooks; the parent goes on undisturbed."""
    for child_report, numbers in run_ranks(_fork, 2, env=env):
        assert child_report == "(1, True, []) 1 0"
        assert numbers == [1, 2]


def _on_another_group(rank: int, world_size: int) -> list[int]:
    import torch
    import torch.distributed as dist

    from rankcall import hooks

    group = dist.new_group([0, 1])
    total, seen = torch.zeros(1), Seen()

    def add_up(status: Any) -> None:
        if status.pg_name == "0" and status.operation == "all_reduce":
            mine = torch.tensor([float(rank + 1)])
            dist.all_reduce(mine, group=group)
            total.add_(mine)
        seen(status)

    with hooks.register_collective_end_hook(add_up):
        for _ in range(20):
            dist.all_reduce(torch.ones(4))
        seen.wait(lambda seen: len(seen) == 40)
    dist.barrier()
    return [int(total)]


def test_hooks_reduce_on_another_group(env: dict[str, str]) -> None:
    """A collective from within a hook meets its peers'; the training threads go on meanwhile."""
    assert run_ranks(_on_another_group, 2, env=env) == [[60], [60]]

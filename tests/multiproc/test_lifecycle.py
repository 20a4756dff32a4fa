"""Recording that begins, ends and begins again; groups made again; collectives that fail."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, try_ranks
from world import here, plain, wait_until

from rankcall import load
from rankcall.run.settle import settle

pytestmark = pytest.mark.multiproc


@pytest.fixture(params=["native", "python"])
def env(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Run on both captures."""
    return {"RANKCALL_CAPTURE": request.param}


def _rows(run_dir: Path, rank: int) -> list[dict[str, Any]]:
    rows = [plain(row) for row in load(run_dir).records.to_dicts()]
    return [row for row in rows if row["rank"] == rank]


def _init(folder: str, name: str, rank: int, world_size: int) -> None:
    import torch.distributed as dist

    store = dist.FileStore(f"{folder}/{name}", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


# --- groups that come and go ---


def _init_twice(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import rankcall

    with rankcall.enable(f"{folder}/run"):
        for time, ops in ("first", 3), ("second", 2):
            _init(folder, time, rank, world_size)
            twin = dist.new_group([1, 0] if rank else [0, 1])
            for _ in range(ops):
                dist.all_reduce(torch.ones(1))
                dist.all_reduce(torch.ones(2), group=twin)
            dist.destroy_process_group()


def test_a_second_init(tmp_path: Path, env: dict[str, str | None]) -> None:
    """Enabled before init without a rank in sight: it is learned; a second init counts anew."""
    unknown = {"RANK": None, "WORLD_SIZE": None}
    run_ranks(_init_twice, 2, str(tmp_path), init=False, env={**env, **unknown})
    run = load(tmp_path / "run")
    assert run.ranks["rank"].to_list() == [0, 1]
    assert run.ranks["world_size"].to_list() == [2, 2]
    assert run.groups["group"].to_list() == ["0", "1", "0#2", "1#2"]
    for rank in (0, 1):
        calls = [(row["group"], row["seq"]) for row in _rows(tmp_path / "run", rank)]
        assert calls == [
            *((group, seq) for seq in (1, 2, 3) for group in ("0", "1")),
            *((group, seq) for seq in (1, 2) for group in ("0#2", "1#2")),
        ]


def _new_groups(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import rankcall

    with rankcall.enable(f"{folder}/run"):
        for _ in range(3):
            group = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=group)
            dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
            dist.destroy_process_group(group)
            del group
        dist.destroy_process_group()


def test_sub_groups_made_again(tmp_path: Path, env: dict[str, str | None]) -> None:
    """Each is a group of its own, though an address or a counter may serve again."""
    run_ranks(_new_groups, 2, str(tmp_path), env=env)
    for rank in (0, 1):
        calls = [(row["group"], row["seq"]) for row in _rows(tmp_path / "run", rank)]
        labels = list(dict.fromkeys(group for group, _ in calls))
        assert len(labels) == 3
        assert calls == [(label, seq) for label in labels for seq in (1, 2)]


def _waits_late(rank: int, world_size: int, folder: str) -> None:
    import gc

    import torch
    import torch.distributed as dist

    import rankcall

    with rankcall.enable(f"{folder}/run"):
        group = dist.new_group([0, 1])
        tensors = [torch.zeros(4) for _ in range(20)]
        works = [dist.irecv(tensor, None, group=group) for tensor in tensors] if rank == 0 else []
        for _ in range(20 if rank else 0):
            dist.send(torch.ones(4), 0, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        new_group = dist.new_group([0, 1])  # a new group is met: destroyed ones are forgotten
        dist.all_reduce(torch.ones(1), group=new_group)
        for work in works:
            work.wait()
        dist.barrier()


def test_a_receive_is_waited_for_after_its_group(
    tmp_path: Path, env: dict[str, str | None]
) -> None:
    """Its number and its sender are written then, though its group is gone by that time."""
    run_ranks(_waits_late, 2, str(tmp_path), env=env)
    receives = [row for row in _rows(tmp_path / "run", 0) if row["op"] == "recv"]
    assert [(row["seq"], row["peer"]) for row in receives] == [(n, 1) for n in range(1, 21)]


def _nothing_seen_twice(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import rankcall

    dist.set_debug_level(dist.DebugLevel.DETAIL)
    with rankcall.enable(f"{folder}/run"):
        _init(folder, "store", rank, world_size)
        dist.all_reduce(torch.ones(3))
        dist.broadcast(torch.ones(3), src=1)
        dist.all_gather([torch.ones(1), torch.ones(1)], torch.ones(1))
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            dist.recv(torch.ones(3), 0)
        dist.destroy_process_group()


def test_debug_detail(tmp_path: Path, env: dict[str, str | None]) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every op in checks of its own: none is recorded."""
    run_ranks(_nothing_seen_twice, 2, str(tmp_path), init=False, env=env)
    for rank in (0, 1):
        ops = [row["op"] for row in _rows(tmp_path / "run", rank)]
        last = "recv" if rank else "send"
        assert ops == ["all_reduce", "broadcast", "all_gather", "barrier", last]


# --- on, off, on ---


def _on_and_off(rank: int, world_size: int, folder: str) -> list[int]:
    import torch
    import torch.distributed as dist

    import rankcall

    lines = []
    for time in range(5):
        tensor = torch.full((4,), float(rank + time))
        rankcall.enable(f"{folder}/{time}")
        lines.append(here())
        work = dist.all_reduce(tensor, async_op=True)
        rankcall.disable()
        dist.all_reduce(torch.ones(1))  # which is not recorded
        work.wait()
        assert tensor.eq(2 * time + 1).all()
    return lines


def test_on_and_off_with_ops_in_flight(tmp_path: Path, env: dict[str, str | None]) -> None:
    """Each time on is a run of its own, counted from one; ops in flight come to no harm."""
    lines = run_ranks(_on_and_off, 2, str(tmp_path), env=env)
    for rank in (0, 1):
        for time in range(5):
            (row,) = _rows(tmp_path / str(time), rank)
            assert (row["op"], row["seq"]) == ("all_reduce", 1)
            assert row["call_site"] == f"{__file__}:{lines[rank][time]}"


def _off_in_between(rank: int, world_size: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    import rankcall

    rankcall.enable(f"{folder}/run")
    take = torch.zeros(2)
    work = dist.irecv(take, 1) if rank == 0 else None
    rankcall.disable()
    if work is None:
        dist.send(torch.ones(2), 0)
    else:
        work.wait()
        assert take.eq(1).all()


def test_an_op_that_ends_after_disable(tmp_path: Path, env: dict[str, str | None]) -> None:
    """Its end is recorded all the same."""
    run_ranks(_off_in_between, 2, str(tmp_path), env=env)
    settle(tmp_path / "run")
    (row,) = _rows(tmp_path / "run", 0)
    assert row["status"] == "completed"


# --- collectives that fail ---

Attempt = Callable[[Any], Any]


def _alone(rank: int, world_size: int, folder: str) -> list[tuple[int, str]]:
    """Rank 0 issues each op on a group that rank 1 stays away from; return lines and errors."""
    import torch
    import torch.distributed as dist

    import rankcall

    two, into = torch.ones(2), torch.empty(1)
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=0.3)) for _ in range(5)]
    if rank == 1:
        dist.barrier()
        return []
    recording = rankcall.enable(f"{folder}/run")
    line = here() + 1
    attempts: list[Attempt] = [
        lambda group: dist.all_reduce(two, group=group),
        lambda group: dist.all_reduce(two, group=group, async_op=True).wait(),
        lambda group: dist.reduce_scatter(into, [into, into], group=group),
        lambda group: dist.recv(two, 1, group=group),
        lambda group: dist.monitored_barrier(group, timedelta(seconds=0.3)),
    ]
    errors = []
    for at, (attempt, group) in enumerate(zip(attempts, groups, strict=True)):
        try:
            attempt(group)
        except RuntimeError as error:
            errors.append((line + at, str(error)))
    wait_until(lambda: recording.capture.counts()[0] == recording.capture.counts()[1])
    rankcall.disable()
    dist.barrier()
    return errors


def test_ops_that_time_out(tmp_path: Path, env: dict[str, str | None]) -> None:
    """The user gets torch's exception; the record is failed and carries its text."""
    errors, _ = run_ranks(_alone, 2, str(tmp_path), env=env)
    rows = _rows(tmp_path / "run", 0)
    assert len(errors) == len(rows) == 5
    for (line, error), row in zip(errors, rows, strict=True):
        assert row["status"] == "failed", row
        assert row["completed_ns"] > row["enqueued_ns"] + 200_000_000
        assert row["call_site"] == f"{__file__}:{line}"
        assert row["error"].splitlines()[0] in error


def _peer_leaves(rank: int, world_size: int, folder: str) -> str:
    import os

    import torch
    import torch.distributed as dist

    import rankcall

    with rankcall.enable(f"{folder}/run"):
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            os._exit(0)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            text = str(error)
        dist.destroy_process_group()
    return text


def test_a_peer_that_leaves(tmp_path: Path, env: dict[str, str | None]) -> None:
    """The survivor's record has the error's text; the one before is completed."""
    survivor, leaver = try_ranks(_peer_leaves, 2, str(tmp_path), env=env)
    assert survivor.ok, survivor.error
    assert leaver.exitcode == 0
    settle(tmp_path / "run")
    first, second = _rows(tmp_path / "run", 0)
    assert (first["status"], second["status"]) == ("completed", "failed")
    assert second["error"].splitlines()[0] in survivor.value
    assert [row["op"] for row in _rows(tmp_path / "run", 1)] == ["all_reduce"]


def _wrong_arguments(rank: int, world_size: int, folder: str) -> list[str]:
    import torch
    import torch.distributed as dist

    import rankcall

    errors = []
    with rankcall.enable(f"{folder}/run"):
        for tensor, root in ((torch.ones(2), 7), (torch.ones(2, 2).t(), 0)):
            try:
                dist.broadcast(tensor, group_src=root)
            except (RuntimeError, ValueError) as error:
                errors.append(str(error))
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
    return errors


def test_an_op_that_torch_refuses(tmp_path: Path, env: dict[str, str | None]) -> None:
    """An error that the back end raises at issue is in the record, and the next op is sound."""
    errors = run_ranks(_wrong_arguments, 2, str(tmp_path), env=env)
    for rank in (0, 1):
        *refused, sound = _rows(tmp_path / "run", rank)
        failed = [row["error"] for row in refused if row["status"] == "failed"]
        assert failed
        assert all(any(text.splitlines()[0] in error for error in errors[rank]) for text in failed)
        assert (sound["op"], sound["status"]) == ("all_reduce", "completed")

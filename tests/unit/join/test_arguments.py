"""Join refuses wrong arguments early and clearly; a run's list of joins is read as hostile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join, Joinable, JoinHook
from rankcall.join.block import Weight
from rankcall.run.joins import (
    FILE,
    JoinSummary,
    RankSummary,
    append_join,
    read_joins,
    total_by_rank,
)


@pytest.fixture(scope="module")
def model() -> Iterator[DistributedDataParallel]:
    """Return a DDP model in a world of one."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(2, 2))
    dist.destroy_process_group()


class Bare(Joinable):
    """A joinable whose constructor does not call the base's."""

    def __init__(self) -> None:
        pass

    def join_hook(self, **_: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class Ready(Bare):
    """A joinable whose constructor does."""

    def __init__(self) -> None:
        Joinable.__init__(self)


def test_wrong_arguments_are_refused(model: DistributedDataParallel) -> None:
    """Each wrong argument raises an error with its own message."""
    optimizer = torch.optim.SGD(model.parameters())
    world = dist.group.WORLD
    for error, says, arguments, options in [
        (ValueError, "at least one joinable or a group", [[]], {}),
        (ValueError, "answers their collectives", [[]], {"group": world}),
        (ValueError, "must call Joinable.__init__", [[Bare()]], {}),
        (ValueError, "given twice", [[model, model]], {}),
        (TypeError, "Linear is not a joinable", [[nn.Linear(1, 1)]], {}),
        (TypeError, "joinables is a list", [model], {}),
        (TypeError, "a process group or a device mesh", [[model]], {"group": 3}),
        (ValueError, "when an iteration begins", [[optimizer]], {"group": world}),
        (ValueError, "pass group=", [[optimizer]], {"on_exhausted": "replay"}),
        (ValueError, "must be one of shadow, replay", [[model]], {"on_exhausted": "wait"}),
        (ValueError, "must be 'world' or 'active'", [[model]], {"divide_by": "two"}),
        (ValueError, "is on_exhausted='raise'", [[model], True, True], {"on_exhausted": "stop"}),
        (
            ValueError,
            "is divide_by='active'",
            [[model]],
            {"divide_by": "world", "divide_by_initial_world_size": False},
        ),
    ]:
        with pytest.raises(error, match=says):
            Join(*arguments, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must call Joinable\.__init__"):
        Join.notify_join_context(Bare())
    with pytest.raises(ValueError, match="window must be at least 1"):
        Join([model]).batches([], window=0)
    with pytest.raises(ValueError, match="length must not be negative"):
        Join([model]).batches([], length=-1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of its own import
def test_joinables_without_a_shadow_are_refused(model: DistributedDataParallel) -> None:
    """A joinable that cannot be shadowed is refused with advice; other policies take it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
    overlapping = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    skipping = DistributedDataParallel(
        nn.Linear(2, 2), find_unused_parameters=True, skip_all_reduce_unused_params=True
    )
    for joinables in ([sharded], [model, overlapping], [skipping]):
        with pytest.raises(ValueError, match="cannot be shadowed: use on_exhausted='replay'"):
            Join(joinables)
        Join(joinables, on_exhausted="replay")


def test_misplaced_blocks(model: DistributedDataParallel) -> None:
    """``batches()`` needs its block, a block is not entered twice, and a Join can be used again."""
    join = Join([model])
    with pytest.raises(RuntimeError, match="inside the block"):
        list(join.batches([1]))
    with join:
        with pytest.raises(RuntimeError, match="entered already"), join:
            pass
        with pytest.raises(RuntimeError, match="is in a Join already"), Join([model]):
            pass
        with Join([Ready()]):
            assert model._join_config.enable
        with Join([model], enable=False), Join([Ready()], enable=False):
            assert model._join_config.enable
        assert model._join_config.enable
    for _ in range(2):
        with join as again:
            batches = again.batches([1, 2])
            assert list(batches) == list(batches) == [1, 2]
    assert not model._join_config.enable
    with Join([model], enable=False), Join([model]):
        assert model._join_config.enable
    assert again.summary is not None
    assert again.summary.ranks[0].batches == 4


def test_an_error_leaves_everything_as_it_was(model: DistributedDataParallel) -> None:
    """After an error in the block, the model has its old configuration and no hooks."""
    config = model._join_config
    with pytest.raises(KeyError), Join([model]):
        raise KeyError("x")
    assert model._join_config is config
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def test_a_weight_is_a_float() -> None:
    """A weight is a float in every product; zero makes infinite losses and their gradients zero."""
    zero, half = Weight(0.0), Weight(0.5)
    loss = torch.tensor(4.0)
    for product in (loss * half, half * loss, torch.mul(loss, half), loss.clone().mul_(half)):
        assert type(product) is torch.Tensor
        assert product == 2.0
    assert half == 0.5
    assert torch.full((2,), half).tolist() == [0.5, 0.5]
    leaf = torch.zeros(3, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="not finite"):
        (torch.log(leaf).sum() * zero).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.0, 0.0]
    leaf.grad = None
    (torch.exp(leaf).sum() * zero).backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [0.0, 0.0, 0.0]


def test_the_list_of_joins_is_read_as_hostile(tmp_path: Path) -> None:
    """Damaged lines are named, and the others are read."""
    ranks = [RankSummary(1, 5, 2, 0, 0.5), RankSummary(0, 7)]
    good = JoinSummary("shadow", "world", "train.py:3", ranks)
    append_join(tmp_path, good)
    row = {"rank": 0, "batches": 1, "shadowed": 0, "replayed": 0, "extra_s": 0}
    whole = {"on_exhausted": "x", "divide_by": "y", "call_site": "z", "ranks": [row]}
    damaged = [
        "{",
        "[]",
        "3",
        "null",
        '{"ranks": 1}',
        "[" * 100_000,
        json.dumps({**whole, "ranks": [{**row, "batches": "many"}]}),
        json.dumps({**whole, "ranks": [{**row, "rank": -1}]}),
        json.dumps({**whole, "ranks": [{**row, "shadowed": 1 << 80}]}),
        json.dumps({**whole, "ranks": [{**row, "extra_s": []}]}),
    ]
    with (tmp_path / FILE).open("a") as file:
        file.write("\n".join(damaged) + "\n")
    append_join(tmp_path, good)
    joins, problems = read_joins(tmp_path)
    assert joins == [good, good]
    assert len(problems) == len(damaged)
    assert "line 2 is damaged" in problems[0].text
    assert [total.batches for total in total_by_rank(joins)] == [14, 10]
    assert read_joins(tmp_path / "nowhere") == ([], [])

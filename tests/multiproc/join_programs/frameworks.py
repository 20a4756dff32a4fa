"""Train unevenly under Lightning and Accelerate, with the real packages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WORLD = 2


def samples(rank: int) -> torch.Tensor:
    """Return a rank's samples, 4 a batch: 3 batches on rank 0, 5 on rank 1."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4 * (3 + 2 * rank), 6, generator=generator, dtype=torch.float64)


def network() -> nn.Linear:
    """Return the same model everywhere."""
    torch.manual_seed(0)
    return nn.Linear(6, 2).double()


def alone(shares: list[list[torch.Tensor]], epochs: int = 1) -> list[float]:
    """Train in one process, on each rank's batches; return the weights."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in [*range(max(map(len, shares)))] * epochs:
        optimizer.zero_grad()
        for share in shares:
            if step < len(share):
                (model(share[step]).square().mean() / len(shares)).backward()
        optimizer.step()
    weights: list[float] = model.weight.flatten().tolist()
    return weights


def apart(weights: list[float], wanted: list[float]) -> float:
    """Return the largest difference."""
    return max(abs(weight - expected) for weight, expected in zip(weights, wanted, strict=True))


def _module(before_step: Callable[[int], None] = lambda step: None) -> Any:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, step: int) -> torch.Tensor:
            before_step(step)
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def with_lightning(rank: int, world_size: int, folder: str) -> dict[str, dict[str, Any]]:
    """Fit three times on the same ranks, because to import Lightning takes seconds.

    The first fit ends well, in a group that Lightning makes. The others fail on rank 1, in a
    training step and in the loader.
    """
    import warnings

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {"good": _fit(rank, folder)}
    dist.destroy_process_group()
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for where in ("step", "loader"):
        own = dist.PrefixStore(where, store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size)
        results[where] = _failing_fit(rank, folder, where)
        dist.destroy_process_group()
    return results


def _fit(rank: int, folder: str) -> dict[str, Any]:
    """Fit for two epochs."""
    from rankcall.integrations.lightning import JoinCallback

    uneven = JoinCallback()
    module = _module()
    trainer = _trainer(rank, folder, uneven)
    loader = DataLoader(TensorDataset(samples(rank)), batch_size=4)
    trainer.fit(module, uneven.loader(loader))
    shares = [list(samples(member).split(4)) for member in range(WORLD)]
    wanted = alone(shares, epochs=2)  # ranks run dry in each of them
    assert uneven.join is not None
    assert uneven.join.summary is not None
    rows = uneven.join.summary.ranks
    return {
        "apart": apart(module.model.weight.flatten().tolist(), wanted),
        "replayed": [row.replayed for row in rows],
        "batches": [row.batches for row in rows],
        "restored": "pre_backward" not in vars(trainer.strategy.precision_plugin),
    }


def _trainer(rank: int, folder: str, uneven: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        max_epochs=2,
        callbacks=[uneven],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=Path(folder) / str(rank),
    )


def _failing_fit(rank: int, folder: str, where: str) -> dict[str, Any]:
    """Fail on rank 1 in a training step or in its loader."""
    from rankcall.integrations.lightning import JoinCallback

    def before_step(step: int) -> None:
        if (rank, step, where) == (1, 2, "step"):
            raise KeyError("no such sample")

    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if (rank, index, where) == (1, 9, "loader"):
                raise KeyError("no such sample")
            return super().__getitem__(index)

    uneven = JoinCallback()
    trainer = _trainer(rank, folder, uneven)
    caught: Any = None
    try:
        trainer.fit(
            _module(before_step), uneven.loader(DataLoader(Broken(samples(rank)), batch_size=4))
        )
    except BaseException as error:
        caught = error
    return {
        "error": type(caught).__name__,
        "text": str(caught),
        "rank": getattr(caught, "rank", None),
        "restored": "pre_backward" not in vars(trainer.strategy.precision_plugin),
    }


def with_accelerate(rank: int, world_size: int) -> dict[str, Any]:
    """Train with prepared objects; 20 samples make 5 batches of 4, an odd number: uneven."""
    import warnings

    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    from rankcall.integrations.accelerate import join_uneven_inputs

    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    data = torch.cat([samples(0), samples(1)])[:20]
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(data), batch_size=4)
    )
    with join_uneven_inputs(accelerator, [model, optimizer]) as join:
        for (batch,) in join.batches(loader):
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
    weights = model.module.weight.flatten().tolist()
    batches = list(data.split(4))
    wanted = alone([batches[0::2], batches[1::2]])
    assert join.summary is not None
    results = {
        "apart": apart(weights, wanted),
        "batches": [row.batches for row in join.summary.ranks],
        "shadowed": [row.shadowed for row in join.summary.ranks],
        "even": loader.batch_sampler.even_batches,
        "sync": accelerator.gradient_state.sync_with_dataloader,
    }
    dist.barrier()
    return results

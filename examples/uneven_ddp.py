"""Train a DistributedDataParallel model on ranks that have different amounts of data.

Four ranks have 40, 30, 20 and 10 % of scikit-learn's digits. A rank that has run out answers the
collectives of the others (``on_exhausted="shadow"``) and steps its optimizer with them. At the end
every rank compares its model and its optimizer with those of one process that sums what the ranks
computed in each step. Record it, and see who waited for whom::

    rankcall run --nproc-per-node 4 examples/uneven_ddp.py
    rankcall report
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rankcall.join import Join

SHARES = (0.4, 0.3, 0.2, 0.1)  # of the data, by rank
BATCH = 16
EPOCHS = 3
TOLERANCE = 1e-6  # relative
Batch = tuple[Tensor, Tensor]


def digits() -> Batch:
    """Return the images (8 x 8, as rows of 64 numbers) and what they show."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images).flatten(1)[order] / 16.0, torch.tensor(data.target)[order]


def batches_of(rank: int) -> list[Batch]:
    """Return the batches of a rank's share."""
    images, labels = digits()
    begins = round(sum(SHARES[:rank]) * len(labels))
    ends = round(sum(SHARES[: rank + 1]) * len(labels))
    rows = slice(begins, ends)
    pairs = zip(torch.split(images[rows], BATCH), torch.split(labels[rows], BATCH), strict=True)
    return list(pairs)


def network() -> nn.Sequential:
    """Return the same small network on every rank, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()


def train_together(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train with DDP; each rank on its own share."""
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mine = batches_of(rank)
    with Join([model, optimizer]) as join:
        for _ in range(EPOCHS):
            for images, labels in join.batches(mine):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    if rank == 0:
        print(join.summary, flush=True)
    return model.module, optimizer


def train_alone(ranks: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train the same in one process: the active ranks' gradients, divided by the world."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    shares = [batches_of(rank) for rank in range(ranks)]
    for _ in range(EPOCHS):
        for step in range(max(map(len, shares))):
            optimizer.zero_grad()
            for share in shares:
                if step < len(share):
                    images, labels = share[step]
                    loss = nn.functional.cross_entropy(model(images), labels)
                    (loss / ranks).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model, optimizer


def numbers(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return every tensor of a model and its optimizer."""
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    parameters = [parameter.detach() for parameter in model.parameters()]
    return [*parameters, *(state[key] for state in states for key in sorted(state))]


def main() -> int:
    """Train, compare, and return 0 where both are the same and the model is good."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != len(SHARES):
        raise SystemExit(f"start it on {len(SHARES)} ranks: --nproc-per-node {len(SHARES)}")
    together, alone = train_together(rank), train_alone(ranks)
    dist.destroy_process_group()
    pairs = zip(numbers(*together), numbers(*alone), strict=True)
    apart = max(
        float((value - expected).abs().max() / expected.abs().max()) for value, expected in pairs
    )
    images, labels = digits()
    right = float((together[0](images).argmax(dim=1) == labels).double().mean())
    print(
        f"rank {rank}: {right:.1%} right; largest difference to training in one process, "
        f"optimizer state included: {apart:.1e}",
        flush=True,
    )
    return int(apart > TOLERANCE or right < 0.9)


if __name__ == "__main__":
    sys.exit(main())

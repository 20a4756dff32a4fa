"""Train a small network on scikit-learn's digits with DistributedDataParallel.

Plain PyTorch: nothing in here knows of rankcall, and ``rankcall run`` records it as it is::

    rankcall run --nproc-per-node 4 examples/train_digits.py --slow-rank 2 --slow-ms 20
    rankcall report

The data are 1,797 real 8x8 images of handwritten digits, shipped in scikit-learn's wheel.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

ACCURACY_WANTED = 0.95
BATCH = 32  # per rank


class SlowReads(Dataset[tuple[Tensor, ...]]):
    """A data set of which each batch takes so many seconds more to read, as from a busy disk."""

    def __init__(self, data: TensorDataset, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.data)

    def __getitems__(self, places: list[int]) -> list[tuple[Tensor, ...]]:
        """Return the images of a batch: the loader asks for them at once."""
        time.sleep(self.seconds)
        return [self.data[place] for place in places]


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return a training set of 1,437 images and a test set of 360, the same on every rank."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def network() -> nn.Module:
    """Return a small convolutional network for 8x8 images."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """Return the share of test images named correctly: each rank tests a part, all add up."""
    images, labels = (part[dist.get_rank() :: dist.get_world_size()] for part in test.tensors)
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).sum()
    counts = torch.stack([right, torch.tensor(len(labels))])
    dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader[tuple[Tensor, ...]]
) -> None:
    """Train on every batch once."""
    for images, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def main() -> int:
    """Train, test, and return 0 where the accuracy is what it should be."""
    parser = argparse.ArgumentParser(description="Train on digits with DDP.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--slow-rank", type=int, default=-1, help="this rank reads slowly")
    parser.add_argument("--slow-ms", type=float, default=20.0, help="each batch takes longer by it")
    parser.add_argument("--slow-from", type=int, default=1, help="from this epoch on")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the ranks share this machine's cores
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train, test = digits()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(train, seed=0)
    batches: DataLoader[tuple[Tensor, ...]] = DataLoader(train, batch_size=BATCH, sampler=sampler)
    slow = SlowReads(train, args.slow_ms / 1e3)
    slow_batches = DataLoader(slow, batch_size=BATCH, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    reached = 0.0
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        is_slow = rank == args.slow_rank and epoch >= args.slow_from
        train_epoch(model, optimizer, slow_batches if is_slow else batches)
        if epoch % 3 == 0 or epoch == args.epochs:
            reached = accuracy(model, test)
            if rank == 0:
                print(f"epoch {epoch:2}: test accuracy {reached:.1%}", flush=True)
    dist.destroy_process_group()
    if reached < ACCURACY_WANTED:
        print(f"rank {rank}: {reached:.1%} is below {ACCURACY_WANTED:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train an FSDP2 model on ranks that have different amounts of data, and check the result.

Four ranks have 40, 30, 20 and 10 % of scikit-learn's digits. A rank that has run out goes on with
its last batch at weight zero (``on_exhausted="replay"``), so that FSDP2's collectives match, until
all are done. At the end rank 0 trains the same model alone, summing what the ranks would compute
in each step, and compares::

    torchrun --nproc-per-node 4 examples/uneven_fsdp.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from rankcall.join import Join

SHARES = (0.4, 0.3, 0.2, 0.1)  # of the data, by rank
BATCH = 32
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


def train_together(rank: int, ranks: int) -> nn.Module:
    """Train with FSDP2; each rank on its own share."""
    model = network()
    mesh = init_device_mesh("cpu", (ranks,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = batches_of(rank)
    with Join([model], on_exhausted="replay", divide_by="active") as join:
        for _ in range(EPOCHS):
            for images, labels in join.batches(mine):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss * join.weight).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    if rank == 0:
        print(join.summary, flush=True)
    return model


def steps_alone(ranks: int) -> Iterator[list[Batch]]:
    """Yield, for each step of an epoch, the batches of the ranks that have one."""
    shares = [batches_of(rank) for rank in range(ranks)]
    for step in range(max(map(len, shares))):
        yield [share[step] for share in shares if step < len(share)]


def train_alone(ranks: int) -> nn.Module:
    """Train the same in one process: the active ranks' gradients, divided by their number."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(EPOCHS):
        for active in steps_alone(ranks):
            optimizer.zero_grad()
            for images, labels in active:
                loss = nn.functional.cross_entropy(model(images), labels)
                (loss / len(active)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def difference(whole: dict[str, Tensor], alone: nn.Module) -> float:
    """Return the largest difference of a parameter, relative to its largest value."""
    return max(
        float((whole[name] - wanted).abs().max() / wanted.abs().max())
        for name, wanted in alone.state_dict().items()
    )


def main() -> int:
    """Train, compare, and return 0 where both are the same and the model is good."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != len(SHARES):
        raise SystemExit(f"start it on {len(SHARES)} ranks: torchrun --nproc-per-node 4 ...")
    model = train_together(rank, ranks)
    whole = {name: part.full_tensor() for name, part in model.state_dict().items()}
    dist.destroy_process_group()
    if rank:
        return 0
    apart = difference(whole, train_alone(ranks))
    reference = network()
    reference.load_state_dict(whole)
    images, labels = digits()
    right = float((reference(images).argmax(dim=1) == labels).double().mean())
    print(f"{right:.1%} right; largest difference to training in one process: {apart:.1e}")
    return int(apart > TOLERANCE or right < 0.9)


if __name__ == "__main__":
    sys.exit(main())

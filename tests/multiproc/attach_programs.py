"""Training scripts as users have them: nothing in them knows of rankcall.

Each trains for a few steps with a data loader that has a process of its own, and prints a digest of
the weights. ``HANG``: rank 1 sleeps before the third step. ``STATUS``: the exit status.
"""

from __future__ import annotations

PLAIN = """
import hashlib, os, sys, time

LOADERS = 0 if os.environ.get("HANG") else 1  # those of a rank that is killed outlive it a moment
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

# Kept to the end: DDP holds the group, so its threads are not joined when it is destroyed. If one
# frees a tensor while the interpreter ends, torch ends the process by SIGABRT (issue 190489).
TOTAL = torch.zeros(1)

def train(rank=None, world_size=None, init_method=None):
    if init_method:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(7)
    weights = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4, num_workers=LOADERS)
    for step, (batch,) in enumerate(batches):
        if step == 2 and dist.get_rank() == 1 and os.environ.get("HANG"):
            time.sleep(600)
        optimizer.zero_grad()
        weights(batch * (dist.get_rank() + 1)).sum().backward()
        optimizer.step()
        dist.all_reduce(TOTAL)
    raw = b"".join(each.detach().numpy().tobytes() for each in weights.parameters())
    os.write(1, f"rank {dist.get_rank()} {hashlib.sha256(raw).hexdigest()}\\n".encode())
    dist.destroy_process_group()
    sys.exit(int(os.environ.get("STATUS", "0")))

if __name__ == "__main__":
    train()
"""

CHILDREN = """
import sys
import torch.multiprocessing as mp
from train import train

def child(rank, init_method):
    train(rank, 2, init_method)

if __name__ == "__main__":
    _, how, path = sys.argv
    mp.start_processes(child, (f"file://{path}",), nprocs=2, start_method=how)
"""

CRASHING = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def child(rank, path):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    for step in range(4):
        if rank == 1 and step == 2:
            raise ValueError("sample 17 has no label")
        dist.all_reduce(torch.ones(4))

if __name__ == "__main__":
    _, how, path = sys.argv
    mp.start_processes(child, (path,), nprocs=2, start_method=how)
"""

ELASTIC = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("once")
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""

REINIT = """
import os, tempfile
import torch
import torch.distributed as dist

for turn in range(2):
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}.{turn}",
                            rank=int(os.environ["RANK"]), world_size=2)
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()
"""

LATE = """import os, time
import torch.distributed as dist

if os.environ["RANK"] == "0":
    dist.init_process_group("gloo")
time.sleep(600)
"""

ACCELERATE = """
import hashlib, os, sys, time

LOADERS = 0 if os.environ.get("HANG") else 1  # those of a rank that is killed outlive it a moment
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(7)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=2, num_workers=LOADERS)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
for step, (batch,) in enumerate(batches):
    if step == 2 and accelerator.process_index == 1 and os.environ.get("HANG"):
        time.sleep(600)
    optimizer.zero_grad()
    accelerator.backward(model(batch).sum())
    optimizer.step()
raw = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
os.write(1, f"rank {accelerator.process_index} {hashlib.sha256(raw).hexdigest()}\\n".encode())
accelerator.end_training()  # destroys the process group
sys.exit(int(os.environ.get("STATUS", "0")))
"""

LIGHTNING = """
import hashlib, os, sys, time

LOADERS = 0 if os.environ.get("HANG") else 1  # those of a rank that is killed outlive it a moment
import torch
import lightning
from torch.utils.data import DataLoader, TensorDataset

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, index):
        if index == 2 and self.global_rank == 1 and os.environ.get("HANG"):
            time.sleep(600)  # the hang
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    torch.manual_seed(7)
    batches = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4, num_workers=LOADERS)
    trainer = lightning.Trainer(
        accelerator=os.environ.get("DEVICE", "cpu"), devices=2, strategy="ddp", max_steps=4,
        logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, batches)
    raw = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    os.write(1, f"rank {trainer.global_rank} {hashlib.sha256(raw).hexdigest()}\\n".encode())
    torch.distributed.destroy_process_group()
    sys.exit(int(os.environ.get("STATUS", "0")))
"""

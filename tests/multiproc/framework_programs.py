"""Training scripts for frameworks and schedulers. Nothing in them knows of rankcall.

``FAULT`` says what rank 1 does: ``hang`` sleeps before its third step, ``slow`` sleeps in each
step, ``crash`` raises an error in the third step. With ``even``, all ranks sleep in each step.
``STEPS`` is the number of steps, ``STATUS`` the exit status. With ``DEVICE=cuda``, Transformers and
DeepSpeed train on devices. At the end, each script prints a digest of each rank's weights.
"""

from __future__ import annotations

# A rank that is killed leaves its loaders for a moment, so a rank that hangs has none.
_HEAD = """
import hashlib, os, sys, time

FAULT = os.environ.get("FAULT", "")
ON_CPU = os.environ.get("DEVICE", "cpu") == "cpu"
BACKEND = "gloo" if ON_CPU else "nccl"
STEPS = int(os.environ.get("STEPS", "4"))
STATUS = int(os.environ.get("STATUS", "0"))
LOADERS = 0 if FAULT else 1

def digest(model):
    raw = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(raw).hexdigest()

def show(rank, model):
    import torch.distributed as dist

    os.write(1, f"rank {rank} {digest(model)}\\n".encode())
    dist.barrier()  # a launcher ends the others as soon as one fails

def work(step, rank):
    if rank == 1 and FAULT == "hang" and step == 2:
        time.sleep(600)  # the hang
    if FAULT == "even" or (rank == 1 and FAULT == "slow"):
        time.sleep(0.04)  # the delay
    if rank == 1 and FAULT == "crash" and step == 2:
        raise ValueError("sample 17 has no label")
"""

TRANSFORMERS = (
    _HEAD
    + """
import torch
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(8, 1)
        self.step = 0

    def forward(self, inputs):
        work(self.step, int(os.environ["RANK"]))
        self.step += 1
        return {"loss": self.layer(inputs).sum()}

if __name__ == "__main__":
    torch.manual_seed(7)
    samples = [{"inputs": each} for each in torch.randn(8 * STEPS, 8)]
    arguments = TrainingArguments(
        output_dir="out", use_cpu=ON_CPU, ddp_backend=BACKEND, max_steps=STEPS, disable_tqdm=True,
        per_device_train_batch_size=4, dataloader_num_workers=LOADERS, save_strategy="no",
        report_to=[], logging_strategy="no",
    )
    trainer = Trainer(Model(), arguments, train_dataset=samples)
    trainer.train()
    show(os.environ["RANK"], trainer.model)
    sys.exit(STATUS)
"""
)

DEEPSPEED = (
    _HEAD
    + """
import torch
import deepspeed

torch.manual_seed(7)
model = torch.nn.Linear(8, 1)
samples = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 8))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
}
deepspeed.init_distributed(BACKEND)
engine, _, _, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
loader = engine.deepspeed_io(samples, num_local_io_workers=LOADERS)
for step, (batch,) in enumerate(loader):
    work(step, engine.global_rank)
    engine.backward(engine(batch.to(engine.device)).sum())
    engine.step()
show(engine.global_rank, model)
sys.exit(STATUS)
"""
)

_RAY = """
import json

import ray
import ray.train
import torch

def start():
    ray.init(
        address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1", _temp_dir=os.environ["RAY_FOLDER"],
        runtime_env={
            "env_vars": {"FOLDER": os.getcwd(), **json.loads(os.environ.get("WORKERS", "{}"))}
        },
    )

def finish():
    for rank in range(2):
        with open(f"rank-{rank}") as file:
            os.write(1, f"rank {rank} {file.read()}\\n".encode())
    sys.exit(STATUS)

def keep(rank, model):
    with open(f"{os.environ['FOLDER']}/rank-{rank}", "w") as file:
        file.write(digest(model))
"""

RAY_TRAIN = (
    _HEAD
    + _RAY
    + """
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset

def train():
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(7)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(8 * STEPS, 8))
    batches = prepare_data_loader(DataLoader(samples, batch_size=4, num_workers=LOADERS))
    for step, (batch,) in enumerate(batches):
        work(step, rank)
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
    keep(rank, model)

if __name__ == "__main__":
    start()
    TorchTrainer(
        train, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.getcwd() + "/results"),
    ).fit()
    finish()
"""
)

# With rankcall's callback if CALLBACK is set. Each rank writes what the callback logs, and the
# phase that is declared while it saves a checkpoint. Training goes on until the callback has logged
# a figure, and with slow steps a verdict; rank 0 tells rank 1: each report waits for both.
RAY_CALLBACK = (
    _HEAD
    + _RAY
    + """
import logging, pathlib, tempfile

import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

CALLBACK = os.environ.get("CALLBACK", "")
callbacks = []
if CALLBACK:
    from rankcall.integrations.ray_train import RankcallCallback

    callbacks = [RankcallCallback(every_s=0.0)]

def declared():
    from rankcall.capture import session
    from rankcall.ring.layout import read_header

    header = read_header(session.current().path)
    return header.expect_what if header.expect_until_ns > time.monotonic_ns() else "nothing"

def train():
    rank, folder = ray.train.get_context().get_world_rank(), pathlib.Path(os.environ["FOLDER"])
    log = folder / f"log-{rank}"
    log.touch()
    logger = logging.getLogger("ray.train.rankcall")
    logger.addHandler(logging.FileHandler(log))
    torch.manual_seed(7)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(number):
        work(number, rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()

    for number in range(STEPS):
        step(number)
    keep(rank, model)

    def save(checkpoint, name):
        with open(folder / f"phases-{rank}", "a") as file:
            file.write(declared() + "\\n")
        storage = ray.train.get_context().get_storage().experiment_fs_path
        os.makedirs(f"{storage}/{name}", exist_ok=True)
        return Checkpoint(f"{storage}/{name}")

    wanted = "straggler: Rank 1" if FAULT == "slow" else "rankcall/waiting_share="
    is_over, number = torch.zeros(1), STEPS
    while CALLBACK and not is_over.item():
        with tempfile.TemporaryDirectory() as saved:
            ray.train.report(
                {"step": number}, checkpoint=Checkpoint(saved), checkpoint_upload_fn=save
            )
        with open(folder / f"phases-{rank}", "a") as file:
            file.write("after: " + declared() + "\\n")
        is_over[0] = wanted in (folder / "log-0").read_text()
        dist.broadcast(is_over, 0)
        step(number)
        number += 1

if __name__ == "__main__":
    start()
    TorchTrainer(
        train, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=os.getcwd() + "/results", callbacks=callbacks),
    ).fit()
    finish()
"""
)

# Rank 1 hangs in the first attempt of each of two runs. Ray may start only the second one again.
RAY_HANGS = (
    _HEAD
    + _RAY
    + """
import pathlib

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from rankcall.integrations.ray_train import HangError, RaiseOnHang

def train(config):
    rank = ray.train.get_context().get_world_rank()
    marks = pathlib.Path(os.environ["FOLDER"])
    first = not (marks / f"{config['name']}-{rank}").exists()
    (marks / f"{config['name']}-{rank}").touch()
    model = prepare_model(torch.nn.Linear(8, 1))
    for step in range(STEPS):
        if first:
            work(step, rank)
        model(torch.randn(4, 8)).sum().backward()
    keep(rank, model)

def fit(name, max_failures):
    return TorchTrainer(
        train, train_loop_config={"name": name}, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name, storage_path=os.getcwd() + "/results", callbacks=[RaiseOnHang()],
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    ).fit()

if __name__ == "__main__":
    start()
    try:
        fit("once", 0)
    except HangError as error:
        told = error.kind, error.ranks, error.summary, list(error.worker_failures)
        os.write(1, f"hang {told}\\n".encode())
    fit("twice", 1)
    finish()
"""
)

RAY_ACTORS = (
    _HEAD
    + _RAY
    + """
@ray.remote
class Worker:
    def train(self, rank):
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['FOLDER']}/meet", rank=rank, world_size=2
        )
        torch.manual_seed(7)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            work(step, rank)
            optimizer.zero_grad()
            model(torch.randn(4, 8) * (rank + 1)).sum().backward()
            optimizer.step()
        keep(rank, model)

if __name__ == "__main__":
    start()
    workers = [Worker.remote() for _ in range(2)]
    ray.get([worker.train.remote(rank) for rank, worker in enumerate(workers)])
    finish()
"""
)

# Open MPI and Slurm number the ranks in variables of their own.
SCHEDULED = (
    _HEAD
    + """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["SLURM_PROCID"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = TensorDataset(torch.randn(4 * STEPS, 8))
    for step, (batch,) in enumerate(DataLoader(samples, batch_size=4, num_workers=LOADERS)):
        work(step, rank)
        optimizer.zero_grad()
        model(batch * (rank + 1)).sum().backward()
        optimizer.step()
    show(rank, model)
    dist.destroy_process_group()
    sys.exit(STATUS)
"""
)

# A cell, as PyTorch's notebook guides have it: the kernel forks the ranks.
NOTEBOOK = (
    _HEAD.lstrip()
    + """
import torch.multiprocessing as mp

def train(rank, meet):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.manual_seed(7)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        work(step, rank)
        optimizer.zero_grad()
        model(torch.randn(4, 8) * (rank + 1)).sum().backward()
        optimizer.step()
    show(rank, model)
    dist.destroy_process_group()

mp.start_processes(train, (os.path.abspath("meet"),), nprocs=2, start_method="fork")
"""
)

# Executes cell.py in a kernel, as Jupyter does, and prints what the cell prints.
KERNEL = """
import sys
from jupyter_client.manager import KernelManager

def show(message):
    if message["msg_type"] == "stream":
        sys.stdout.write(message["content"]["text"])
    elif message["msg_type"] == "error":
        sys.stdout.write("\\n".join(message["content"]["traceback"]) + "\\n")

manager = KernelManager(transport="ipc", ip=sys.argv[1])  # sockets in a folder, no ports
manager.start_kernel()
client = manager.blocking_client()
client.start_channels()
client.wait_for_ready(timeout=200)
with open("cell.py") as file:
    reply = client.execute_interactive(file.read(), timeout=400, output_hook=show)
print("the cell:", reply["content"]["status"], reply["content"].get("ename", ""), flush=True)
client.stop_channels()
manager.shutdown_kernel()
"""

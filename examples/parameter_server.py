"""A parameter server whose trainers join and leave while it runs, and one of them is killed.

The server and the trainers form a dynamic group. Each trainer fetches the parameters, computes a
gradient on its own data and pushes it. One leaves early, one is killed in the middle of its work,
and one joins late; the server works with the trainers that are there, until the model fits.
On TENSORPIPE no trainer is killed: a dynamic group is torch's own there, and would not survive it.

    python examples/parameter_server.py [--backend ZMQ|TENSORPIPE]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import threading

import torch
import torch.distributed as dist

from rankcall import rpc

TRUE_WEIGHTS = torch.tensor([2.0, -1.0, 0.5, 3.0])
STEPS = 120


class Server:
    """The parameters, on worker `server`; gradients come from several threads."""

    def __init__(self) -> None:
        self.weights = torch.zeros(4)
        self.pushes: dict[str, int] = {}
        self.lock = threading.Lock()

    def push(self, trainer: str, gradient: torch.Tensor) -> torch.Tensor:
        """Apply a gradient and return the new parameters."""
        with self.lock:
            self.weights = self.weights - 0.05 * gradient
            self.pushes[trainer] = self.pushes.get(trainer, 0) + 1
            return self.weights


server = Server()


def push(trainer: str, gradient: torch.Tensor) -> torch.Tensor:
    """Run on the server."""
    return server.push(trainer, gradient)


def join(name: str, rank: int, backend: str, store: str) -> None:
    """Become a member of the group."""
    options = rpc.construct_rpc_backend_options(
        rpc.BackendType[backend], rpc_timeout=30, init_method=f"tcp://{store}"
    )
    rpc.init_rpc(name, backend, rank, None, options)


def train(rank: int, backend: str, store: str, steps: int, killed_at: int) -> None:
    """Be one trainer."""
    torch.manual_seed(rank)
    name = f"trainer{rank}"
    join(name, rank, backend, store)
    weights = torch.zeros(4)
    for step in range(steps):
        if step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)  # as a machine that loses power
        inputs = torch.randn(32, 4)
        error = inputs @ weights - inputs @ TRUE_WEIGHTS
        weights = rpc.rpc_sync("server", push, args=(name, 2 * inputs.T @ error / 32))
    rpc.shutdown()


def main() -> None:
    """Start the server here and the trainers beside it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="ZMQ", choices=["ZMQ", "TENSORPIPE"])
    backend = parser.parse_args().backend
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = f"127.0.0.1:{host.port}"
    context = multiprocessing.get_context("spawn")
    # For how many steps each stays, and the step at which it is killed. 3 joins late.
    killed_at = STEPS // 4 if backend == "ZMQ" else -1
    plans = {1: (STEPS // 4, -1), 2: (STEPS, killed_at), 3: (STEPS, -1)}
    trainers = {
        rank: context.Process(target=train, args=(rank, backend, store, *plan))
        for rank, plan in plans.items()
    }
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store above is everybody's
    join("server", 0, backend, store)
    trainers[1].start()
    trainers[2].start()
    trainers[1].join()
    trainers[2].join()
    trainers[3].start()
    trainers[3].join()
    left = float((server.weights - TRUE_WEIGHTS).norm())
    print(f"{backend}: pushes {server.pushes}, distance to the true weights {left:.4f}")
    assert trainers[2].exitcode == (-signal.SIGKILL if killed_at > 0 else 0)
    assert trainers[1].exitcode == trainers[3].exitcode == 0
    assert server.pushes["trainer3"] == STEPS
    assert left < 0.05
    rpc.shutdown()


if __name__ == "__main__":
    main()

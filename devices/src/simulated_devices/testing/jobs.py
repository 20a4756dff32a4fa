"""Start jobs of several ranks on simulated devices, and wait for them with a deadline.

A program is a text that every rank executes, behind ``PRELUDE``.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._environment import environment

ZYGOTE = Path(__file__).parent / "zygote.py"
# Importing torch takes some seconds of a core, and minutes on a machine with thirty busy processes.
_READY_DEADLINE_S = 300.0

# What every rank begins with.
PRELUDE = """
import datetime, json, os, signal, sys, threading, time
import torch
import torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def init(backend="nccl", timeout=200, **options):
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        backend, init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=timeout), **options)
def say(*words):
    os.write(1, (" ".join(str(word) for word in words) + "\\n").encode())
def same(got, want):
    want = torch.as_tensor(want, dtype=got.dtype)
    assert torch.equal(got.cpu(), want), f"got {got.cpu().tolist()}, want {want.tolist()}"
def cuda(values, **options):
    return torch.tensor(values, **options).cuda()
def wait_until(condition, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
"""


@dataclass
class Rank:
    """One process of a job."""

    output_path: Path
    pid: int = 0
    status: int | None = None

    @property
    def output(self) -> str:
        """All that it has written to stdout and stderr until now."""
        return self.output_path.read_text(errors="replace") if self.output_path.exists() else ""


class Zygote:
    """The process that forks the ranks; see zygote.py. ``options`` are those of ``environment``.

    It returns once torch is imported there, so that this is no part of any job's time.

    Raises:
        DevicesError: The installed torch cannot run on simulated devices.
    """

    def __init__(self, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ZYGOTE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(**options)
            | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"},
        )
        self._ids = itertools.count()
        self._ranks: dict[int, Rank] = {}
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(_READY_DEADLINE_S) or self._process.poll() is not None:
            self._process.kill()
            self.close()
            raise AssertionError("the process that forks the ranks has not imported torch: see its output")

    def start(self, code: str, variables: dict[str, str], output: Path, timeout: float) -> Rank:
        """Fork a rank, which ends after ``timeout`` seconds at the latest."""
        rank = Rank(output)
        identity = next(self._ids)
        self._ranks[identity] = rank
        request = {
            "id": identity,
            "code": code,
            "environment": variables,
            "output": str(output),
            "timeout": timeout,
        }
        assert self._process.stdin
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        self._process.stdin.flush()
        return rank

    def wait(self, ranks: list[Rank], deadline: float) -> bool:
        """Wait until the ranks have ended; return False if they have not at the deadline."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(rank.status is not None for rank in ranks),
                max(0, deadline - time.monotonic()),
            )

    def close(self) -> None:
        """End the process and the thread that reads its answers."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait(200)
        self._reader.join(200)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            answer = json.loads(line)
            if "id" not in answer:
                self._ready.set()
                continue
            with self._changed:
                rank = self._ranks[answer["id"]]
                rank.pid = answer.get("pid", rank.pid)
                rank.status = answer.get("status", rank.status)
                self._changed.notify_all()
        self._ready.set()  # it has ended, before it was ready or after


@dataclass
class Job:
    """Ranks that run one program together."""

    zygote: Zygote
    folder: Path
    deadline: float
    ranks: list[Rank] = field(default_factory=list)

    def wait(self) -> list[Rank]:
        """Wait for all ranks; end those that are late, and fail the test."""
        in_time = self.zygote.wait(self.ranks, self.deadline)
        if not in_time:
            self.kill()
            raise AssertionError("the job did not end in time:\n" + self.report())
        return self.ranks

    def succeed(self) -> list[Rank]:
        """Wait for all ranks, and fail the test unless each ends with status 0."""
        self.wait()
        assert [rank.status for rank in self.ranks] == [0] * len(self.ranks), self.report()
        return self.ranks

    def wait_for(self, text: str, rank: int) -> None:
        """Wait until a rank has written a text."""
        while text not in self.ranks[rank].output:
            assert time.monotonic() < self.deadline, f"rank {rank} never wrote {text!r}:\n" + self.report()
            assert self.ranks[rank].status is None, f"rank {rank} ended without writing {text!r}:\n" + self.report()
            time.sleep(0.01)

    def kill(self, *which: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to some ranks, by default to all."""
        for index in which or range(len(self.ranks)):
            rank = self.ranks[index]
            if rank.status is None and rank.pid:
                os.kill(rank.pid, number)

    def report(self) -> str:
        """Return the status and the output of each rank."""
        return "\n".join(
            f"--- rank {index}, status {rank.status}\n{rank.output}" for index, rank in enumerate(self.ranks)
        )


class Jobs:
    """Starts the jobs of one test. At its end, none of their processes and shared files is left.

    Args:
        zygote: Forks the ranks.
        folder: Gets a folder for each job, named ``JOB`` in its ranks' environment.
        prelude: What every rank executes between ``PRELUDE`` and its program.
    """

    def __init__(self, zygote: Zygote, folder: Path, prelude: str = "") -> None:
        self._zygote, self._folder, self._prelude = zygote, folder, prelude
        self._started: list[Job] = []

    def __enter__(self) -> Jobs:
        # A folder of its own: jobs of other tests run on the machine at the same time.
        self._shm = Path(tempfile.mkdtemp(prefix="simulated-devices-", dir="/dev/shm"))
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._started:
            job.kill()
            assert self._zygote.wait(job.ranks, time.monotonic() + 10), "a rank could not be killed"
        left = os.listdir(self._shm)
        shutil.rmtree(self._shm)
        assert not left, f"shared files were left: {left}"

    def start(self, size: int, code: str, *, timeout: float = 240, **variables: str) -> Job:
        """Start a program on ``size`` ranks; ``variables`` are added to its environment."""
        folder = self._folder / f"job-{len(self._started)}"
        folder.mkdir()
        job = Job(self._zygote, folder, time.monotonic() + timeout)
        self._started.append(job)
        common = {
            "WORLD_SIZE": str(size),
            "RENDEZVOUS": str(folder / "store"),
            "JOB": str(folder),
            "SIMULATED_DEVICES_SHM": str(self._shm),
            **variables,
        }
        program = PRELUDE + self._prelude + textwrap.dedent(code)
        for rank in range(size):
            own = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            # The stacks are dumped before the job is killed.
            job.ranks.append(self._zygote.start(program, own, folder / f"rank-{rank}", timeout - 3))
        return job

    def run(self, size: int, code: str, *, timeout: float = 240, **variables: str) -> list[Rank]:
        """Run a program on ``size`` ranks, each of which must end with status 0."""
        return self.start(size, code, timeout=timeout, **variables).succeed()

"""A campaign of random faults against one job that carries on: ``recovery.py --campaign``.

Each node is a network namespace with a launcher of its own, ``rankcall run --on-hang recover``, and
one rank; torchrun's rendezvous joins them. Faults strike at random, from a seed that is printed:

========  ==========================================================================
kill      SIGKILL to a rank
stop      SIGSTOP to a rank
hang      a rank sleeps between two calls
raise     a rank raises an exception, once
two       SIGKILL to two ranks on two nodes
again     SIGKILL to a rank, and to one of the next attempt as soon as it starts
========  ==========================================================================

What must hold, each breach being a violation: after each fault, the job takes a step that it had
not taken before; no process of an attempt lives when one of the next begins; all launchers end
with 0, and the weights are those of a job without faults; no process and no ring is left.

The host of the store is not killed, nor are launchers: torchrun's agents do not survive either.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
MARK = "RANKCALL_CAMPAIGN"
KINDS = ("kill", "stop", "hang", "raise", "two", "again")
START_S, RECOVER_S, END_S = 300.0, 300.0, 300.0  # deadlines: a busy machine starts slowly
PORT = 29411  # each campaign has its own network
JOB = """
import fcntl, glob, json, os, sys, time
import torch
import torch.distributed as dist
import rankcall

folder, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def path(name):
    return os.path.join(folder, name)

def write(name, content):
    with open(path(f"new.{name}"), "w") as file:
        json.dump(content, file)
    os.replace(path(f"new.{name}"), path(name))

# A process holds the lock of its attempt as long as it lives.
own = os.open(path(f"alive.{attempt}"), os.O_RDWR | os.O_CREAT)
fcntl.flock(own, fcntl.LOCK_SH)
for name in glob.glob(path("alive.*")):
    if name != path(f"alive.{attempt}"):
        other = os.open(name, os.O_RDWR)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            write(f"breach.{attempt}.{rank}", f"{os.path.basename(name)} beside {attempt}")
        os.close(other)
write(f"pid.{rank}", [os.getpid(), attempt])

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
step, last = 0, None
if os.path.exists(path("checkpoint")):
    saved = torch.load(path("checkpoint"))
    step, last = saved["step"], saved["last"]
    model.load_state_dict(saved["model"])
while step != last:
    try:
        os.unlink(path(f"fault.hang.{rank}"))
        time.sleep(10000)
    except FileNotFoundError:
        pass
    try:
        os.unlink(path(f"fault.raise.{rank}"))
        raise ValueError(f"planted at step {step}")
    except FileNotFoundError:
        pass
    model(torch.full((4,), float(step % 7 + rank))).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    finish = torch.tensor([int(os.path.exists(path("finish")))])
    dist.all_reduce(finish)
    if finish and last is None:
        last = step + 3
    if rank == 0:
        state = {"step": step, "last": last, "model": model.state_dict()}
        torch.save(state, path("new.checkpoint"))
        os.replace(path("new.checkpoint"), path("checkpoint"))
        rankcall.checkpointed(step)
        write("progress", [step, attempt])
    time.sleep(0.05)
dist.destroy_process_group()
"""


def _ran(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@contextlib.contextmanager
def network(nodes: int) -> Iterator[list[str]]:
    """Make a namespace for each node, on one bridge; yield their names."""
    mark = uuid.uuid4().hex[:5]
    hub, names = f"rc{mark}h", [f"rc{mark}{number}" for number in range(nodes)]
    try:
        _ran("ip", "netns", "add", hub)
        _ran("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _ran("ip", "-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            _ran("ip", "netns", "add", name)
            cable = ("ip", "-n", name, "link", "add", "cable", "type", "veth")
            _ran(*cable, "peer", "name", f"to{number}", "netns", hub)
            _ran("ip", "-n", hub, "link", "set", f"to{number}", "master", "bridge", "up")
            _ran("ip", "-n", name, "addr", "add", f"10.79.0.{number + 1}/24", "dev", "cable")
            for link in ("cable", "lo"):
                _ran("ip", "-n", name, "link", "set", link, "up")
        yield names
    finally:
        for name in [*names, hub]:
            subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


class Campaign:
    """One job, and the faults against it."""

    def __init__(self, names: list[str], folder: Path, memory: Path, hang_after: float) -> None:
        self._names, self._folder, self._memory = names, folder, memory
        self._hang_after = hang_after
        self._mark = uuid.uuid4().hex
        (folder / "job.py").write_text(JOB)
        self.violations: list[str] = []
        self.faults: Counter[str] = Counter()
        self.seconds: list[float] = []
        self._launchers = [self._launch(number) for number in range(len(names))]

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        memory = self._memory / f"node-{number}"
        memory.mkdir(parents=True)
        command = ["ip", "netns", "exec", self._names[number], str(BIN / "rankcall"), "run"]
        command += ["--capture", "python", "--on-hang", "recover", "--max-recoveries", "100000"]
        command += ["--hang-after", f"{self._hang_after:g}", "--run-dir", f"run-{number}"]
        command += ["--nnodes", str(len(self._names)), "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.79.0.1:{PORT}"]
        command += ["--rdzv-id", "campaign", "--rdzv-conf", f"is_host={int(number == 0)}"]
        command += ["--local-addr", f"10.79.0.{number + 1}", "job.py", str(self._folder)]
        env = {**os.environ, "RANKCALL_HOST": f"node-{number}", "RANKCALL_SHM": str(memory)}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", MARK: self._mark}
        env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "5"
        with (self._folder / f"output-{number}").open("wb") as output:
            return subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=output, stderr=output
            )

    def read(self, name: str) -> Any:
        """Return what the job has written; None if it has not."""
        try:
            return json.loads((self._folder / name).read_text())
        except FileNotFoundError:
            return None

    def progressed(self, beyond: int, later_than: int, seconds: float) -> bool:
        """Wait until an attempt after one has come beyond a step; return whether it has."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            step, attempt = self.read("progress") or (0, -1)
            if step > beyond and attempt > later_than:
                return True
            if any(launcher.poll() is not None for launcher in self._launchers):
                return False
            time.sleep(0.1)
        return False

    def strike(self, kind: str, chosen: random.Random) -> None:
        """Strike with one fault, and wait until the job has got over it."""
        step, attempt = self.read("progress")
        ranks = chosen.sample(range(len(self._names)), 2)
        began = time.monotonic()
        self.faults[kind] += 1
        if kind in ("hang", "raise"):
            (self._folder / f"fault.{kind}.{ranks[0]}").touch()
        else:
            number = signal.SIGSTOP if kind == "stop" else signal.SIGKILL
            for rank in ranks[: 2 if kind == "two" else 1]:
                self._signal(rank, number, attempt)
        if kind == "again":
            self._strike_next(ranks[1], attempt)
        if self.progressed(step, attempt, RECOVER_S):
            self.seconds.append(time.monotonic() - began)
        else:
            self.violations.append(f"no new step after {kind} on ranks {ranks} at step {step}")

    def _signal(self, rank: int, number: signal.Signals, attempt: int) -> None:
        pid, its_attempt = self.read(f"pid.{rank}")
        if its_attempt >= attempt:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _strike_next(self, rank: int, attempt: int) -> None:
        deadline = time.monotonic() + RECOVER_S
        while time.monotonic() < deadline:
            if self.read(f"pid.{rank}")[1] > attempt:
                self.faults["again"] += 1
                self._signal(rank, signal.SIGKILL, attempt + 1)
                return
            time.sleep(0.02)

    def finish(self) -> None:
        """Let the job come to its end, and check what must hold then."""
        (self._folder / "finish").touch()
        deadline = time.monotonic() + END_S
        for number, launcher in enumerate(self._launchers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline - time.monotonic()))
            if launcher.poll() != 0:
                self.violations.append(f"the launcher of node {number} ended: {launcher.poll()}")
        left = self._end_all()
        if left:
            self.violations.append(f"{left} processes were left")
        rings = [str(ring) for ring in self._memory.rglob("*.ring")]
        if rings:
            self.violations.append(f"rings were left: {rings}")
        self.violations += [
            f"two attempts: {file.read_text()}" for file in self._folder.glob("breach.*")
        ]
        if not self._has_right_weights():
            self.violations.append("the weights are not those of a job without faults")

    def _end_all(self) -> int:
        """End what is left of the job; return how many processes that were."""
        left = 0
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self._mark}".encode() in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
                    left += 1
        for launcher in self._launchers:
            launcher.wait()
        return left

    def _has_right_weights(self) -> bool:
        """Take the same steps without a fault. All values are exact in binary."""
        import torch

        saved = torch.load(self._folder / "checkpoint")
        weight, bias, world = torch.zeros(4, 4), torch.zeros(4), len(self._names)
        for step in range(saved["step"]):
            weight -= 0.125 * sum(step % 7 + rank for rank in range(world))
            bias -= 0.125 * world
        model = saved["model"]
        is_over = saved["step"] == saved["last"]
        return is_over and torch.equal(model["weight"], weight) and torch.equal(model["bias"], bias)


def run(nodes: int, seconds: float, seed: int, hang_after: float) -> dict[str, Any]:
    """Run a campaign; return its figures."""
    chosen = random.Random(seed)
    print(f"seed {seed}", flush=True)
    with (
        network(nodes) as names,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        campaign = Campaign(names, Path(folder), Path(memory), hang_after)
        if campaign.progressed(0, -1, START_S):
            until = time.monotonic() + seconds
            while time.monotonic() < until and not campaign.violations:
                kind = chosen.choice(KINDS)
                campaign.strike(kind, chosen)
                print(f"{kind}: {'no recovery' if campaign.violations else 'over'}", flush=True)
                time.sleep(chosen.random())
        else:
            campaign.violations.append("the job did not start")
        campaign.finish()
        if campaign.violations:
            for output in sorted(Path(folder).glob("output-*")):
                print(f"{output.name}:\n{output.read_text(errors='replace')[-4000:]}")
    return {
        "faults": campaign.faults.total(),
        "violations": len(campaign.violations),
        "what": campaign.violations,
        "kinds": dict(campaign.faults),
        "nodes": nodes,
        "recovery_s": round(statistics.median(campaign.seconds), 1) if campaign.seconds else None,
        "seed": seed,
    }

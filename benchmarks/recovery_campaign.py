"""Campaigns of random faults against jobs that carry on: ``recovery.py --campaign``.

Each node is a network namespace with a launcher of its own, ``rankcall run --on-hang recover``, a
small file system of its own, and one rank; torchrun's rendezvous joins them. Workers are forked
from their launcher, in which torch is imported already (torchrun's ``--start-method fork`` with
``--run-path``): the start of Python and torch is no part of what is tried here, and would be most
of the time. Several jobs run at once, each with three to six nodes.

Faults strike at random. Each one has a seed, which is printed:

==========  ========================================================================
kill        SIGKILL to a rank
stop        SIGSTOP to a rank
hang        a rank sleeps between two calls
raise       a rank raises an exception, once
two         SIGKILL to two ranks on two nodes
again       SIGKILL to a rank, and to one of the next attempt as soon as it starts
stop_again  SIGKILL to a rank, and SIGSTOP to one of the next attempt as soon as it starts
launcher    SIGKILL to a launcher that does not host the store
store_host  SIGKILL to all processes of the node that hosts the store
cut         the network of a node is down for longer than a call may take
disk_full   the file system of a node is full while one of its ranks is killed
loop        a rank raises an exception at the same step in each attempt
forged      a process writes to the job's store that a rank is missing
bad_node    SIGKILL to the rank of a node, which is barred for it
==========  ========================================================================

``bad_node`` strikes jobs with one node less than launchers (``--nnodes MIN:MAX --bar-after 1``):
one launcher waits as a spare. Some jobs are of this kind, and no other fault strikes those.

With ``CAMPAIGN_KEEP``, the folder of that name gets what the launchers of a job with a violation
printed, its runs and rings, and, with py-spy, the stacks of its ranks.

The campaign does what a scheduler does: it starts a launcher again that has ended, and all of them
once the host of the store is gone. What must hold, each breach being a violation:

* After each fault, the job takes a step that it had not taken before.
* A verdict that no watcher has reached ends no attempt.
* No process of an attempt lives when one of the next begins.
* A launcher ends by itself only if its network or its store's host is gone, or with the others if
  the policy ends the job. The policy ends it only in a crash loop, and then names the right rank.
* A node that is barred leaves with 69, and is refused until ``rankcall unbar``. The job goes on
  with the spare in its place, and never with less nodes than MIN.
* At the end, all launchers of the last attempt end with 0, the weights are those of a job without
  faults, and no process and no ring is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rankcall.ring.layout import read_header
from rankcall.ring.lock import try_lock

BIN = Path(sys.executable).parent
MARK = "RANKCALL_CAMPAIGN"
# Deadlines: a busy machine starts slowly.
START_S, RECOVER_S, END_S = 300.0, 240.0, 300.0
START_AGAIN_S = 1.0  # after which a scheduler starts a launcher again
PORT = 29411  # each job has its own network
# Of a node: room for what a hundred attempts leave. Rings that find none stay where they are.
DISK_BYTES = 512 << 20
REPEATS, BARRED = 65, 69  # exit statuses of launchers
_WITH_SPARE = 0.2  # the share of jobs in which nodes are barred: other faults are over sooner
GENERATION = 100_000  # rendezvous of a job's store: more than any has
FORGED = "forged_op"  # of the verdicts that a job's ``forge`` writes
JOB = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its launcher's handlers
import _rankcall_hook
_rankcall_hook.install()
import fcntl, glob, json, struct, time
import torch
import torch.distributed.distributed_c10d as dist  # torch.distributed was imported before the hook
import rankcall

folder, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["CAMPAIGN_GENERATION"]) + int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def path(name):
    return os.path.join(folder, name)

def write(name, content):
    new = path(f"new.{name}.{os.getpid()}")
    with open(new, "w") as file:
        json.dump(content, file)
    os.replace(new, path(name))

def planted(kind):
    try:
        os.unlink(path(f"fault.{kind}.{rank}"))
    except FileNotFoundError:
        return False
    return True

# Writes a verdict, as any process can that reaches the job's store.
def forge(named):
    from rankcall.analysis.verdicts.encoding import encode
    from rankcall.analysis.verdicts.finding import Finding
    from rankcall.analysis.verdicts.verdict import Origin, Verdict
    from rankcall.packed_json import pack
    from dataclasses import replace

    prefix = f"rankcall/watch/{os.environ['TORCHELASTIC_RESTART_COUNT']}/"
    store = torch.distributed.PrefixStore(prefix[:-1], dist._get_default_store())
    number = 1 + (int(store.get("latest")) if store.check(["latest"]) else 0)
    victims = tuple(other for other in range(dist.get_world_size()) if other != named)
    finding = Finding("missing", (named,), victims=victims, op="forged_op")
    finding = replace(finding, confidence="certain", stops=True)
    verdict = Verdict("run", [finding], origin=Origin("x", "forger", 1, time.time_ns(), 1))
    store.set(f"{number}/verdict", pack(encode(verdict)))
    store.set(f"{number}/posts", "1")
    store.add("bell", 1)

# A process holds the lock of its attempt as long as it lives. The others ask who holds it, and do
# not try to take it: two that try at once would meet each other.
own = os.open(path(f"alive.{attempt}"), os.O_RDWR | os.O_CREAT)
fcntl.lockf(own, fcntl.LOCK_SH)
for name in glob.glob(path("alive.*")):
    if name != path(f"alive.{attempt}"):
        other = os.open(name, os.O_RDWR)
        asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, holder = struct.unpack("hhqqi4x", fcntl.fcntl(other, fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            write(f"breach.{attempt}.{rank}", f"{holder} of {os.path.basename(name)} at {attempt}")
        os.close(other)
write(f"pid.{rank}", [os.getpid(), attempt])
write(f"member.{os.environ['RANKCALL_HOST']}", [os.getpid(), attempt])

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
torch.nn.init.zeros_(model.weight), torch.nn.init.zeros_(model.bias)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
step, last, worlds = 0, None, []  # worlds: the number of ranks that took each step
if os.path.exists(path("checkpoint")):
    saved = torch.load(path("checkpoint"))
    step, last, worlds = saved["step"], saved["last"], saved["worlds"]
    model.load_state_dict(saved["model"])
while step != last:
    if planted("hang"):
        time.sleep(10000)
    if planted("forge"):
        forge((rank + 1) % dist.get_world_size())
    if planted("raise"):
        raise ValueError(f"planted at step {step}")
    if os.path.exists(path(f"fault.loop.{rank}")):
        raise ValueError("planted in each attempt")
    model(torch.full((4,), float(step % 7 + rank))).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    worlds.append(dist.get_world_size())
    finish = torch.tensor([int(os.path.exists(path("finish")))])
    dist.all_reduce(finish)
    if finish and last is None:
        last = step + 3
    if rank == 0:
        state = {"step": step, "last": last, "worlds": worlds, "model": model.state_dict()}
        torch.save(state, path("new.checkpoint"))
        os.replace(path("new.checkpoint"), path("checkpoint"))
        rankcall.checkpointed(step)
        write("progress", [step, attempt, dist.get_world_size()])
    time.sleep(0.05)
dist.destroy_process_group()
"""


def _ran(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


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


@contextlib.contextmanager
def disks(folder: Path, nodes: int) -> Iterator[list[Path]]:
    """Make a small file system for each node; yield where they are mounted."""
    places = [folder / f"disk-{number}" for number in range(nodes)]
    try:
        for place in places:
            place.mkdir()
            _ran("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place))
        yield places
    finally:
        for place in places:
            subprocess.run(("umount", "-l", str(place)), capture_output=True, check=False)


class Violated(Exception):
    """What must hold did not; says what."""


class Job:
    """One job, and its scheduler."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        places: Sequence[Path],
        hang_after: float,
        *,
        has_spare: bool,
    ) -> None:
        self.names, self.folder, self.places = names, folder, places
        # The fewest nodes, and the most. All launchers take part, or one of them is a spare.
        self.sizes = (len(names) - 2, len(names) - 1) if has_spare else (len(names), len(names))
        self.left: set[int] = set()  # nodes whose launchers have ended and are not started again
        self._hang_after = hang_after
        self._mark = uuid.uuid4().hex
        self._generation = 0
        (folder / "job.py").write_text(JOB)
        self.launchers = [self._launch(number) for number in range(len(names))]
        # When a launcher that has ended is started again; of those that the campaign lets end.
        self._again_at: dict[int, float] = {}
        self.may_end: set[int] = set()

    def _launch(self, number: int) -> subprocess.Popen[bytes]:
        place = self.places[number]
        command = ["ip", "netns", "exec", self.names[number], str(BIN / "rankcall"), "run"]
        command += ["--capture", "python", "--on-hang", "recover", "--max-recoveries", "100000"]
        command += ["--hang-after", f"{self._hang_after:g}", "--run-dir", str(place / "run")]
        command += ["--bar-after", "1"] if self.sizes[0] < self.sizes[1] else []
        command += ["--start-method", "fork", "--run-path"]
        command += ["--nnodes", "{}:{}".format(*self.sizes), "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.79.0.1:{PORT}"]
        conf = f"is_host={int(number == 0)},last_call_timeout=5"
        command += ["--rdzv-id", "campaign", "--rdzv-conf", conf]
        command += ["--local-addr", f"10.79.0.{number + 1}", "job.py", str(self.folder)]
        memory = place / "memory"
        memory.mkdir(exist_ok=True)
        env = {**os.environ, "RANKCALL_HOST": f"node-{number}", "RANKCALL_SHM": str(memory)}
        env |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "cable", MARK: self._mark}
        env |= {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        env["CAMPAIGN_GENERATION"] = str(self._generation)
        with (self.folder / f"output-{number}").open("ab") as output:
            return subprocess.Popen(command, cwd=self.folder, env=env, stdout=output, stderr=output)

    def read(self, name: str) -> Any:
        """Return what the job has written; None if it has not."""
        try:
            return json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            return None

    @property
    def progress(self) -> tuple[int, int]:
        """The step that the job has saved, and the attempt that did."""
        step, attempt, _ = self.read("progress") or (0, -1, 0)
        return step, attempt

    def tend(self) -> None:
        """Start launchers again that have ended and may. Raises ``Violated`` if one may not."""
        if self.launchers[0].poll() is not None:
            self._start_all_again()
            return
        for number, launcher in enumerate(self.launchers):
            if launcher.poll() is None or number in self.left:
                continue
            if number not in self.may_end:
                raise Violated(f"the launcher of node {number} ended: {launcher.returncode}")
            at = self._again_at.setdefault(number, time.monotonic() + START_AGAIN_S)
            if time.monotonic() >= at:
                del self._again_at[number]
                self.launchers[number] = self._launch(number)

    def _start_all_again(self) -> None:
        """Wait until all launchers and their processes are gone, and start the job again."""
        if 0 not in self.may_end:
            raise Violated(f"the launcher of node 0 ended: {self.launchers[0].returncode}")
        deadline = time.monotonic() + END_S
        while self.pids() or any(launcher.poll() is None for launcher in self.launchers):
            if time.monotonic() > deadline:
                raise Violated(f"{len(self.pids())} processes outlive the store's host")
            time.sleep(0.2)
        self._generation += GENERATION
        self._again_at.clear()
        self.launchers = [self._launch(number) for number in range(len(self.names))]

    def start_again(self, number: int) -> None:
        """Start the launcher of a node that has left."""
        self.left.discard(number)
        self.launchers[number] = self._launch(number)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until a condition holds, and be the scheduler meanwhile; return whether it does."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            self.tend()
            time.sleep(0.1)
        return True

    def signal_rank(self, rank: int, number: signal.Signals, attempt: int) -> bool:
        """Send a signal to a rank of an attempt or of a later one; return whether there is one."""
        pid, its_attempt = self.read(f"pid.{rank}") or (0, -1)
        if its_attempt < attempt:
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True

    def state(self) -> str:
        """Return where the job stands: what it has saved, and its processes with their states."""
        ranks = []
        for number in range(len(self.names)):
            pid, attempt = self.read(f"pid.{number}") or (0, -1)
            try:
                letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                letter = "gone"
            ranks.append(f"rank {number}: {pid} {letter} of attempt {attempt}")
        step, attempt = self.progress
        return f"now at step {step} of attempt {attempt}; {', '.join(ranks)}"

    def pids(self, host: str = "") -> list[int]:
        """Return the processes of this job that run; of one host, if one is given."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                variables = environ.read_bytes().split(b"\0")
                is_ours = f"{MARK}={self._mark}".encode() in variables
                if is_ours and (not host or f"RANKCALL_HOST={host}".encode() in variables):
                    found.append(int(environ.parent.name))
        return found

    def end_all(self) -> int:
        """End what is left of the job; return how many processes that were."""
        left = self.pids()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self.launchers:
            launcher.wait()
        return len(left)

    def finish(self) -> Iterator[str]:
        """Let the job come to its end; yield what did not hold."""
        (self.folder / "finish").touch()
        deadline = time.monotonic() + END_S
        for number, launcher in enumerate(self.launchers):
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(max(0.1, deadline - time.monotonic()))
            if launcher.poll() != 0 and self._takes_part(number):
                yield f"the launcher of node {number} ended: {launcher.poll()}"
        left = self.end_all()
        if left:
            yield f"{left} processes were left"
        rings = [ring for place in self.places for ring in (place / "memory").rglob("*.ring")]
        if rings:
            yield f"rings were left: {'; '.join(map(_about, rings))}"
        if not self._has_right_weights():
            yield "the weights are not those of a job without faults"

    def _takes_part(self, number: int) -> bool:
        """Return whether a node is in the last attempt; a spare that waits ends as torch has it."""
        member = self.read(f"member.node-{number}") or []
        return self.sizes[1] == len(self.names) or member[1:] == [self.progress[1]]

    def breaches(self) -> list[str]:
        """Return where two attempts lived at once."""
        return [f"two attempts: {file.read_text()}" for file in self.folder.glob("breach.*")]

    def _has_right_weights(self) -> bool:
        """Take the same steps without a fault. All values are exact in binary."""
        import torch

        saved = torch.load(self.folder / "checkpoint")
        weight, bias = torch.zeros(4, 4), torch.zeros(4)
        for step, world in enumerate(saved["worlds"]):
            weight -= 0.125 * sum(step % 7 + rank for rank in range(world))
            bias -= 0.125 * world
        model = saved["model"]
        is_over = saved["step"] == saved["last"] == len(saved["worlds"])
        least, most = self.sizes
        is_over = is_over and all(least <= world <= most for world in saved["worlds"])
        return is_over and torch.equal(model["weight"], weight) and torch.equal(model["bias"], bias)


def _about(ring: Path) -> str:
    """Return what could have kept a ring from being moved."""
    header, disk = read_header(ring), os.statvfs(ring)
    with ring.open("rb") as file:
        lock = "free" if try_lock(file.fileno()) else "held"
    said = f"{ring}: lock {lock}, {disk.f_bavail * disk.f_frsize} bytes free on its disk"
    if header is None:
        return f"{said}, no header that can be read"
    return f"{said}, closed at {header.closed_ns}, its process {header.process.liveness()}"


class Fault:
    """One fault against a job, from a seed."""

    def __init__(self, job: Job, kind: str, chosen: random.Random, hang_after: float) -> None:
        self._job, self.kind, self._hang_after = job, kind, hang_after
        nodes = range(len(job.names))
        self.ranks = chosen.sample(nodes, 2)
        self._other = chosen.choice(nodes[1:])  # a node that does not host the store
        self._seconds = chosen.uniform(0.5, 2.5) * hang_after
        self.count = 2 if kind in ("two", "again", "stop_again") else 1

    def strike(self) -> None:
        """Strike, and wait until the job has got over it. Raises ``Violated`` if it has not."""
        step, attempt = self._job.progress
        with contextlib.ExitStack() as after:
            later_than = getattr(self, f"_{self.kind}")(step, attempt, after)
            if not self._job.wait_for(lambda: self._is_over(step, later_than), RECOVER_S):
                where = f"step {step} of attempt {attempt}; {self._job.state()}"
                raise Violated(f"no new step after {where}")
        self._job.may_end.clear()
        if self._job.breaches():
            raise Violated("; ".join(self._job.breaches()))
        # A launcher that has just ended, or does so now, may have been let end by this fault only.
        self._job.tend()

    def _is_over(self, step: int, later_than: int) -> bool:
        now, attempt = self._job.progress
        return now > step and attempt > later_than

    def _plant(self, name: str) -> Path:
        file = self._job.folder / f"fault.{name}"
        file.touch()
        return file

    def _signal(self, rank: int, number: signal.Signals, attempt: int) -> None:
        """Send a signal to a rank, which runs unless an attempt ends by itself at this moment."""
        struck = lambda: self._job.signal_rank(rank, number, attempt)  # noqa: E731
        if not self._job.wait_for(struck, RECOVER_S):
            raise Violated(f"no process of rank {rank}; {self._job.state()}")

    def _kill(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._signal(self.ranks[0], signal.SIGKILL, attempt)
        return attempt

    def _stop(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._signal(self.ranks[0], signal.SIGSTOP, attempt)
        return attempt

    def _hang(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._plant(f"hang.{self.ranks[0]}")
        return attempt

    def _raise(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._plant(f"raise.{self.ranks[0]}")
        return attempt

    def _two(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._signal(self.ranks[0], signal.SIGKILL, attempt)
        self._job.signal_rank(self.ranks[1], signal.SIGKILL, attempt)  # if it is not gone already
        return attempt

    def _again(
        self,
        step: int,
        attempt: int,
        after: contextlib.ExitStack,
        number: signal.Signals = signal.SIGKILL,
    ) -> int:
        self._kill(step, attempt, after)
        self._signal(self.ranks[1], number, attempt + 1)
        return int(self._job.read(f"pid.{self.ranks[1]}")[1])

    def _stop_again(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        return self._again(step, attempt, after, signal.SIGSTOP)

    def _launcher(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._job.may_end.add(self._other)
        self._job.launchers[self._other].kill()
        return attempt

    def _store_host(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        self._job.may_end.update(range(len(self._job.names)))
        for pid in self._job.pids("node-0"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return attempt

    def _cut(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        """Take a node off the network, for longer than a call may take or not as long."""
        link = "ip", "-n", self._job.names[self._other], "link", "set", "cable"
        self._job.may_end.update(range(len(self._job.names)))
        _ran(*link, "down")
        try:
            until = time.monotonic() + self._seconds
            self._job.wait_for(lambda: time.monotonic() > until, self._seconds + 1)
        finally:
            _ran(*link, "up")
        return -1

    def _disk_full(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        filler = self._job.places[self.ranks[0]] / "filler"
        after.callback(filler.unlink)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 16))
        return self._kill(step, attempt, after)

    def _forged(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        """Give the watchers a verdict of nobody's, and the time to act on it."""
        job, planted = self._job, self._plant(f"forge.{self.ranks[0]}")
        if not job.wait_for(lambda: not planted.exists(), RECOVER_S):
            raise Violated(f"rank {self.ranks[0]} takes no step; {job.state()}")
        until = time.monotonic() + 2 * self._hang_after
        job.wait_for(lambda: time.monotonic() > until, 2 * self._hang_after + 1)
        for noted in job.folder.glob("disk-*/run/recoveries/*.jsonl"):
            for line in noted.read_text().splitlines():
                if FORGED in line:
                    raise Violated(f"a forged verdict was taken for a cause: {line}")
        return attempt - 1

    def _bad_node(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        """Have a node barred; it is refused, and its place is taken. Then let it come back."""
        job, node = self._job, self._member(attempt)
        job.left.add(node)  # the campaign, and not the scheduler, starts it again
        began = self._kill_member(node, attempt)
        self._wait_for_end(node, "was the culprit")
        if not job.wait_for(lambda: self._is_over(step, began), RECOVER_S):
            raise Violated(f"no new step without node {node}; {job.state()}")
        _, now, world = job.read("progress")
        _, its_last = job.read(f"member.node-{node}")
        if its_last >= now or not job.sizes[0] <= world <= job.sizes[1]:
            raise Violated(
                f"node {node} left in attempt {its_last}, and {world} nodes are in {now}"
            )
        job.launchers[node] = job._launch(node)
        self._wait_for_end(node, "came back while it was barred")
        if job.read(f"member.node-{node}")[1] != its_last:
            raise Violated(f"node {node} is barred, and takes part again")
        unbar = str(BIN / "rankcall"), "unbar", f"node-{node}", str(job.places[node] / "run")
        _ran(*unbar)
        step, attempt = job.progress
        job.start_again(node)
        return attempt - 1

    def _member(self, attempt: int) -> int:
        """Return a node that takes part in an attempt, and does not host the store."""
        nodes = range(1, len(self._job.names))
        for node in (*nodes[self._other - 1 :], *nodes):
            _, its_attempt = self._job.read(f"member.node-{node}") or (0, -1)
            if its_attempt >= attempt:
                return int(node)
        raise Violated(f"no node but the store's host is in attempt {attempt}; {self._job.state()}")

    def _kill_member(self, node: int, attempt: int) -> int:
        """Kill the rank of a node once its attempt has taken a step; return that attempt."""
        job, step = self._job, self._job.progress[0]

        def has_begun() -> bool:
            _, its_attempt = job.read(f"member.node-{node}") or (0, -1)
            now, of_attempt = job.progress
            return bool(its_attempt == of_attempt >= attempt and now > step)

        if not job.wait_for(has_begun, RECOVER_S):
            raise Violated(f"node {node} takes no step in attempt {attempt}; {job.state()}")
        pid, its_attempt = job.read(f"member.node-{node}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return int(its_attempt)

    def _wait_for_end(self, node: int, why: str) -> None:
        launcher = self._job.launchers[node]
        if not self._job.wait_for(lambda: launcher.poll() is not None, RECOVER_S):
            raise Violated(f"node {node} {why}, and is not barred; {self._job.state()}")
        if launcher.returncode != BARRED:
            raise Violated(f"node {node} {why}, and its launcher ended: {launcher.returncode}")

    def _loop(self, step: int, attempt: int, after: contextlib.ExitStack) -> int:
        """Have the policy end the job, and start it again without the fault."""
        rank, launchers = self.ranks[0], self._job.launchers
        planted = self._plant(f"loop.{rank}")
        deadline = time.monotonic() + RECOVER_S
        while any(launcher.poll() is None for launcher in launchers):
            if time.monotonic() > deadline:
                raise Violated("a crash loop does not end")
            time.sleep(0.1)
        planted.unlink()
        if launchers[rank].returncode != REPEATS:
            raise Violated(f"a crash loop ended with {launchers[rank].returncode}")
        outcome = json.loads((self._job.places[rank] / "run/outcome.json").read_text())
        failure = outcome["failure"] or {}
        told = outcome["outcome"], failure.get("ranks"), failure.get("family")
        if told != ("repeats", [rank], "program") or "planted" not in failure["line"]:
            raise Violated(f"a crash loop of rank {rank} was told as {told}, {failure}")
        self._job.may_end.update(range(len(self._job.names)))
        return attempt


KINDS = tuple(
    name[1:]
    for name, member in vars(Fault).items()
    if re.fullmatch("_[a-z][a-z_]*", name)
    and name not in ("_is_over", "_plant", "_signal", "_member", "_kill_member", "_wait_for_end")
    and callable(member)
)


@dataclass
class Result:
    """What became of one job."""

    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each kind
    nodes: int = 0


def _run_job(seed: str, seconds: float, hang_after: float, kinds: Sequence[str]) -> Result:
    """Strike one job until the time is over, or something does not hold."""
    chosen, result = random.Random(seed), Result()
    result.nodes = chosen.randint(3, 6)
    has_spare = "bad_node" in kinds and (len(kinds) == 1 or chosen.random() < _WITH_SPARE)
    kinds = ["bad_node"] if has_spare else [kind for kind in kinds if kind != "bad_node"]
    with (
        network(result.nodes) as names,
        tempfile.TemporaryDirectory() as name,
        disks(Path(name), result.nodes) as places,
    ):
        job = Job(names, Path(name), places, hang_after, has_spare=has_spare)
        try:
            if not job.wait_for(lambda: job.progress[0] > 0, START_S):
                raise Violated("the job did not start")
            until, number = time.monotonic() + seconds, 0
            while time.monotonic() < until and (number == 0 or seconds):
                _strike(job, f"{seed}.{number}", hang_after, kinds, result)
                number += 1
                time.sleep(chosen.random() / 2)
            unheld = list(job.finish())
            result.violations += [f"{seed}: {violation}" for violation in unheld]
            if unheld:
                print(f"{seed} violated: {unheld}", flush=True)
                _keep(job, seed)
        except Violated as violated:
            result.violations.append(f"{seed}: {violated}")
            print(f"{seed} violated: {violated}", flush=True)
            _keep(job, seed)
        finally:
            job.end_all()
        if result.violations:
            for output in sorted(job.folder.glob("output-*")):
                text = output.read_text(errors="replace")
                lines = [line for line in text.splitlines() if "rankcall" in line.lower()]
                print(f"{seed} {output.name}:\n" + "\n".join(lines[-25:]), flush=True)
                kept = os.environ.get("CAMPAIGN_KEEP")
                if kept:
                    Path(kept, f"{seed}.{output.name}").write_text(text)
    return result


def _keep(job: Job, seed: str) -> None:
    """Copy the runs, the rings and the stacks of a job that still stands where it should not."""
    kept, py_spy = os.environ.get("CAMPAIGN_KEEP"), shutil.which("py-spy", path=str(BIN))
    if not kept:
        return
    for place in job.places:
        for name in ("run", "memory"):
            with contextlib.suppress(OSError, shutil.Error):
                shutil.copytree(place / name, Path(kept, seed, place.name, name), symlinks=True)
    for rank in range(len(job.names)) if py_spy else ():
        pid, _ = job.read(f"pid.{rank}") or (0, -1)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            dumped = subprocess.run(
                [str(py_spy), "dump", "--nonblocking", "--pid", str(pid)],
                capture_output=True,
                timeout=60,
                check=False,
            )
            Path(kept, seed, f"stacks-{rank}").write_bytes(dumped.stdout + dumped.stderr)


def _strike(job: Job, seed: str, hang_after: float, kinds: Sequence[str], result: Result) -> None:
    chosen = random.Random(seed)
    fault = Fault(job, chosen.choice(kinds), chosen, hang_after)
    result.faults[fault.kind] += fault.count
    began = time.monotonic()
    try:
        fault.strike()
    except Violated as violated:
        raise Violated(f"{fault.kind} on {fault.ranks} ({seed}): {violated}") from violated
    result.seconds.setdefault(fault.kind, []).append(time.monotonic() - began)
    print(f"{seed} {fault.kind}: over after {result.seconds[fault.kind][-1]:.1f} s", flush=True)


def run(
    jobs: int, seconds: float, seed: int, hang_after: float, kinds: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a campaign of several jobs at once; return its figures.

    A job that has a violation ends, and another one takes its place.
    """
    print(f"seed {seed}", flush=True)
    until = time.monotonic() + seconds

    def one_after_another(job: int) -> list[Result]:
        results: list[Result] = []
        while not results or time.monotonic() < until - START_S / 10:
            name = f"{seed}.{job}.{len(results)}"
            left = max(0.0, until - time.monotonic())
            results.append(_run_job(name, left, hang_after, kinds or KINDS))
        return results

    with ThreadPoolExecutor(jobs) as pool:
        results = [
            result for of_one in pool.map(one_after_another, range(jobs)) for result in of_one
        ]
    faults = sum((result.faults for result in results), Counter[str]())
    times: dict[str, list[float]] = {}
    for result in results:
        for kind, values in result.seconds.items():
            times.setdefault(kind, []).extend(values)
    violations = [violation for result in results for violation in result.violations]
    return {
        "faults": faults.total(),
        "violations": len(violations),
        "what": violations,
        "kinds": dict(faults),
        "nodes": [result.nodes for result in results],
        "recovery_s": {kind: round(statistics.median(values), 1) for kind, values in times.items()},
        "seed": seed,
    }

"""Two nodes that share no disk and no memory: evidence goes from one to the other.

The nodes are network and mount namespaces with a cable between them. A copy of one node's run
directory is read alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import Launch
from ports import free_port
from world import wait_until

from rankcall.analysis.diagnosis import Diagnosis, diagnose
from rankcall.cli._torchrun import BOOT
from rankcall.run.hangs import kept_hangs
from rankcall.run.load import load
from rankcall.watch._judge import findings_of

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]
PYTHON = sys.executable

# Each rank learns from its environment what to do, and says by files where it stands.
SCRIPT = """
import datetime, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD"])
plan, said = os.environ["PLAN"], Path(os.environ["SAID"])
timeout = datetime.timedelta(seconds=400)
place = os.environ["STORE"], int(os.environ["PORT"])
hosts = plan == "lose rank 0" and rank == 0
store = dist.TCPStore(*place, is_master=hosts, timeout=timeout, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
for step in range(3):
    dist.all_reduce(torch.ones(4))
if plan == "stop" and rank == 1:
    time.sleep(600)
if plan == "lose rank 0":
    (said / f"ready.{rank}").touch()
    while rank < 2 or not (said / "go").exists():
        time.sleep(0.05)
if rank == world - 1 and plan in ("kill", "raise"):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(torch.ones(4))  # the line
except RuntimeError as error:
    (said / f"failed.{rank}").touch()
    if plan in ("kill", "lose rank 0"):
        time.sleep(600)  # a program that goes on with something else
    while rank == 0 and not (said / "go").exists():
        time.sleep(0.05)
    raise
"""
STORE = """
import sys, time
import torch.distributed as dist
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
open(sys.argv[3], "w").close()
time.sleep(900)
"""


def _ran(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0


@dataclass(frozen=True)
class Node:
    """A namespace: how to start a command in it, and where its disk and its memory are."""

    name: str
    address: str
    interface: str
    folder: Path  # its disk, which its processes see as /mnt
    memory: Path  # what they see as /dev/shm

    def command(self, *command: str) -> list[str]:
        """Return a command that runs on this node, with a disk and a shared memory of its own."""
        mounts = (
            f"mount --make-rprivate / && mount --bind {self.memory} /dev/shm "
            f"&& mount --bind {self.folder} /mnt && hostname {self.name} && cd /mnt "
            '&& exec "$@"'
        )
        inside = ["unshare", "--mount", "--uts", "sh", "-c", mounts, "sh"]
        return ["ip", "netns", "exec", f"{self.interface}n", *inside, *command]

    def cut(self) -> None:
        """Pull the cable out."""
        assert _ran("ip", "-n", f"{self.interface}n", "link", "set", self.interface, "down")


@contextlib.contextmanager
def cabled(folder: Path) -> Iterator[list[Node]]:
    """Make three nodes on one bridge: two for ranks, and one for the store. Skip if it fails."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network and mount namespaces need root, ip and unshare")
    mark = uuid.uuid4().hex[:5]
    bridge = f"rb{mark}"
    nodes = [
        Node(
            f"node-{side}",
            f"10.78.0.{number}",
            f"r{mark}{side}",
            folder / f"disk-{side}",
            folder / f"memory-{side}",
        )
        for number, side in enumerate("abc", 1)
    ]
    hub = f"{bridge}n"
    try:
        made = _ran("ip", "netns", "add", hub)
        made = made and _ran("ip", "-n", hub, "link", "add", bridge, "type", "bridge")
        made = made and _ran("ip", "-n", hub, "link", "set", bridge, "up")
        for node in nodes:
            node.folder.mkdir()
            node.memory.mkdir()
            name, inside = f"{node.interface}n", ("ip", "-n", f"{node.interface}n")
            peer = f"p{node.interface}"
            made = (
                made
                and _ran("ip", "netns", "add", name)
                and _ran(
                    *("ip", "link", "add", node.interface, "netns", name),
                    *("type", "veth", "peer", "name", peer, "netns", hub),
                )
                and _ran("ip", "-n", hub, "link", "set", peer, "master", bridge, "up")
                and _ran(*inside, "addr", "add", f"{node.address}/24", "dev", node.interface)
                and _ran(*inside, "link", "set", node.interface, "up")
                and _ran(*inside, "link", "set", "lo", "up")
                and _ran(*node.command("true"))
            )
        if not made:
            pytest.skip("network and mount namespaces cannot be made here")
        yield nodes
    finally:
        for name in [*(f"{node.interface}n" for node in nodes), hub]:
            _ran("ip", "netns", "delete", name)


class Job:
    """Two ranks on each of two nodes, or one on the second; a store on a third, or on rank 0."""

    def __init__(
        self, nodes: list[Node], folder: Path, plan: str, world_size: int = 4, **more: str
    ) -> None:
        self.nodes, self.said = nodes, folder / "said"
        self.said.mkdir()
        port = str(free_port())
        self._all: list[Launch] = []
        store_node = nodes[0] if plan == "lose rank 0" else nodes[2]
        if store_node is nodes[2]:
            (folder / "store.py").write_text(STORE)
            ready = folder / "ready"
            about = (store_node.address, port, str(ready))
            self._start(store_node, {}, PYTHON, str(folder / "store.py"), *about).wait_for(
                ready, 120
            )
        self.ranks = []
        for rank in range(world_size):
            node = nodes[rank // 2]
            (node.folder / "train.py").write_text(SCRIPT)
            env = {
                **{"RANK": str(rank), "STORE": store_node.address, "PORT": port, "PLAN": plan},
                **{"WORLD": str(world_size), "SAID": str(self.said)},
                **{"GLOO_SOCKET_IFNAME": node.interface},
                **{"PYTHONPATH": str(BOOT), "RANKCALL": "1", "RANKCALL_CAPTURE": "python"},
                **{"RANKCALL_RUN_DIR": "/mnt/run", "RANKCALL_SHM": "/dev/shm"},
                **{"RANKCALL_HANG_AFTER": "2", "PYTHONFAULTHANDLER": ""},
                **more,
            }
            self.ranks.append(self._start(node, env, PYTHON, "/mnt/train.py"))

    def _start(self, node: Node, env: dict[str, str], *command: str) -> Launch:
        self._all.append(Launch(*node.command(*command), cwd=node.folder, env=env, program=()))
        return self._all[-1]

    def kill(self, ranks: list[int]) -> None:
        """End ranks as the loss of their node does."""
        for rank in ranks:
            self.ranks[rank].process.send_signal(signal.SIGKILL)

    def end(self) -> str:
        """End everything; return what the ranks printed."""
        for each in self._all:
            each.process.kill()
        return "\n".join(each.finish(60).err for each in self._all)

    def wait(self, ranks: list[int]) -> None:
        """Wait until ranks have ended."""
        for rank in ranks:
            self.ranks[rank].process.wait(200)


def judged(disk: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Diagnosis:
    """Diagnose a copy of one node's run directory, as on a laptop."""
    copied = shutil.copytree(disk / "run", folder / f"copied-{disk.name}")
    monkeypatch.setenv("RANKCALL_SHM", str(folder / "nothing"))
    return diagnose(load(copied), state_of=lambda header: "unknown")


def ranks_in(disk: Path) -> set[int]:
    """Return the ranks of which a node's run directory has records."""
    return {int(re.findall(r"rank-(\d+)", path.name)[0]) for path in (disk / "run/rings").glob("*")}


def test_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 is killed, the others hang: rank 0's node alone has the verdict, and is certain."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "kill")
        try:
            disk = nodes[0].folder
            wait_until(lambda: ranks_in(disk) == {0, 1, 2, 3}, 300)
        finally:
            text = job.end()
        found = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = found.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (3,), "certain"), text


def test_rank_0s_node_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 hangs; then its node, which is rank 0's, is lost. The other node has everything."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "stop")
        try:
            disk = nodes[1].folder
            wait_until(lambda: ranks_in(disk) == {0, 1, 2, 3}, 300)
            job.kill([0, 1])
            job.wait([0, 1])
            shutil.rmtree(nodes[0].folder)
            shutil.rmtree(nodes[0].memory)
        finally:
            text = job.end()
        found = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = found.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("missing", (1,), "certain"), text
    assert "train.py" in str(finding.call_site)
    assert sorted(path.name for path in (disk / "run/hangs/0001/stacks").glob("*")) == [
        f"rank-0000{rank}.txt" for rank in range(4)
    ]


def test_ranks_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a watcher, ranks that fail because of a killed one send what they have at exit."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "raise", RANKCALL_HANG_AFTER="0")
        try:
            job.wait([1, 2, 3])
            (job.said / "go").touch()
            job.wait([0])
        finally:
            text = job.end()
        disk = nodes[0].folder
        assert ranks_in(disk) == {0, 1, 2, 3}, text
        found = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = found.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (3,), "certain"), text


def test_a_node_whose_only_rank_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left to send its records: the other node knows that its connections closed."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "kill", world_size=3)
        try:
            disk = nodes[0].folder
            wait_until(lambda: kept_hangs(disk / "run"), 300)
            wait_until(lambda: ranks_in(disk) == {0, 1}, 100)
        finally:
            text = job.end()
        (kept,) = findings_of(kept_hangs(disk / "run")[0])
        (found,) = judged(disk, monkeypatch, tmp_path).findings
    for finding in (kept, found):
        assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (2,), "likely"), text
        assert "its connections were closed" in finding.summary
        assert "train.py" in str(finding.call_site)
    assert "Rank 2 (node-b, pid " in kept.summary


@pytest.mark.parametrize("is_cut", [True, False])
def test_the_store_dies_with_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """The other node cannot ask anybody: it keeps a verdict of its own, its stacks and records."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "lose rank 0")
        try:
            disk = nodes[1].folder
            wait_until(lambda: len(list(job.said.glob("ready.*"))) == 4, 300)
            if is_cut:
                nodes[0].cut()  # so nobody closes the connections
            job.kill([0, 1])
            job.wait([0, 1])
            (job.said / "go").touch()
            wait_until(lambda: kept_hangs(disk / "run"), 300)
            wait_until(lambda: ranks_in(disk) == {2, 3}, 100)
        finally:
            text = job.end()
        (verdict,) = kept_hangs(disk / "run")
        (kept,) = findings_of(verdict)
        (found,) = judged(disk, monkeypatch, tmp_path).findings
    for finding in (kept, found):
        assert (finding.kind, finding.ranks, finding.confidence) == (
            *("missing", (0, 1)),
            "possible",  # nobody knows whether they are gone, or only cannot be reached
        ), text
        assert finding.victims == (2, 3)
        assert "train.py" in str(finding.call_site)
    assert f"the job's store at {nodes[0].address}" in " ".join(text.split())
    assert sorted(path.name for path in (Path(verdict["place"]) / "stacks").glob("*")) == [
        "rank-00002.txt",
        "rank-00003.txt",
    ]

"""Jobs on nodes that share no disk and no memory: namespaces with a cable between them.

A job has four ranks on two nodes, and a store on a third.
"""

from __future__ import annotations

import contextlib
import os
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

from rankcall.cli.environment import BOOT

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
while plan == "steps":
    if rank == 1 and (said / "hold").exists():
        time.sleep(600)  # the missing rank
    dist.all_reduce(torch.ones(4))
    time.sleep(0.05)
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

    def lose(self, other: Node) -> None:
        """Lose all packets to another node."""
        route = ("route", "add", "blackhole", f"{other.address}/32")
        assert _ran("ip", "-n", f"{self.interface}n", *route)


@contextlib.contextmanager
def cabled(folder: Path, sides: str = "abc") -> Iterator[list[Node]]:
    """Make nodes on one bridge, a letter for each. Skip if it fails."""
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
        for number, side in enumerate(sides, 1)
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
            arguments = (store_node.address, port, str(ready))
            self.store = self.start(store_node, {}, PYTHON, str(folder / "store.py"), *arguments)
            self.store.wait_for(ready, 120)
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
            self.ranks.append(self.start(node, env, PYTHON, "/mnt/train.py"))

    def start(self, node: Node, env: dict[str, str], *command: str) -> Launch:
        """Start a command on a node; it ends with the job."""
        self._all.append(Launch(*node.command(*command), cwd=node.folder, env=env, program=()))
        return self._all[-1]

    def kill(self, ranks: list[int]) -> None:
        """End ranks as the loss of their node does."""
        for rank in ranks:
            self.ranks[rank].process.send_signal(signal.SIGKILL)

    def end(self) -> str:
        """End everything; return what the ranks printed."""
        for launch in self._all:
            launch.process.kill()
        return "\n".join(launch.finish(60).err for launch in self._all)

    def wait(self, ranks: list[int]) -> None:
        """Wait until ranks have ended."""
        for rank in ranks:
            self.ranks[rank].process.wait(200)

"""Nodes that leave a job, and spares that get in: nodes are network namespaces here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cabled import Node, cabled
from launch import RANKCALL, Launch

from rankcall.run.bars import read_bars
from rankcall.run.recoveries import NodeChecked, newest_checks, read_recoveries

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
PORT = 29421  # each job has a network of its own

JOB = """
import os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
hosts = [None] * dist.get_world_size()
dist.all_gather_object(hosts, os.environ["RANKCALL_HOST"])
go, done = os.environ["GO"], torch.zeros(1)
open(f"{go}.{'+'.join(sorted(hosts))}", "w").close()
while not done:
    if os.path.exists(f"{go}.strike.{os.environ['RANKCALL_HOST']}"):
        os.kill(os.getpid(), signal.SIGKILL)
    done += os.path.exists(go)
    dist.all_reduce(done)
    time.sleep(0.05)
os.write(1, f"done {sorted(hosts)}\\n".encode())
dist.destroy_process_group()
"""


class Cluster:
    """Launchers of one job, each on a node of its own. The first node hosts the store."""

    def __init__(self, nodes: list[Node], folder: Path, least: int, most: int) -> None:
        self.nodes, self.go = nodes, folder / "go"
        self._bounds = f"{least}:{most}"
        self._all: list[Launch] = []

    def start(self, number: int) -> Launch:
        """Start a node's launcher."""
        node, host = self.nodes[number], self.nodes[0]
        (node.folder / "job.py").write_text(JOB)
        command = [str(RANKCALL), "run", "--capture", "python", "--run-dir", "/mnt/run"]
        command += ["--on-hang", "recover", "--hang-after", "1000", "--health-check", "true"]
        command += ["--bar-after", "1", "--nnodes", self._bounds, "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host.address}:{PORT}"]
        command += ["--rdzv-id", "job", "--rdzv-conf"]
        command += [f"is_host={int(number == 0)},last_call_timeout=2"]
        command += ["--local-addr", node.address, "job.py"]
        env = {"RANKCALL_HOST": node.name, "GLOO_SOCKET_IFNAME": node.interface}
        env |= {"RANKCALL_SHM": "/dev/shm", "GO": str(self.go)}
        self._all.append(Launch(*node.command(*command), cwd=node.folder, env=env, program=()))
        return self._all[-1]

    def checked(self, number: int) -> NodeChecked | None:
        """Return how a node was when it was checked last; None before that."""
        checks = newest_checks(read_recoveries(self.nodes[number].folder / "run"))
        return checks[0] if checks else None

    def wait_until_checked(self, number: int, launched: Launch) -> None:
        """Wait until a node was checked for the first time."""
        deadline = time.monotonic() + 240
        while self.checked(number) is None:
            if time.monotonic() > deadline or launched.process.poll() is not None:
                launched.process.kill()
                raise AssertionError(launched.finish())
            time.sleep(0.05)

    def wait_until_met(self, launched: Launch, *names: str) -> None:
        """Wait until an attempt of just these nodes runs."""
        launched.wait_for(Path(f"{self.go}.{'+'.join(names)}"))

    def end(self) -> None:
        """End what still runs."""
        running = [launched for launched in self._all if launched.process.poll() is None]
        for launched in running:
            launched.process.kill()
        for launched in running:
            launched.finish(60, linger=60)  # the kernel ends the workers with their launcher


@contextlib.contextmanager
def cluster(folder: Path, sides: str, least: int, most: int) -> Iterator[Cluster]:
    """Make the nodes of a job, and end its launchers."""
    with cabled(folder, sides) as nodes:
        made = Cluster(nodes, folder, least, most)
        try:
            yield made
        finally:
            made.end()


def _network(checked: NodeChecked | None) -> tuple[str, str]:
    assert checked is not None
    (check,) = [check for check in checked.checks if check.name == "network"]
    return check.state, check.text


def test_a_node_that_fails_with_several(tmp_path: Path) -> None:
    """It reaches the store, and not the nodes beside it: it leaves, and the others go on."""
    with cluster(tmp_path, "abcd", least=3, most=4) as job:
        bad = job.nodes[3]
        for other in job.nodes[1:3]:
            bad.lose(other)
        good = []
        for number in range(3):
            good.append(job.start(number))
            job.wait_until_checked(number, good[-1])
        left = job.start(3).finish()
        assert left.status == 69, left.err
        assert "node-d leaves the job, and is barred until" in left.err
        state, text = _network(job.checked(3))
        assert state == "failed"
        assert "node-b (" in text
        assert "node-c (" in text
        assert "2 of 3 nodes" in text
        (bar,) = read_bars(bad.folder / "run")
        assert bar.reason == text
        job.go.touch()
        for number, launched in enumerate(good):
            ended = launched.finish()
            assert ended.status == 0, ended.err
            assert "done ['node-a', 'node-b', 'node-c']" in ended.out
            assert _network(job.checked(number))[0] == "well"


def test_a_link_that_fails(tmp_path: Path) -> None:
    """Either of two nodes may be at fault: the pair is named, and the node is let in."""
    with cluster(tmp_path, "abc", least=3, most=3) as job:
        job.nodes[2].lose(job.nodes[1])
        launched = []
        for number in range(3):
            launched.append(job.start(number))
            job.wait_until_checked(number, launched[-1])
        state, text = _network(job.checked(2))
        assert state == "suspect"
        assert text.startswith("no transfer between node-c and node-b (")
        assert (
            launched[2].process.poll() is None
        )  # the collectives of its worker are another matter
        checked = job.checked(2)
        assert checked is not None
        (clock,) = [check for check in checked.checks if check.name == "clock"]
        assert clock.state == "well"
        assert "node-a, which hosts the store" in clock.text


def test_a_spare_takes_the_place_of_a_bad_node(tmp_path: Path) -> None:
    """A node whose rank is killed leaves, the spare that waits gets in, and it is refused."""
    with cluster(tmp_path, "abcd", least=2, most=3) as job:
        first, second, bad = (job.start(number) for number in range(3))
        job.wait_until_met(first, "node-a", "node-b", "node-c")
        spare = job.start(3)
        job.wait_until_checked(3, spare)
        Path(f"{job.go}.strike.node-c").touch()
        left = bad.finish()
        assert left.status == 69, left.err
        assert "node-c leaves the job, and is barred until" in left.err
        assert "its ranks held the job up once" in left.err
        job.wait_until_met(first, "node-a", "node-b", "node-d")
        refused = job.start(2).finish()
        assert refused.status == 69, refused.err
        job.go.touch()
        for launched in (first, second, spare):
            ended = launched.finish()
            assert ended.status == 0, ended.err
            assert "done ['node-a', 'node-b', 'node-d']" in ended.out

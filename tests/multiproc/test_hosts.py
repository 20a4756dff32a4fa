"""A job over two hosts: the run knows which rank is where, and which groups cross the network.

As root the hosts are network and UTS namespaces with a cable between them: their own addresses and
host names, nothing set by hand. Else they are two agents on one machine, told apart by their
``--local-addr``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import launch as launch_module
import polars as pl
import pytest
from launch import Launch
from ports import free_port

import rankcall

pytestmark = pytest.mark.multiproc

SCRIPT = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))
groups = {name: dist.new_group(ranks, group_desc=name)
          for name, ranks in {"here": [0, 1], "there": [2, 3], "across": [1, 2]}.items()}
for name, ranks in {"here": [0, 1], "there": [2, 3], "across": [1, 2]}.items():
    if rank in ranks:
        dist.all_reduce(torch.ones(4), group=groups[name])
dist.barrier()
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Host:
    """How to start a command on a host, and how it is reached."""

    name: str
    address: str
    interface: str
    prefix: tuple[str, ...] = ()


def _quietly(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0


@contextlib.contextmanager
def namespaces() -> Iterator[list[Host] | None]:
    """Two network namespaces with a pair of interfaces between them; None if that is impossible."""
    mark = uuid.uuid4().hex[:6]
    names = [f"rc{mark}{side}" for side in "ab"]
    hosts = [
        Host(
            f"node-{side}",
            f"10.77.0.{number}",
            f"v{name}",
            (
                "ip",
                "netns",
                "exec",
                name,
                "unshare",
                "--uts",
                "sh",
                "-c",
                f'hostname node-{side} && exec "$@"',
                "sh",
            ),
        )
        for name, side, number in zip(names, "ab", (1, 2), strict=True)
    ]
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        yield None
        return
    try:
        made = all(_quietly("ip", "netns", "add", name) for name in names) and _quietly(
            "ip",
            "link",
            "add",
            hosts[0].interface,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            hosts[1].interface,
            "netns",
            names[1],
        )
        for name, host in zip(names, hosts, strict=True):
            inside = ("ip", "-n", name)
            made = made and all(
                _quietly(*inside, *command)
                for command in (
                    ("addr", "add", f"{host.address}/24", "dev", host.interface),
                    ("link", "set", host.interface, "up"),
                    ("link", "set", "lo", "up"),
                )
            )
        made = made and all(_quietly(*host.prefix, "true") for host in hosts)
        yield hosts if made else None
    finally:
        for name in names:
            _quietly("ip", "netns", "delete", name)


@contextlib.contextmanager
def loopback() -> Iterator[list[Host]]:
    """Two agents of this machine, on addresses of the loopback interface."""
    yield [Host(address, address, "lo") for address in ("127.0.0.2", "127.0.0.3")]


def run_on(hosts: list[Host], folder: Path, monkeypatch: pytest.MonkeyPatch) -> rankcall.Run:
    """Run the script on two ranks of each host, with a run directory both share."""
    (folder / "job.py").write_text(SCRIPT)
    port = free_port()
    agents = []
    for number, host in enumerate(hosts):
        local = ("--local-addr", host.address) if not host.prefix else ()
        with monkeypatch.context() as patch:
            command = [*host.prefix, str(launch_module.RANKCALL)]
            patch.setattr(launch_module, "RANKCALL", command[0])
            agents.append(
                Launch(
                    *command[1:],
                    "run",
                    "--run-dir",
                    folder / "run",
                    "--capture",
                    "python",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "2",
                    "--node-rank",
                    str(number),
                    "--master-addr",
                    hosts[0].address,
                    "--master-port",
                    str(port),
                    *local,
                    "job.py",
                    cwd=folder,
                    env={"GLOO_SOCKET_IFNAME": host.interface},
                )
            )
    ended = [agent.finish(90) for agent in agents]
    assert [outcome.status for outcome in ended] == [0, 0], "\n".join(
        outcome.err for outcome in ended
    )
    return rankcall.load(folder / "run")


def check(run: rankcall.Run, first: str, second: str) -> None:
    """The run's ranks, groups and records say who is where."""
    assert run.hosts == {0: first, 1: first, 2: second, 3: second}
    assert run.missing_ranks == []
    groups = {
        tuple(run_group.group.ranks): (run_group.hosts, run_group.cross_host)
        for run_group in run.run_groups.values()
    }
    assert groups == {
        (0, 1, 2, 3): ((first, first, second, second), True),
        (0, 1): ((first, first), False),
        (2, 3): ((second, second), False),
        (1, 2): ((first, second), True),
    }
    crossing = run.groups.filter(pl.col("cross_host"))["ranks"].to_list()
    assert sorted(crossing) == [[0, 1, 2, 3], [1, 2]]
    by_host = run.records.group_by("host").agg(pl.col("rank").unique().sort()).sort("host")
    assert by_host.rows() == [(first, [0, 1]), (second, [2, 3])]


def test_two_hosts_in_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts with names and addresses of their own, two ranks each."""
    with namespaces() as hosts:
        if hosts is None:
            pytest.skip("network and UTS namespaces are not to be had (they need root)")
        check(run_on(hosts, tmp_path, monkeypatch), "node-a", "node-b")


@pytest.mark.slow
def test_two_agents_on_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that differ in ``--local-addr`` only count as hosts named by it."""
    with loopback() as hosts:
        check(run_on(hosts, tmp_path, monkeypatch), "127.0.0.2", "127.0.0.3")

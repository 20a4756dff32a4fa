"""Stores in use: several processes on a file, under torchrun, in torch's agents, in a roll call."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosting import LONG, all_at, attempt, hosted
from ranks import run_ranks

pytestmark = pytest.mark.multiproc
EXAMPLE = Path(__file__).parents[2] / "examples/barrier_missing.py"


def _files(rank: int, world_size: int, path: str, folder: str) -> Any:
    from torch.distributed import FileStore

    from rankcall import store

    client: Any = FileStore(path, -1)
    before = client.timeout
    for turn in range(3):
        store.barrier(client, world_size, "p", LONG, rank)
        exchanged = store.synchronize(client, b"%d" % (rank + turn), rank, world_size, "p", LONG)
        assert exchanged == [b"%d" % (member + turn) for member in range(world_size)]
    outcome = ("", "", 0.0)
    if rank:
        attempt(lambda: store.barrier(client, world_size, "p", 0.2, rank))
        all_at(folder, "arrived", rank, world_size - 1)
        outcome = attempt(lambda: store.barrier(client, world_size, "p", 0.5, rank))
    store.barrier(client, world_size, "q", LONG, rank)
    assert client.timeout == before
    return outcome


def test_processes_on_a_file_store(tmp_path: Path) -> None:
    """A FileStore serves several processes, names the missing, and is late by less than two s."""
    store = str(tmp_path / "store")
    _zero, *others = run_ranks(_files, 3, store, str(tmp_path), init=False)
    for name, text, took in others:
        assert name == "BarrierTimeout"
        assert "2 of 3 ranks arrived; missing 0" in text
        assert took < 2.5


def _recorded(rank: int, world_size: int, folder: str) -> Any:
    import torch
    import torch.distributed as dist

    import rankcall
    from rankcall import store

    client = dist.distributed_c10d._get_default_store()
    with rankcall.enable(f"{folder}/run"):
        dist.all_reduce(torch.ones(4))
        idle = store.rollcall(client, rank, world_size, "idle", LONG)
        receive = dist.irecv(torch.zeros(4), src=1) if rank == 0 else None
        busy = store.rollcall(client, rank, world_size, "busy", LONG)
        if rank == 1:
            dist.send(torch.ones(4), dst=0)
        if receive is not None:
            receive.wait()
    assert {answer.pid for answer in busy.answers if answer.rank == rank} == {os.getpid()}
    return [[answer.doing for answer in rollcall.answers] for rollcall in (idle, busy)]


def test_a_roll_call_says_what_each_rank_is_doing(tmp_path: Path) -> None:
    """By default that is a rank's newest collective that has not ended."""
    for idle, busy in run_ranks(_recorded, 2, str(tmp_path)):
        assert idle == [None, None]
        assert re.fullmatch(r"in recv #1 on group \S+", busy[0])
        assert busy[1] is None


@pytest.mark.slow
def test_the_example_names_the_rank_asleep() -> None:
    """Under torchrun, every rank that came prints who did not, with its host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--timeout=4"],
        env={**os.environ, "RANKCALL_HOST": "node-c", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    messages = re.findall(r"barrier 'epoch-3' .*? on rank (\d) \(node-c\): (.*?)\.", done.stdout)
    assert sorted(messages) == [
        (rank, "3 of 4 ranks arrived; missing 2 (node-c)") for rank in ("0", "1", "3")
    ]
    assert "(before evaluation) timed out after 4 s" in done.stdout


AGENTS = """
import sys
from rankcall import store
store.install()
from torch.distributed.run import main
main(sys.argv[1:])
"""


def test_agents_meet_at_our_exit_barrier(tmp_path: Path) -> None:
    """With the shim, two agents' exit barrier is ours: both end well, and its keys say so."""
    script = tmp_path / "work.py"
    script.write_text("print('worked')\n")
    spy = tmp_path / "agents.py"
    spy.write_text(
        AGENTS.replace(
            "from torch.distributed.run",
            "import torch.distributed.elastic.agent.server.api as api\n"
            "inner = api.store_util.barrier\n"
            "def told(*a, **k):\n"
            "    inner(*a, **k)\n"
            "    print('exit barrier', inner.__module__, k['key_prefix'], flush=True)\n"
            "api.store_util.barrier = told\n"
            "from torch.distributed.run",
        )
    )
    with hosted() as (port, _):
        options = [
            "--nnodes=2",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-id=x",
            f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-conf=is_host=0",
        ]
        agents = [
            subprocess.Popen(
                [sys.executable, str(spy), *options, "--local-addr=127.0.0.1", str(script)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for _ in range(2)
        ]
        try:
            outputs = [agent.communicate(timeout=240)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    for agent, text in zip(agents, outputs, strict=True):
        assert agent.returncode == 0, text
        assert "exit barrier rankcall.store.barriers torchelastic/agent/terminal_state" in text
        assert "Error waiting on exit barrier" not in text

"""Stores with real processes: late, dead, stopped and doubled ranks, and hosts that are gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosting import all_at, attempt, connect, hosted
from ranks import run_ranks, try_ranks

pytestmark = pytest.mark.multiproc
EXAMPLE = Path(__file__).parents[2] / "examples/barrier_missing.py"


def _late(rank: int, world_size: int, port: int, folder: str) -> list[Any]:
    from rankcall import store

    client = connect(port)
    all_at(folder, "connected", rank, world_size)
    told = []
    if rank == 0:  # late: comes when the others have given up
        client.wait(["given up"])
        told.append(attempt(lambda: store.barrier(client, world_size, "late", 10, rank)))
    else:
        told.append(attempt(lambda: store.barrier(client, world_size, "late", 1, rank)))
        if client.add("givers", 1) == world_size - 1:
            client.set("given up", "")
        told.append(attempt(lambda: store.barrier(client, world_size, "late", 10, rank)))
    told.append(attempt(lambda: store.barrier(client, world_size, "late", 10, rank)))
    return told


def test_a_late_rank_lets_all_pass_when_they_retry(tmp_path: Path) -> None:
    """Rank 0 comes after the others timed out: it passes at once, they pass when they retry."""
    with hosted() as (port, _):
        zero, *others = run_ranks(_late, 3, port, str(tmp_path), init=False)
    assert [name for name, _, _ in zero] == ["", ""]
    for told in others:
        assert [name for name, _, _ in told] == ["BarrierTimeout", "", ""]
        assert "missing 0 (host unknown)" in told[0][1]
        assert told[0][2] < 2


def _dies(rank: int, world_size: int, port: int, when: str) -> Any:
    import rankcall.store._meeting as meeting
    from rankcall import store

    client = connect(port)
    for _ in range(2):
        store.barrier(client, world_size, "p", 20, rank)
    if rank == 1 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        wait = meeting.Meeting.wait

        def killed(self: Any) -> bool:
            os.kill(os.getpid(), signal.SIGKILL)
            return wait(self)

        meeting.Meeting.wait = killed  # type: ignore[method-assign]
    return [attempt(lambda: store.barrier(client, world_size, "p", 1, rank)) for _ in range(2)]


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_rank_that_is_killed(when: str) -> None:
    """Killed before it arrives it is missing; between arriving and leaving it harms nobody once."""
    with hosted() as (port, _):
        zero, killed, two = try_ranks(_dies, 3, port, when, init=False)
    assert killed.exitcode == -signal.SIGKILL
    for result in (zero, two):
        first, second = result.value
        assert first[0] == ("" if when == "between" else "BarrierTimeout")
        assert second[0] == "BarrierTimeout"
        assert re.search(r"missing 1 \(\S+\)", second[1])
        assert "host unknown" not in second[1], "it was here before"
        assert second[2] < 2


def _stopped_rank(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, world_size, "p", 20, rank)
    if rank == 1:
        client.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return attempt(lambda: store.barrier(client, world_size, "p", 20, rank))
    told = attempt(lambda: store.barrier(client, world_size, "p", 1, rank))
    if rank == 0:
        os.kill(int(client.get("pid")), signal.SIGCONT)
    return told, attempt(lambda: store.barrier(client, world_size, "p", 20, rank))


def test_a_stopped_rank() -> None:
    """While it is stopped it is missing; when it goes on, all pass."""
    with hosted() as (port, _):
        zero, one, two = run_ranks(_stopped_rank, 3, port, init=False)
    assert one[0] == ""
    for first, second in (zero, two):
        assert first[0] == "BarrierTimeout"
        assert "2 of 3 ranks arrived; missing 1" in first[1]
        assert second[0] == ""


def _doubled(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    mine = min(rank, 1)  # ranks 1 and 2 both believe to be rank 1
    return os.getpid(), attempt(lambda: store.barrier(client, world_size, "p", 1, mine))


def test_two_processes_that_are_one_rank() -> None:
    """The second is told who the first is; the others are told of both."""
    with hosted() as (port, _):
        results = run_ranks(_doubled, 3, port, init=False)
    pids = [pid for pid, _ in results]
    (zero, *doubled) = [told for _, told in results]
    assert sorted(name for name, _, _ in doubled) == ["BarrierTimeout", "WorldMismatch"]
    refused = next(told for told in doubled if told[0] == "WorldMismatch")
    assert f"pid {pids[1]} on" in refused[1]
    assert f"pid {pids[2]} on" in refused[1]
    assert "rank 1 was claimed a second time by pid" in zero[1]
    assert "missing 2" in zero[1]


def _all_zero(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    return attempt(lambda: store.barrier(client, world_size, "p", 1, 0))


def test_nobody_knows_its_rank() -> None:
    """When all believe to be rank 0, nobody passes, and all but one are told why."""
    with hosted() as (port, _):
        results = run_ranks(_all_zero, 6, port, init=False)
    names = [name for name, _, _ in results]
    assert "" not in names
    assert names.count("WorldMismatch") >= 5


def _sizes(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    size = world_size if rank else world_size + 2
    return attempt(lambda: store.synchronize(client, b"", rank, size, "p", 1))


def test_world_sizes_that_differ() -> None:
    """Every process is told who says what."""
    with hosted() as (port, _):
        for name, text, took in run_ranks(_sizes, 3, port, init=False):
            assert name == "WorldMismatch"
            assert "3 say ranks 1-2" in text
            assert "5 say ranks 0" in text
            assert took < 2


def _host_stops(rank: int, world_size: int, port: int, pid: int, folder: str) -> Any:
    from rankcall import store

    client: Any = connect(port)
    before = client.timeout
    store.barrier(client, world_size, "p", 20, rank)
    all_at(folder, "passed", rank, world_size)
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    all_at(folder, "stopped", rank, world_size)
    told = [attempt(lambda: store.barrier(client, world_size, "p", 1.0, rank))]
    told.append(attempt(lambda: store.synchronize(client, b"", rank, world_size, "p", 1.0)))
    told.append(attempt(lambda: store.rollcall(client, rank, world_size)))
    all_at(folder, "told", rank, world_size)
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    told.append(attempt(lambda: store.barrier(client, world_size, "p", 20, rank)))
    assert client.timeout == before
    return told


@pytest.mark.parametrize("libuv", [True, False])
def test_a_stopped_host(libuv: bool, tmp_path: Path) -> None:
    """No call outlasts its timeout by more than a second; when the host goes on, so does all."""
    with hosted(libuv) as (port, pid):
        results = run_ranks(_host_stops, 3, port, pid, str(tmp_path), init=False)
    for told in results:
        for name, text, took in told[:3]:
            assert name == "StoreLost"
            assert f"127.0.0.1:{port} does not answer" in text
            assert took < 2
    assert [told[3][:2] for told in results] == [["", ""]] * 3


def _host_stops_for_good(rank: int, world_size: int, port: int, pid: int, folder: str) -> Any:
    from rankcall import store

    client = connect(port)
    for _ in range(3):
        store.barrier(client, world_size, "p", 30, rank)
    all_at(folder, "passed", rank, world_size)
    if rank == 0:  # the others wait already
        time.sleep(1)
        os.kill(pid, signal.SIGSTOP)
    return attempt(lambda: store.barrier(client, world_size, "p", 18, rank))


@pytest.mark.slow
def test_a_host_that_stops_under_a_long_wait(tmp_path: Path) -> None:
    """A timeout that is long enough to block in is kept, too, whenever the host stops."""
    with hosted() as (port, pid):
        for name, _, took in run_ranks(
            _host_stops_for_good, 3, port, pid, str(tmp_path), init=False
        ):
            assert name == "StoreLost"
            assert took < 19


def _host_dies(rank: int, world_size: int, port: int, pid: int, timeout: float) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, world_size, "p", 20, rank)
    if rank == 0:
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
    told = [attempt(lambda: store.barrier(client, world_size, "p", timeout, rank))]
    told.append(attempt(lambda: store.barrier(client, world_size, "p", timeout, rank)))
    return told


@pytest.mark.parametrize("timeout", [10.0, 60.0])
def test_a_host_that_dies(timeout: float) -> None:
    """Every rank gets one clear error within seconds, also from the next call."""
    with hosted() as (port, pid):
        for told in run_ranks(_host_dies, 3, port, pid, timeout, init=False):
            for name, text, took in told:
                assert name == "StoreLost"
                assert f"the store at 127.0.0.1:{port} is gone" in text
                assert took < 5


def _forked(rank: int, world_size: int, port: int) -> Any:
    from rankcall import store

    client = connect(port)
    store.barrier(client, 2, "p", 20, rank)
    child = os.fork()
    if child == 0:
        name, text, _ = attempt(lambda: store.barrier(client.clone(), 2, "p", 1, rank))
        os._exit(0 if name == "WorldMismatch" and "claimed by 2 processes" in text else 1)
    _, status = os.waitpid(child, 0)
    store.barrier(client, 2, "p", 20, rank)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_another_process() -> None:
    """A child does not speak for its parent, nor on its connection."""
    with hosted() as (port, _):
        assert run_ranks(_forked, 2, port, init=False) == [0, 0]


def _files(rank: int, world_size: int, path: str) -> Any:
    from torch.distributed import FileStore

    from rankcall import store

    client = FileStore(path, -1)
    for turn in range(3):
        store.barrier(client, world_size, "p", 20, rank)
        got = store.synchronize(client, b"%d" % (rank + turn), rank, world_size, "p", 20)
        assert got == [b"%d" % (one + turn) for one in range(world_size)]
    told = ("", "", 0.0)
    if rank:
        told = attempt(lambda: store.barrier(client, world_size, "p", 0.5, rank))
    store.barrier(client, world_size, "q", 20, rank)
    return told


def test_processes_on_a_file_store(tmp_path: Path) -> None:
    """A FileStore serves several processes, names the missing, and is late by less than two s."""
    _zero, *others = run_ranks(_files, 3, str(tmp_path / "store"), init=False)
    for name, text, took in others:
        assert name == "BarrierTimeout"
        assert "missing 0" in text
        assert took < 2.5


def test_the_example_names_the_rank_asleep() -> None:
    """Under torchrun, every rank that came prints who did not, with its host."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--standalone"]
    done = subprocess.run(
        [*command, str(EXAMPLE), "--timeout=1.5"],
        env={**os.environ, "RANKCALL_HOST": "node-c", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = re.findall(r"barrier 'epoch-3' .*? on rank (\d) \(node-c\): (.*?)\.", done.stdout)
    assert sorted(said) == [
        (rank, "3 of 4 ranks arrived; missing 2 (node-c)") for rank in ("0", "1", "3")
    ]
    assert "(before evaluation) timed out after 1.5 s" in done.stdout


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
            "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=x",
            f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=is_host=0",
        ]  # fmt: skip
        agents = [
            subprocess.Popen(
                [sys.executable, str(spy), *options, "--local-addr=127.0.0.1", str(script)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for _ in range(2)
        ]  # fmt: skip
        try:
            said = [agent.communicate(timeout=80)[0] for agent in agents]
        finally:
            for agent in agents:
                agent.kill()
    for agent, text in zip(agents, said, strict=True):
        assert agent.returncode == 0, text
        assert "exit barrier rankcall.store._barrier torchelastic/agent/terminal_state" in text
        assert "Error waiting on exit barrier" not in text

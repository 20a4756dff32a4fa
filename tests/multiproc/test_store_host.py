"""Stores whose host is stopped or dies: one clear error on every rank, in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hosting import LONG, all_at, attempt, await_ranks, connect, hosted, stop
from ranks import run_ranks, try_ranks
from world import wait_until

from rankcall import store
from rankcall.background import BackgroundCall
from rankcall.c10d import location, own_connections
from rankcall.c10d.calls import Call
from rankcall.c10d.client import Over, perform
from rankcall.c10d.requests import Read
from rankcall.errors import StoreLostError

pytestmark = pytest.mark.multiproc


def _host_stops(rank: int, world_size: int, port: int, pid: int, folder: str) -> Any:
    client: Any = connect(port)
    before = client.timeout

    store.barrier(client, world_size, "p", LONG, rank)
    all_at(folder, "passed", rank, world_size)
    if rank == 0:
        stop(pid)
    all_at(folder, "stopped", rank, world_size)
    calls = [
        lambda: store.barrier(client, world_size, "p", 1.0, rank, what="a test"),
        lambda: store.barrier(client, world_size, "q", 1.0, what="a test"),
        lambda: store.synchronize(client, b"", rank, world_size, "p", 1.0, what="a test"),
        lambda: store.get_all(client, rank, "x", world_size, timeout=1.0, what="a test"),
        lambda: store.rollcall(client, rank, world_size, timeout=1.0),
        lambda: store.clean_up(client, rank, world_size, "p", timeout=1.0),
    ]
    outcomes = [attempt(call) for call in calls]
    all_at(folder, "told", rank, world_size)
    if rank == 0:
        os.kill(pid, signal.SIGCONT)
    outcomes.append(attempt(lambda: store.barrier(client, world_size, "after", LONG, rank)))
    assert client.timeout == before
    return outcomes


@pytest.mark.parametrize("libuv", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stopped_host(libuv: bool, tmp_path: Path) -> None:
    """No call outlasts its timeout by more than a second; when the host goes on, so does all."""
    with hosted(libuv) as (port, pid):
        results = run_ranks(_host_stops, 3, port, pid, str(tmp_path), init=False)
    for *outcomes, after in results:
        for number, (name, text, took) in enumerate(outcomes):
            assert name == "StoreLostError", (number, text)
            assert f"127.0.0.1:{port} does not answer" in text
            assert ("(a test)" in text) is (number not in (4, 5)), text
            assert took < 2, number
        assert after[:2] == ["", ""]


def _host_stops_for_good(rank: int, world_size: int, port: int, pid: int, folder: str) -> Any:
    client = connect(port)
    for _ in range(3):
        store.barrier(client, world_size, "p", 30, rank)
    all_at(folder, "passed", rank, world_size)
    if rank == 0:  # the others wait already
        time.sleep(1)
        stop(pid)
    return attempt(lambda: store.barrier(client, world_size, "p", 18, rank))


@pytest.mark.slow
def test_a_host_that_stops_under_a_long_wait(tmp_path: Path) -> None:
    """A timeout long enough for a blocking wait is also kept, whenever the host stops."""
    with hosted() as (port, pid):
        for name, _, took in run_ranks(
            _host_stops_for_good, 3, port, pid, str(tmp_path), init=False
        ):
            assert name == "StoreLostError"
            assert took < 19


def _host_dies(rank: int, world_size: int, port: int, pid: int, timeout: float) -> Any:
    client = connect(port)
    store.barrier(client, world_size, "p", 20, rank)
    if rank == 0:
        time.sleep(0.2)  # the others wait by now, most likely
        os.kill(pid, signal.SIGKILL)
    outcomes = [attempt(lambda: store.barrier(client, world_size, "p", timeout, rank))]
    outcomes.append(attempt(lambda: store.barrier(client, world_size, "p", timeout, rank)))
    return outcomes


@pytest.mark.parametrize("timeout", [10.0, 60.0])
def test_a_host_that_dies(timeout: float) -> None:
    """Every rank gets one clear error within seconds, also from the next call."""
    with hosted() as (port, pid):
        for outcomes in run_ranks(_host_dies, 3, port, pid, timeout, init=False):
            for name, text, took in outcomes:
                assert name == "StoreLostError"
                assert f"the store at 127.0.0.1:{port} is gone" in text
                assert took < 5


@pytest.mark.parametrize("is_used", [True, False])
def test_a_host_that_dies_before_the_first_call(is_used: bool) -> None:
    """The error comes at once, also if the job's own request has found the connection reset."""
    with hosted() as (port, pid):
        client = connect(port)
        os.kill(pid, signal.SIGKILL)
        # Until it is reaped: a zombie's other threads may hold its sockets.
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        for _ in range(2 * is_used):
            with suppress(RuntimeError):
                client.set("key", b"value")
        name, text, took = attempt(lambda: store.barrier(client, 2, "p", LONG, 0))
    assert name == "StoreLostError"
    assert f"the store at 127.0.0.1:{port} is gone" in text
    assert took < 5


def test_a_host_that_dies_while_a_call_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that was there at the first look, and then refuses connections, is gone at once."""
    looks: list[bool] = []

    def look(*store_and_addresses: Any) -> bool:
        looks.append(len(looks) > 0 and location.is_closed(*store_and_addresses))
        return looks[-1]

    monkeypatch.setattr(own_connections, "is_closed", look)
    with hosted() as (port, pid):
        client = connect(port)
        client.set_timeout(timedelta(seconds=8))  # so long torch goes on trying, on a thread
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())
        name, text, took = attempt(lambda: store.barrier(client, 2, "p", LONG, 0))
    assert name == "StoreLostError"
    assert f"the store at 127.0.0.1:{port} is gone" in text
    assert looks == [False, True]
    assert took < 5


def _hosts_and_dies(rank: int, world_size: int, folder: str) -> Any:
    """Rank 0 hosts the store itself, and is killed while the others wait for it."""
    from torch.distributed import TCPStore

    if rank == 0:
        client: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(folder, "port.tmp").write_text(str(client.port))
        Path(folder, "port.tmp").rename(Path(folder, "port.0"))
    await_ranks(folder, "port", 1)
    if rank:
        client = connect(int(Path(folder, "port.0").read_text()))
    store.barrier(client, world_size, "p", LONG, rank)
    if rank == 0:
        while client.add("waiting", 0) < world_size - 1:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)
    client.add("waiting", 1)
    return [attempt(lambda: store.barrier(client, world_size, "p", LONG, rank)) for _ in range(2)]


def test_a_rank_that_hosts_the_store_and_dies(tmp_path: Path) -> None:
    """The other ranks raise that the store is gone, long before their timeout."""
    _zero, *others = try_ranks(_hosts_and_dies, 3, str(tmp_path), init=False)
    for result in others:
        assert result.ok, result
        for name, text, took in result.value:
            assert name == "StoreLostError"
            assert "is gone" in text
            assert took < LONG / 2


LEAVES = """
import sys
from hosting import attempt, connect
from rankcall import store
client = connect(int(sys.argv[1]))
print("connected", flush=True)
sys.stdin.readline()
print(*(attempt(lambda: store.barrier(client, 2, "p", t, 0))[0] for t in (0.5, 16.0)), flush=True)
"""


def test_an_abandoned_call_leaves_the_jobs_connection() -> None:
    """``Call.abandon`` ends its thread; the job's connection goes on once the host does."""
    asked, stopped = threading.Event(), threading.Event()

    def ask_twice() -> Any:
        yield Read("key")
        asked.set()
        assert stopped.wait(LONG)
        yield Read("key")

    with hosted() as (port, pid):
        client = connect(port)
        client.set("key", b"value")
        call = Call()
        helper = BackgroundCall(
            lambda: perform(client, LONG, ask_twice(), over=Over.NEW, call=call), "standby"
        )
        assert asked.wait(LONG)
        stop(pid)
        stopped.set()
        assert not helper.ended(0.2)
        call.abandon()
        assert helper.ended(LONG / 2), "the call was not given up"
        with pytest.raises(StoreLostError):
            helper.outcome()
        os.kill(pid, signal.SIGCONT)
        assert client.get("key") == b"value"


CONNECTS = """
import sys, threading
from hosting import connect
from rankcall import store
from rankcall.c10d.requests import Read
from rankcall.background import BackgroundCall
from rankcall.c10d.calls import Call
from rankcall.c10d.client import Over, perform

def read():
    yield Read("key")

client, call = connect(int(sys.argv[1])), Call()
print("connected", flush=True)
sys.stdin.readline()
helper = BackgroundCall(lambda: perform(client, 60, read(), over=Over.NEW, call=call), "standby")
print(helper.ended(1), flush=True)
call.abandon()
"""


@pytest.mark.parametrize(
    ("program", "said"), [(LEAVES, "StoreLostError StoreLostError"), (CONNECTS, "False")]
)
def test_a_process_ends_well_beside_a_stopped_host(program: str, said: str) -> None:
    """Threads that still wait for the store, or connect to it, do not hold it up: status 0."""
    with hosted() as (port, pid):
        leaving = subprocess.Popen(
            [sys.executable, "-c", program, str(port)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            assert leaving.stdout is not None
            assert leaving.stdout.readline() == "connected\n"
            stop(pid)
            out, errors = leaving.communicate("go\n", timeout=240)
        finally:
            leaving.kill()
    assert out == f"{said}\n", errors
    assert leaving.returncode == 0, errors

"""Groups of many workers: descriptors are counted before a group starts, and while it grows."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rpcgroup import aside, come_up, names
from world import wait_until

pytestmark = pytest.mark.multiproc
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "rpc_workers.py"


def _limit(count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _too_many(rank: int, world_size: int) -> str:
    """The first of 400 workers may open 512 files."""
    from rankcall.errors import BackendUnavailableError

    _limit(512)
    with pytest.raises(BackendUnavailableError) as caught:
        come_up(0, 400, "ZMQ")
    return str(caught.value)


def test_the_limit_of_descriptors_is_checked_at_the_start() -> None:
    """The error comes before the other workers do, and says what is needed and what to do."""
    (message,) = run_ranks(_too_many, 1, init=False)
    needed = int(message.split("'w0' needs ")[1].split()[0])
    assert 2 * 399 < needed < 2 * 399 + 100
    assert "file descriptors to talk to 399 more workers" in message
    assert "the limit of its process is 512: raise it with `ulimit -n 4096`" in message


def _grows_too_large(rank: int, world_size: int) -> Any:
    """Rank 0 may open few further files when rank 1 joins."""
    from rankcall import rpc

    store = aside()
    if rank == 0:
        come_up(0, None, "ZMQ")
        _limit(len(os.listdir("/proc/self/fd")) + 14)
        store.set("up", "")
        store.wait(["refused"])
        _limit(1024)
        wait_until(lambda: names() == {"w0"})
        rpc.shutdown(timeout=120)
        return None
    store.wait(["up"])
    with pytest.raises(RuntimeError) as caught:
        come_up(1, None, "ZMQ")
    store.set("refused", "")
    return str(caught.value)


def test_a_group_that_grows_beyond_a_members_limit() -> None:
    """The newcomer's ``init_rpc`` says which member has no room, and the member forgets it."""
    _, message = run_ranks(_grows_too_large, 2, init=False)
    assert "worker 'w0' needs" in message
    assert "file descriptors to talk to another worker" in message


@pytest.mark.slow
@pytest.mark.timeout(900, func_only=True)
def test_four_hundred_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """One worker of 400 calls all others, on its host and on another: two descriptors for each."""
    command = [sys.executable, str(BENCHMARK), "--workers", "400", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{figures}")
    for where in ("one_host", "two_hosts"):
        assert 2 * 399 <= figures[f"{where}_descriptors"] <= 2 * 399 + 40
    assert figures["one_host_descriptors_at_start"] <= 40  # connections are made when used

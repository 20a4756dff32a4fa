"""RPC jobs that hang: the watcher and ``diagnose`` say who waits for whose answer.

Each job has a folder of its own for rings and workers' directories, so that jobs that run at the
same time do not see each other's.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from rpcgroup import backend, come_up
from world import wait_until

from rankcall.analysis.looks import diagnose_asking
from rankcall.run.opening import open_run
from rankcall.testing import start_ranks

__all__ = ["backend"]  # a fixture
pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]
HANG_AFTER_S = 2.0


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the job of each test a folder of its own."""
    folder = tmp_path / "shm"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("RANKCALL_SHM", str(folder))
    return folder


def blocks() -> None:
    """Not return while the job lives."""
    time.sleep(3600)


def passes_on(to: str) -> None:
    """Wait for the answer of another worker."""
    from torch.distributed import rpc

    rpc.rpc_sync(to, blocks, timeout=0)


def there_and_back(place: int) -> None:
    """Call the other worker of two, from each of them in turn."""
    from torch.distributed import rpc

    rpc.rpc_sync(f"w{1 - place}", there_and_back, args=(1 - place,), timeout=0)


def _chain(rank: int, world_size: int, backend: str) -> None:
    """Let 0 wait for 1, and 1 for 2, which does not return."""
    from torch.distributed import rpc

    come_up(rank, world_size, backend)
    if rank == 0:
        rpc.rpc_sync("w1", passes_on, args=("w2",), timeout=0)
    time.sleep(3600)


def _circle(rank: int, world_size: int, backend: str) -> None:
    """Let two workers with one thread each wait for each other: no thread is left to answer."""
    come_up(rank, world_size, backend, num_worker_threads=1)
    if rank == 0:
        there_and_back(0)
    time.sleep(3600)


def findings(program: Any, ranks: int, backend: str, run: Path) -> list[dict[str, Any]]:
    """Run a job until its watcher speaks; return the finding of the watcher, and of diagnose."""
    with start_ranks(
        program,
        ranks,
        backend,
        init=False,
        run_dir=run,
        watch={"hang_after": HANG_AFTER_S},
        timeout=200,
    ):
        wait_until(lambda: list(run.glob("hangs/*/verdict.json")), 200)
        now = diagnose_asking(open_run(run), HANG_AFTER_S)
    kept = json.loads(next(run.glob("hangs/*/verdict.json")).read_text())["findings"]
    return [
        *kept,
        *({"kind": f.kind, "ranks": [*f.ranks], "summary": f.summary} for f in now.findings),
    ]


@pytest.mark.slow
def test_a_chain_of_calls(tmp_path: Path, backend: str) -> None:
    """The worker at its end is named, with the function that it is in."""
    found = findings(_chain, 3, backend, tmp_path / "run")
    assert [(each["kind"], each["ranks"]) for each in found] == [("rpc", [2])] * 2
    for each in found:
        assert "for worker 'w2', rank 2" in each["summary"]
        assert "test_rpc_hang.blocks" in each["summary"].partition("Rank 2 has been in")[2]
        assert "test_rpc_hang.blocks, called at " in each["summary"]


@pytest.mark.slow
def test_workers_that_wait_for_each_other(tmp_path: Path, backend: str) -> None:
    """Both are named, with the function that no thread is left for."""
    found = findings(_circle, 2, backend, tmp_path / "run")
    assert [(each["kind"], each["ranks"]) for each in found] == [("rpc", [0, 1])] * 2
    for each in found:
        assert "test_rpc_hang.there_and_back" in each["summary"]

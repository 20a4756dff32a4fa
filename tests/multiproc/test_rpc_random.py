"""RPC under random calls, kills, stops and restarts, against a model of what may have run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rpcrandom import judge, play

pytestmark = pytest.mark.multiproc


def check(folder: Path, size: int, seconds: float, seed: int, monkeypatch) -> None:
    """Run a group, and hold its logs against the rules."""
    from rankcall.rpc.backends.zmq.agent_module import AGENT
    from rankcall.rpc.backends.zmq.worker_dir import WorkerDir

    AGENT.prebuild()  # not at the cost of a worker's deadline
    late = list(play(folder, size, seconds, seed))
    outcome = judge(folder)
    print(f"seed {seed}: {dict(outcome.counts)}")
    assert late == [], outcome.problems[:20]
    assert outcome.problems == []
    assert outcome.counts["answered"] > 20
    monkeypatch.setenv("RANKCALL_SHM", str(folder / "shm"))
    WorkerDir(1).close()  # removes what the killed workers left
    assert not list((folder / "shm").rglob("*"))


def test_random_calls_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No wrong byte, no call run twice, no call without an end, nothing left behind."""
    check(tmp_path, 3, 50.0, 3, monkeypatch)  # with its start and its end, a minute


@pytest.mark.slow
@pytest.mark.timeout(4000, func_only=True)
@pytest.mark.parametrize("seed", range(3))
def test_random_calls_for_long(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with more workers, for RANKCALL_RPC_RANDOM_SECONDS (default 600) each."""
    seconds = float(os.environ.get("RANKCALL_RPC_RANDOM_SECONDS", "600"))
    check(tmp_path, 3 + seed, seconds, 100 + seed, monkeypatch)

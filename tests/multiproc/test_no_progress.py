"""In real jobs that wait outside any collective, watcher and diagnose name the absent rank."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import wait_until

from rankcall.analysis.looks import diagnose_asking
from rankcall.run.opening import open_run
from rankcall.testing import Ranks, start_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.timeout(300)]
HANG_AFTER_S = 2.0


def late_to_init(rank: int, world_size: int) -> None:
    """Rank 1 works for a long time before it makes its process group."""
    if rank == 1:
        time.sleep(3600)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))


def alone_in_new_group(rank: int, world_size: int) -> None:
    """All ranks issue collectives; then rank 0 alone makes a group."""
    for _ in range(50):
        dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.new_group([0, 1])
    time.sleep(3600)


def verdicts(run: Path) -> list[dict[str, Any]]:
    """Return the verdicts that the watcher has kept."""
    return [json.loads(path.read_text()) for path in sorted(run.glob("hangs/*/verdict.json"))]


def check(run: Path, ranks: Ranks, absent: int, function: str) -> None:
    """Wait for the watcher's verdict; ``diagnose`` must agree with it."""
    wait_until(lambda: bool(verdicts(run)), 200)
    (finding,) = verdicts(run)[0]["findings"]
    (now,) = diagnose_asking(open_run(run), HANG_AFTER_S).findings
    for kind, ranks_, sure, summary in (
        (finding["kind"], finding["ranks"], finding["confidence"], finding["summary"]),
        (now.kind, list(now.ranks), now.confidence, now.summary),
    ):
        assert (kind, ranks_, sure) == ("no_progress", [absent], "certain")
        assert f"in {function} at " in summary
        assert "test_no_progress.py:" in summary


def test_a_rank_that_is_late_to_init_process_group(tmp_path: Path) -> None:
    """The rank that has not called it is named, and the line where the other waits."""
    run = tmp_path / "run"
    with start_ranks(
        late_to_init, 2, run_dir=run, init=False, watch={"hang_after": HANG_AFTER_S}, timeout=200
    ) as ranks:
        check(run, ranks, 1, "init_process_group")


def test_a_rank_that_is_alone_in_new_group(tmp_path: Path) -> None:
    """A job that had issued many calls a second is not healthy once it waits in new_group."""
    run = tmp_path / "run"
    with start_ranks(
        alone_in_new_group, 2, run_dir=run, watch={"hang_after": HANG_AFTER_S}, timeout=200
    ) as ranks:
        check(run, ranks, 1, "new_group")

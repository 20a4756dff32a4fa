"""``spawn_ranks``, on which other tests rely: results, failures, hangs, and clean ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks import RanksFailed, run_ranks, try_ranks
from world import wait_until

from rankcall.testing import start_ranks

pytestmark = pytest.mark.multiproc


def _sum(rank: int, world_size: int, add: int) -> int:
    import torch
    import torch.distributed as dist

    tensor = torch.tensor([rank + add])
    dist.all_reduce(tensor)
    return int(tensor.item())


def _fail_on_one(rank: int, world_size: int) -> None:
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _hang(rank: int, world_size: int, folder: str = "") -> None:
    if folder:
        (Path(folder) / str(rank)).touch()
    time.sleep(3600)


def _killed(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_results_come_back_in_rank_order() -> None:
    """Values come back in rank order, and the default group works."""
    assert run_ranks(_sum, 2, 10) == [21, 21]


def test_a_failure_names_the_rank_and_its_traceback() -> None:
    """If one rank raises, the others are ended, and the message has the traceback."""
    with pytest.raises(RanksFailed, match="rank one says no"):
        run_ranks(_fail_on_one, 2)


def test_a_missed_deadline_is_an_error() -> None:
    """If the time is up, ``spawn_ranks`` raises, and no process is left."""
    with pytest.raises(RanksFailed, match=r"not done after 0\.1 s") as caught:
        run_ranks(_hang, 2, timeout=0.1, init=False)
    for result in caught.value.results:
        assert not Path(f"/proc/{result.pid}").exists()


def test_a_hang_dumps_stacks(tmp_path: Path) -> None:
    """A rank that still runs at the end is killed, and its stderr has the stacks of its threads."""
    with start_ranks(_hang, 2, str(tmp_path), init=False) as ranks:
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        assert not ranks.wait(0.0)
    for result in ranks.results:
        assert "in _hang" in result.stderr


def test_a_killed_rank_is_reported_by_its_signal() -> None:
    """``check=False`` returns the exit code of a killed rank instead of raising."""
    first, second = try_ranks(_killed, 2, init=False)
    assert first.ok
    assert first.value == first.pid
    assert second.exitcode == -signal.SIGKILL


def test_a_script_runs_as_main(tmp_path: Path) -> None:
    """A path runs as ``__main__`` with its arguments."""
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    (result,) = try_ranks(script, 1, "a", 2)
    assert result.ok
    assert "__main__ ['a', '2']" in result.stdout

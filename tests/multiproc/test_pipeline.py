"""A real pipeline over Gloo: the slow stage is to blame, and its lines are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import launch

from rankcall.analysis.details import detail
from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

# Stage 1 waits for stage 2 twice in each step: with its send, and for the gradient.
STAGES = """
import time, torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, last = dist.get_rank(), dist.get_world_size() - 1
activation = torch.zeros(1 << 18)


def compute():
    time.sleep(0.06 if rank == 2 else 0.0)


for step in range(25):
    if rank > 0:
        dist.recv(activation, rank - 1)
    compute()
    if rank < last:
        dist.send(activation, rank + 1)
        dist.recv(activation, rank + 1)
    if rank > 0:
        dist.send(activation, rank - 1)
dist.destroy_process_group()
"""


def test_the_slow_stage_of_a_real_pipeline(tmp_path: Path) -> None:
    """Stage 2 computes 60 ms in each step. No other stage caused half as much waiting."""
    (tmp_path / "stage.py").write_text(STAGES)
    ended = launch("run", "--nproc-per-node", "4", "stage.py", cwd=tmp_path, timeout=300)
    assert ended.status == 0, ended.err
    summary = detail(load(tmp_path / "rankcall-runs" / "latest")).summary
    first, second = summary.stragglers[:2]
    assert first.rank == 2
    assert (second.caused_wait_ms or 0.0) < (first.caused_wait_ms or 0.0) / 2
    gap = next(gap for gap in summary.gaps if gap.rank == 2)
    lines = [STAGES.splitlines()[site.line - 1].strip() for site in (gap.after, gap.before)]
    assert lines == ["dist.recv(activation, rank - 1)", "dist.send(activation, rank + 1)"]
    assert gap.median_ms >= 60
    shown = launch("report", cwd=tmp_path, env={"COLUMNS": "120"}).out
    assert "rank 2: " in shown
    assert "ms between stage.py:" in shown

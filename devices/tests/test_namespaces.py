"""Ranks in several network namespaces of one machine, which stand for several hosts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_devices import environment
from simulated_devices.testing import PRELUDE


def _can_unshare() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode == 0
    )


@pytest.mark.skipif(not _can_unshare(), reason="network namespaces cannot be made here")
def test_ranks_without_a_common_network(tmp_path: Path) -> None:
    """NCCL works between namespaces, since it needs only the shared folder."""
    code = (
        PRELUDE
        + "init(); x = torch.ones(3, device='cuda'); dist.all_reduce(x); same(x, [2] * 3); say(os.readlink('/proc/self/ns/net'))"
    )
    common = environment(gpus=2) | {
        "WORLD_SIZE": "2",
        "RENDEZVOUS": str(tmp_path / "store"),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", code],
            env=os.environ | common | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(set(outputs)) == 2

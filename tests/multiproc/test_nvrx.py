"""NVRx's ``ft_launcher`` leaves out the node that rankcall's verdict names.

NVRx is no package of our environment (see the Makefile): ``make setup-integrations`` puts it into a
folder of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from launch import Launch
from ports import free_port

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]
NVRX = Path(sys.prefix) / "nvrx"
PROGRAM = NVRX / "bin/ft_launcher"

JOB = """
import os, time
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
from rankcall import watch
from rankcall.integrations.nvrx import ExcludeThisNode

dist.init_process_group("gloo")
client = RankMonitorClient()
client.init_workload_monitoring()
exclude = ExcludeThisNode(client)

def leave(findings):
    exclude(findings)
    os._exit(3)  # so that the launcher need not wait for its own time-out

watch.start(3, leave)
world = dist.get_world_size()
for step in range(10):
    if step == 5 and world == 2 and os.environ["RANKCALL_HOST"] == "node-1":
        time.sleep(1000)
    dist.all_reduce(torch.ones(2))
    client.send_heartbeat()
os.write(1, f"done {world}\\n".encode())
dist.destroy_process_group()
client.shutdown_workload_monitoring()
"""


@pytest.mark.skipif(not PROGRAM.exists(), reason="NVRx is not installed: make setup-integrations")
def test_the_culprits_node_is_left_out(tmp_path: Path) -> None:
    """Its launcher says why it leaves, and the other node finishes the job alone."""
    (tmp_path / "job.py").write_text(JOB)
    address = f"localhost:{free_port()}"
    nodes = [
        Launch(
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=one"),
            *(f"--rdzv-conf=is_host={int(number == 0)},last_call_timeout=2",),
            *("--local-addr=localhost", "--ft-param-workload_check_interval=0.5"),
            *("--ft-param-initial_rank_heartbeat_timeout=600",),
            *("--ft-param-rank_heartbeat_timeout=600", "job.py"),
            program=(sys.executable, PROGRAM),
            cwd=tmp_path,
            env={
                "PYTHONPATH": str(NVRX),
                "RANKCALL_HOST": f"node-{number}",
                "RANKCALL_CAPTURE": "python",
                "RANKCALL_RUN_DIR": str(tmp_path / "run"),
            },
        )
        for number in (0, 1)
    ]
    good, bad = (node.finish(linger=60) for node in nodes)
    assert "done 1" in good.out, good.err
    assert good.status == 0
    said = bad.out + bad.err
    assert "is excluded from the training due to an user request" in said
    assert "action=WorkloadAction.ExcludeThisNode, description=Rank " in said
    assert "(node-1, pid " in said
    assert os.listdir(tmp_path / "run" / "hangs")

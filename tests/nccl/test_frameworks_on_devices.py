"""What the frameworks, graphs and torch's own watchdog do on NCCL, as the records have it."""

from __future__ import annotations

import json

import polars as pl
import pytest
from recorded_jobs import TIMED_OUT, RecordedJobs, torch_version

# Five steps of a model of two layers; `wrap` makes it parallel.
TRAIN = """
from torch import nn
init(device_id=torch.device("cuda", rank)); torch.manual_seed(7)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).cuda()
{wrap}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(4, 16, device="cuda")).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
torch.cuda.synchronize(); say("done"); wait_told("end")
dist.destroy_process_group()
"""
# How each wraps the model, and the ops that it must have issued, at least so often on each rank.
WRAPS = {
    "ddp": (
        "model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])",
        {"all_reduce": 5},
    ),
    "fsdp2": (
        """
from torch.distributed.fsdp import fully_shard
for layer in model: fully_shard(layer)
fully_shard(model)
""",
        # Each layer is gathered in forward, the first one again in backward.
        {"all_gather": 15, "reduce_scatter": 10},
    ),
    "tensor parallel": (
        """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import *
plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
model = parallelize_module(model, init_device_mesh("cuda", (2,)), plan)
""",
        {"all_reduce": 5},
    ),
}

PIPELINE = """
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
init(device_id=torch.device("cuda", rank)); device = torch.device("cuda", rank)
stage = PipelineStage(nn.Linear(16, 16).cuda(), rank, 2, device)
schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
for _ in range(5):
    if rank == 0: schedule.step(torch.ones(8, 16, device=device))
    else: schedule.step(target=torch.zeros(8, 16, device=device))
torch.cuda.synchronize(); say("done"); wait_told("end")
dist.destroy_process_group()
"""

COMPILED = """
import torch.distributed._functional_collectives as funcol
init(device_id=torch.device("cuda", rank))
def scaled_sum(tensor): return funcol.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1
run = torch.compile(scaled_sum, backend="aot_eager", fullgraph=True)
for _ in range(5): same(run(torch.ones(4, device="cuda")), [5, 5, 5, 5])
torch.cuda.synchronize(); say("done"); wait_told("end")
dist.destroy_process_group()
"""

PROGRAMS = {
    **{
        name: (TRAIN.replace("{wrap}", wrap.strip()), least)
        for name, (wrap, least) in WRAPS.items()
    },
    "pipeline": (PIPELINE, {"send": 20, "recv": 20}),
    "compiled": (COMPILED, {"all_reduce": 5}),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_ops_of_frameworks_have_ends(jobs: RecordedJobs, capture: str, name: str) -> None:
    """Once a framework's job has waited for its devices, each of its ops has completed."""
    program, least = PROGRAMS[name]
    job = jobs.start(2, program, RANKCALL_CAPTURE=capture)
    for rank in range(2):
        job.job.wait_for("done", rank)
    rows = job.wait_for(lambda rows: len(rows) and _are_over(rows))
    unknown = rows.filter("abandoned")
    if torch_version() >= (2, 15):
        # Its back end does not tell the end of a batch, and a pipeline's first messages are one.
        in_a_batch = pl.col("op").is_in(["send", "recv"]) & (pl.col("index") < 7)
        unknown = unknown.filter(~in_a_batch)
    assert unknown.is_empty(), unknown
    for op, count in least.items():
        for rank in range(2):
            issued = rows.filter(op=op, rank=rank).height
            assert issued >= count, (op, rank, issued)
    job.tell("end")
    job.job.succeed()


def _are_over(rows: pl.DataFrame) -> bool:
    """Return whether each op has completed, or will have no end on record."""
    return bool((rows["completed_ns"].is_not_null() | rows["abandoned"]).all())


def test_a_graph_is_captured_and_replayed(jobs: RecordedJobs, capture: str) -> None:
    """A capture stays valid. Its op has no end of its own; ops before and after it have theirs."""
    job = jobs.start(
        2,
        """
        init(device_id=torch.device("cuda", rank)); x = torch.ones(4, device="cuda")
        for _ in range(2): dist.all_reduce(x)
        torch.cuda.synchronize(); x.fill_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): dist.all_reduce(x)
        for _ in range(3): graph.replay()
        torch.cuda.synchronize(); same(x, [8, 8, 8, 8])
        dist.all_reduce(x); torch.cuda.synchronize(); same(x, [16, 16, 16, 16])
        graph.reset()  # it must not outlive the group: torch 2.15.0 refers to that
        say("done"); wait_told("end"); dist.destroy_process_group()
        """,
        RANKCALL_CAPTURE=capture,
    )
    job.wait_for(lambda rows: rows.filter(status="completed").height >= 6)
    job.after_a_look()
    rows = job.records()
    for rank in range(2):
        of_rank = rows.filter(rank=rank)
        assert of_rank["abandoned"].to_list() == [False, False, True, False]
        assert of_rank["completed_ns"].is_null().to_list() == [False, False, True, False]
    job.tell("end")
    job.job.succeed()


def test_the_watcher_speaks_beside_torchs_watchdog(jobs: RecordedJobs, capture: str) -> None:
    """The watcher names the rank before torch's watchdog times out, which ends the job as usual."""
    job = jobs.start(
        2,
        """
        from rankcall import watch
        watch.start(hang_after=2)
        init(timeout=15); x = torch.ones(4, device="cuda")
        for count in range(5):
            if count < 4 or rank == 0: dist.all_reduce(x); torch.cuda.synchronize()
        wait_told("end"); os._exit(0)
        """,
        RANKCALL_CAPTURE=capture,
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="100",  # else a minute, for the dumps of other ranks
    )
    waiting, missing = job.job.ranks
    job.job.wait_for("missing: Rank 1", 0)
    job.job.wait_for(TIMED_OUT, 0)
    assert "missing: Rank 1" in waiting.output.split(TIMED_OUT)[0]
    job.tell("end")
    job.job.wait()
    assert (waiting.status, missing.status) == (-6, 0), job.job.report()
    found = json.loads(job.command("diagnose", "--json").stdout)
    assert [one["ranks"] for one in found["hangs"][0]["causes"]] == [[1]]

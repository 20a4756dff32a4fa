"""Dumps of Flight Recorder that the installed torch writes on Gloo lead to the right verdict."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks, try_ranks
from scenarios import SLOW_KINDS

import rankcall
from rankcall.analysis.verdicts import diagnose
from rankcall.run.load import load

pytestmark = pytest.mark.multiproc

RANKS = 4
LATER_NS = 60 * 10**9  # the dumps are dated a minute after the last call
ENV = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}


def _dump(rank: int, folder: str, form: str) -> None:
    import torch._C._distributed_c10d as c10d

    path = Path(folder) / f"trace_{rank}"
    if form == "json":
        path.write_bytes(c10d._dump_fr_trace_json())
    else:
        path.write_bytes(c10d._dump_fr_trace())
    at = path.stat().st_mtime_ns + LATER_NS
    os.utime(path, ns=(at, at))


def _everybody(rank: int, world_size: int, what: str, ranks: list[int]) -> None:
    """Meet without a collective: through the store."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    store.set(f"{what}/{rank}", "1")
    store.wait([f"{what}/{member}" for member in ranks])


def _healthy(rank: int, world_size: int, folder: str, form: str) -> None:
    import torch
    import torch.distributed as dist

    x = torch.ones(8)
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for _ in range(5):
        dist.all_reduce(x)
        dist.all_reduce(x, group=half)
        dist.broadcast(x, 0)
    dist.barrier()
    _everybody(rank, world_size, "end", list(range(world_size)))
    _dump(rank, folder, form)
    _everybody(rank, world_size, "dumped", list(range(world_size)))


def _hangs(rank: int, world_size: int, folder: str, form: str, fault: str, victim: int) -> None:
    """Issue three sound calls, then one in which ``victim`` goes wrong, and dump."""
    import torch
    import torch.distributed as dist

    x = torch.ones(8)
    for _ in range(3):
        dist.all_reduce(x)
    others = [other for other in range(world_size) if other != victim]
    works = []
    if fault == "size":
        # Gloo aborts the process if a message does not fit. A short one leaves the rest as it was.
        y = torch.ones(16 if rank != 0 and victim in (0, rank) else 8)
        works.append(dist.broadcast(y, 0, async_op=True))
    elif rank != victim:
        works.append(dist.all_reduce(x, async_op=True))
    elif fault == "order":
        works.append(dist.all_gather([torch.ones(8) for _ in range(4)], x, async_op=True))
    _everybody(rank, world_size, "issued", list(range(world_size)))
    if fault != "dead" or rank != victim:
        _dump(rank, folder, form)
    if rank == victim and fault == "dead":
        _everybody(rank, world_size, "dumped", [rank, *others])
        os.kill(os.getpid(), signal.SIGKILL)
    _everybody(rank, world_size, "dumped", list(range(world_size)))
    os._exit(0)  # the calls in flight never end


def _verdict(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return what is found. On a busy machine, a rank of a healthy job may well be slow."""
    findings = diagnose(load(folder)).findings
    return [(found.kind, found.ranks) for found in findings if found.kind not in SLOW_KINDS]


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_a_healthy_job_has_no_finding(tmp_path: Path, form: str) -> None:
    """All calls have ended, in the world and in its halves: no rank is named."""
    run_ranks(_healthy, RANKS, str(tmp_path), form, env=ENV)
    assert _verdict(tmp_path) == []
    run = load(tmp_path)
    assert run.world_size == RANKS
    assert {tuple(group.ranks) for group in run.run_groups} == {(0, 1, 2, 3), (0, 1), (2, 3)}
    assert len(run.records) == RANKS * 16


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("fault", "kind", "form"),
    [
        ("missing", "missing", "pickle"),
        ("missing", "missing", "json"),
        ("order", "desync", "pickle"),
        ("size", "mismatch", "pickle"),
    ],
)
def test_the_rank_that_went_wrong_is_named(
    tmp_path: Path, fault: str, kind: str, form: str, victim: int
) -> None:
    """A rank that is missing, or issues another op or another size, is the only one named."""
    try_ranks(_hangs, RANKS, str(tmp_path), form, fault, victim, env=ENV)
    assert len(list(tmp_path.iterdir())) == RANKS
    assert _verdict(tmp_path) == [(kind, (victim,))]


def test_a_rank_that_died_without_a_dump_is_named(tmp_path: Path) -> None:
    """The others wait for it, and it left no dump. That is only possibly the cause."""
    try_ranks(_hangs, RANKS, str(tmp_path), "pickle", "dead", 1, env=ENV)
    diagnosis = diagnose(load(tmp_path))
    # The dumps of Gloo do not say how many ranks there are, but rank 3 has left one.
    assert [
        (finding.kind, finding.ranks, finding.confidence) for finding in diagnosis.findings
    ] == [("missing", (1,), "possible")]
    assert "left no dump" in diagnosis.findings[0].summary


def test_the_commands_read_a_directory_of_dumps_without_torch(tmp_path: Path) -> None:
    """Diagnose, top, report and export work where torch cannot be imported."""
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    try_ranks(_hangs, RANKS, str(dumps), "pickle", "missing", 2, env=ENV)
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = f"{tmp_path}{os.pathsep}{Path(rankcall.__file__).parents[1]}"

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rankcall", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    diagnosed = command("diagnose", str(dumps), "--json")
    assert diagnosed.returncode == 1, diagnosed.stderr
    (finding,) = json.loads(diagnosed.stdout)["findings"]
    assert (finding["kind"], finding["ranks"], finding["victims"]) == ("missing", [2], [0, 1, 3])
    assert finding["call_site"].endswith(".py:" + finding["call_site"].rpartition(":")[2])
    assert "rank 2" in command("diagnose", str(dumps)).stdout.lower()
    assert "all_reduce" in command("top", str(dumps), "--once").stdout
    assert "all_reduce" in command("report", str(dumps)).stdout
    exported = command("export", str(dumps), "--to", "jsonl", "-o", "out.jsonl")
    assert (tmp_path / "out.jsonl").exists(), exported.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == 3 * 4 + 3
    assert {line["op"] for line in lines} == {"all_reduce"}

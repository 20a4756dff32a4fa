"""Two nodes that share no disk and no memory: evidence goes from one to the other.

The nodes are network and mount namespaces with a cable between them. A copy of one node's run
directory is read alone.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from cabled import Job, cabled
from world import wait_until

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.run.load import load

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]


def judged(disk: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Diagnosis:
    """Diagnose a copy of one node's run directory, as on a laptop."""
    copied = shutil.copytree(disk / "run", folder / f"copied-{disk.name}")
    monkeypatch.setenv("RANKCALL_SHM", str(folder / "nothing"))
    return diagnose(load(copied), state_of=lambda header: "unknown")


def ranks_in(disk: Path) -> set[int]:
    """Return the ranks of which a node's run directory has records."""
    return {
        int(re.findall(r"rank-(\d+)", path.name)[0]) for path in (disk / "run/rings").glob("rank-*")
    }


@pytest.mark.slow
def test_a_killed_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 is killed, the others hang: rank 0's node alone has the verdict, and is certain."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "kill")
        try:
            disk = nodes[0].folder
            wait_until(lambda: ranks_in(disk) == {0, 1, 2, 3}, 300)
        finally:
            text = job.end()
        diagnosis = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (3,), "certain"), text


def test_rank_0s_node_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 hangs; then its node, which is rank 0's, is lost. The other node has everything."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "stop")
        try:
            disk = nodes[1].folder
            wait_until(lambda: ranks_in(disk) == {0, 1, 2, 3}, 300)
            job.kill([0, 1])
            job.wait([0, 1])
            shutil.rmtree(nodes[0].folder)
            shutil.rmtree(nodes[0].memory)
        finally:
            text = job.end()
        diagnosis = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("missing", (1,), "certain"), text
    assert "train.py" in str(finding.call_site)
    assert sorted(path.name for path in (disk / "run/hangs/0001/stacks").glob("*")) == [
        f"rank-0000{rank}.txt" for rank in range(4)
    ]


@pytest.mark.slow
def test_ranks_that_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a watcher, ranks that fail because of a killed one send what they have at exit."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "raise", RANKCALL_HANG_AFTER="0")
        try:
            job.wait([1, 2, 3])
            (job.said / "go").touch()
            job.wait([0])
        finally:
            text = job.end()
        disk = nodes[0].folder
        assert ranks_in(disk) == {0, 1, 2, 3}, text
        diagnosis = judged(disk, monkeypatch, tmp_path)
    (finding, *_) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (3,), "certain"), text


def test_a_node_whose_only_rank_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left to send its records: the other node knows that its connections closed."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "kill", world_size=3)
        try:
            disk = nodes[0].folder
            wait_until(lambda: kept_in(disk / "run"), 300)
            wait_until(lambda: ranks_in(disk) == {0, 1}, 100)
        finally:
            text = job.end()
        (kept_finding,) = kept_in(disk / "run")[0].verdict.findings
        (later_finding,) = judged(disk, monkeypatch, tmp_path).findings
    for finding in (kept_finding, later_finding):
        assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (2,), "likely"), text
        assert "its connections were closed" in finding.summary
        assert "train.py" in str(finding.call_site)
    # The node had registered its rank, if it had looked at the store before the kill.
    assert kept_finding.summary.startswith(("Rank 2 (node-b, pid ", "Rank 2 is gone"))


@pytest.mark.parametrize("is_cut", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_store_dies_with_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    """The other node, now alone, keeps a verdict of its own, its stacks and records."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "lose rank 0")
        try:
            disk = nodes[1].folder
            wait_until(lambda: len(list(job.said.glob("ready.*"))) == 4, 300)
            if is_cut:
                nodes[0].cut()  # so no process closes the connections
            job.kill([0, 1])
            job.wait([0, 1])
            (job.said / "go").touch()
            wait_until(lambda: kept_in(disk / "run"), 300)
            wait_until(lambda: ranks_in(disk) == {2, 3}, 100)
        finally:
            text = job.end()
        (kept,) = kept_in(disk / "run")
        (kept_finding,) = kept.verdict.findings
        (later_finding,) = judged(disk, monkeypatch, tmp_path).findings
    for finding in (kept_finding, later_finding):
        assert (finding.kind, finding.ranks, finding.confidence) == (
            *("missing", (0, 1)),
            "possible",  # they may be gone, or only out of reach
        ), text
        assert finding.victims == (2, 3)
        assert "train.py" in str(finding.call_site)
    assert f"the job's store at {nodes[0].address}" in " ".join(text.split())
    assert sorted(path.name for path in (kept.folder / "stacks").glob("*")) == [
        "rank-00002.txt",
        "rank-00003.txt",
    ]

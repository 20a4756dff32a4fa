"""The live page of a job on nodes that share no disk and no memory: each page shows all ranks."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cabled import PYTHON, Job, Node, cabled
from world import wait_until

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.run.load import load

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(550)]
DEADLINE_S = 240.0
PORT = "8088"  # each node has a network of its own
FETCH = """
import sys, urllib.error, urllib.request
try:
    asked = urllib.request.Request(sys.argv[1], headers={"Authorization": f"Bearer {sys.argv[2]}"})
    print(urllib.request.urlopen(asked, timeout=60).read().decode())
except urllib.error.URLError:  # it is not there yet
    print("null")
"""


class Page:
    """``rankcall serve`` on a node, as a viewer on the same node sees it."""

    def __init__(self, job: Job, node: Node) -> None:
        self._node = node
        wait_until(lambda: any(node.memory.rglob("*.ring")) and (node.folder / "run").is_dir(), 200)
        env = {"RANKCALL_SHM": "/dev/shm"}
        arguments = ("-m", "rankcall", "serve", "/mnt/run", "--port", PORT)
        self._launch = job.start(node, env, PYTHON, *arguments)
        self.process = self._launch.process

    def diagnosis(self) -> Any:
        """Return the page's JSON, or None without an answer."""
        url = f"http://127.0.0.1:{PORT}/api/diagnosis"
        token = self._launch.printed().strip().partition("#token=")[2]
        done = subprocess.run(
            self._node.command(PYTHON, "-c", FETCH, url, token),
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return json.loads(done.stdout)

    def until(self, true: Callable[[Any], bool]) -> Any:
        """Look until something is true of what the page says, and return that."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            diagnosis = self.diagnosis()
            if diagnosis and true(diagnosis):
                return diagnosis
            assert time.monotonic() < deadline, json.dumps(diagnosis, indent=1)
            assert self.process.poll() is None


def hosts(found: Any) -> list[str]:
    """Return the hosts of all ranks, as far as they are known."""
    return [rank["host"] for rank in found["ranks"] if rank["state"] != "unknown"]


def with_all_records(nodes: list[Node], folder: Path) -> Diagnosis:
    """Diagnose the live records of all nodes together."""
    rings = folder / "whole/rings"
    rings.mkdir(parents=True)
    for node in nodes[:2]:
        for ring in node.memory.rglob("*.ring"):
            shutil.copyfile(ring, rings / ring.name)
    return diagnose(load(folder / "whole"))


def victims(found: Any) -> list[list[int]]:
    """Return the ranks that wait, of each finding of a page."""
    return [finding["victims"] for finding in found["findings"]]


def test_each_page_shows_all_ranks(tmp_path: Path) -> None:
    """While the job goes on and while it hangs, pages of both nodes have all four ranks.

    Their verdict is that of ``diagnose`` with the records of both nodes.
    """
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "steps")
        try:
            pages = [Page(job, node) for node in nodes[:2]]
            for page in pages:
                page.until(lambda diagnosis: hosts(diagnosis) == ["node-a"] * 2 + ["node-b"] * 2)
            (job.said / "hold").touch()
            # A first look may know of one node what was so a moment before the others' wait began.
            seen = [
                page.until(lambda diagnosis: victims(diagnosis) == [[0, 2, 3]]) for page in pages
            ]
            expected = with_all_records(nodes, tmp_path)
        finally:
            text = job.end()
    (finding,) = expected.findings
    assert (finding.kind, finding.ranks) == ("missing", (1,)), text
    for diagnosis in seen:
        (cause,) = diagnosis["findings"]
        assert (cause["kind"], cause["ranks"], cause["victims"], cause["op"], cause["seq"]) == (
            *(finding.kind, list(finding.ranks), list(finding.victims)),
            *(finding.op, finding.seq),
        ), text
        assert cause["call_site"] == finding.call_site
        assert cause["hosts"] == ["node-a"]


@pytest.mark.slow
def test_a_node_that_stops_answering(tmp_path: Path) -> None:
    """If all processes of a node are stopped, the page of the other names it, and goes on."""
    with cabled(tmp_path) as nodes:
        job = Job(nodes, tmp_path, "steps", RANKCALL_HANG_AFTER="60")
        try:
            page = Page(job, nodes[0])
            # These ranks go on, and so look for viewers only every 30 seconds.
            page.until(lambda diagnosis: hosts(diagnosis) == ["node-a"] * 2 + ["node-b"] * 2)
            for rank in (2, 3):
                job.ranks[rank].process.send_signal(signal.SIGSTOP)
            late = page.until(
                lambda diagnosis: any(
                    "node-b (rank 2-3) has not answered for" in problem
                    for problem in diagnosis["problems"]
                )
            )
            unknown = page.until(lambda diagnosis: hosts(diagnosis) == ["node-a"] * 2)
        finally:
            job.end()
    assert late["state"] == unknown["state"] == "live"
    assert [row["host"] for row in unknown["ranks"]] == ["node-a"] * 2 + ["node-b"] * 2

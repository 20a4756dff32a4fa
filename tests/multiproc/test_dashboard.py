"""Each query of the Grafana dashboard returns data from a Prometheus that scrapes a real job."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import Launch
from ports import bound, free_port

pytest.importorskip("prometheus_client", reason="needs rankcall[prometheus]")

DASHBOARD = Path(__file__).parents[2] / "docs/grafana/rankcall.json"
DEADLINE_S = 150.0

# Two ranks take steps until they are ended. Rank 1 comes late, and a file makes it hang.
SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import rankcall.trace

rankcall.trace.enable("CROSSNODE", sinks=[rankcall.trace.PrometheusNode(int(sys.argv[1]))])
dist.init_process_group("gloo")
rank, weight = dist.get_rank(), torch.nn.Parameter(torch.ones(10_000))
optimizer = torch.optim.SGD([weight], lr=0.1)
while True:
    if rank == 1:
        while Path(sys.argv[2]).exists():
            time.sleep(0.05)
        time.sleep(0.02)
    weight.grad = torch.ones(10_000)
    dist.all_reduce(weight.grad)
    optimizer.step()
"""


def queries() -> list[tuple[str, str]]:
    """Return the title and the query of each panel, for all hosts."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [
        (panel["title"], target["expr"].replace("$host", ".*"))
        for panel in panels
        for target in panel["targets"]
    ]


def test_every_panel_asks_for_metrics_of_the_sink() -> None:
    """Each query names metrics that the sink by node serves; titles are not used twice."""
    source = Path(__file__).parents[2] / "src/rankcall/trace/sinks/prometheus_node.py"
    known = source.read_text()
    for title, query in queries():
        names = re.findall(r"rankcall_node_(\w+)", query)
        assert names, title
        for name in names:
            assert f'"{name.removesuffix("_total")}"' in known or f"rankcall_node_{name}" in known
    titles = [title for title, _ in queries()]
    assert len(titles) == len(set(titles)) >= 4


class Server:
    """Debian's Prometheus, which scrapes one address every second."""

    def __init__(self, folder: Path, target: int, port: int) -> None:
        path = shutil.which("prometheus")
        if path is None:
            pytest.skip("needs Prometheus: apt-get install prometheus, or make setup-integrations")
        config = folder / "prometheus.yml"
        config.write_text(
            "global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n"
            f"scrape_configs:\n- job_name: job\n  static_configs:\n"
            f"  - targets: ['127.0.0.1:{target}']\n"
        )
        self.url = f"http://127.0.0.1:{port}"
        self.process = subprocess.Popen(
            [
                path,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, query: str) -> list[dict[str, Any]]:
        """Return the result of a query; empty while the server is not there yet."""
        address = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                reply = json.load(answer)
        except (TimeoutError, urllib.error.URLError, ConnectionError):
            return []
        assert reply["status"] == "success", query
        return list(reply["data"]["result"])

    def value(self, query: str) -> float:
        """Return the one value of a query; NaN without one."""
        series = self.ask(query)
        return float(series[0]["value"][1]) if len(series) == 1 else float("nan")

    def end(self) -> None:
        """End the server."""
        self.process.kill()
        self.process.wait(60)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    """Return a Prometheus that scrapes a job of two ranks, and the file that makes rank 1 hang."""
    script, hold = tmp_path / "train.py", tmp_path / "hold"
    script.write_text(SCRIPT)
    with socket.socket() as taken:
        port = bound(taken)
        server = Server(tmp_path, port, free_port())
    launched = Launch(
        *("run", "--run-dir", str(tmp_path / "run"), "--hang-after", "3"),
        *("--nproc-per-node", "2", str(script), str(port), str(hold)),
        cwd=tmp_path,
    )
    try:
        yield server, hold
    finally:
        server.end()
        launched.process.terminate()
        launched.finish(120)


def until(true: Any, what: str) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.timeout(900)
def test_each_query_returns_data(job: tuple[Server, Path]) -> None:
    """While the job runs every panel has a value, and a hang shows in those that are for it."""
    server, hold = job
    for title, query in queries():
        until(lambda query=query: server.ask(query), f"{title}: {query}")
    assert server.value("sum(rankcall_node_ranks)") == 2
    assert server.value("count(rankcall_node_steps_total)") == 1  # not one for each rank
    assert server.value("rankcall_node_verdicts_total") == 0
    hold.touch()
    until(lambda: server.value("sum(rankcall_node_overdue_ranks)") >= 1, "the hang is not seen")
    until(lambda: server.value("rankcall_node_verdicts_total") >= 1, "the verdict is not seen")
    until(lambda: server.value("max(rankcall_node_oldest_collective_seconds)") > 3, "its age")

"""Metrics of all ranks of a host from one endpoint, as Prometheus' own parser reads them."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from liveruns import HUNG_S, live_run
from tracing import origin

from rankcall.analysis.spent import RankSamples, Spending
from rankcall.ring.layout import SAMPLE, SAMPLE_COUNTERS
from rankcall.run.recoveries import (
    FILE_VARIABLE,
    AttemptEnd,
    AttemptResumed,
    AttemptStart,
    Signature,
    file_of,
    note,
)
from rankcall.testing.synthetic import synthetic_run
from rankcall.trace import PrometheusNode

pytest.importorskip("prometheus_client")
RANKS = 8
MOMENTS = "fault_ns", "verdict_ns", "ended_ns", "noticed_ns", "stopped_ns"


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(60)


def opened(run: Path | None, host: str = "node-0") -> PrometheusNode:
    """Return the sink of local rank 0 on a free port."""
    sink = PrometheusNode(0)
    sink.open(replace(origin(run, 0), host=host, attempt=0))
    return sink


def scraped(sink: PrometheusNode) -> dict[str, list[Any]]:
    """Return the samples by name."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    samples: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(sample)
    return samples


def test_a_hang_is_in_the_metrics(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """Eight live ranks, which hang: one series for the host, with the age of the oldest call."""
    run = live_run(tmp_path, RANKS, someone.pid)
    sink = opened(run)
    try:
        metrics = scraped(sink)
    finally:
        sink.close()
    states = {s.labels["state"]: s.value for s in metrics["rankcall_node_ranks"]}
    assert states == {"alive": RANKS, "stopped": 0, "gone": 0, "unknown": 0}
    (age,) = metrics["rankcall_node_oldest_collective_seconds"]
    assert age.labels == {"host": "node-0"}
    assert HUNG_S - 5 < age.value < HUNG_S + 200  # it began with the last call of each rank
    for name in ("collectives_total", "steps_total", "verdicts_total", "overdue_ranks"):
        assert len(metrics[f"rankcall_node_{name}"]) == 1, name
    assert metrics["rankcall_node_collectives_total"][0].value >= 40 * RANKS
    assert not any("rank" in sample.labels for samples in metrics.values() for sample in samples)


def test_recoveries_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent that started this process tells of restarts, and where their time went."""
    synthetic_run(tmp_path / "run", 2, 20)
    file, second = file_of(tmp_path / "run", "node-0", 1), 10**9
    ended = AttemptEnd(
        *(0, Signature("stopped"), "machine"),
        **{name: number * second for number, name in enumerate(MOMENTS, 1)},
        decision="restart",
    )
    resumed = AttemptResumed(1, 19 * second, 23 * second)
    for event in (ended, AttemptStart(1, 9 * second), resumed):
        note(file, event)
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    sink = opened(tmp_path / "run")
    try:
        metrics = scraped(sink)
    finally:
        sink.close()
    (count,) = metrics["rankcall_node_recoveries_total"]
    assert (count.labels, count.value) == ({"host": "node-0", "kind": "stopped"}, 1)
    phases = metrics["rankcall_node_recovery_seconds_total"]
    assert {sample.labels["phase"]: sample.value for sample in phases} == {
        "verdict": 1.0,
        "evidence": 1.0,
        "end": 2.0,
        "restart": 4.0,
        "start": 10.0,
        "step": 4.0,
        "catch_up": 0.0,  # not known
    }


def test_what_ranks_spend_their_time_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter for each rank and cause, of causes that its system shows."""
    samples = np.zeros(2, SAMPLE)
    known = ("gc_ns", "full_gc_ns", "runnable_ns")
    samples["known"] = sum(1 << SAMPLE_COUNTERS.index(name) for name in known)
    samples["gc_ns"], samples["full_gc_ns"] = [0, 1_000_000_000], [0, 500_000_000]
    samples["runnable_ns"], samples["disk_wait_ns"] = [0, 250_000_000], 7
    rank = RankSamples(3, samples, 0, 0, 0, 0)
    synthetic_run(tmp_path / "run", RANKS, 60)
    sink = opened(tmp_path / "run")
    look = sink._reader.snapshot
    spending = Spending(sampled=[rank, RankSamples(4, samples[:0], 0, 0, 0, 0)])
    monkeypatch.setattr(
        sink._reader, "snapshot", lambda *about: replace(look(*about), spending=spending)
    )
    try:
        late = scraped(sink)["rankcall_late_seconds_total"]
    finally:
        sink.close()
    assert {(s.labels["rank"], s.labels["cause"]): s.value for s in late} == {
        ("3", "gc"): 1.5,
        ("3", "no_cpu"): 0.25,
    }
    assert {s.labels["host"] for s in late} == {"node-0"}


def test_the_ranks_of_the_host_alone(tmp_path: Path) -> None:
    """Of a run on a shared disk, each host shows its own ranks; bandwidths are positive."""
    synthetic_run(tmp_path / "run", RANKS, 60, hosts=2)
    for host in ("node-0", "node-1"):
        sink = opened(tmp_path / "run", host)
        try:
            metrics = scraped(sink)
        finally:
            sink.close()
        assert sum(sample.value for sample in metrics["rankcall_node_ranks"]) == RANKS / 2
        assert all(s.labels["host"] == host for s in metrics["rankcall_node_ranks"])
        rates = metrics["rankcall_node_busbw_bytes_per_second"]
        assert 1 <= len(rates) <= 8
        assert all(sample.value > 0 for sample in rates)


def test_one_rank_of_a_host_listens() -> None:
    """Other local ranks have no port, and closing them is harmless."""
    sink = PrometheusNode(0)
    sink.open(replace(origin(None), local_rank=1))
    assert sink.port is None
    sink.close()


def test_scrapes_share_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapes within a second read the run once."""
    synthetic_run(tmp_path / "run", 4, 40)
    sink = opened(tmp_path / "run")
    now, looks = [100.0], []
    monkeypatch.setattr(
        "rankcall.trace.sinks.prometheus_node.time.monotonic", lambda: now[0], raising=True
    )
    read = sink._read
    monkeypatch.setattr(sink, "_read", lambda: looks.append(1) or read())
    try:
        assert list(sink.collect()) == list(sink.collect())
        now[0] += 1.5
        list(sink.collect())
    finally:
        sink.close()
    assert len(looks) == 2


def test_a_run_that_is_gone(tmp_path: Path) -> None:
    """Without a run, or if it cannot be read, the endpoint answers with no metrics."""
    for run in (None, tmp_path / "nothing"):
        sink = opened(run)
        try:
            assert scraped(sink) == {}
        finally:
            sink.close()


def test_a_port_that_is_none() -> None:
    """A wrong port is an error when the sink is made."""
    with pytest.raises(ValueError, match="port must be from 0 to 65535"):
        PrometheusNode(-1)

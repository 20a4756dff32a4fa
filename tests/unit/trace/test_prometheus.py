"""Prometheus: counters and gauges as Prometheus' own parser reads them over HTTP."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ports import bound
from tracing import COUNT, Clock, finished, origin, some

from rankcall.trace import Origin, Prometheus
from rankcall.trace.sinks.guard import Guarded
from rankcall.trace.sinks.metrics import OTHER, MetricKeys

pytestmark = pytest.mark.filterwarnings("ignore:trace.Prometheus is deprecated")


def test_it_is_deprecated() -> None:
    """The warning names what to use, at the line that makes the sink."""
    with pytest.warns(DeprecationWarning, match=r"use trace\.PrometheusNode or") as warned:
        Prometheus(0)
    assert warned[0].filename == __file__


@pytest.fixture
def prometheus() -> Iterator[Prometheus]:
    """Return an endpoint on a free port that has some ops, one of them in flight."""
    sink = Prometheus(0)
    flying = some(1, enqueued_epoch_ns=np.array([0]), in_flight=np.array([True]))
    rank_origin = Origin(3, 4, 3, 1, 'node "a"\n', None, lambda: flying)
    sink.open(rank_origin)
    sink.write(some(200))
    sink.write(some(COUNT - 200, 200))
    yield sink
    sink.close()


def scrape(sink: Prometheus) -> dict[str, Any]:
    """Fetch over HTTP, and parse with Prometheus' own parser."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_prometheus_is_scraped(prometheus: Prometheus) -> None:
    """Counters, histograms and gauges, with hostile names as labels."""
    pytest.importorskip("prometheus_client")
    families = scrape(prometheus)
    expected = list(finished(some(COUNT)))
    calls = Counter(key for key, _ in expected)
    seconds, sizes = defaultdict(list), defaultdict(list)
    for key, description in expected:
        seconds[key].append((description["duration_ms"] or 0) / 1e3)
        sizes[key].append(description["message_size"])
    totals = {
        (sample.labels["op"], sample.labels["group"]): sample.value
        for sample in families["rankcall_collectives"].samples
    }
    assert totals == dict(calls)
    for family, values in (("duration_seconds", seconds), ("bytes", sizes)):
        samples = families[f"rankcall_collective_{family}"].samples
        assert {(sample.labels["op"], sample.labels["group"]) for sample in samples} == calls.keys()
        assert {sample.name.rpartition("_")[2] for sample in samples} == {"bucket", "count", "sum"}
        for sample in samples:
            mine = values[sample.labels["op"], sample.labels["group"]]
            assert sample.labels["host"] == 'node "a"\n'
            assert sample.labels["rank"] == "3"
            if sample.name.endswith("_sum"):
                assert sample.value == pytest.approx(sum(mine))
            elif sample.name.endswith("_count"):
                assert sample.value == len(mine)
            else:
                assert sample.value == sum(value <= float(sample.labels["le"]) for value in mine)
    (age,) = families["rankcall_in_flight_age_seconds"].samples
    assert age.value == pytest.approx(time.time(), abs=60)  # since 1970
    assert families["rankcall_in_flight"].samples[0].value == 1


def test_prometheus_tells_what_failed_and_what_was_dropped(prometheus: Prometheus) -> None:
    """By op and group, and as one number; a size that equals a bucket's bound is in it."""
    pytest.importorskip("prometheus_client")
    before = scrape(prometheus)
    failed = np.array([True, False, True, False])
    batch = some(4, failed=failed, message_bytes=np.full(4, 64))
    prometheus.write(replace(batch, dropped=7))
    after = scrape(prometheus)

    def added(family: str, name: str, **labels: str) -> float:
        values = [
            [
                sample.value
                for sample in families[family].samples
                if sample.name == name and labels.items() <= sample.labels.items()
            ]
            for families in (before, after)
        ]
        return values[1][0] - values[0][0]

    assert added("rankcall_dropped", "rankcall_dropped_total") == 7
    for op, fail in (("all_reduce", 2), ("send", 0)):
        counted = added("rankcall_collectives_failed", "rankcall_collectives_failed_total", op=op)
        assert counted == fail
        sizes = "rankcall_collective_bytes"
        assert added(sizes, f"{sizes}_bucket", op=op, le="64.0") == 2
        assert added(sizes, f"{sizes}_bucket", op=op, le="16.0") == 0


def test_a_port_in_use_is_reported_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Once, with the port; when it is free in time, the endpoint comes up."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        port = bound(taken)
        taken.listen()
        clock = Clock()
        sinks = [Prometheus(port), Prometheus(port)]
        first, second = (Guarded(sink, clock) for sink in sinks)
        on_rank_0 = origin(rank=0)
        for _ in range(6):
            first.deliver(some(1), on_rank_0)
            clock.now += 10
        second.deliver(some(1), on_rank_0)
    (record,) = caplog.records
    assert f"port {port} on 127.0.0.1: Address already in use" in record.message
    clock.now += 10
    second.deliver(None, on_rank_0)
    assert sinks[1].port == port
    assert scrape(sinks[1])["rankcall_collectives"].samples[0].value == 1
    second.close(on_rank_0)


def test_each_rank_of_a_host_has_its_port() -> None:
    """The port is counted up by the local rank."""
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        port = bound(taken)
        taken.listen()
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1"):
            Prometheus(port - 3).open(origin(rank=3))
    with pytest.raises(ValueError, match="port"):
        Prometheus(70_000)


def test_label_sets_are_bounded() -> None:
    """Groups beyond the first ones share a name."""
    keys = MetricKeys(most=2)
    groups = [keys.of("all_reduce", str(group)).group for group in (1, 2, 3, 1, 4)]
    assert groups == ["1", "2", OTHER, "1", OTHER]

"""Prometheus by node: one endpoint for all ranks of a host, with few series.

Only what the ranks spend their time on has a series for each rank of the host and each cause.

A scrape reads the newest records of the host's ranks in shared memory, on the thread that serves
it. The ranks send nothing, and between scrapes nothing is read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from rankcall.analysis.recent_figures import recent_figures
from rankcall.analysis.recoveries import agent_phases
from rankcall.analysis.run_reader import RunReader
from rankcall.analysis.snapshot import ALIVE, GONE, STOPPED, UNKNOWN, end_unknown, unfinished
from rankcall.analysis.spent import seconds_by_cause
from rankcall.analysis.summary import size_name
from rankcall.background import holding
from rankcall.capture import session
from rankcall.errors import RankcallError
from rankcall.ring.reader import Ring
from rankcall.run.recoveries import own_file, read_file
from rankcall.trace.sinks.optional import optional_module
from rankcall.trace.sinks.prometheus_endpoint import Endpoint
from rankcall.trace.sinks.protocols import Origin

# Records that a scrape reads of each rank, and those of them that figures are computed from. So the
# cost of a scrape does not depend on how long the job has run.
_NEWEST, _WINDOW = 512, 256
_FRESH_S = 1.0  # scrapes within that time get the same figures: several scrapers cost one read
_READ_S = 5.0  # a scrape that waits longer for another one gets the figures before
_MOST_KINDS = 32  # there are fewer kinds of verdicts; a damaged file could have any number
_STATES = (ALIVE, STOPPED, GONE, UNKNOWN)


class PrometheusNode:
    """Serves metrics of all ranks of a host over HTTP, from the process with local rank 0.

    The labels are host, for bandwidths op, group and size (eight series at most), and for what
    makes ranks late the rank and the cause.
    docs/grafana/rankcall.json is a dashboard of them.

    Args:
        port: The port. With 0 a free one, shown by ``.port``.
        address: The address to listen on. The default accepts connections from this host only;
            ``"0.0.0.0"`` accepts them from every host.

    Raises:
        ValueError: ``port`` is not a port.
        ExtraMissingError: ``prometheus-client`` is not installed.
    """

    sink_name = "prometheus-node"

    def __init__(self, port: int = 9463, address: str = "127.0.0.1") -> None:
        self._endpoint = Endpoint(port, address)
        self._reader = RunReader(_NEWEST)
        self._reading = threading.Lock()
        self._families: list[Any] = []
        self._read_at = float("-inf")
        self._origin: Origin | None = None

    @property
    def port(self) -> int | None:
        """The port that is listened on; None on the other ranks of the host."""
        return self._endpoint.port

    def open(self, origin: Origin) -> None:
        """Listen, on one rank of the host."""
        self._origin = origin
        if origin.local_rank <= 0:
            self._endpoint.open(self, 0)

    def write_records(self, ring: Ring) -> None:
        """Do nothing: a scrape reads the records of all ranks."""

    def close(self) -> None:
        """Stop listening."""
        self._endpoint.close()

    # prometheus_client calls these on the threads of its server.

    def describe(self) -> list[Any]:
        """Return no metric names in advance."""
        return []

    def collect(self) -> Iterator[Any]:
        """Yield the metrics as they are now; without a run that can be read, none."""
        with holding(self._reading, _READ_S) as is_held:
            if is_held and time.monotonic() - self._read_at > _FRESH_S:
                try:
                    self._families = self._read()
                except (RankcallError, OSError, ValueError):
                    self._families = []
                self._read_at = time.monotonic()
            families = self._families
        yield from families

    def _read(self) -> list[Any]:
        origin, recording = self._origin, session.current()
        if origin is None:
            return []
        run_dir, attempt = origin.run_dir, origin.attempt
        if run_dir is None and recording is not None:  # the ranks chose it after ``open``
            run_dir, attempt = recording.run_dir, recording.identity.attempt
        if run_dir is None:
            return []
        run = self._reader.load(run_dir).only(attempt, origin.host)
        headers = [head.header for head in run.heads]
        snapshot = self._reader.snapshot(run, _WINDOW)
        figures = recent_figures(snapshot)
        calls = snapshot.calls
        core = optional_module("prometheus_client.core", "prometheus")
        host = [origin.host]

        def gauge(name: str, text: str, value: float | None) -> Any:
            family = core.GaugeMetricFamily(f"rankcall_node_{name}", text, labels=["host"])
            if value is not None:
                family.add_metric(host, value)
            return family

        def counter(name: str, text: str, value: int) -> Any:
            family = core.CounterMetricFamily(f"rankcall_node_{name}", text, labels=["host"])
            family.add_metric(host, value)
            return family

        ranks = core.GaugeMetricFamily(
            "rankcall_node_ranks", "Ranks by the state of their process.", labels=["host", "state"]
        )
        states = Counter(state.state for state in snapshot.ranks if not state.blind)
        for state in _STATES:
            ranks.add_metric([*host, state], states[state])
        busbw = core.GaugeMetricFamily(
            "rankcall_node_busbw_bytes_per_second",
            "Bus bandwidth of the newest collectives.",
            labels=["host", "op", "group", "size"],
        )
        for row in figures.rows:
            if row.busbw_gbps is not None and np.isfinite(row.busbw_gbps):
                labels = [*host, row.op, row.group, size_name(row.bucket)]
                busbw.add_metric(labels, row.busbw_gbps * 1e9)
        late = core.CounterMetricFamily(
            "rankcall_late_seconds",
            "Time that each rank, or its cgroup, spent on what makes ranks late, by cause.",
            labels=["host", "rank", "cause"],
        )
        for sampled in snapshot.spending.sampled:
            for cause, seconds in seconds_by_cause(sampled).items():
                late.add_metric([*host, str(sampled.rank), cause], seconds)
        recoveries = core.CounterMetricFamily(
            "rankcall_node_recoveries",
            "Restarts of this host's workers after a failure, by the kind of the verdict.",
            labels=["host", "kind"],
        )
        recovering = core.CounterMetricFamily(
            "rankcall_node_recovery_seconds",
            "Time that recoveries took on this host, by phase, as far as it is known.",
            labels=["host", "phase"],
        )
        agent = own_file()
        if agent is not None:
            attempts = read_file(agent)
            restarts = [end for end in attempts.ends if end.decision == "restart"]
            kinds = Counter(end.signature.kind for end in restarts)
            for kind, count in kinds.most_common(_MOST_KINDS):
                recoveries.add_metric([*host, kind], count)
            for phase, seconds in agent_phases(attempts).items():
                recovering.add_metric([*host, phase], seconds)
        in_flight = unfinished(calls) & ~end_unknown(calls)
        oldest = float(np.max(calls["age_s"][in_flight], initial=0.0))
        return [
            ranks,
            busbw,
            late,
            recoveries,
            recovering,
            counter(
                "collectives",
                "Collectives and messages that were issued.",
                sum(header.head for header in headers),
            ),
            counter("steps", "Steps.", max((header.step for header in headers), default=0)),
            counter(
                "verdicts",
                "Verdicts of the watcher of this host.",
                sum(header.verdicts for header in headers),
            ),
            gauge(
                "overdue_ranks",
                "Ranks with a call that has been in flight for longer than the threshold.",
                sum(header.overdue_ns != 0 for header in headers),
            ),
            gauge("oldest_collective_seconds", "Age of the oldest call in flight.", oldest),
            gauge(
                "communication_ratio",
                "Share of the last seconds that a rank of this host spends in communication.",
                figures.share,
            ),
            gauge(
                "waiting_ratio",
                "Share of the time that the ranks of this host wait for each other.",
                figures.waiting,
            ),
        ]

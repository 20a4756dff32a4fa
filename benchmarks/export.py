"""How fast a run becomes a file: Parquet, a Perfetto trace, the HTML report.

A synthetic run of 64 ranks x 10,000 collectives is written by ``rankcall.testing``; each format is
then written by a process of its own, three times in turn, and the median counts, from before the
imports to the finished file. The peers are what one would do without this path: all records as one
Polars frame written as Parquet, and (of one rank) the trace built with Perfetto's own Python
package, one protobuf message an event. ``html_seconds`` is the whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_PEER_RECORDS = 20_000
_FORMATS = ("parquet", "perfetto", "jsonl", "html")


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--collectives", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--dir", type=Path, help="where to write; else a temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--measure", nargs=2, metavar=("WHAT", "RUN"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        what, run = options.measure
        print(json.dumps(_measure(what, Path(run))))
    else:
        print(
            json.dumps(
                measure(options.ranks, options.collectives, options.repeat, options.dir), indent=1
            )
        )
    return 0


def measure(
    ranks: int = 64, collectives: int = 10_000, repeat: int = 3, folder: Path | None = None
) -> dict[str, Any]:
    """Return the figures; ``export_*_records_per_s``, ``html_seconds`` and ``html_mib`` first."""
    place = Path(tempfile.mkdtemp(prefix="rankcall-bench-", dir=folder))
    try:
        records = _write(place / "run", ranks, collectives)
        measurements: dict[str, list[dict[str, float]]] = {}
        for _ in range(repeat):
            for what in (*_FORMATS, "peer_parquet", "peer_perfetto"):
                measurements.setdefault(what, []).append(_fresh(what, place / "run"))
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return _figures(measurements, ranks, collectives, records)


def _figures(
    measurements: dict[str, list[dict[str, float]]], ranks: int, collectives: int, records: int
) -> dict[str, Any]:
    def middle(what: str, key: str) -> float:
        return median(measurement[key] for measurement in measurements[what])

    figures: dict[str, Any] = {
        f"export_{what}_records_per_s": round(records / middle(what, "seconds"))
        for what in ("parquet", "perfetto", "jsonl")
    }
    figures["html_seconds"] = round(middle("html", "process_seconds"), 2)
    figures["html_mib"] = round(middle("html", "mib"), 3)
    for what in ("parquet", "perfetto"):
        rate = round(
            median(
                measurement["records"] / measurement["seconds"]
                for measurement in measurements[f"peer_{what}"]
            )
        )
        figures[f"peer_{what}_records_per_s"] = rate
        figures[f"{what}_over_peer"] = round(figures[f"export_{what}_records_per_s"] / rate, 1)
    figures["peak_mib"] = {what: round(middle(what, "peak_mib")) for what in _FORMATS}
    figures["file_mib"] = {what: round(middle(what, "mib"), 1) for what in _FORMATS}
    return {**figures, "ranks": ranks, "collectives": collectives, "records": records}


def _write(run: Path, ranks: int, collectives: int) -> int:
    from rankcall.run.load import load
    from rankcall.testing.model import Op
    from rankcall.testing.synthetic import synthetic_run

    hosts, group = max(1, ranks // 8), min(8, ranks)
    program = (
        Op(message_bytes=25 << 20, line=41),
        Op("all_gather", 4 << 20, family="tp", line=57),
        Op("reduce_scatter", 1 << 20, family="tp", line=61),
        Op(message_bytes=1 << 20, line=42),
    )
    synthetic_run(
        run,
        ranks,
        collectives,
        hosts=hosts,
        straggler=ranks // 2,
        program=program,
        clock_offsets_ns=[host * 137_000_000 for host in range(hosts)],
        groups={"tp": [list(range(at, at + group)) for at in range(0, ranks, group)]},
    )
    loaded = load(run)
    return sum(loaded.count(head)[0] for head in loaded.heads)


def _fresh(what: str, run: Path) -> dict[str, float]:
    # This process stays small: a child's ru_maxrss begins with its parent's size.
    command = [sys.executable, __file__, "--measure", what, str(run)]
    start = time.perf_counter()
    figures: dict[str, float] = json.loads(subprocess.check_output(command))
    return {"process_seconds": time.perf_counter() - start, **figures}


def _measure(what: str, run: Path) -> dict[str, float]:
    target, start = run.parent / f"out.{what}", time.perf_counter()
    if what.startswith("peer_"):
        peers: dict[str, Callable[[Path, Path], int]] = {
            "peer_parquet": _peer_parquet,
            "peer_perfetto": _peer_perfetto,
        }
        records = peers[what](run, target)
        return {"records": records, "seconds": time.perf_counter() - start}
    from rankcall.cli import main as rankcall

    html = ["report", str(run), "--html", str(target)]
    export = ["export", str(run), "--to", what, "-o", str(target)]
    with contextlib.redirect_stdout(io.StringIO()):
        status = rankcall(html if what == "html" else export)
    assert status == 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "mib": target.stat().st_size / 2**20, "peak_mib": peak}


def _peer_parquet(run: Path, target: Path) -> int:
    from rankcall.run.load import load

    records = load(run).records
    records.write_parquet(target)
    return len(records)


def _peer_perfetto(run: Path, target: Path) -> int:
    """Build the same trace as the package's users do, an object an event."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import TraceProtoBuilder

    from rankcall.run.load import load

    ring = next(load(run).iter_rings())
    builder = TraceProtoBuilder()
    for row in ring.records[:_PEER_RECORDS].tolist():
        for kind, moment in (
            (TrackEvent.TYPE_SLICE_BEGIN, row[3]),
            (TrackEvent.TYPE_SLICE_END, row[4]),
        ):
            packet = builder.add_packet()
            packet.timestamp = moment
            packet.trusted_packet_sequence_id = 1
            packet.track_event.type = kind
            packet.track_event.track_uuid = 1
            if kind == TrackEvent.TYPE_SLICE_BEGIN:
                packet.track_event.name = "all_reduce"
                packet.track_event.flow_ids.append(row[1])
                note = packet.track_event.debug_annotations.add()
                note.name, note.uint_value = "seq", row[1]
    target.write_bytes(builder.serialize())
    return min(len(ring.records), _PEER_RECORDS)


if __name__ == "__main__":
    sys.exit(main())

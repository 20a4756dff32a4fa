"""How long a post-mortem takes: load, align and render a synthetic run.

The run is written by ``rankcall.testing``; then a fresh process loads it and renders the report to
a string, so that its peak memory is the analysis's own. The peer is what one would do without this
path: the whole run as one Polars frame, grouped; on a subset of the ranks, since it keeps all
records in memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PEER_RECORDS = 500_000


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--collectives", type=int, default=4000)
    parser.add_argument("--hosts", type=int, default=0, help="default: one for 8 ranks")
    parser.add_argument("--repeat", type=int, default=3, help="the median counts")
    parser.add_argument("--dir", type=Path, help="where to write the run; else a temporary folder")
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure-frame", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        print(json.dumps(_write(options.write, options)))
    elif options.measure:
        print(json.dumps(_report(options.measure)))
    elif options.measure_frame:
        print(json.dumps(_frame(options.measure_frame)))
    else:
        print(json.dumps(_benchmark(options), indent=1))
    return 0


def _benchmark(options: argparse.Namespace) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="rankcall-bench-", dir=options.dir))
    try:
        run = folder / "run"
        written = _fresh(
            "--write",
            run,
            f"--ranks={options.ranks}",
            f"--collectives={options.collectives}",
            f"--hosts={options.hosts}",
        )
        rounds = [_fresh("--measure", run) for _ in range(options.repeat)]
        rounds.sort(key=lambda figures: float(figures["seconds"]))
        peer = _fresh("--measure-frame", _subset(run, folder / "subset", options.collectives))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "ranks": options.ranks,
        "collectives": options.collectives,
        "records": options.ranks * options.collectives,
        **rounds[len(rounds) // 2],
        "peak_mib": max(figures["peak_mib"] for figures in rounds),
        "rounds_seconds": [figures["seconds"] for figures in rounds],
        **written,
        **peer,
    }


def _write(run: Path, options: argparse.Namespace) -> dict[str, float]:
    from rankcall.testing.synthetic import synthetic_run

    hosts = options.hosts or max(1, options.ranks // 8)
    offsets = [host * 7_000_000 % 1_000_000_000 for host in range(hosts)]
    start = time.perf_counter()
    synthetic_run(
        run,
        options.ranks,
        options.collectives,
        hosts=hosts,
        straggler=options.ranks // 2,
        clock_offsets_ns=offsets,
    )
    return {"write_seconds": round(time.perf_counter() - start, 3)}


def _fresh(what: str, run: Path, *more: str) -> dict[str, Any]:
    # This process stays small: a child's ru_maxrss begins with its parent's size.
    command = [sys.executable, __file__, what, str(run), *more]
    figures: dict[str, Any] = json.loads(subprocess.check_output(command))
    return figures


def _subset(run: Path, folder: Path, collectives: int) -> Path:
    (folder / "rings").mkdir(parents=True)
    rings = sorted((run / "rings").glob("*.ring"))[: max(2, _PEER_RECORDS // collectives)]
    for ring in rings:
        (folder / "rings" / ring.name).symlink_to(ring)
    return folder


def _report(run: Path) -> dict[str, Any]:
    start = time.perf_counter()
    from rankcall.analysis.summary import summarise
    from rankcall.report import summary_text
    from rankcall.run.load import load

    loaded = load(run)
    text = summary_text.render(summarise(loaded))
    seconds = time.perf_counter() - start
    assert "caused" in text
    return {"seconds": round(seconds, 3), "peak_mib": _peak_mib()}


def _frame(run: Path) -> dict[str, Any]:
    start = time.perf_counter()
    import polars as pl

    from rankcall.run.load import load

    frame = load(run).records
    spent = pl.col("completed_ns") - pl.col("started_ns")
    frame.group_by("op", "group", "message_bytes").agg(spent.sum(), spent.median().alias("median"))
    return {
        "polars_frame_seconds": round(time.perf_counter() - start, 3),
        "polars_frame_records": len(frame),
        "polars_frame_peak_mib": _peak_mib(),
    }


def _peak_mib() -> float:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


if __name__ == "__main__":
    sys.exit(main())

"""How often the diagnosis is right, and how fast: a score over planted faults.

Two parts. Real jobs: every scenario of tests/multiproc/scenarios.py is run on real ranks with the
watcher in them, and judged by the watcher, by a diagnosis from outside while it hangs, and after
its end. With ``--backend nccl``, the ranks are on simulated devices, in the environment that ``make
test-nccl`` makes, and the scenarios are those of tests/nccl/scenarios_on_devices.py. Synthetic
worlds: rings of 64 to 16,384 ranks with one planted fault of each kind.

``--rows FILE`` has one JSON object a line for each scenario that was run. Those in it are not run
again, so that the real jobs can be run in parts: ``--stop-after 400`` begins no scenario later
than that, in s. ``scenarios`` says how many there are, and ``of`` how many there should be.

A finding is right where kind and culprits are exactly what was planted. ``precision``: of what was
found, the part that is right. ``recall``: of what was planted, the part that was found.
``false_alarms``: findings in healthy jobs. ``median_seconds_to_verdict``: from the threshold until
the watcher's verdict is in the run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kept_rows import keep, kept

TESTS = Path(__file__).resolve().parents[1] / "tests"
WORLDS = (64, 512, 4096, 16384)
KINDS = ("missing", "dead", "stopped", "exhausted", "desync", "mismatch", "deadlock")
CALLS = 64
Cause = tuple[str, tuple[int, ...]]


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--only", default="", help="only scenarios with this in their name")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--rows", type=Path, help="keep each scenario here, run only those missing")
    parser.add_argument("--stop-after", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--worlds", type=int, nargs="*", default=list(WORLDS))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(_measured(options.measure)))
        return 0
    score = Score()
    sys.path[:0] = [str(TESTS / "multiproc"), str(TESTS / "nccl")]
    scenarios, run_options = _scenarios(options.backend)
    chosen = [scenario for scenario in scenarios if options.only in scenario.name]
    rows = kept(options.rows)
    begin_until = time.monotonic() + options.stop_after
    for row in _run(
        (scenario for scenario in chosen if scenario.name not in rows), run_options, begin_until
    ):
        rows[row["name"]] = row
        keep(options.rows, row)
    real = _real(score, [rows[scenario.name] for scenario in chosen if scenario.name in rows])
    real["of"] = len(chosen)
    worlds = _worlds(score, options.worlds)
    print(json.dumps({**score.figures(), **real, **worlds}, indent=1))
    return 0


class Score:
    """Counts findings against what was planted."""

    def __init__(self) -> None:
        self.found = self.right = self.planted = self.judgements = self.false_alarms = 0
        self.wrong: list[str] = []

    def add(self, name: str, found: Iterable[Cause], planted: Sequence[Cause]) -> None:
        """Count one judgement."""
        findings = list(found)
        right = sum((Counter(findings) & Counter(planted)).values())
        self.judgements += 1
        self.found, self.right = self.found + len(findings), self.right + right
        self.planted += len(planted)
        self.false_alarms += 0 if planted else len(findings)
        if Counter(findings) != Counter(planted):
            self.wrong.append(f"{name}: {sorted(findings)} instead of {sorted(planted)}")

    def figures(self) -> dict[str, Any]:
        """Return the score."""
        return {
            "precision": round(self.right / self.found, 4) if self.found else 1.0,
            "recall": round(self.right / self.planted, 4) if self.planted else 1.0,
            "false_alarms": self.false_alarms,
            "judgements": self.judgements,
            "wrong": self.wrong,
        }


def _scenarios(backend: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the scenarios on a back end, and the options of ``run`` for them."""
    if backend == "gloo":
        from scenarios import ALL  # type: ignore[import-not-found]

        return ALL, {}
    from scenarios_on_devices import (  # type: ignore[import-not-found]
        NOT_NATIVE,
        ON_DEVICES,
        start_fork_server,
    )

    start_fork_server()
    chosen = [scenario for scenario in ON_DEVICES if scenario.name not in NOT_NATIVE]
    return chosen, {"capture": "native", "check_facts": False}


def _run(
    scenarios: Iterable[Any], options: dict[str, Any], begin_until: float
) -> Iterator[dict[str, Any]]:
    """Run scenarios until a time of the monotonic clock; yield a row for each.

    One that fails, for example because a cause was not named in time, has found nothing.
    """
    from scenario_run import run  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder:
        before, live = os.environ.get("RANKCALL_SHM"), Path(tempfile.mkdtemp(dir="/dev/shm"))
        os.environ["RANKCALL_SHM"] = str(live)
        try:
            for scenario in scenarios:
                if time.monotonic() > begin_until:
                    break
                row = {"name": scenario.name, "planted": scenario.causes}
                try:
                    verdicts = run(scenario, Path(folder) / scenario.name, **options)
                except AssertionError as error:
                    problem = str(error).partition("\n")[0]
                    yield row | {"by": {"not to its end": []}, "problem": problem}
                    continue
                yield row | {
                    "by": verdicts.by,
                    "took": verdicts.took,
                    "seconds": verdicts.seconds,
                }
        finally:
            shutil.rmtree(live, ignore_errors=True)
            os.environ.pop("RANKCALL_SHM")
            if before is not None:
                os.environ["RANKCALL_SHM"] = before


def _real(score: Score, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count the rows of real jobs, and return their times."""
    for row in rows:
        for judge, causes in row["by"].items():
            score.add(f"{row['name']} ({judge})", _causes(causes), _causes(row["planted"]))
    seconds = [row["seconds"] for row in rows if row.get("seconds") is not None]
    took = [row["took"] for row in rows if "took" in row]
    return {
        "scenarios": len(rows),
        "not_to_their_end": {row["name"]: row["problem"] for row in rows if "problem" in row},
        "median_seconds_to_verdict": round(median(seconds), 3) if seconds else None,
        "worst_seconds_to_verdict": round(max(seconds), 3) if seconds else None,
        "median_seconds_of_a_scenario": round(median(took), 2) if took else None,
    }


def _causes(causes: Iterable[Sequence[Any]]) -> list[Cause]:
    """Return causes as they are compared: JSON has lists for tuples."""
    return [(kind, tuple(ranks)) for kind, ranks in causes]


def _worlds(score: Score, sizes: Sequence[int]) -> dict[str, Any]:
    """Judge one synthetic run a size and kind; time the missing ones in a process of their own."""
    figures: dict[str, Any] = {"synthetic_calls_per_rank": CALLS, "seconds_4096": None}
    for ranks in sizes:
        spent = []
        for kind in KINDS:
            folder = Path(tempfile.mkdtemp(prefix="rankcall-bench-"))
            try:
                planted = _write(folder / "run", ranks, kind)
                output = subprocess.check_output(
                    [sys.executable, __file__, "--measure", str(folder / "run")]
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            measured = json.loads(output)
            spent.append(measured["seconds"])
            causes = [(kind, tuple(culprits)) for kind, culprits in measured["findings"]]
            score.add(f"{ranks} ranks, {kind}", causes, [planted])
        figures[f"seconds_{ranks}"] = round(median(spent), 3)
    return figures


def _write(run: Path, ranks: int, kind: str) -> Cause:
    from rankcall.testing import synthetic_run
    from rankcall.testing.model import Planted

    culprits = (ranks // 3, ranks // 3 + 1, ranks // 3 + 2) if kind == "deadlock" else (ranks // 3,)
    rows = [list(range(first, first + 8)) for first in range(0, ranks, 8)]
    hosts = ranks // 8
    synthetic_run(
        run,
        ranks,
        CALLS,
        hosts=hosts,
        groups={"node": rows},
        clock_offsets_ns=[host * 7_000_003 % 1_000_000_000 for host in range(hosts)],
        planted=Planted(kind, culprits, CALLS * 3 // 4),
    )
    return kind, culprits


def _measured(run: Path) -> dict[str, Any]:
    start = time.perf_counter()
    from rankcall.analysis.verdicts import diagnose
    from rankcall.run.load import load

    diagnosis = diagnose(load(run))
    seconds = time.perf_counter() - start
    return {
        "seconds": seconds,
        "findings": [(finding.kind, finding.ranks) for finding in diagnosis.findings],
    }


if __name__ == "__main__":
    sys.exit(main())

"""How often the diagnosis is right on faults that others defined, beside what torch says.

The rows are in tests/multiproc/scoreboard_table.py: the classes of faults of the MPI Bugs
Initiative and of MPI-CorrBench, as small programs on 2 to 4 Gloo ranks, and correct programs. Each
runs under rankcall, and a second time without it, with TORCH_DISTRIBUTED_DEBUG=DETAIL.

A finding is right if its kind and its ranks are exactly what was planted. For each class:
``planted`` and ``found`` causes, ``recall``, ``precision`` (the part of the findings that is right)
and ``false_alarms`` (findings that are not right). ``torch`` and ``torch_detail`` count what torch
says: nothing, a time-out, another error, the right ranks, the right ones among others, some of
them, or other ranks.

``--rows FILE`` has one JSON object a line for each row that was run. Rows in it are not run
again, so that a run that was stopped goes on.

``--page FILE`` also judges logs and dumps (``scoreboard_evidence.py``), and writes all figures as
docs/scoreboard.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import scoreboard_evidence
import scoreboard_page
from kept_rows import keep, kept

SUITE = Path(__file__).resolve().parents[1] / "tests/multiproc"


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--only", default="", help="only rows with this in their name")
    parser.add_argument("--timeout", type=float, default=4.0, help="of the groups, in s")
    parser.add_argument("--no-detail", action="store_true", help="leave DETAIL mode out")
    parser.add_argument("--page", type=Path, help="also judge logs and dumps, and write this page")
    parser.add_argument(
        "--programs", type=Path, help="take the programs' figures from this earlier output"
    )
    parser.add_argument("--rows", type=Path, help="keep each row here, and run only those missing")
    parser.add_argument("--no-programs", action="store_true", help="judge logs and dumps only")
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="for torch's analyser")
    options = parser.parse_args()
    if options.programs is not None:
        figures = json.loads(options.programs.read_text())
    else:
        figures = {} if options.no_programs else _programs(options)
    if options.page is not None:
        figures |= scoreboard_evidence.figures(options.peer_seconds)
        figures["evidence"] = [time.strftime("%Y-%m-%d"), round(os.getloadavg()[0], 1)]
        options.page.write_text(scoreboard_page.page(figures))
    print(json.dumps(figures, indent=1))
    return 0


def _programs(options: argparse.Namespace) -> dict[str, Any]:
    """Run the programs, and return their figures."""
    sys.path.insert(0, str(SUITE))
    from scoreboard_run import run  # type: ignore[import-not-found]
    from scoreboard_table import CASES  # type: ignore[import-not-found]

    load = os.getloadavg()[0]
    done = kept(options.rows)
    for case in CASES:
        if options.only not in case.name or case.name in done:
            continue
        row = _row(case, options.timeout, run, torch_detail=not options.no_detail)
        done[case.name] = row
        keep(options.rows, row)
    rows = [done[case.name] for case in CASES if case.name in done]
    classes = list(dict.fromkeys(row["class"] for row in rows))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],  # before, and at the end
        "seconds": [row["seconds"] for row in rows if "seconds" in row],
        **_score(rows),
        "by_class": {name: _score(row for row in rows if row["class"] == name) for name in classes},
        "wrong": [row["problem"] for row in rows if row["problem"]],
        "in_table": len(CASES),
    }


def _row(case: Any, timeout_s: float, run: Any, *, torch_detail: bool) -> dict[str, Any]:
    """Run one program, and return what was found; one that does not end is a row as well."""
    row = {"name": case.name, "class": case.kind_of_fault, "planted": len(case.causes)}
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder:
            judged = run(case, Path(folder), timeout_s, torch_detail=torch_detail)
    except AssertionError as error:
        problem = str(error).partition("\n")[0]
        return row | {"reported": 0, "right": 0, "torch": {}, "problem": problem}
    return row | {
        "reported": len(judged.found),
        "right": judged.right,
        "torch": judged.torch,
        "problem": judged.problem,
        "seconds": round(time.perf_counter() - began, 1),
    }


def _score(some: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of some rows."""
    rows = list(some)
    planted, reported, right = (
        sum(row[key] for row in rows) for key in ("planted", "reported", "right")
    )
    return {
        "programs": len(rows),
        "planted": planted,
        "found": right,
        "recall": round(right / planted, 4) if planted else None,
        "precision": round(right / reported, 4) if reported else None,
        "false_alarms": reported - right,
        "torch": dict(Counter(row["torch"].get("plain", "not run") for row in rows)),
        "torch_detail": dict(Counter(row["torch"].get("detail", "not run") for row in rows)),
    }


if __name__ == "__main__":
    sys.exit(main())

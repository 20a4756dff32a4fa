"""Measure how long the watchers of many nodes take to agree on one verdict over one TCPStore.

Each node is a process with a connection of its own, which knows the rings of its eight ranks (of a
synthetic run in which one rank is missing) and their stacks. All begin at the same moment, as nodes
do whose ranks have hung in one collective. On this machine they share its cores, and the store's
host has the same ones. No other tool's nodes agree while the job hangs, so there is no peer beside.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

# torch looks up the name of every address it connects to: ask nobody, and do not warn of it.
os.environ.setdefault("RES_OPTIONS", "attempts:0")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from torch.distributed import TCPStore

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.encoding import encode
from rankcall.job.judge import Judge
from rankcall.job.other_nodes import Exchange
from rankcall.run.load import Run, load
from rankcall.testing import synthetic_run
from rankcall.testing.model import Planted

FORK = get_context("fork")
RANKS_PER_NODE = 8
CALLS = 64
STACK = "\n".join(
    f'  File "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/layer_{depth}.py", '
    f"line {7 * depth} in _call_impl"
    for depth in range(40)
)


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--nodes", type=int, nargs="*", default=[16, 128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = {}
    for nodes in options.nodes:
        rounds = [_round(nodes) for _ in range(options.rounds)]
        figures[f"{nodes}_nodes"] = {
            "ranks": nodes * RANKS_PER_NODE,
            **{
                key: round(median(round_figures[key] for round_figures in rounds), 3)
                for key in rounds[0]
            },
        }
    print(json.dumps(figures, indent=1))
    return 0


def _round(nodes: int) -> dict[str, Any]:
    """Let all nodes agree once."""
    missing = nodes * RANKS_PER_NODE // 3
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder:
        _write(Path(folder) / "run", nodes, missing)
        run = load(Path(folder) / "run")
        gc.freeze()  # a collection would copy all that was inherited, in every process
        # The store is no thread of this process: what it holds while others are forked stays held.
        store, host = _started(_serve)
        port = store.recv()
        leaders = [_started(_node, run, node, nodes, port) for node in range(nodes)]
        reports = [pipe.recv() for pipe, _ in leaders]
        host.terminate()
        for child in (host, *(process for _, process in leaders)):
            child.join()
    seconds = [report["seconds"] for report in reports]
    verdicts = {json.dumps(report["found"]) for report in reports}
    return {
        "seconds_median": median(seconds),
        "seconds_worst": max(seconds),
        "cpu_s_of_a_node": median(report["cpu_s"] for report in reports),
        "verdicts": len(verdicts),
        "right": float(verdicts == {json.dumps([["missing", [missing]]])}),
        "printed": sum(report["loud"] for report in reports),
        "verdict_bytes": reports[0]["bytes"],
    }


def _started(target: Callable[..., None], *arguments: Any) -> tuple[Connection, Any]:
    """Start a process; return it, and the pipe on which it tells what it has to."""
    mine, theirs = FORK.Pipe()
    process = FORK.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()  # so that the death of the process is its end
    return mine, process


def _serve(pipe: Connection) -> None:
    """Host the store until ended."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.poll(None)


def _write(run: Path, nodes: int, missing: int) -> None:
    ranks = nodes * RANKS_PER_NODE
    rows = [list(range(at, at + RANKS_PER_NODE)) for at in range(0, ranks, RANKS_PER_NODE)]
    synthetic_run(
        run,
        ranks,
        CALLS,
        hosts=nodes,
        groups={"node": rows},
        planted=Planted("missing", (missing,), CALLS * 3 // 4),
    )


def _node(pipe: Connection, run: Run, node: int, nodes: int, port: int) -> None:
    """Be one node's leader."""
    mine = _own(run, node)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=120))
    judge = Judge(run.path, hang_after=60.0)
    judge._exchange = Exchange(lambda: store, "watch/")
    judge._exchange.asked()  # as every second in a job: it connects
    store.add("ready", 1)
    while int(store.add("ready", 0)) < nodes:
        time.sleep(0.1)
    began, cpu = time.monotonic(), time.process_time()
    verdict, loud = judge._together(mine)
    seconds, cpu = time.monotonic() - began, time.process_time() - cpu
    findings = [(finding.kind, list(finding.ranks)) for finding in verdict.findings]
    size = len(encode(verdict))
    pipe.send({"seconds": seconds, "cpu_s": cpu, "loud": loud, "bytes": size, "found": findings})


def _own(run: Run, node: int) -> Snapshot:
    """Return what a node knows: where its own ranks stand."""
    first = node * RANKS_PER_NODE
    own = range(first, first + RANKS_PER_NODE)
    snapshot = snapshot_of_run(run.only(ranks=own))
    snapshot.problems = []
    snapshot.ranks = [
        replace(state, stack=STACK) if state.rank in own else state for state in snapshot.ranks
    ]
    return snapshot


if __name__ == "__main__":
    sys.exit(main())

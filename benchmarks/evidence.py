"""From Flight Recorder dumps to a verdict: how long it takes, beside torch's own analyser.

The dumps are of a made-up job on NCCL: ``--ranks`` ranks in groups of eight, ``--entries`` entries
each. One rank stops issuing collectives; the others go on issuing. ``seconds``, ``cpu_seconds`` and
``peak_mib`` are those of one ``rankcall diagnose``, a process of its own, and of the processes that
it starts. ``peak_mib`` is the largest sum of their resident memory.

``torchfrtrace_seconds`` is the time of ``torch.distributed.flight_recorder.fr_trace`` on the same
files, and ``torchfrtrace_right`` says whether it names that rank and no other one. Both are null if
the analyser was ended after ``--peer-seconds``.

``log_seconds`` and ``log_peak_mib`` are those of ``rankcall diagnose --log`` on a log of
``--log-bytes``: what the ranks of a job print while they train, with the time-outs of 1,023 of them
near its end. ``log_right`` says whether the verdict names the one that had not come. The figures
that begin with ``log_json`` are those of a log of the same size that a collector wrote, with each
line in a JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

GROUP = 8
BEHIND = 500  # collectives that the others issue behind the one that hangs
LATE = 3  # the rank that stops
_PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
T0, STEP_NS = 1_780_000_000_000_000_000, 1_000_000


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--entries", type=int, default=2000)
    parser.add_argument("--peer-seconds", type=float, default=400.0)
    parser.add_argument("--log-bytes", type=int, default=1_000_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rank in range(options.ranks):
            dump = _dump(rank, options.ranks, options.entries)
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
        figures = {"ranks": options.ranks, "entries": options.entries}
        figures |= _ours(folder) | _peer(folder, options.peer_seconds)
        for path in folder.iterdir():
            path.unlink()
        figures |= _log(folder / "job.log", options.log_bytes)
        figures |= _log(folder / "job.jsonl", options.log_bytes, as_json=True)
    print(json.dumps(figures, indent=1))
    return 0


def _dump(rank: int, ranks: int, entries: int) -> dict[str, Any]:
    """Return one rank's dump: an op in its group of eight after each op in the world."""
    first = rank // GROUP * GROUP
    groups = {"0": list(range(ranks)), "1": list(range(first, min(first + GROUP, ranks)))}
    hangs_at = max(2, entries - BEHIND) // 2 * 2  # in the world
    frames = [
        [
            {"name": "all_reduce", "filename": "/venv/torch/distributed/c10d.py", "line": 3245},
            {"name": "step", "filename": "/job/train.py", "line": 10 + place},
            {"name": "<module>", "filename": "/job/train.py", "line": 80},
        ]
        for place in range(2)
    ]
    names = ("nccl:all_reduce", "nccl:_all_gather_base")
    pairs = (("0", "default_pg"), ("1", "TENSOR_MODEL_PARALLEL_GROUP"))
    dump_entries = []
    for number in range(hangs_at if rank == LATE else entries):
        place, done = number % 2, number < hangs_at
        created = T0 + number * STEP_NS + rank
        dump_entries.append(
            {
                "record_id": number,
                "pg_id": place,
                "process_group": pairs[place],
                "collective_seq_id": number // 2 + 1,
                "p2p_seq_id": 0,
                "op_id": number // 2 + 1,
                "profiling_name": names[place],
                "time_created_ns": created,
                "input_sizes": [[4096]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[4096 * (GROUP if place else 1)]],
                "output_dtypes": ["BFloat16"],
                "state": "completed" if done else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": created + STEP_NS // 2 if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": False,
                "frames": frames[place],
            }
        )
    config = {
        name: {"name": name, "desc": desc, "ranks": str(groups[name])} for name, desc in pairs
    }
    return {"version": "2.9", "pg_config": config, "pg_status": {}, "entries": dump_entries}


def _ours(folder: Path) -> dict[str, Any]:
    """Return how long ``rankcall diagnose`` took, its peak memory, and whether it was right."""
    return _diagnosed([str(folder)])


def _diagnosed(arguments: list[str]) -> dict[str, Any]:
    """Return the figures of one ``rankcall diagnose``, a process of its own."""
    command = [sys.executable, "-m", "rankcall", "diagnose", *arguments, "--json"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        peak = _Peak(process.pid)
        diagnosis = json.loads(process.stdout.read())
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 1
        peak.stop()
    causes = [(finding["kind"], finding["ranks"]) for finding in diagnosis["findings"]]
    return {
        "seconds": round(time.perf_counter() - began, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_mib": round(max(peak.kib, usage.ru_maxrss) / 1024),
        "right": causes == [("missing", [LATE])],
    }


class _Peak:
    """The largest resident memory of a process and its children, as seen 20 times a second."""

    def __init__(self, pid: int) -> None:
        self.kib = 0
        self._pid = pid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopping.wait(0.05):
            children: list[str] = []
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{self._pid}/task").iterdir():
                    children += (task / "children").read_text().split()
            self.kib = max(self.kib, sum(map(_resident_kib, [str(self._pid), *children])))

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()


def _resident_kib(pid: str) -> int:
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_KIB
    return 0


def _log(path: Path, size: int, *, as_json: bool = False) -> dict[str, Any]:
    """Return how long ``rankcall diagnose --log`` took on a log of so many bytes."""

    def line_of(text: str) -> str:
        if not as_json:
            return text
        record = {"log": text, "stream": "stderr", "time": "2026-12-06T18:44:12.715298746Z"}
        return json.dumps(record) + "\n"

    lines = [
        f"[rank{rank}]: 2026-11-22 18:44:{rank % 60:02d},715 INFO train.py:123 step {number:7d} "
        f"loss 2.3{rank} lr 1.2e-4 tokens/s 12345 memory 60.1 GiB\n"
        for number in range(64)
        for rank in range(1024)
    ]
    block = "".join(map(line_of, [*lines, *_LOGGED])).encode()
    end = "".join(map(line_of, _time_outs())).encode()
    with path.open("wb") as file:
        while file.tell() < size - len(end):
            file.write(block)
        file.write(end)
    prefix = "log_json" if as_json else "log"
    figures = _diagnosed(["--log", str(path)]).items()
    counted = path.stat().st_size
    path.unlink()
    return {f"{prefix}_bytes": counted, **{f"{prefix}_{name}": value for name, value in figures}}


_LOGGED = [  # an exception that the program caught
    "Traceback (most recent call last):\n",
    '  File "/job/data.py", line 80, in load\n',
    "    return open(path)\n",
    "FileNotFoundError: shard-17\n",
]


def _time_outs() -> list[str]:
    group = "[PG ID 0 PG GUID 0(default_pg) Rank {}]"
    head = "[rank{}]:[E1206 18:44:12.715298746 ProcessGroupNCCL.cpp:683] "
    lines = []
    for rank in range(1024):
        prefix, place = head.format(rank), group.format(rank)
        if rank == LATE:
            lines.append(
                f"{prefix}{place} Received a dump signal due to a collective timeout from  rank 0 "
                "and we will try our best to dump the debug info. Last enqueued NCCL work: 7750, "
                "last completed NCCL work: 7750.\n"
            )
            continue
        lines.append(
            f"{prefix}[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL("
            "SeqNum=7753, OpType=_REDUCE_SCATTER_BASE, NumelIn=544997376, NumelOut=68124672, "
            "Timeout(ms)=600000) ran for 600061 milliseconds before timing out.\n"
        )
        lines.append(
            f"{prefix}{place}  failure detected by watchdog at work sequence id: 7753 PG status: "
            "last enqueued work: 7755, last completed work: 7752\n"
        )
    return lines


def _peer(folder: Path, seconds: float) -> dict[str, Any]:
    """Return how long torch's analyser took, and whether it names the rank that stopped alone."""
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(folder), "-p", "nccl_trace_rank_"]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"torchfrtrace_seconds": None, "torchfrtrace_right": None}
    took = round(time.perf_counter() - began, 2)
    named: set[int] = set()
    for ranks in re.findall(r"missing ranks: \{([\d, ]*)\}", done.stdout + done.stderr):
        named.update(map(int, re.findall(r"\d+", ranks)))
    for rank in re.findall(r"Culprit rank (\d+)", done.stdout + done.stderr):
        named.add(int(rank))
    return {
        "torchfrtrace_seconds": took,
        "torchfrtrace_exit": done.returncode,
        "torchfrtrace_named": sorted(named)[:32],
        "torchfrtrace_right": named == {LATE},
    }


if __name__ == "__main__":
    sys.exit(main())

"""Traces on devices have a line for each op, also of the last second; unknown ends say so."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import polars as pl
import pytest
from recorded_jobs import RecordedJobs

PROGRAM = """
from rankcall import trace
folder = os.environ["TRACES"]
path = f"{folder}/{rank}.jsonl"
handle = trace.enable("ALL", print_=False, sinks=[trace.JsonLines(folder + "/{rank}.jsonl"),
                                                 trace.Parquet(folder)])
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
z = torch.ones(128, device="cuda")
def step():
    dist.all_reduce(x); dist.broadcast(y, 0, async_op=True).wait()
    (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
"""


def lines(folder: Path, rank: int) -> list[dict[str, object]]:
    """Return the descriptions that a rank has written."""
    return [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]


ENDINGS = {
    "stopped": "dist.destroy_process_group(); handle.stop(60)",
    "destroyed": "dist.destroy_process_group()",
    "not destroyed": "",
    "a group before": "dist.destroy_process_group(second); dist.destroy_process_group()",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_short_job_has_all_lines(
    jobs: RecordedJobs, capture: str, ending: str, tmp_path: Path
) -> None:
    """A job that ends at once, in whichever way, has a line with the end of each op of each group.

    The last ops end within the last second, in which no thread of rankcall's has looked.
    """
    jobs.run(
        2,
        PROGRAM
        + f"""
# The two seconds that an exit may take are too few where several processes share a CPU.
from rankcall import background
background.exit_budget._seconds, type(handle).stop.__defaults__ = 60.0, (60.0,)
second = dist.new_group()
for _ in range(20): step(); dist.all_gather_into_tensor(z, x, group=second)
torch.cuda.synchronize(); {ENDINGS[ending]}
""",
        RANKCALL_CAPTURE=capture,
        TRACES=str(tmp_path),
    )
    for rank in (0, 1):
        found = lines(tmp_path, rank)
        assert Counter(line["name"] for line in found) == {
            "all_reduce": 20,
            "broadcast": 20,
            "all_gather": 20,
            "send" if rank == 0 else "recv": 20,
        }
        assert not any("end_unknown" in line for line in found)
        assert {line["duration_ms"] for line in found} == {None}  # there are no device times
    rows = pl.concat(pl.read_parquet(path) for path in tmp_path.glob("rank-*.parquet"))
    assert rows.height == 160
    assert set(rows["status"]) == {"completed"}


def test_what_hangs_is_issued_and_its_end_unknown(
    jobs: RecordedJobs, capture: str, tmp_path: Path
) -> None:
    """At its end, a trace has a line for an op that hangs, too: its end is not known."""
    job = jobs.start(
        2,
        PROGRAM
        + """
for _ in range(5): dist.all_reduce(x)
torch.cuda.synchronize()
if rank == 0: dist.all_reduce(x)  # rank 1 does not come
wait_until(lambda: handle.flush(60) and sum(1 for _ in open(path)) >= 5)
handle.stop(60); say("stopped"); wait_told("end"); os._exit(0)
""",
        RANKCALL_CAPTURE=capture,
        TRACES=str(tmp_path),
    )
    for rank in (0, 1):
        job.job.wait_for("stopped", rank)
    *ended, stuck = lines(tmp_path, 0)
    assert [line.get("end_unknown") for line in ended] == [None] * 5
    assert (stuck["seq"], stuck["end_unknown"], stuck["duration_ms"]) == (6, True, None)
    assert len(lines(tmp_path, 1)) == 5
    job.tell("end")
    job.job.succeed()


def test_marks_are_no_ranges(jobs: RecordedJobs) -> None:
    """A tool gets a mark for each op at its issue, and no range, which would have no true end.

    Only the native recorder calls such a tool.
    """
    job = jobs.run(
        2,
        """
import ctypes
from rankcall import trace
from rankcall.capture.marks import Functions
libc = ctypes.CDLL(None)
class Printing:
    def functions(self):
        puts = ctypes.cast(libc.puts, ctypes.c_void_p).value
        return Functions(puts, puts, ctypes.cast(libc.abs, ctypes.c_void_p).value)
    def open(self, origin): pass
    def write(self, descriptions): pass
    def close(self): pass
trace.enable("ALL", print_=False, sinks=[Printing()])
init(); x = torch.ones(64, device="cuda"); cpu = dist.new_group(backend="gloo")
dist.all_reduce(x); dist.all_reduce(torch.ones(1), group=cpu)
torch.cuda.synchronize(); dist.destroy_process_group(); libc.fflush(None)
""",
        RANKCALL_CAPTURE="native",
    )
    for number, rank in enumerate(job.job.ranks):
        seen = rank.output.splitlines()
        marks = [json.loads(line) for line in seen if line.startswith('{"name"')]
        assert [mark["device"] for mark in marks if mark["name"] == "all_reduce"] == [number, "cpu"]
        assert not any("end_unknown" in mark for mark in marks)
        assert seen.count("all_reduce") == 1  # the range on the CPU

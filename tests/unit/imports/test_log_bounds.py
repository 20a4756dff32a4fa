"""Hostile, huge, growing and truncated logs: bounded cost, and no wrong rank."""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from collected_logs import LOGS
from log_cases import judged
from nccl_logs import WORDINGS, Call, log_of

from rankcall.analysis.logs import diagnose_logs
from rankcall.imports.logs.reading import Log
from rankcall.imports.logs.sources import markers


def test_lines_are_counted_whatever_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An excerpt has three lines before a marker and after it, with their numbers in the log."""
    words = "Watchdog caught"
    lines = [f"line {number}" for number in range(1, 400)]
    for number in (1, 57, 58, 200, 399):
        lines[number - 1] = f"{words} {number}"
    path = tmp_path / "x.log"
    path.write_text("\n".join(lines) + "\n")
    wanted = {*range(1, 5), *range(54, 62), *range(197, 204), *range(396, 400)}
    for size in (16, 64, 100, 1000, 1 << 22):
        monkeypatch.setattr("rankcall.imports.logs.reading._BLOCK", size)
        log = Log(path)
        kept = [line for run in log.excerpts(markers()) for line in run]
        assert {line.number for line in kept} == wanted, size
        assert all(lines[line.number - 1] == line.text for line in kept)
        assert log.count == 399


def test_hostile_lines_cost_little(tmp_path: Path) -> None:
    """NULs, invalid UTF-8, deep JSON and huge numbers are text like any other."""
    path = tmp_path / "x.log"
    bad = [
        b"\x00" * 1000 + b"Watchdog caught",
        b"\xff\xfe Watchdog caught \xc3\x28",
        b'{"log":' * 5000 + b'"Watchdog caught"' + b"}" * 5000,
        b"[rank99999999999]: Watchdog caught",
        b"a:1:1 [0] NCCL INFO rank 9999999 nranks 1 - Init START",
        b"(Worker_TP9999999 pid=1) Traceback (most recent call last):",
    ]
    path.write_bytes(b"\n".join(bad))
    (finding,) = diagnose_logs([path]).findings
    assert finding.ranks == ()


def test_lines_of_ten_megabytes(tmp_path: Path) -> None:
    """A long line costs no more than its bytes, and a message behind it is read."""
    lines, kind, ranks = LOGS["nccl-missing"]
    path = tmp_path / "job.log"
    with path.open("w") as file:
        for piece in ("x", "[rank3]: ", '{"log": "', "Watchdog caught "):
            file.write((piece * (10_000_000 // len(piece))) + "\n")
        file.write("\n".join(lines) + "\n")
    assert judged(path) == (kind, ranks)


def test_times_that_run_backwards(tmp_path: Path) -> None:
    """A clock that was set back makes no rank the first one: all that failed are named together."""
    text = (
        "[rank{0}]:[E808 10:31:{1:02d}.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 "
        "Rank {0}] Process group watchdog thread terminated with exception: CUDA error: an illegal "
        "memory access was encountered"
    )
    path = tmp_path / "job.log"
    path.write_text("\n".join(text.format(rank, 40 - rank) for rank in range(3)))
    (finding,) = diagnose_logs([path]).findings
    assert (finding.kind, set(finding.ranks) <= {0, 1, 2}) == ("dead", True)
    assert "first" not in finding.summary


def test_two_jobs_in_one_file(tmp_path: Path) -> None:
    """The same rank counts from the beginning again: the jobs are not mixed, and it is said."""
    first = log_of(WORDINGS[-1], {0: Call(500), 1: Call(500)}, {2: (499, 499)})
    second = log_of(WORDINGS[-1], {0: Call(20), 1: Call(20)}, {2: (20, 19)})
    path = tmp_path / "job.log"
    path.write_text("\n".join([*first, *second]))
    diagnosis = diagnose_logs([path])
    assert diagnosis.findings[0].ranks in ((), (2,))
    assert any("several attempts" in problem for problem in diagnosis.problems)


@pytest.mark.parametrize(
    "name", [name for name in LOGS if name.startswith(("nccl-m", "nccl-o", "nccl-d"))]
)
def test_a_truncated_log_is_never_called_healthy(tmp_path: Path, name: str) -> None:
    """Wherever a log ends, one that shows a time-out is not ``nothing_found``."""
    text = "\n".join(LOGS[name][0])
    path = tmp_path / "job.log"
    begin = text.index("Watchdog caught") + len("Watchdog caught")
    for end in range(begin, len(text), 97):
        path.write_text(text[:end])
        kind, ranks = judged(path)
        assert kind != "nothing_found", text[:end][-80:]
        assert set(ranks) <= {2} or (kind == "desync" and 2 in ranks)


def test_lines_that_were_made_to_be_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All messages of all logs have one budget of time; what was not read is said."""
    monkeypatch.setattr("rankcall.imports.logs.job._MOST_SECONDS", 0.05)
    line = "Detected mismatch between collectives on ranks. Rank 1 is running collective: "
    path = tmp_path / "job.log"
    path.write_text("\n".join([(line * 200)[: 1 << 14]] * 200))
    diagnosis = diagnose_logs([path])
    assert "not read beyond line" in diagnosis.problems[0]


def test_a_wrapped_line_without_an_end(tmp_path: Path) -> None:
    """Lines that all seem to go on are put together up to the length of any other line."""
    rows = [f"{'x' * 90} {'yz' * (1 + number % 3)}word" for number in range(3000)]
    path = tmp_path / "job.log"
    path.write_text("\n".join(["Watchdog caught", *(row[:100] for row in rows)] * 3))
    assert judged(path)[1] == ()


@pytest.mark.parametrize("limit", ["_MOST_LINES", "_MOST_KEPT"])
def test_exceptions_all_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """A job that catches exceptions by the thousand still says at the end why it failed."""
    most = 2000 if limit == "_MOST_LINES" else 100_000
    monkeypatch.setattr(f"rankcall.imports.logs.reading.{limit}", most)
    lines, kind, ranks = LOGS["nccl-missing"]
    caught = [
        "Traceback (most recent call last):",
        '  File "/job/x.py", line 1, in load',
        "KeyError",
    ]
    steps = [f"step {step}" for step in range(300)]
    path = tmp_path / "job.log"
    path.write_text("\n".join([*[*caught, *steps] * 100, *lines, ""]))
    diagnosis = diagnose_logs([path])
    assert (diagnosis.findings[0].kind, diagnosis.findings[0].ranks) == (kind, ranks)
    (problem,) = diagnosis.problems
    assert "in its middle are left out" in problem
    log = Log(path)
    kept = [line for run in log.excerpts(markers()) for line in run]
    assert len(kept) + log.left_out == 100 * 303 + len(lines)
    assert len(kept) <= most + 2 * 4096
    assert log.count == 100 * 303 + len(lines)


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_a_compressed_log_that_is_still_written(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """What can be unpacked is judged, and a line says that the end is missing."""
    lines, kind, ranks = LOGS["nccl-2.14-oom"]
    rest = random.Random(1).randbytes(1 << 20)  # which does not become smaller
    path = tmp_path / "job.log.packed"
    path.write_bytes(pack("\n".join([*lines, ""]).encode() + rest)[: 1 << 19])
    verdict = diagnose_logs([path])
    assert (verdict.findings[0].kind, verdict.findings[0].ranks) == (kind, ranks)
    assert pack is zstandard.compress or "its end cannot be read" in str(verdict.problems)

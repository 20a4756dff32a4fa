"""Several processes read the same run from dumps as one does, and survive damaged files."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from dumps import Fault, dump_of, simulate, write_dumps

from rankcall.analysis.verdicts import diagnose
from rankcall.errors import CorruptRunError
from rankcall.imports.dumps import readers
from rankcall.imports.dumps.files import contents_of_dump, find_dumps, read_dump
from rankcall.imports.dumps.readers import File, read_contents
from rankcall.problems import texts
from rankcall.run.load import load

RANKS = 8
HEAD = b"\x80\x02}(X\x07\x00\x00\x00entries]X\x07\x00\x00\x00versionX\x03\x00\x00\x002.9"
# A tuple in a tuple, 300,000 times over, as the key of a dict: its hash overflows the C stack.
DEEP = HEAD + b"Nq\x00" + b"h\x00\x86" * 300_000 + b"Nu."
# 60 tuples, each of which contains the one before twice: its hash takes 2**60 steps.
SHARED = HEAD + b")q\x00" + b"".join(b"h%c\x86q%c" % (n, n + 1) for n in range(60)) + b"Nu."


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a few small dumps for many large ones, and this machine for one with three cores."""
    monkeypatch.setattr(readers, "_SMALL_BYTES", 0)
    monkeypatch.setattr(readers, "_BYTES_OF_WORKER", 1)
    monkeypatch.setattr(readers, "_available_cores", lambda: 3)


def dumps(folder: Path) -> Path:
    """Write the dumps of a job in which rank 3 stops."""
    return write_dumps(folder / "dumps", simulate(RANKS, 60, [Fault("missing", 3, 42)]))


def same(files: Sequence[File]) -> None:
    """Check each answer against what this process reads from the file."""
    answers = dict(read_contents(files))
    assert sorted(answers) == sorted(files)
    for (_, path), (contents, problems) in answers.items():
        expected = contents_of_dump(path)
        assert problems == expected.problems
        for one, other in zip(contents, expected.contents, strict=True):
            assert one.groups == other.groups
            assert one.records.sites == other.records.sites
            assert one.records.records.tobytes() == other.records.records.tobytes()


@pytest.mark.usefixtures("many")
def test_several_processes_read_what_one_reads(tmp_path: Path) -> None:
    """Each dump has the contents, or the problem, that it has in one process."""
    folder = dumps(tmp_path)
    (folder / "nccl_trace_rank_5").write_bytes(pickle.dumps({"entries": []}))
    same(find_dumps([folder]))


@pytest.mark.usefixtures("many")
def test_the_verdict_is_that_of_one_process(tmp_path: Path) -> None:
    """Nothing depends on which process is first."""
    diagnosis = diagnose(load(dumps(tmp_path)))
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("missing", (3,))]


@pytest.mark.usefixtures("many")
def test_a_file_that_ends_its_process_is_left_out(tmp_path: Path) -> None:
    """The others are read, and the problem names the file and the signal."""
    folder = dumps(tmp_path)
    (folder / "nccl_trace_rank_1").write_bytes(DEEP)
    answers = {rank: answer for (rank, _), answer in read_contents(find_dumps([folder]))}
    assert [rank for rank, answer in answers.items() if not answer.contents] == [1]
    (problem,) = texts(answers[1].problems)
    assert "nccl_trace_rank_1: damaged" in problem
    assert f"status {-signal.SIGSEGV}" in problem
    diagnosis = diagnose(load(folder))
    assert [(finding.kind, finding.ranks) for finding in diagnosis.findings] == [("missing", (3,))]
    assert any("nccl_trace_rank_1" in line for line in diagnosis.problems)


@pytest.mark.slow
@pytest.mark.usefixtures("many")
def test_a_file_that_holds_its_process_up_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is ended at the deadline, and another one reads the rest."""
    monkeypatch.setattr(readers, "_SECONDS", 15.0)
    folder = dumps(tmp_path)
    (folder / "nccl_trace_rank_1").write_bytes(SHARED)
    answers = {rank: answer for (rank, _), answer in read_contents(find_dumps([folder]))}
    assert not answers[1].contents
    assert "it takes too long to read" in answers[1].problems[0].text
    assert sorted(answers) == list(range(RANKS))


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("program", ["/does/not/exist", "/bin/false"])
def test_without_other_processes_this_one_reads_the_dumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """No process can be made, or it cannot run this package."""
    monkeypatch.setattr(sys, "executable", program)
    same(find_dumps([dumps(tmp_path)]))


@pytest.mark.usefixtures("many")
def test_a_reader_that_stops_early_leaves_no_process(tmp_path: Path) -> None:
    """The processes end with the iteration."""
    earlier = children()  # a server of forked ranks, for example
    reading = read_contents(find_dumps([dumps(tmp_path)]))
    next(reading)
    assert children() > earlier
    before = threading.active_count()
    reading.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert children() == earlier


def children() -> set[str]:
    """Return the processes that this one has started and not reaped."""
    found = set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # one that is gone by now
            after_name = Path("/proc", name, "stat").read_text().rpartition(")")[2]
            if int(after_name.split()[1]) == os.getpid():
                found.add(name)
    return found


@pytest.mark.parametrize("what", ["deep", "shared"])
def test_this_process_refuses_tuples_in_tuples(tmp_path: Path, what: str) -> None:
    """It survives files that end a process or hold it up."""
    path = tmp_path / "rank_0"
    path.write_bytes(DEEP if what == "deep" else SHARED)
    with pytest.raises(CorruptRunError, match="does not only hold plain data"):
        read_dump(path, [])


def test_shared_lists_in_any_field_are_survived(tmp_path: Path) -> None:
    """No field is turned into text as a whole: 60 lists would make a text of 2**60 characters."""
    bomb: list[object] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    good = dump_of(simulate(8, 20), 0)
    path = tmp_path / "rank_0"
    for field in ("version", "host_name"):
        path.write_bytes(pickle.dumps({**good, field: bomb}))
        answer = contents_of_dump(path)
        assert (not answer.contents) == (field == "version")
    config = {"a": {"ranks": bomb, "desc": bomb}, "b": {"ranks": [0, 1], "desc": bomb}}
    entries = [
        {**entry, field: bomb, "profiling_name": "nccl:all_to_all"}
        for entry, field in zip(good["entries"], good["entries"][0], strict=False)
    ]
    entries.append({**good["entries"][0], "profiling_name": "nccl:all_to_all"})
    entries[-1]["input_sizes"] = [bomb]
    path.write_bytes(pickle.dumps({**good, "pg_config": config, "entries": entries}))
    (contents,) = contents_of_dump(path).contents
    assert contents.groups == {"b": ("", "[0, 1]")}

"""Dumps of all ranks in one file, and dumps of back ends that torch records for.

``tests/flight-recorder`` has what torch 2.15 wrote on simulated devices: rank 2 of 3 did not come
to the fifth all_reduce of the world; and rank 1 of 2 did not come to the fifth batch of messages.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from dumps import T0, Fault, dump_of, simulate

from rankcall.analysis.snapshot import END_UNKNOWN
from rankcall.analysis.verdicts import diagnose
from rankcall.errors import CorruptRunError
from rankcall.imports.dumps.records import records_of
from rankcall.problems import texts
from rankcall.record import FLAG_ABANDONED, FLAG_NOT_STARTED
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.run.load import load

REAL = Path(__file__).parents[2] / "flight-recorder"
NCCL2 = REAL / "nccl2-2.15.json"
BATCHES = REAL / "nccl2-2.15-batch.json"
TABLES = "fr_trace_20261125_173006.txt"
Dumps = dict[str, dict[str, Any]]


def cause(path: Path) -> tuple[str, tuple[int, ...], int]:
    """Return the kind, the ranks and the sequence number of the first finding."""
    finding = diagnose(load(path)).findings[0]
    return finding.kind, finding.ranks, finding.seq


def written(path: Path, content: object, seconds: float = 60.0) -> Path:
    """Write JSON, as if the job had hung for some seconds."""
    path.write_text(json.dumps(content))
    moment = T0 + int(seconds * 1e9)
    os.utime(path, ns=(moment, moment))
    return path


@pytest.mark.parametrize("form", ["names", "numbers", "list", "own"])
def test_one_file_of_all_ranks(tmp_path: Path, form: str) -> None:
    """The dumps of 16 ranks in one JSON give the verdict that was planted, whatever names them."""
    job = simulate(16, 100, [Fault("missing", 5, 41)])
    dumps = [dump_of(job, rank) for rank in range(16)]
    keyed = {
        "names": {f"node-7/rank{rank}.json": dump for rank, dump in enumerate(dumps)},
        "numbers": {str(rank): dump for rank, dump in enumerate(dumps)},
        "list": dumps,
        "own": [{"rank": rank, **dump} for rank, dump in reversed([*enumerate(dumps)])],
    }[form]
    kind, ranks, _ = cause(written(tmp_path / "all.json", keyed))
    assert (kind, ranks) == ("missing", (5,))


def test_one_file_of_all_ranks_in_a_folder(tmp_path: Path) -> None:
    """A folder may hold a file of several ranks, and files of others; one rank twice is refused."""
    job = simulate(16, 100, [Fault("missing", 5, 41)])
    dumps = {str(rank): dump_of(job, rank) for rank in range(16)}
    written(tmp_path / "first.json", {key: dumps[key] for key in list(dumps)[:9]})
    for rank in range(9, 16):
        written(tmp_path / f"rank_{rank}.json", dumps[str(rank)])
    assert cause(tmp_path)[:2] == ("missing", (5,))
    written(tmp_path / "rank_8.json", dumps["8"])
    with pytest.raises(CorruptRunError, match="a dump of rank 8, like"):
        load(tmp_path)


@pytest.mark.parametrize("content", ['{"0": {"entries": [', '{"0" 1}', '{"0": {"pg_config": 1}} x'])
def test_a_damaged_file_of_all_ranks(tmp_path: Path, content: str) -> None:
    """The error names the file and says that it is damaged."""
    path = tmp_path / "all.json"
    path.write_text('{"0": {"version": "2.10", "entries": []}, ' + content[1:])
    with pytest.raises(CorruptRunError, match=r"all\.json"):
        load(path)


def test_two_dumps_of_one_rank_in_a_file(tmp_path: Path) -> None:
    """A file whose keys do not tell the ranks apart is refused."""
    dump = json.loads(NCCL2.read_text())["rank0.json"]
    with pytest.raises(CorruptRunError, match="does not tell which rank"):
        load(written(tmp_path / "all.json", {"a1": dump, "b1": dump}))


def test_dumps_without_any_call(tmp_path: Path) -> None:
    """If Flight Recorder was off, or another back end was asked, nothing is called healthy."""
    for rank in range(2):
        written(tmp_path / f"rank_{rank}.json", {"version": "2.10", "pg_config": {}})
    with pytest.raises(CorruptRunError, match="TORCH_FR_BUFFER_SIZE"):
        load(tmp_path)


# --- back ends for which torch records by hooks: nccl2, and those without an own recorder ---


def test_what_torch_recorded_for_nccl2() -> None:
    """Torch 2.15's dump on simulated devices: rank 2 had not come to all_reduce #5."""
    assert cause(NCCL2) == ("missing", (2,), 5)


def test_ends_of_batches_that_torch_noted_at_their_issue(tmp_path: Path) -> None:
    """Torch 2.15's dump on simulated devices: rank 1 had not come to the last batch of rank 0.

    The dump has all batches as complete, so which of them hang is not known, and nothing is called
    healthy. The all_reduce before them ended in full sight.
    """
    diagnosis = diagnose(load(BATCHES))
    assert [position.how for position in diagnosis.ranks] == [END_UNKNOWN, END_UNKNOWN]
    assert any("a batch of sends and receives" in text for text in diagnosis.problems)
    text = diagnosis_text(diagnosis)
    assert text.startswith("nothing found: ")
    assert "Nobody knows whether the last calls of ranks 0-1 ended" in " ".join(text.split())
    records = load(BATCHES).records
    assert set(records.filter(op="all_reduce")["status"]) == {"completed"}


def test_a_start_that_is_noted_with_the_end_says_nothing() -> None:
    """torch notes both at once then: an op that has not ended may have started."""
    entries = json.loads(NCCL2.read_text())["rank0.json"]["entries"]
    records = records_of(entries).records
    assert not (records["flags"] & FLAG_NOT_STARTED).any()
    # With timing, torch's NCCL back end notes a start before the end.
    entries[0]["time_discovered_started_ns"] -= 1000
    records = records_of(entries).records
    assert (records["flags"] & FLAG_NOT_STARTED != 0).tolist() == [False] * 8 + [True]


def without_ends(dumps: Dumps, backend: str) -> Dumps:
    """Return dumps as torch writes them for a back end that does not tell when an op ends."""
    for dump in dumps.values():
        for entry in dump["entries"]:
            entry |= {"state": "scheduled", "retired": True}
            entry |= {"time_discovered_started_ns": 0, "time_discovered_completed_ns": 0}
            entry["profiling_name"] = entry["profiling_name"].replace("nccl", backend)
    return dumps


@pytest.mark.parametrize("backend", ["mccl", "ucc"])
def test_a_back_end_that_does_not_tell_of_ends(tmp_path: Path, backend: str) -> None:
    """An op that all members issued may have ended; one that a member did not issue has not."""
    job = simulate(16, 100, [Fault("missing", 5, 41)])
    dumps = without_ends({str(rank): dump_of(job, rank) for rank in range(16)}, backend)
    diagnosis = diagnose(load(written(tmp_path / "all.json", dumps)))
    assert {(finding.kind, finding.ranks) for finding in diagnosis.findings} == {("missing", (5,))}
    whole = without_ends({str(r): dump_of(simulate(16, 100), r) for r in range(16)}, backend)
    diagnosis = diagnose(load(written(tmp_path / "all.json", whole)))
    assert not diagnosis.findings
    assert any("does not tell when an op has ended" in text for text in diagnosis.problems)


def test_only_retired_entries_without_any_end_are_of_such_a_back_end() -> None:
    """NCCL's own entries of a work that failed are retired, too; others of it have ended."""
    entries = json.loads(NCCL2.read_text())["rank0.json"]["entries"]
    entries[-1]["retired"] = True
    content = records_of(entries)
    assert not content.endless.any()
    for entry in entries:
        entry |= {"state": "scheduled", "retired": True, "time_discovered_completed_ns": 0}
    content = records_of(entries)
    assert content.endless.all()
    assert not (content.records["flags"] & FLAG_ABANDONED).any()  # the members decide


# --- the folder of torch's debug server ---


def test_tables_of_the_debug_server(tmp_path: Path) -> None:
    """What torch 2.15's own handler wrote: the age comes from the first table with the call."""
    shutil.copy(REAL / TABLES, tmp_path / TABLES)
    shutil.copy(REAL / TABLES, tmp_path / "fr_trace_20261125_173136.txt")
    (tmp_path / "stacks_20261125_173006.txt").write_text("=== Rank 0: http://node-a:1 ===\n")
    assert cause(tmp_path) == ("missing", (2,), 5)
    (finding,) = diagnose(load(tmp_path)).findings
    assert finding.since_s == pytest.approx(90.0)
    assert finding.victims == (0, 1)


def test_one_table_alone(tmp_path: Path) -> None:
    """A call that is in the only table may have just begun: nothing is called a hang."""
    shutil.copy(REAL / TABLES, tmp_path / TABLES)
    assert not diagnose(load(tmp_path)).findings


def test_dumps_are_better_than_tables(tmp_path: Path) -> None:
    """If a folder has dumps of the ranks, too, the tables are left alone."""
    shutil.copy(REAL / TABLES, tmp_path / TABLES)
    shutil.copy(NCCL2, tmp_path / "all.json")
    run = load(tmp_path)
    assert diagnose(run).findings[0].seq == 5
    assert not any(TABLES in text for text in texts(run.problems))


@pytest.mark.parametrize("cut", [40, 200, 900, 3000])
def test_a_table_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    """Whatever is left of a table, no other rank is named."""
    for name in (TABLES, "fr_trace_20261125_173136.txt"):
        (tmp_path / name).write_bytes((REAL / TABLES).read_bytes()[:cut])
    try:
        named = [rank for finding in diagnose(load(tmp_path)).findings for rank in finding.ranks]
    except CorruptRunError:
        named = []
    assert named in ([], [2])

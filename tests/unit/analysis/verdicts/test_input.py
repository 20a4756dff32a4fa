"""Runs that are damaged, mixed up, restarted or vanish: a less sure verdict, or an error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from diagnosing import (
    RANK_2_MISSING,
    SECOND,
    THREE_ENDED,
    WORLD,
    causes,
    diagnose_calls,
    unfinished,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import MS, Call, group_of, write_world

from rankcall.analysis.verdicts import diagnose
from rankcall.cli import main
from rankcall.errors import CorruptRunError
from rankcall.ring.layout import offset_of
from rankcall.run.exits import Exit, note_exit, read_exits
from rankcall.run.load import load
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run


def test_the_culprits_file_is_missing(tmp_path: Path) -> None:
    """A rank without records that all others wait for is named, as possible."""
    findings = diagnose_calls(
        tmp_path, [call for call in RANK_2_MISSING if call.rank != 2], states={}
    ).findings
    assert [(finding.kind, finding.ranks, finding.confidence) for finding in findings] == [
        ("missing", (2,), "possible")
    ]
    assert "no records" in findings[0].summary


def test_another_ranks_file_is_missing(tmp_path: Path) -> None:
    """If a victim's ring is missing, the culprit is named with less confidence."""
    findings = diagnose_calls(
        tmp_path, [call for call in RANK_2_MISSING if call.rank != 1], states={}
    ).findings
    assert [(finding.kind, finding.ranks, finding.confidence) for finding in findings] == [
        ("missing", (2,), "likely")
    ]
    assert any("rank 1" in line for line in findings[0].evidence)


def test_a_rank_restarted_by_elastic(tmp_path: Path) -> None:
    """Only the last attempt counts, however the earlier ones ended."""
    earlier = [Call(rank, 1, 0, None, group=WORLD) for rank in (0, 1, 3)]
    calls = [*earlier, *[Call(**{**vars(call), "attempt": 1}) for call in THREE_ENDED]]
    assert causes(diagnose_calls(tmp_path, calls, seconds=50, states={})) == []


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    """If two processes left a ring as one rank, the later one counts, and a problem says so."""
    calls = [
        *THREE_ENDED,
        *[Call(2, seq, seq * MS, seq * MS + 1, life=1, group=WORLD) for seq in (1, 2)],
    ]
    run = write_world(tmp_path / "run", calls)
    other = next(path for path in (run / "rings").glob("rank-00002*.1.ring"))
    data = bytearray(other.read_bytes())
    data[offset_of("pid") : offset_of("pid") + 4] = (77).to_bytes(4, "little")
    other.write_bytes(data)
    snapshot = diagnose(load(run)).snapshot
    assert snapshot.ranks[2].pid == 77
    assert any("several processes left a ring as rank 2" in str(p) for p in snapshot.problems)


def test_files_of_jobs_of_two_sizes(tmp_path: Path) -> None:
    """The rings of the job that started last count, and a problem reports the others."""
    synthetic_run(tmp_path / "a", 4, 60, planted=Planted("missing", (2,), 41))
    later = {"epoch_errors_ns": [10**12]}  # started a quarter of an hour later
    synthetic_run(tmp_path / "b", 8, 60, planted=Planted("missing", (5,), 41), **later)
    for path in (tmp_path / "a/rings").iterdir():
        path.rename(tmp_path / "b/rings" / f"a.{path.name}")
    diagnosis = diagnose(load(tmp_path / "b"))
    assert causes(diagnosis) == [("missing", (5,))]
    (problem,) = diagnosis.problems
    assert "rings of a job of 4 ranks (rank 0-3) lie beside those of one of 8" in problem


def test_files_of_two_jobs(tmp_path: Path) -> None:
    """If one ring is from another day, each finding is only possible, and a problem says why."""
    synthetic_run(tmp_path / "a", 4, 60)
    later = {"epoch_errors_ns": [10**15]}
    synthetic_run(tmp_path / "b", 4, 60, planted=Planted("missing", (2,), 41), **later)
    name = next(path.name for path in (tmp_path / "a/rings").glob("rank-00001*"))
    (tmp_path / "a/rings" / name).replace(tmp_path / "b/rings" / name)
    diagnosis = diagnose(load(tmp_path / "b"))
    assert {finding.confidence for finding in diagnosis.findings} == {"possible"}
    assert any(
        "rank 1 was last seen before others began" in str(p) for p in diagnosis.snapshot.problems
    )


def test_records_dropped_at_the_decisive_moment(tmp_path: Path) -> None:
    """A culprit whose calls in the group were overwritten is named with less confidence."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 5 * MS)]
    calls = [call for call in calls if call.rank != 2]
    many = [Call(2, seq, seq, seq + 1, group=group_of(3, "1")) for seq in range(1, 300)]
    findings = diagnose_calls(tmp_path, [*calls, *many], states={}, capacities={2: 128}).findings
    assert [(finding.kind, finding.ranks, finding.confidence) for finding in findings] == [
        ("missing", (2,), "likely")
    ]
    assert any("overwritten" in line for line in findings[0].evidence)


def test_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a run of another ring schema, the command prints one clear line."""
    run = write_world(tmp_path / "run", RANK_2_MISSING)
    for ring in (run / "rings").iterdir():
        data = bytearray(ring.read_bytes())
        data[offset_of("schema")] = 9
        ring.write_bytes(data)
    assert main(["diagnose", str(run)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "ring schema 9" in err


def test_a_run_that_vanishes(tmp_path: Path) -> None:
    """Rings that vanish after load() leave their ranks unknown, without an error."""
    run = load(write_world(tmp_path / "run", RANK_2_MISSING))
    shutil.rmtree(tmp_path / "run")
    diagnosis = diagnose(run)
    assert all(state.blind for state in diagnosis.snapshot.ranks)
    assert diagnosis.findings == []
    assert diagnosis.snapshot.problems


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=40)), max_size=6))
def test_damage_never_escapes(tmp_path_factory: pytest.TempPathFactory, damage: list) -> None:
    """For any bytes in a ring, there is a diagnosis or a CorruptRunError."""
    folder = tmp_path_factory.mktemp("damaged")
    run = write_world(folder / "run", RANK_2_MISSING, closed=lambda rank: False)
    for ring in sorted((run / "rings").iterdir())[:3]:
        data = bytearray(ring.read_bytes())
        for at, new in damage:
            at %= len(data)
            data[at : at + len(new)] = new[: len(data) - at]
        ring.write_bytes(data)
    try:
        diagnose(load(run))
    except CorruptRunError:
        pass
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b"null", b'{"rank": "x"}', b"\xff\xfe", b"[" * 5000, b"7" * 5000]
)
def test_damaged_lists_of_exits(tmp_path: Path, line: bytes) -> None:
    """Damaged lines are left out; the other lines count."""
    ended = Exit(2, 0, "node/a", 1002, -9, 10**18, by_launcher=True)
    note_exit(tmp_path, ended)
    (file,) = (tmp_path / "exits").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(line + b"\n" + file.read_bytes() + line)
    assert read_exits(tmp_path) == [ended]


def test_one_ring_file_alone(tmp_path: Path) -> None:
    """From one rank's ring, the call that it waits in is known, and the culprit only possible."""
    beats = dict.fromkeys(range(4), (70 * SECOND, 70 * SECOND))
    run = write_world(tmp_path / "run", RANK_2_MISSING, closed=lambda rank: False, beats=beats)
    findings = diagnose(load(next((run / "rings").glob("rank-00000*")))).findings
    assert [(finding.kind, finding.confidence) for finding in findings] == [("missing", "possible")]

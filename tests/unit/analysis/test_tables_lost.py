"""If a ring had no room for names, every command says so, and a verdict is less certain."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import RANK_2_MISSING, diagnose_calls
from worlds import write_world

from rankcall.analysis.node_snapshot import decode, encode, merge, node_snapshot_of
from rankcall.analysis.summary import summarise
from rankcall.analysis.verdicts import find
from rankcall.cli import main
from rankcall.problems import texts
from rankcall.report import json as json_report
from rankcall.ring.layout import offset_of
from rankcall.run.load import load

PROBLEM = "side tables are full on ranks 1 and 3: 12 names (of groups, lines or error texts)"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of four ranks; rank 2 hangs it, ranks 1 and 3 lost 5 and 7 names."""
    made = write_world(tmp_path / "job", RANK_2_MISSING)
    at = offset_of("tables_lost")
    for rank, lost in ((1, 5), (3, 7)):
        (ring,) = (made / "rings").glob(f"rank-{rank:05d}*.ring")
        data = bytearray(ring.read_bytes())
        data[at : at + 8] = lost.to_bytes(8, "little")
        ring.write_bytes(data)
    return made


def test_a_run_says_which_ranks_lost_names(run: Path) -> None:
    """``tables_lost`` has the counts, and ``problems`` has one sentence about them."""
    loaded = load(run)
    assert loaded.tables_lost == {1: 5, 3: 7}
    (problem,) = texts(loaded.problems)
    assert PROBLEM in problem
    assert "rankcall.disable() and enable()" in problem


def test_a_run_that_lost_none_says_nothing(tmp_path: Path) -> None:
    """A run that lost no names has no such problem."""
    loaded = load(write_world(tmp_path / "sound", RANK_2_MISSING))
    assert (loaded.tables_lost, loaded.problems) == ({}, [])


def test_every_command_says_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``report`` and ``diagnose`` print it, and their JSON holds it."""
    assert PROBLEM in " ".join(json_report.as_object(summarise(load(run)))["problems"])
    assert main(["report", str(run)]) == 1
    assert PROBLEM in " ".join(capsys.readouterr().err.split())
    main(["diagnose", str(run)])
    assert PROBLEM in " ".join(capsys.readouterr().out.split())
    main(["diagnose", "--json", str(run)])
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert PROBLEM in problem


def test_a_verdict_on_ranks_without_names_is_less_sure(tmp_path: Path) -> None:
    """A culprit or a victim that lost names lowers the confidence, also through the store."""
    sure = diagnose_calls(tmp_path, RANK_2_MISSING, states={})
    assert [finding.confidence for finding in sure.findings] == ["certain"]
    for rank in (1, 2):
        snapshot = sure.snapshot
        ranks = [
            replace(state, tables_lost=4) if state.rank == rank else state
            for state in snapshot.ranks
        ]
        nameless = replace(snapshot, ranks=ranks)
        assert [finding.confidence for finding in find(nameless, 60)] == ["likely"]
        sent = merge([decode(encode(node_snapshot_of(nameless)))])
        assert [finding.confidence for finding in find(sent, 60)] == ["likely"]

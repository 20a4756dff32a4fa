"""docs/design/verdicts.md lists each sentence with its conditions, and names tests that exist."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from diagnosing import RANK_2_MISSING, THREE_ENDED, WORLD, causes, diagnose_calls, unfinished
from worlds import MS, Call

from rankcall.analysis.snapshot import PEER_CLOSED, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts import KINDS, find
from rankcall.analysis.verdicts.facts import group_of
from rankcall.analysis.verdicts.naming import name_group
from rankcall.record import STATUSES
from rankcall.ring.tables import Group

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs/design/verdicts.md").read_text(encoding="utf-8")


def test_the_page_names_tests_that_exist() -> None:
    """A sentence's test is named by its file, below a folder of tests, and its function."""
    tests = ROOT / "tests"
    sources = {
        path.relative_to(base).with_suffix("").as_posix(): path.read_text(encoding="utf-8")
        for base in (ROOT, tests / "unit", tests / "multiproc")
        for path in sorted(tests.rglob("test_*.py"))
        if path.is_relative_to(base)
    }
    names = re.findall(r"`((?:\w+/)*test_\w+|\.\.\.)(?:\.py)?(?:::(\w+))?`", PAGE)
    assert len(names) > 20
    file = ""
    for path, function in names:
        file = file if path == "..." else path
        assert file in sources, file
        assert f"def {function}" in sources[file] or not function, f"{file}::{function}"


def test_the_page_knows_every_kind() -> None:
    """Every kind of verdict has its sentences on the page."""
    missing = [kind.kind for kind in KINDS if kind.kind not in PAGE]
    assert missing == []


def test_a_held_gil(tmp_path: Path) -> None:
    """A rank with a native heartbeat but no Python heartbeat holds the GIL."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 5 * MS, line=7)]
    run = diagnose_calls(tmp_path / "beats", calls, states={})
    assert causes(run) == [("missing", (2,))]
    snapshot = run.snapshot
    snapshot.ranks[2] = replace(snapshot.ranks[2], gil_s=69.0)
    (held,) = find(snapshot, 60)
    assert (held.kind, held.ranks) == ("stopped", (2,))
    assert "held the GIL for 69 s" in held.summary
    snapshot.ranks[2] = replace(snapshot.ranks[2], gil_s=1.0)
    assert [finding.kind for finding in find(snapshot, 60)] == ["missing"]


def test_a_heartbeat_that_needs_the_gil(tmp_path: Path) -> None:
    """Of a rank with the Python capture, only this is known: no Python thread has run."""
    run = diagnose_calls(tmp_path / "beats", RANK_2_MISSING, states={})
    for needs_gil, sign in ((False, "given no sign of life"), (True, "run no Python thread")):
        state = replace(run.snapshot.ranks[2], silent_s=69.0, gil_s=69.0, needs_gil=needs_gil)
        run.snapshot.ranks[2] = state
        (finding,) = find(run.snapshot, 60)
        assert (finding.kind, finding.ranks) == ("stopped", (2,))
        assert f"{sign} for 69 s" in finding.summary
        assert ("GIL" in finding.advice) == needs_gil


def test_only_those_in_a_call_have_waited_there(tmp_path: Path) -> None:
    """Ranks that wait in another call, or for a waiting rank, are counted apart."""
    ahead = [
        *unfinished(WORLD, 4, (0, 1), 5 * MS, line=7),
        Call(3, 4, 5 * MS, 6 * MS, group=WORLD, line=7),  # as after a broadcast
        *unfinished(WORLD, 5, (3,), 6 * MS, line=8),
    ]
    (finding,) = diagnose_calls(tmp_path / "apart", [*THREE_ENDED, *ahead], states={}).findings
    assert (finding.kind, finding.ranks, finding.victims) == ("missing", (2,), (0, 1, 3))
    assert "3 ranks cannot go on: 2 have waited" in finding.summary
    assert finding.summary.endswith("and 1 is in another call.")
    (finding,) = diagnose_calls(tmp_path / "all", RANK_2_MISSING, states={}).findings
    assert "3 ranks have waited" in finding.summary


@pytest.mark.parametrize("state", ["alive", "stopped"])
def test_network_and_hosts_are_named_only_if_there_are_several(tmp_path: Path, state: str) -> None:
    """On one host no advice sends the user to another host or to the network."""
    diagnosis = diagnose_calls(tmp_path / "one", RANK_2_MISSING, states={2: state})
    everyone = unfinished(WORLD, 9, (0, 1, 2, 3), 9 * MS, line=7)
    slow = diagnose_calls(tmp_path / "stuck", [*THREE_ENDED, *everyone], states={})
    for finding in (*diagnosis.findings, *slow.findings):
        assert "network" not in finding.advice
        assert "host is up" not in finding.advice
    apart = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
    spread = diagnose_calls(
        tmp_path / "two", [*THREE_ENDED, *everyone], states={}, hosts=apart, seconds=70
    )
    assert any("network" in finding.advice for finding in spread.findings)


@pytest.mark.parametrize(
    ("name", "description", "named"),
    [
        ("3", "mesh_dp", "3 (mesh_dp)"),
        ("tp:3", "tp", "tp:3"),
        ("3", "undefined", "3"),
        ("0", "default_pg", "0"),
        ("3", "", "3"),
    ],
)
def test_a_group_is_named_by_its_description(name: str, description: str, named: str) -> None:
    """The number that torch gives a group says nothing; what torch writes by default does not."""
    group = Group(name, 0, "gloo", description, (0, 1))
    assert name_group(*group_of(Snapshot([], no_calls(), [group], [group.label]), 0)) == named


def test_a_call_is_named_by_the_function_that_was_called(tmp_path: Path) -> None:
    """``gather_object`` issues several ops: a user must not look for one that is not there."""
    calls = [replace(call, api="gather_object") for call in RANK_2_MISSING]
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert "in gather_object's all_reduce #4 of group" in finding.summary


def lost(folder: Path, here: int = 2) -> Snapshot:
    """Return a job of four whose first ranks failed in a call; of the others nothing is known."""
    known = range(here)
    calls = [
        *(call for call in THREE_ENDED if call.rank in known),
        *(Call(rank, 4, 5 * MS, 6 * MS, group=WORLD, line=7, status="failed") for rank in known),
    ]
    snapshot = diagnose_calls(folder, calls, states={}, world_size=4).snapshot
    for rank in range(here, 4):
        snapshot.ranks[rank] = RankState(rank, "node-b", 1000 + rank, blind=True, unheard=True)
    return snapshot


def test_closed_connections_of_a_node_that_does_not_answer(tmp_path: Path) -> None:
    """Dead, as far as others saw; not if a call failed for another reason, or all is quiet."""
    snapshot = lost(tmp_path / "lost")
    failed = snapshot.calls["status"] == STATUSES.index("failed")
    assert failed.sum() == 2
    (finding,) = find(snapshot, 60)
    assert (finding.kind, finding.ranks) == ("missing", (2, 3))
    snapshot.calls["flags"][np.flatnonzero(failed)[0]] |= PEER_CLOSED
    assert [finding.kind for finding in find(snapshot, 60)] == ["missing"]
    snapshot.calls["flags"][failed] |= PEER_CLOSED
    (finding,) = find(snapshot, 60)
    assert (finding.kind, finding.ranks, finding.confidence) == ("dead", (2, 3), "likely")
    assert "are gone: their connections were closed, and no word has come" in finding.summary
    snapshot.calls["status"][failed] = STATUSES.index("started")
    assert [finding.kind for finding in find(snapshot, 60)] == ["missing"]


@pytest.mark.parametrize("ahead", [(0,), (0, 1)])
def test_a_node_that_stops_in_the_midst_of_a_call(tmp_path: Path, ahead: tuple[int, ...]) -> None:
    """Some ranks have left the call, and wait in the next one for those that cannot leave it."""
    known = range(3)
    fourth = [
        Call(rank, 4, 5 * MS, 6 * MS if rank in ahead else None, group=WORLD, line=7)
        for rank in known
    ]
    fifth = [Call(rank, 5, 7 * MS, None, group=WORLD, line=8) for rank in ahead]
    calls = [call for call in THREE_ENDED if call.rank in known]
    snapshot = diagnose_calls(tmp_path, [*calls, *fourth, *fifth], states={}, world_size=4).snapshot
    snapshot.ranks[3] = RankState(3, "node-b", 1003, blind=True, unheard=True)
    (finding,) = find(snapshot, 5.0)
    assert (finding.kind, finding.ranks, finding.seq) == ("missing", (3,), 4)
    assert "does not answer" in finding.summary


def test_closed_connections_of_ranks_without_records(tmp_path: Path) -> None:
    """Without answers, only a single rank without records can be the one that is gone."""
    for here, kind, ranks in ((2, "missing", (2, 3)), (3, "dead", (3,))):
        snapshot = lost(tmp_path / str(here), here)
        failed = snapshot.calls["status"] == STATUSES.index("failed")
        snapshot.calls["flags"][failed] |= PEER_CLOSED
        for rank in ranks:
            snapshot.ranks[rank] = RankState(rank, blind=True)
        (finding,) = find(snapshot, 60)
        assert (finding.kind, finding.ranks) == (kind, ranks)
    assert finding.confidence == "likely"
    assert "is gone: its connections were closed, and it left no records here" in finding.summary

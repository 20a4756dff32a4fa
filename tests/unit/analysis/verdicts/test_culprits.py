"""When ranks wait, the verdict names the missing, dead, stopped or exhausted rank, not a victim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
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
from worlds import MS, Call, together

from rankcall.analysis.node_snapshot import decode, encode, merge, node_snapshot_of
from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot
from rankcall.analysis.verdicts import find
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.ring.tables import Group


def test_missing(tmp_path: Path) -> None:
    """A rank in user code that others wait for is missing; the waiting ranks are its victims."""
    findings = diagnose_calls(tmp_path, RANK_2_MISSING, states={}).findings
    assert len(findings) == 1
    first = findings[0]
    assert (first.kind, first.ranks, first.victims) == ("missing", (2,), (0, 1, 3))
    assert (first.group, first.seq, first.op, first.call_site) == (
        "0",
        4,
        "all_reduce",
        "train.py:7",
    )
    assert first.hosts == ("node-a",)
    assert first.since_s == pytest.approx(70, abs=0.1)
    assert first.confidence == "certain"


@pytest.mark.parametrize(
    ("code", "kind"), [(-9, "dead"), (-11, "dead"), (1, "dead"), (0, "exhausted"), (143, "dead")]
)
def test_gone(tmp_path: Path, code: int, kind: str) -> None:
    """A process that exited with code 0 is exhausted; with a signal or another code it is dead."""
    diagnosis = diagnose_calls(
        tmp_path, RANK_2_MISSING, states={2: "gone"}, exits={2: (code, 1.0)}, beats={2: 1.0}
    )
    assert causes(diagnosis) == [(kind, (2,))]
    assert diagnosis.findings[0].confidence == "certain"
    assert diagnosis.findings[0].victims == (0, 1, 3)


def test_stopped(tmp_path: Path) -> None:
    """A stopped process gets the verdict "stopped", not "missing"."""
    assert causes(
        diagnose_calls(tmp_path, RANK_2_MISSING, states={2: "stopped"}, beats={2: 1.0})
    ) == [("stopped", (2,))]


@pytest.mark.parametrize("closed", [(), (2,)])
def test_closing_down(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """A rank whose program ended while others wait for it ran out of inputs."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={}, left=[2], closed=closed)
    assert causes(diagnosis) == [("exhausted", (2,))]
    assert diagnosis.findings[0].confidence == "likely"
    assert "left the loop: it is closing down" in diagnosis.findings[0].summary


def test_recording_switched_off(tmp_path: Path) -> None:
    """A rank that runs on without recording is only possibly missing."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={}, closed=[2])
    assert causes(diagnosis) == [("missing", (2,))]
    assert diagnosis.findings[0].confidence == "possible"
    assert "has stopped recording" in diagnosis.findings[0].summary


def test_stopped_within_a_call(tmp_path: Path) -> None:
    """A rank that was stopped inside the hung collective is named."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 2, 3), 5 * MS)]
    diagnosis = diagnose_calls(tmp_path, calls, states={2: "stopped"}, beats={2: 1.0})
    assert causes(diagnosis) == [("stopped", (2,))]
    assert diagnosis.findings[0].victims == (0, 1, 3)


MISSING_2 = ("missing", (2,))


@pytest.mark.parametrize(
    ("silent", "expected"),
    [(5.0, [MISSING_2]), (29.0, [MISSING_2]), (69.0, [MISSING_2, ("stopped", (1,))])],
)
def test_a_heartbeat_that_is_late(
    tmp_path: Path, silent: float, expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    """A victim with a late heartbeat has a busy machine; only one that froze is a cause."""
    assert (
        causes(diagnose_calls(tmp_path, RANK_2_MISSING, states={}, beats={1: 70 - silent}))
        == expected
    )


def test_no_call_is_hung_before_the_threshold(tmp_path: Path) -> None:
    """A call that has been in flight for less than hang_after is healthy."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={}, seconds=59)
    assert (diagnosis.findings, diagnosis.kind) == ([], "healthy")
    words = " ".join(diagnosis_text(diagnosis).split())
    assert "has been in flight for 59 s; it counts as hung from 60 s on (--hang-after 60)." in words


def test_the_advice_continues_all_stopped_ranks(tmp_path: Path) -> None:
    """The advice is a command that continues all stopped ranks, host by host."""
    hosts = {0: "node-a", 1: "node-b", 2: "node-b", 3: "node-a"}
    diagnosis = diagnose_calls(
        tmp_path, RANK_2_MISSING, states=dict.fromkeys((1, 2), "stopped"), hosts=hosts
    )
    assert causes(diagnosis) == [("stopped", (1, 2))]
    assert diagnosis.findings[0].advice == "kill -CONT 1001 1002 on node-b lets them go on."
    apart = diagnose_calls(
        tmp_path / "apart", RANK_2_MISSING, states=dict.fromkeys((2, 3), "stopped"), hosts=hosts
    )
    assert apart.findings[0].advice == (
        "kill -CONT 1002 on node-b, kill -CONT 1003 on node-a lets them go on."
    )


def test_a_stopped_rank_is_found_before_the_threshold(tmp_path: Path) -> None:
    """A process that a signal stopped is a finding, however short the wait for it."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={2: "stopped"}, seconds=59)
    assert causes(diagnosis) == [("stopped", (2,))]
    assert diagnosis.findings[0].victims == (0, 1, 3)


def test_a_declared_phase_is_shown(tmp_path: Path) -> None:
    """A call that waits for a rank in a declared phase is not hung, and the text says why."""
    snapshot = diagnose_calls(tmp_path, RANK_2_MISSING, states={}).snapshot
    snapshot.ranks = [replace(state, expects="checkpoint") for state in snapshot.ranks]
    diagnosis = Diagnosis.of("run", snapshot, find(snapshot, 60), 60)
    assert diagnosis.kind == "healthy"
    assert "its rank declared to take long" in " ".join(diagnosis_text(diagnosis).split())


@pytest.mark.parametrize(("later_s", "named"), [(30, 2), (32, 1)])
def test_a_second_hang_that_began_later(tmp_path: Path, later_s: int, named: int) -> None:
    """Beside a hung call, an independent one counts as hung after half the threshold."""
    left = Group("l", 0, "gloo", "left", (0, 1))
    right = Group("r", 0, "gloo", "right", (2, 3))
    calls = [call for group in (left, right) for call in together(1, [0, 0], MS, group)]
    calls += [*unfinished(left, 2, (0,), 2 * MS), *unfinished(right, 2, (3,), later_s * SECOND)]
    culprits = causes(diagnose_calls(tmp_path, calls, states={}, seconds=61))
    assert culprits == [("missing", (1,)), ("missing", (2,))][:named]


def test_a_rank_that_the_watcher_ended_is_a_victim(tmp_path: Path) -> None:
    """A rank that its watcher ended is no cause; a rank that was silent before its end is."""
    gone = dict.fromkeys(range(4), "gone")
    aborted = dict.fromkeys((0, 1, 3), (124, 66.0))
    stopped = diagnose_calls(
        tmp_path / "a",
        RANK_2_MISSING,
        states=gone,
        exits={**aborted, 2: (-9, 96)},
        seconds=97,
        beats={0: 66, 1: 66, 3: 66, 2: 0.5},
        aborted=[0, 1, 3],
    )
    assert causes(stopped) == [("stopped", (2,))]
    assert stopped.findings[0].victims == (0, 1, 3)
    busy = diagnose_calls(
        tmp_path / "b",
        RANK_2_MISSING,
        states=gone,
        exits={**aborted, 2: (124, 66.1)},
        seconds=67,
        beats=dict.fromkeys(range(4), 66),
        aborted=range(4),
    )
    assert causes(busy) == [("missing", (2,))]


def test_victims_of_victims(tmp_path: Path) -> None:
    """A rank that itself waits is never named, even in a chain of three groups."""
    pairs = [Group(name, 0, "gloo", "", ranks) for name, ranks in (("1", (0, 1)), ("2", (1, 2)))]
    calls = [
        *THREE_ENDED,
        *unfinished(WORLD, 4, (3,), 9 * MS),
        *unfinished(pairs[0], 1, (0,), 8 * MS),
        *unfinished(pairs[1], 1, (1,), 7 * MS),
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={})
    assert causes(diagnosis) == [("missing", (2,))]
    assert diagnosis.findings[0].victims == (0, 1, 3)


def test_survivors_fail_one_after_another(tmp_path: Path) -> None:
    """The first rank to die is named; ranks whose collectives then failed are its victims."""
    calls = [
        *THREE_ENDED,
        *[Call(rank, 4, 5 * MS, 9 * MS, group=WORLD, status="failed") for rank in (0, 1, 3)],
    ]
    exits = {2: (-9, 1.0), 0: (1, 1.2), 3: (1, 1.3), 1: (-15, 1.5)}
    diagnosis = diagnose_calls(
        tmp_path, calls, states=dict.fromkeys(range(4), "gone"), exits=exits, seconds=2
    )
    assert causes(diagnosis) == [("dead", (2,))]


def test_nodes_tell_each_other(tmp_path: Path) -> None:
    """The snapshots of two nodes, sent and merged, give the same verdict as the whole run."""
    hosts = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
    whole = diagnose_calls(tmp_path, RANK_2_MISSING, states={}, hosts=hosts).snapshot
    parts = []
    for host in ("node-a", "node-b"):
        ranks = [
            state if state.host == host else RankState(state.rank, blind=True)
            for state in whole.ranks
        ]
        mine = np.isin(whole.calls["rank"], [state.rank for state in ranks if not state.blind])
        part = Snapshot(ranks, whole.calls[mine], whole.groups, whole.labels, whole.sites)
        parts.append(decode(encode(node_snapshot_of(part))))
    assert find(merge(parts)) == find(whole) != []


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("known", [True, False])
def test_a_rank_that_asks_the_wrong_one(tmp_path: Path, goes_on: bool, known: bool) -> None:
    """Rank 3 sends to rank 2, which suddenly waits for rank 0 instead: rank 2 is to blame.

    Rank 0 has nothing to do with it, unless it has sent messages to rank 2 before, or does nothing.
    """
    calls = []
    pairs = [(0, 1), (3, 2), (0, 2)] if known else [(0, 1), (3, 2)]
    for seq in range(1, 31):
        for source, target in pairs:
            at = seq * 100 * MS
            calls += [
                Call(source, seq, at, at + MS, "send", group=WORLD, peer=target, api="send"),
                Call(target, seq, at, at + MS, "recv", group=WORLD, peer=source, api="recv"),
            ]
    next_seq = 31 if known else 1
    calls.append(Call(2, next_seq, 4 * SECOND, None, "recv", group=WORLD, peer=0, api="recv"))
    calls.append(Call(3, 31, 4 * SECOND, None, "send", group=WORLD, peer=2, api="send"))
    for seq in range(31, 97 if goes_on else 32):
        at = seq * SECOND if goes_on else 4 * SECOND
        if at < 69 * SECOND:
            calls += [
                Call(0, seq, at, at + MS, "send", group=WORLD, peer=1, api="send"),
                Call(1, seq, at, at + MS, "recv", group=WORLD, peer=0, api="recv"),
            ]
    states = dict.fromkeys(range(4), ALIVE)
    (finding,) = diagnose_calls(tmp_path, calls, states=states).findings
    assert finding.kind == "missing"
    assert finding.ranks == ((2,) if goes_on and not known else (0,))
    if finding.ranks == (2,):
        assert "rank 2: in recv #1 from rank 0 (tag 0, group 0)" in finding.evidence[0]

"""Who is named when ranks wait: missing, dead, stopped, exhausted, and never a victim."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from worlds import MS, START, Call, group_of, together, write_world

from rankcall.analysis.diagnosis import Diagnosis, diagnose
from rankcall.analysis.state.node_snapshot import decode, encode, merge, node_snapshot_of
from rankcall.analysis.state.snapshot import RankState, Snapshot
from rankcall.analysis.verdicts import find
from rankcall.processes import Exit, note_exit
from rankcall.report.diagnosis import render
from rankcall.ring.header import Header
from rankcall.ring.tables import Group
from rankcall.run import load

S = 1000 * MS
HERE = 10**18  # epoch of START, see worlds


def stuck(group: Group, seq: int, ranks: tuple[int, ...], at: int, **fields: object) -> list[Call]:
    """Return a collective that some members are in, and do not get out of."""
    return [Call(rank, seq, at, None, group=group, **fields) for rank in ranks]  # type: ignore[arg-type]


def look(
    folder: Path,
    calls: list[Call],
    *,
    seconds: int = 70,
    states: dict[int, str] | None = None,
    beats: dict[int, float] | None = None,
    exits: dict[int, tuple[int, float]] | None = None,
    hang_after: float = 60,
    closed: Collection[int] = (),
    **options: object,
) -> Diagnosis:
    """Diagnose a world of calls as it is ``seconds`` after its start.

    ``states`` are the processes' (alive without one, where any is given), ``beats`` when their
    last heartbeat was, s; ``exits`` their codes and when they ended; ``closed`` have stopped to
    record.
    """
    ranks = {call.rank for call in calls} | set(options.get("ranks", ()))  # type: ignore[call-overload]
    last = {rank: round((beats or {}).get(rank, seconds) * S) for rank in ranks}
    run = write_world(
        folder / "run", calls, closed=lambda rank: rank in closed,
        beats={rank: (at, at) for rank, at in last.items()}, **options,  # type: ignore[arg-type]
    )  # fmt: skip
    for rank, (code, at) in (exits or {}).items():
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, code, HERE + round(at * S)))

    def state_of(header: Header) -> str:
        return "unknown" if states is None else states.get(header.rank, "alive")

    return diagnose(load(run), hang_after, state_of=state_of, now_ns=lambda: START + seconds * S)


def said(found: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    """Return kind and culprits of each finding."""
    return [(each.kind, each.ranks) for each in found.findings]


WORLD = group_of(4)
BEFORE = [call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, line=7)]
WAITING = [*BEFORE, *stuck(WORLD, 4, (0, 1, 3), 5 * MS, line=7)]


def test_missing(tmp_path: Path) -> None:
    """A rank in user code that others wait for is missing; the waiting are its victims."""
    found = look(tmp_path, WAITING, states={}).findings
    assert len(found) == 1
    first = found[0]
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
    """A process that is gone with exit code 0 is exhausted, with a signal or another code dead."""
    found = look(tmp_path, WAITING, states={2: "gone"}, exits={2: (code, 1.0)}, beats={2: 1.0})
    assert said(found) == [(kind, (2,))]
    assert found.findings[0].confidence == "certain"
    assert found.findings[0].victims == (0, 1, 3)


def test_stopped(tmp_path: Path) -> None:
    """A process that is stopped is that, and not missing."""
    assert said(look(tmp_path, WAITING, states={2: "stopped"}, beats={2: 1.0})) == [
        ("stopped", (2,))
    ]


@pytest.mark.parametrize("closed", [(), (2,)])
def test_closing_down(tmp_path: Path, closed: tuple[int, ...]) -> None:
    """Whose program came to its end while others wait for it ran out of inputs."""
    found = look(tmp_path, WAITING, states={}, left=[2], closed=closed)
    assert said(found) == [("exhausted", (2,))]
    assert found.findings[0].confidence == "likely"
    assert "left the loop: it is closing down" in found.findings[0].summary


def test_recording_switched_off(tmp_path: Path) -> None:
    """Of a rank that runs on without recording it is only possible that it has not come."""
    found = look(tmp_path, WAITING, states={}, closed=[2])
    assert said(found) == [("missing", (2,))]
    assert found.findings[0].confidence == "possible"
    assert "has stopped recording" in found.findings[0].summary


def test_stopped_within_a_call(tmp_path: Path) -> None:
    """A rank that was stopped inside the collective that hangs is named, too."""
    calls = [*BEFORE, *stuck(WORLD, 4, (0, 1, 2, 3), 5 * MS)]
    found = look(tmp_path, calls, states={2: "stopped"}, beats={2: 1.0})
    assert said(found) == [("stopped", (2,))]
    assert found.findings[0].victims == (0, 1, 3)


MISSING_2 = ("missing", (2,))


@pytest.mark.parametrize(
    ("silent", "causes"),
    [(5.0, [MISSING_2]), (29.0, [MISSING_2]), (69.0, [MISSING_2, ("stopped", (1,))])],
)
def test_a_heartbeat_that_is_late(
    tmp_path: Path, silent: float, causes: list[tuple[str, tuple[int, ...]]]
) -> None:
    """A victim whose heart beats late is no cause: its machine is busy. One that froze then is."""
    assert said(look(tmp_path, WAITING, states={}, beats={1: 70 - silent})) == causes


def test_nobody_is_hung_before_the_threshold(tmp_path: Path) -> None:
    """What has been in flight for less than hang_after is healthy."""
    found = look(tmp_path, WAITING, states={}, seconds=59)
    assert (found.findings, found.verdict) == ([], "healthy")
    words = " ".join(render(found).split())
    assert "has been in flight for 59 s; it counts as hung from 60 s on (--hang-after 60)." in words


def test_all_who_are_stopped_can_be_let_go_on(tmp_path: Path) -> None:
    """The advice is a command for all of them, host by host."""
    hosts = {0: "node-a", 1: "node-b", 2: "node-b", 3: "node-a"}
    found = look(tmp_path, WAITING, states=dict.fromkeys((1, 2), "stopped"), hosts=hosts)
    assert said(found) == [("stopped", (1, 2))]
    assert found.findings[0].advice == "kill -CONT 1001 1002 on node-b lets them go on."
    apart = look(tmp_path / "apart", WAITING, states=dict.fromkeys((2, 3), "stopped"), hosts=hosts)
    assert apart.findings[0].advice == (
        "kill -CONT 1002 on node-b, kill -CONT 1003 on node-a lets them go on."
    )


def test_a_stopped_rank_is_told_before_anybody_hangs(tmp_path: Path) -> None:
    """It is healthy by then; who asks reads who is stopped all the same."""
    found = look(tmp_path, WAITING, states={2: "stopped"}, seconds=59)
    assert found.verdict == "healthy"
    words = " ".join(render(found).split())
    assert "healthy: 3 ranks go on" in words
    assert "Rank 2 (node-a, pid 1002) is stopped just now" in words


def test_a_declared_phase_is_told(tmp_path: Path) -> None:
    """Nobody is promised a verdict on a call of a rank that said it takes long."""
    snapshot = look(tmp_path, WAITING, states={}).snapshot
    snapshot.ranks = [replace(each, expects="checkpoint") for each in snapshot.ranks]
    found = Diagnosis("run", snapshot, find(snapshot, 60), 60)
    assert found.verdict == "healthy"
    assert "its rank declared to take long" in " ".join(render(found).split())


@pytest.mark.parametrize(("later_s", "named"), [(30, 2), (32, 1)])
def test_a_second_hang_that_began_later(tmp_path: Path, later_s: int, named: int) -> None:
    """Beside a hung call, another that nobody of that hang holds up counts at half its patience."""
    left = Group("l", 0, "gloo", "left", (0, 1))
    right = Group("r", 0, "gloo", "right", (2, 3))
    calls = [call for each in (left, right) for call in together(1, [0, 0], MS, each)]
    calls += [*stuck(left, 2, (0,), 2 * MS), *stuck(right, 2, (3,), later_s * S)]
    found = said(look(tmp_path, calls, states={}, seconds=61))
    assert found == [("missing", (1,)), ("missing", (2,))][:named]


def test_who_ended_because_the_job_hung_is_a_victim(tmp_path: Path) -> None:
    """Watchers that end their ranks name nobody; who had been silent before its end is named."""
    gone = dict.fromkeys(range(4), "gone")
    aborted = dict.fromkeys((0, 1, 3), (124, 66.0))
    stopped = look(
        tmp_path / "a", WAITING, states=gone, exits={**aborted, 2: (-9, 96)}, seconds=97,
        beats={0: 66, 1: 66, 3: 66, 2: 0.5}, aborted=[0, 1, 3],
    )  # fmt: skip
    assert said(stopped) == [("stopped", (2,))]
    assert stopped.findings[0].victims == (0, 1, 3)
    busy = look(
        tmp_path / "b", WAITING, states=gone, exits={**aborted, 2: (124, 66.1)}, seconds=67,
        beats=dict.fromkeys(range(4), 66), aborted=range(4),
    )  # fmt: skip
    assert said(busy) == [("missing", (2,))]


def test_victims_of_victims(tmp_path: Path) -> None:
    """A rank that waits for somebody else is never named, three groups deep."""
    pairs = [Group(name, 0, "gloo", "", ranks) for name, ranks in (("1", (0, 1)), ("2", (1, 2)))]
    calls = [
        *BEFORE,
        *stuck(WORLD, 4, (3,), 9 * MS),
        *stuck(pairs[0], 1, (0,), 8 * MS),
        *stuck(pairs[1], 1, (1,), 7 * MS),
    ]
    found = look(tmp_path, calls, states={})
    assert said(found) == [("missing", (2,))]
    assert found.findings[0].victims == (0, 1, 3)


def test_survivors_fail_one_after_another(tmp_path: Path) -> None:
    """Of a job that died, the first to die is named; whose collectives failed are its victims."""
    calls = [
        *BEFORE,
        *[Call(rank, 4, 5 * MS, 9 * MS, group=WORLD, status="failed") for rank in (0, 1, 3)],
    ]
    exits = {2: (-9, 1.0), 0: (1, 1.2), 3: (1, 1.3), 1: (-15, 1.5)}
    found = look(tmp_path, calls, states=dict.fromkeys(range(4), "gone"), exits=exits, seconds=2)
    assert said(found) == [("dead", (2,))]


def test_nodes_tell_each_other(tmp_path: Path) -> None:
    """What two nodes say of their own ranks, sent and merged, gives the verdict of the whole."""
    hosts = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
    whole = look(tmp_path, WAITING, states={}, hosts=hosts).snapshot
    parts = []
    for host in ("node-a", "node-b"):
        ranks = [
            each if each.host == host else RankState(each.rank, blind=True) for each in whole.ranks
        ]
        mine = np.isin(whole.calls["rank"], [each.rank for each in ranks if not each.blind])
        part = Snapshot(ranks, whole.calls[mine], whole.groups, whole.labels, whole.sites)
        parts.append(decode(encode(node_snapshot_of(part))))
    assert find(merge(parts)) == find(whole) != []

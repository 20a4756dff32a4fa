"""How processes ended: before their first record, several at once, after others, or by Ctrl-C."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from diagnosing import (
    RANK_2_MISSING,
    SECOND,
    START_EPOCH_NS,
    THREE_ENDED,
    WORLD,
    causes,
    diagnose_calls,
    unfinished,
)
from worlds import MS, START, Call, write_world

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.cli import exits as launcher_exits
from rankcall.cli.exits import ExitWatch
from rankcall.folders import run_folder
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.run.exits import EXITS, Exit, note_exit, read_exits
from rankcall.run.load import load
from rankcall.run.paths import ring_name

GONE = dict.fromkeys(range(4), "gone")


def without_ring(folder: Path, ends: dict[int, tuple[int, bool]], at: int) -> Diagnosis:
    """Diagnose four ranks of which those in ``ends`` left no ring; the others have no call.

    ``ends``: the exit code of each, and whether the launcher ended it.
    """
    run = write_world(
        folder / "run",
        [],
        ranks=[rank for rank in range(4) if rank not in ends],
        world_size=4,
        closed=lambda rank: False,
    )
    for rank in range(4):
        code, by_launcher = ends.get(rank, (-15, True))
        ended_ns = START_EPOCH_NS + at + rank * MS + (SECOND if by_launcher else 0)
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, code, ended_ns, by_launcher))
    return diagnose(
        load(run, exits_only=True), state_of=lambda head: "gone", now_ns=lambda: START + 9 * SECOND
    )


@pytest.mark.parametrize("code", [1, 3, -9, -11])
@pytest.mark.parametrize("ranks", [(0,), (2,), (1, 3), (0, 1, 2)])
def test_a_rank_that_ends_before_its_first_record(
    tmp_path: Path, code: int, ranks: tuple[int, ...]
) -> None:
    """A rank that fails before it makes a process group is the cause, whichever rank it is."""
    for at in (-SECOND, SECOND):  # before, and after, the others have begun to record
        diagnosis = without_ring(tmp_path / str(at), dict.fromkeys(ranks, (code, False)), at)
        assert sorted(r for _, named in causes(diagnosis) for r in named) == list(ranks)
        assert {kind for kind, _ in causes(diagnosis)} == {"dead"}
        assert diagnosis.findings[0].victims == tuple(sorted(set(range(4)) - set(ranks)))
        assert "left no records" in " ".join(diagnosis_text(diagnosis).split())


def test_no_rank_came_to_its_first_record(tmp_path: Path) -> None:
    """A run without any ring is diagnosed by the exits that its launcher noted."""
    ends = {0: (-15, True), 1: (-15, True), 2: (1, False), 3: (-15, True)}
    diagnosis = without_ring(tmp_path, ends, SECOND)
    assert causes(diagnosis) == [("dead", (2,))]
    assert "exited with code 1" in diagnosis.findings[0].summary


@pytest.mark.parametrize("size", [0, 4096, 1 << 20])
def test_ranks_that_were_killed_while_they_made_their_rings(tmp_path: Path, size: int) -> None:
    """Their launcher ends them when rank 2 fails; a ring without a header says nothing else."""
    ends = {0: (-15, True), 1: (-15, True), 2: (1, False), 3: (-15, True)}
    without_ring(tmp_path, ends, SECOND)
    for rank in (0, 3):
        (tmp_path / "run" / "rings" / ring_name(rank, 0, "node-a", 1000 + rank)).write_bytes(
            bytes(size)
        )
    diagnosis = diagnose(load(tmp_path / "run", exits_only=True))
    assert causes(diagnosis) == [("dead", (2,))]
    assert "it has no header" in " ".join(diagnosis_text(diagnosis).split())


def test_exits_of_an_earlier_job_do_not_count(tmp_path: Path) -> None:
    """A rank without a ring has the exit of its own job, not that of an earlier attempt."""
    run = write_world(tmp_path / "run", [], ranks=[1, 2, 3], world_size=4, closed=lambda _: False)
    note_exit(run, Exit(0, 0, "node-a", 77, 1, START_EPOCH_NS - 3600 * SECOND))
    found = diagnose(load(run), state_of=lambda _: "alive", now_ns=lambda: START + 9 * SECOND)
    assert causes(found) == []
    assert found.snapshot.ranks[0].exit is None


def test_never_healthy_beside_a_failed_exit(tmp_path: Path) -> None:
    """Whatever the codes and their order, a failure that nobody asked for is a finding."""
    for number, codes in enumerate(itertools.product((0, 1, -9, -11), repeat=3)):
        ends = {rank: (code, 5.0 + 30.0 * rank) for rank, code in enumerate((*codes, 0))}
        diagnosis = diagnose_calls(
            tmp_path / str(number), THREE_ENDED, seconds=100, states=GONE, exits=ends
        )
        assert bool(diagnosis.findings) == any(codes), codes


@pytest.mark.parametrize("killed", [(1, 2), (2, 3), (0, 1, 3), (0, 1, 2, 3)])
def test_several_are_killed_at_once(tmp_path: Path, killed: tuple[int, ...]) -> None:
    """All ranks that SIGKILL ended are dead, and the wait before it is not laid on those there.

    Rank 2 is late by itself when a kernel out of memory kills ranks of the group, in any order.
    """
    for number, order in enumerate(itertools.permutations(killed)):
        exits = {rank: (-9, 70.0 + 0.004 * place) for place, rank in enumerate(order)}
        diagnosis = diagnose_calls(
            tmp_path / str(number), RANK_2_MISSING, seconds=71, states=GONE, exits=exits
        )
        dead = [finding for finding in diagnosis.findings if finding.kind == "dead"]
        assert sorted(rank for finding in dead for rank in finding.ranks) == list(killed)
        for finding in dead:
            if 2 not in finding.ranks:
                assert finding.since_s < 2, finding.summary


def test_the_launcher_kills_only_after_its_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SIGKILL soon after the first failure is not torchrun's; one after 30 s is."""
    now = [100.0]
    monkeypatch.setattr(launcher_exits.time, "monotonic", lambda: now[0])
    watch = ExitWatch(tmp_path, "node-a")
    try:
        assert not watch._is_by_torchrun(-9)
        watch._failed_s = 100.0
        assert watch._is_by_torchrun(-15)
        assert not watch._is_by_torchrun(-9)
        now[0] = 130.0
        assert watch._is_by_torchrun(-9)
        assert not watch._is_by_torchrun(1)
    finally:
        watch._selector.close()


PIPE = "DistNetworkError: Broken pipe"


@pytest.mark.parametrize("host", [0, 3])
@pytest.mark.parametrize("noted", [True, False])
def test_an_error_that_follows_another_ranks_end(tmp_path: Path, host: int, noted: bool) -> None:
    """Ranks whose errors say that a peer is gone are victims of the rank that ended before."""
    victims = tuple(rank for rank in range(4) if rank != host)
    exits = {rank: (1, 8.0 + 0.01 * rank) for rank in victims} | {host: (0, 6.0)}
    diagnosis = diagnose_calls(
        tmp_path,
        THREE_ENDED,
        seconds=9,
        states=GONE,
        beats={host: 6.0},
        failures=dict.fromkeys(victims, PIPE),
        closed={host} if noted else (),
        exits=exits if noted else {},
    )
    assert causes(diagnosis) == [("exhausted" if noted else "dead", (host,))]
    (finding,) = diagnosis.findings
    assert finding.victims == victims
    assert "Broken pipe" in finding.summary


def test_a_crash_before_the_others_lost_their_connections(tmp_path: Path) -> None:
    """The rank that failed by itself is the only cause, whichever error the others had then."""
    exits = {rank: (1, 6.0 if rank == 2 else 7.0) for rank in range(4)}
    failures = {
        0: PIPE,
        1: "DistBackendError: Connection closed by peer",
        2: "KeyError: 1",
        3: PIPE,
    }
    diagnosis = diagnose_calls(
        tmp_path, THREE_ENDED, seconds=9, states=GONE, failures=failures, exits=exits
    )
    assert causes(diagnosis) == [("dead", (2,))]


def test_a_rank_that_vanished_moments_before_the_others_lost_their_connections(
    tmp_path: Path,
) -> None:
    """No launcher has noted its end, and it ended less than a heartbeat before them."""
    ended = 8990 * MS
    failed = [
        replace(call, end=ended, status="failed")
        for call in unfinished(WORLD, 4, (0, 1, 3), ended - 5 * MS)
    ]
    diagnosis = diagnose_calls(
        tmp_path,
        [*THREE_ENDED, *failed],
        seconds=9,
        states=GONE,
        beats={2: 8.99},
        failures=dict.fromkeys((0, 1, 3), "RuntimeError: Connection closed by peer"),
        closed={0, 1, 3},
    )
    assert causes(diagnosis) == [("dead", (2,))]
    assert diagnosis.findings[0].victims == (0, 1, 3)


def test_an_error_that_nobody_ended_before(tmp_path: Path) -> None:
    """If no rank ended before, the rank with the broken connection is all that is known."""
    exits = dict.fromkeys(range(4), (1, 7.0))
    diagnosis = diagnose_calls(
        tmp_path, THREE_ENDED, seconds=9, states=GONE, failures={1: PIPE}, exits={1: exits[1]}
    )
    assert [kind for kind, _ in causes(diagnosis)] == ["dead"]


def ended_at_70_s(folder: Path, calls: list[Call], **options: object) -> Diagnosis:
    """Diagnose a job whose four processes gave a sign of life until then, and are gone."""
    beats = dict.fromkeys(range(4), 70.0)
    return diagnose_calls(folder, calls, seconds=71, states=GONE, beats=beats, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("interrupted", [(0,), (3,), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("code", [-2, 130, 1, None])
@pytest.mark.parametrize("in_python", [False, True])
def test_ctrl_c_on_a_hang(
    tmp_path: Path, interrupted: tuple[int, ...], code: int | None, in_python: bool
) -> None:
    """A hang that a user ends by Ctrl-C is the hang's, not that of a rank which Python ended.

    A rank that waits in Python, as by ``work.is_completed()``, closes its ring when it ends.
    """
    error = "KeyboardInterrupt: "
    diagnosis = ended_at_70_s(
        tmp_path,
        RANK_2_MISSING,
        failures=dict.fromkeys(interrupted, error),
        exits=dict.fromkeys(interrupted, (code, 70.2)) if code is not None else {},
        closed_at=dict.fromkeys(interrupted, 70 * SECOND) if in_python else {},
    )
    assert causes(diagnosis) == [("missing", (2,))]
    assert diagnosis.findings[0].victims == (0, 1, 3)


@pytest.mark.parametrize(
    ("code", "sound"),
    [
        *((code, []) for code in (-1, -2, -3, -15, 129, 130, 131, 143)),  # the user's, or asked for
        *((code, ["dead"]) for code in (-10, -12, -24, 138)),  # Slurm's
    ],
)
def test_a_signal_to_all_ranks(tmp_path: Path, code: int, sound: list[str]) -> None:
    """Who ends a whole job that hangs is not why it hung; the terminal may be closed, too."""
    late = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 69 * SECOND + 900 * MS, line=7)]
    exits = {rank: (code, 70.2 + rank / 1000) for rank in range(4)}
    for calls, kinds in ((RANK_2_MISSING, ["missing"]), (late, sound)):
        folder = tmp_path / str(calls is late)
        diagnosis = ended_at_70_s(folder, calls, exits=exits)
        assert [kind for kind, _ in causes(diagnosis)] == kinds
        assert calls is late or diagnosis.findings[0].ranks == (2,)


@pytest.mark.parametrize("code", [-6, -9, -11, 1])
def test_faults_of_all_ranks_after_a_hang(tmp_path: Path, code: int) -> None:
    """What the programs did themselves is told, and what a machine out of memory does."""
    diagnosis = ended_at_70_s(
        tmp_path,
        RANK_2_MISSING,
        exits=dict.fromkeys(range(4), (code, 70.2)),
    )
    assert causes(diagnosis) == [("dead", (0, 1, 2, 3))]


@pytest.mark.parametrize(
    ("error", "seconds", "closed_s", "told"),
    [
        ("KeyboardInterrupt", 18, None, []),
        ("KeyboardInterrupt", 18, 17.5, []),
        ("KeyboardInterrupt", 71, None, [("missing", (2,))]),
        ("KeyboardInterrupt", 18, 0.1, [("dead", (2,))]),  # before the others had waited for long
        ("ValueError: no such sample: 17", 18, None, [("dead", (2,))]),
    ],
)
def test_a_watcher_while_ctrl_c_ends_a_hang(
    tmp_path: Path,
    error: str,
    seconds: int,
    closed_s: float | None,
    told: list[tuple[str, tuple[int, ...]]],
) -> None:
    """The rank that is not in C++ ends first. That is not why the others had waited for so long."""
    diagnosis = diagnose_calls(
        tmp_path,
        RANK_2_MISSING,
        seconds=seconds,
        states={},
        failures={2: error},
        closed_at={} if closed_s is None else {2: round(closed_s * SECOND)},
    )
    assert causes(diagnosis) == told


@pytest.mark.parametrize(
    ("closed_s", "told"),
    [
        (70.1, " had not come: it had issued nothing for 70 s. 3 ranks"),
        (0.004, " had stopped recording, "),  # before the others came
        (20.0, " had stopped recording, "),  # it may have come in the 50 s before its end
    ],
)
def test_ctrl_c_closes_the_ring_of_a_missing_rank(
    tmp_path: Path, closed_s: float, told: str
) -> None:
    """A rank that had recorded until its end had not come, and nobody doubts it."""
    diagnosis = ended_at_70_s(
        tmp_path,
        RANK_2_MISSING,
        failures=dict.fromkeys(range(4), "KeyboardInterrupt"),
        exits=dict.fromkeys(range(4), (-2, 70.2)),
        closed_at={2: round(closed_s * SECOND)},
    )
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks) == ("missing", (2,))
    assert told in finding.summary


def test_one_rank_is_interrupted_in_a_sound_job(tmp_path: Path) -> None:
    """Without a hang, the one rank that was interrupted is why the others ended."""
    calls = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 69 * SECOND + 900 * MS, line=7)]
    diagnosis = ended_at_70_s(
        tmp_path,
        calls,
        failures={2: "KeyboardInterrupt"},
        exits={2: (-2, 70.0)},
    )
    assert causes(diagnosis) == [("dead", (2,))]


@pytest.mark.parametrize("began_s", [3.6, 4.2])
def test_a_rank_that_was_ended_while_it_closed_down(tmp_path: Path, began_s: float) -> None:
    """Its own error counts if it came before the failure for which the launcher ended the others.

    A rank that the launcher asks to end may end with an error as well.
    """
    folder = run_folder(tmp_path, EXITS)
    noted = {
        "node-a.1": [(0, 1000, 1, 4.0, False), (1, 1001, -15, 4.3, True)],  # by the launcher
        "node-a.1001": [(1, 1001, 1, began_s, False)],  # by the process, when it began to end
    }
    for name, ends in noted.items():
        lines = [
            json.dumps(asdict(Exit(rank, 0, "node-a", pid, code, int(at * SECOND), by_launcher)))
            for rank, pid, code, at, by_launcher in ends
        ]
        (folder / f"{name}.jsonl").write_text("\n".join([*lines, ""]))
    (one,) = [ended for ended in read_exits(tmp_path) if ended.rank == 1]
    assert (one.code, one.by_launcher) == (1, began_s > 4.0)
    assert one.epoch_ns == int(began_s * SECOND)

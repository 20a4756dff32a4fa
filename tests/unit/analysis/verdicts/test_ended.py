"""Jobs that were ended: all at once, by their launcher, or with one node of several."""

from __future__ import annotations

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
from rankcall.report.diagnosis_text import diagnosis_text
from rankcall.run.exits import LAUNCHER, Exit, note_exit
from rankcall.run.load import load

HALVES = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}


def test_all_killed_at_once(tmp_path: Path) -> None:
    """If all ranks died at the same time, all are dead and none of them is blamed for a hang."""
    gone = dict.fromkeys(range(4), "gone")
    in_user_code = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 69 * SECOND + 900 * MS, line=7)]
    in_one_call = [
        *THREE_ENDED,
        *unfinished(WORLD, 4, (0, 1, 2, 3), 69 * SECOND + 900 * MS, line=7),
    ]
    for name, calls in (("apart", in_user_code), ("in one", in_one_call)):
        beats = dict.fromkeys(range(4), 70.0)
        diagnosis = diagnose_calls(tmp_path / name, calls, seconds=75, states=gone, beats=beats)
        assert causes(diagnosis) == [("dead", (0, 1, 2, 3))], name
        assert diagnosis.findings[0].confidence == "likely"
        assert "ended together; nobody noted how" in diagnosis.findings[0].summary
    copied = diagnose_calls(tmp_path / "copied", in_user_code, seconds=70)
    assert causes(copied) == [("dead", (0, 1, 2, 3))]
    assert copied.findings[0].confidence == "possible"


def test_all_ended_before_their_group(tmp_path: Path) -> None:
    """Ranks that have never made a process group did not end well, unless they say so.

    A rank that fails before it imports torch leaves no records, and its launcher ends the others.
    So it is named, and not they, unless it may be of a node of which there are no records at all.
    """
    gone = {0: "gone", 2: "gone"}
    diagnosis = diagnose_calls(tmp_path / "killed", [], ranks=(0, 2), states=gone)
    assert causes(diagnosis) == [("dead", (1,))]
    (finding,) = diagnosis.findings
    assert (finding.is_fault, finding.victims) == (True, (0, 2))
    assert "before their process group was made; nobody noted how" in finding.summary
    halves = {"ranks": (0, 1), "states": {0: "gone", 1: "gone"}, "world_size": 4}
    assert causes(diagnose_calls(tmp_path / "one of two nodes", [], **halves)) == [("dead", (0, 1))]
    for name, options in {
        "closed": {"closed": (0, 2)},
        "ended": {"exits": dict.fromkeys((0, 2), (0, 60.0))},
    }.items():
        well = diagnose_calls(tmp_path / name, [], ranks=(0, 2), states=gone, **options)  # type: ignore[arg-type]
        assert not well.findings, name
    alone = diagnose_calls(tmp_path / "alone", [], ranks=(0,), states={0: "gone"})
    assert not alone.findings


def test_a_rank_that_comes_after_others_were_killed(tmp_path: Path) -> None:
    """It waited from when it came until its call failed; the others were there until they died."""
    calls = [
        *THREE_ENDED,
        *unfinished(WORLD, 4, (1, 2, 3), 5 * SECOND, line=7),
        Call(0, 4, 8 * SECOND, 8 * SECOND + 500 * MS, group=WORLD, line=7, status="failed"),
    ]
    diagnosis = diagnose_calls(
        tmp_path,
        calls,
        states=dict.fromkeys(range(4), "gone"),
        exits={**dict.fromkeys((1, 2, 3), (-9, 6.0)), 0: (1, 10.0)},
        seconds=10,
    )
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (1, 2, 3), (0,))
    assert "1 rank had waited 0.5 s for them in all_reduce #4" in finding.summary
    in_call = [line.rpartition(" for ")[2] for line in finding.evidence if "in all_reduce" in line]
    assert in_call == ["1.0 s"] * 3 + ["0.5 s"], finding.evidence


def test_gone_between_two_calls(tmp_path: Path) -> None:
    """Ranks that ended between two calls may have used os._exit, so there is no finding."""
    gone, beats = dict.fromkeys(range(4), "gone"), dict.fromkeys(range(4), 70.0)
    diagnosis = diagnose_calls(tmp_path, THREE_ENDED, seconds=75, states=gone, beats=beats)
    assert causes(diagnosis) == []
    assert "Of 4 ranks nobody noted how they ended." in " ".join(diagnosis_text(diagnosis).split())


def test_killed_in_a_hang(tmp_path: Path) -> None:
    """If the job had hung for longer than a step before it was killed, the culprit is named."""
    gone, beats = dict.fromkeys(range(4), "gone"), dict.fromkeys(range(4), 70.0)
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, seconds=75, states=gone, beats=beats)
    assert causes(diagnosis) == [("missing", (2,))]


def test_told_to_end(tmp_path: Path) -> None:
    """A job that its launcher ended is healthy, and the text says how its ranks ended."""
    folder = tmp_path / "run"
    write_world(folder, THREE_ENDED, closed=lambda rank: False)
    for rank in range(4):
        note_exit(
            folder,
            Exit(rank, 0, "node-a", 1000 + rank, -15, START_EPOCH_NS + SECOND, by_launcher=True),
        )
    diagnosis = diagnose(
        load(folder), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    assert diagnosis.kind == "healthy"
    assert diagnosis_text(diagnosis).startswith(
        "nothing found: 4 ranks had not ended when the launcher ended them"
    )


def test_ranks_that_were_done_when_their_launcher_was_told_to_end(tmp_path: Path) -> None:
    """A rank that ended well is counted once, although its launcher notes that it ended it."""
    run = write_world(tmp_path / "run", THREE_ENDED, closed=lambda rank: False)
    for rank in range(4):
        code = -15 if rank == 3 else 0
        ended = Exit(
            rank, 0, "node-a", 1000 + rank, code, START_EPOCH_NS + SECOND, by_launcher=True
        )
        note_exit(run, ended)
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    text = " ".join(diagnosis_text(diagnosis).split())
    assert text.startswith("healthy: 3 of 4 ranks ended well")
    assert "1 was ended by the launcher." in text


def ended_with_launcher(
    run: Path, host: str, ranks: tuple[int, ...], code: int | None, at: int
) -> None:
    """Note that a host's launcher got SIGTERM at ``at``, in ns, and that its ranks then ended."""
    note_exit(run, Exit(LAUNCHER, 0, host, 1, -15, START_EPOCH_NS + at))
    for rank in ranks:
        note_exit(run, Exit(rank, 0, host, 1000 + rank, code, START_EPOCH_NS + at + 20 * MS))


@pytest.mark.parametrize("code", [-15, 1, None])
def test_a_node_that_is_preempted(tmp_path: Path, code: int | None) -> None:
    """Ranks that ended with their launcher are the cause; ranks that then failed are victims."""
    failed = [
        Call(rank, 4, 5 * MS, 2 * SECOND, group=WORLD, status="failed", line=7) for rank in (0, 1)
    ]
    run = write_world(
        tmp_path / "run",
        [*THREE_ENDED, *failed, *unfinished(WORLD, 4, (2, 3), 6 * MS, line=7)],
        closed=lambda rank: False,
        hosts=HALVES,
    )
    ended_with_launcher(run, "node-b", (2, 3), code, 2 * SECOND - 50 * MS)
    for rank in (0, 1):
        note_exit(
            run, Exit(rank, 0, "node-a", 1000 + rank, 1, START_EPOCH_NS + 2 * SECOND + 90 * MS)
        )
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    assert causes(diagnosis) == [("dead", (2, 3))]
    (finding,) = diagnosis.findings
    assert finding.victims == (0, 1)
    assert "were ended with their launcher, which SIGTERM told to stop," in finding.summary
    assert "who ended the launcher on node-b" in finding.advice


def test_others_wait_for_a_node_that_is_preempted(tmp_path: Path) -> None:
    """Ranks that wait for a preempted node hang, and that node is named without delay."""
    run = write_world(
        tmp_path / "run",
        [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1), 6 * MS, line=7)],
        closed=lambda rank: False,
        hosts=HALVES,
        beats=dict.fromkeys((0, 1), (8 * SECOND, 8 * SECOND))
        | dict.fromkeys((2, 3), (SECOND, SECOND)),
    )
    ended_with_launcher(run, "node-b", (2, 3), -15, SECOND)
    diagnosis = diagnose(
        load(run),
        now_ns=lambda: START + 8 * SECOND,
        state_of=lambda header: "alive" if header.rank < 2 else "gone",
    )
    assert causes(diagnosis) == [("dead", (2, 3))]


def test_a_job_that_is_ended_on_all_nodes(tmp_path: Path) -> None:
    """A job that was ended on all nodes is healthy, with any exit codes (KeyboardInterrupt: 1)."""
    run = write_world(tmp_path / "run", THREE_ENDED, closed=lambda rank: False, hosts=HALVES)
    ended_with_launcher(run, "node-a", (0, 1), 1, SECOND)
    ended_with_launcher(run, "node-b", (2,), -15, SECOND + 3 * MS)
    ended_with_launcher(run, "node-b", (3,), None, SECOND + 3 * MS)
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    assert causes(diagnosis) == []
    assert diagnosis_text(diagnosis).startswith(
        "nothing found: 4 ranks had not ended when the launcher ended them"
    )


def test_a_failure_before_the_launcher_is_told_to_stop(tmp_path: Path) -> None:
    """The rank that failed first is the cause; the other ranks of its node are not."""
    run = write_world(tmp_path / "run", THREE_ENDED, closed=lambda rank: False, hosts=HALVES)
    note_exit(run, Exit(2, 0, "node-b", 1002, 3, START_EPOCH_NS + SECOND))
    ended_with_launcher(run, "node-b", (3,), -15, 2 * SECOND)
    ended_with_launcher(run, "node-a", (0, 1), -15, 2 * SECOND)
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
    )
    assert causes(diagnosis) == [("dead", (2,))]


@pytest.mark.parametrize("noted", [True, False])
def test_a_crash_is_not_running_out_of_data(tmp_path: Path, noted: bool) -> None:
    """A rank that an exception ended is dead, and the summary quotes it, with any launcher."""
    diagnosis = diagnose_calls(
        tmp_path,
        RANK_2_MISSING,
        states={2: "gone"},
        closed={2},
        beats={2: 5.0},
        failures={2: "ValueError: no such sample: 17"},
        exits={2: (1, 5.1)} if noted else {},
    )
    assert causes(diagnosis) == [("dead", (2,))]
    (finding,) = diagnosis.findings
    assert "failed with ValueError: no such sample: 17" in finding.summary
    assert "Join" not in finding.advice
    fine = diagnose_calls(
        tmp_path / "fine", RANK_2_MISSING, states={2: "gone"}, closed={2}, left={2}
    )
    assert causes(fine) == [("exhausted", (2,))]
    assert "Join" in fine.findings[0].advice


def test_ranks_that_handle_the_launchers_signal(tmp_path: Path) -> None:
    """After another rank's exception, a rank that exits without one was asked to end.

    Before it, or without any exception, its exit is its own.
    """
    gone = dict.fromkeys(range(4), "gone")
    failure = {2: "ValueError: no such sample: 17"}
    exits = {0: (1, 6.8), 1: (1, 6.9), 2: (1, 5.1), 3: (1, 6.9)}
    for name, failures, ends, dead in (
        ("asked", failure, exits, (2,)),
        ("before", failure, {**exits, 3: (3, 4.5)}, (2, 3)),
        ("no exception", {}, exits, (0, 1, 2, 3)),
    ):
        diagnosis = diagnose_calls(
            tmp_path / name, THREE_ENDED, seconds=9, states=gone, failures=failures, exits=ends
        )
        named = sorted(
            rank
            for finding in diagnosis.findings
            if finding.kind == "dead"
            for rank in finding.ranks
        )
        assert tuple(named) == dead, name
        if name == "asked":
            assert "failed with ValueError: no such sample: 17" in diagnosis.findings[0].summary


def test_a_rank_that_ends_with_an_error_and_still_exists(tmp_path: Path) -> None:
    """A process that closes down has stopped recording, so the summary names both reasons."""
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, states={}, closed={2})
    assert causes(diagnosis) == [("missing", (2,))]
    assert "stopped recording, to end or by rankcall.disable" in diagnosis.findings[0].summary


GONE = dict.fromkeys(range(4), "gone")


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ({0: 5.000, 3: 5.001}, (0, 3)),
        ({0: 5.001, 3: 5.000}, (0, 3)),
        ({0: 5.000, 3: 5.500}, (0,)),
    ],
)
def test_the_first_of_several_failures(
    tmp_path: Path, ends: dict[int, float], first: tuple[int, ...]
) -> None:
    """Ends that are closer to each other than their times are exact have no order."""
    failed = [
        Call(rank, 4, 5 * MS, 4 * SECOND, group=WORLD, status="failed", line=7) for rank in range(4)
    ]
    exits = {rank: (1, at) for rank, at in ends.items()}
    diagnosis = diagnose_calls(
        tmp_path,
        [*THREE_ENDED, *failed],
        seconds=9,
        states=GONE,
        exits={**exits, 1: (-15, 5.6), 2: (-15, 5.6)},
    )
    dead, transfer = diagnosis.findings
    assert (dead.kind, dead.ranks) == ("dead", first)
    # It took from 5 ms to 4 s, and then failed: no rank is in it any more.
    assert "4 ranks did not get out for 4.0 s" in transfer.summary
    assert transfer.evidence == ()


def test_connections_that_ends_close_are_no_stuck_transfer(tmp_path: Path) -> None:
    """Rank 1 refuses its own arguments and ends; the calls of the others fail because of that."""
    failed = [
        Call(
            rank,
            4,
            4 * SECOND,
            int(4.2 * SECOND),
            group=WORLD,
            line=7,
            status="failed",
            error="invalid tensor size" if rank == 1 else "Connection closed by peer [::1]:1",
        )
        for rank in range(4)
    ]
    exits = {1: (1, 5.0), **dict.fromkeys((0, 2, 3), (1, 5.4))}
    calls = [*THREE_ENDED, *failed]
    findings = diagnose_calls(tmp_path, calls, seconds=9, states=GONE, exits=exits).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("dead", (1,))]


@pytest.mark.parametrize(
    ("host_ended", "lost_at", "named"),
    [
        (5.0, 5.4, (0,)),
        (5.4, 5.4, (0,)),
        (5.41, 5.4, (0,)),  # the launcher saw its end a moment later
        (6.4, 5.4, (3,)),  # known to be later: the store was lost for another reason
    ],
)
def test_a_lost_connection_follows_from_an_end(
    tmp_path: Path, host_ended: float, lost_at: float, named: tuple[int, ...]
) -> None:
    """An error that says that a peer was gone is a consequence, whichever end was noted first."""
    diagnosis = diagnose_calls(
        tmp_path,
        THREE_ENDED,
        seconds=9,
        states=GONE,
        failures={3: "DistNetworkError: Broken pipe"},
        exits={0: (0, host_ended), 1: (0, 7.0), 2: (0, 7.0), 3: (1, lost_at)},
    )
    assert causes(diagnosis) == [("dead" if named == (3,) else "exhausted", named)]


def test_stopped_until_the_job_was_killed(tmp_path: Path) -> None:
    """A rank whose heartbeats ended long before its noted exit was stopped; it did not die then."""
    beats, exits = {0: 70.0, 1: 70.0, 2: 5.0, 3: 70.0}, dict.fromkeys(range(4), (-9, 70.2))
    diagnosis = diagnose_calls(
        tmp_path, RANK_2_MISSING, seconds=75, states=GONE, beats=beats, exits=exits
    )
    assert causes(diagnosis) == [("stopped", (2,))]
    assert "no sign of life for 65 s" in diagnosis.findings[0].summary
    assert "core dump" not in diagnosis.findings[0].advice
    soon = diagnose_calls(
        tmp_path / "soon",
        RANK_2_MISSING,
        seconds=75,
        states=GONE,
        beats=beats,
        exits={**exits, 2: (-9, 5.2)},
    )
    assert causes(soon) == [("dead", (2,))]


def test_nobody_noted_how_it_ended(tmp_path: Path) -> None:
    """Without a launcher, a silent rank counts as dead; a launcher would have noted its exit."""
    beats = {0: 70.0, 1: 70.0, 2: 5.0, 3: 70.0}
    diagnosis = diagnose_calls(tmp_path, RANK_2_MISSING, seconds=75, states=GONE, beats=beats)
    assert causes(diagnosis) == [("dead", (2,))]
    assert "Nobody noted how it ended" in diagnosis.findings[0].advice
    run = tmp_path / "run"
    (run / "run.json").write_text('{"nproc_per_node": 4}')
    diagnosis = diagnose(
        load(run), state_of=lambda header: "gone", now_ns=lambda: START + 75 * SECOND
    )
    assert causes(diagnosis) == [("stopped", (2,))]


def test_calls_of_a_handler_after_the_stop_are_no_desync(tmp_path: Path) -> None:
    """Calls that a rank's SIGTERM handler issues, for example to save, are no desync."""
    barrier_calls = unfinished(WORLD, 4, (2,), 2 * SECOND, op="barrier", line=30)
    for name, at, kinds in (("after", SECOND, []), ("before", 3 * SECOND, ["desync"])):
        run = write_world(
            tmp_path / name,
            [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), SECOND, line=7), *barrier_calls],
            closed=lambda rank: False,
        )
        ended_with_launcher(run, "node-a", (0, 1, 2, 3), -15, at)
        diagnosis = diagnose(
            load(run), state_of=lambda header: "gone", now_ns=lambda: START + 9 * SECOND
        )
        assert [kind for kind, _ in causes(diagnosis) if kind == "desync"] == kinds, name

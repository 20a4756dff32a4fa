"""Hangs on devices: who has started a call, who has only issued it, and what cannot be told.

In each case all hosts run ahead: they have issued three calls behind the one that hangs.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosing import WORLD, causes, diagnose_calls
from dumps import Step, dump_of, simulate
from worlds import MS, Call, group_of

from rankcall.analysis.snapshot import unfinished
from rankcall.analysis.verdicts import diagnose, find
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.lasting import patience
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE, FLAG_NOT_STARTED
from rankcall.ring.tables import Group
from rankcall.run.load import load

R = Relation
HUNG, AHEAD = 5, 3
PAIR = Group("1", 0, "nccl", "pair", (0, 1))


def calls_on_devices(
    started: Collection[int],
    *,
    told: bool = True,
    group: Group = WORLD,
    issued_by: Iterable[int] = (0, 1, 2, 3),
    at: int = 0,
    line: int = 7,
) -> list[Call]:
    """Return calls of a group: four that have ended, one that hangs, and three behind it.

    Args:
        started: The ranks whose devices have started the one that hangs.
        told: Whether the back end tells starts.
        group: The group.
        issued_by: The members that have issued the one that hangs.
        at: When the first is issued, in ms.
        line: Of all calls.
    """
    calls = []
    for rank in group.ranks:
        for seq in range(1, HUNG + AHEAD + 1):
            issue = (at + seq) * MS
            is_over = seq < HUNG
            if not is_over and rank not in issued_by:
                break
            begun = told and (is_over or (seq == HUNG and rank in started))
            calls.append(
                Call(
                    rank,
                    seq,
                    issue,
                    issue + MS if is_over else None,
                    group=group,
                    line=line,
                    flags=FLAG_DEVICE | (FLAG_NOT_STARTED if told and not begun else 0),
                    started=issue if begun else None,
                )
            )
    return calls


def diagnosed(folder: Path, *calls: list[Call]) -> Diagnosis:
    """Diagnose a running job, 70 s after its first call."""
    return diagnose_calls(folder, [call for part in calls for call in part], states={})


def test_a_device_that_has_not_started(tmp_path: Path) -> None:
    """Rank 1 has issued the call as the others have, but only their devices have started it."""
    diagnosis = diagnosed(tmp_path, calls_on_devices((0, 2, 3)))
    assert causes(diagnosis) == [("missing", (1,))]
    (finding,) = diagnosis.findings
    assert (finding.stops, finding.victims, finding.seq) == (True, (0, 2, 3), HUNG)
    fact = finding.facts[0]
    assert fact.relation is R.NOT_STARTED
    assert fact.others is not None
    assert fact.others.numbers == (0, 2, 3)
    assert (fact.call.seq if fact.call else 0) == HUNG
    assert fact.number == pytest.approx(70, abs=0.1)
    assert "has not started all_reduce #5" in finding.summary
    assert "train.py:7" in finding.summary


@pytest.mark.parametrize("last", [0, 4])
def test_a_verdict_does_not_speak_of_ends_that_may_not_have_been_noticed(
    tmp_path: Path, last: int
) -> None:
    """A verdict says of no rank that it is in a call that it may have left.

    It speaks once the call is old enough on each member, and says what the ranks' positions say.
    Rank 1 issues its calls ``last`` seconds after the others.
    """
    calls = [
        replace(call, at=call.at + last * 1000 * MS)
        if call.rank == 1 and call.seq >= HUNG
        else call
        for call in calls_on_devices((0, 2, 3))
    ]
    for seconds in (last + 1, last + 3):
        folder = tmp_path / str(seconds)
        diagnosis = diagnose_calls(folder, calls, states={}, seconds=seconds, hang_after=0.2)
        if seconds == last + 1:
            assert causes(diagnosis) == []
        else:
            assert causes(diagnosis) == [("missing", (1,))]
            assert {(row.how, row.seq) for row in diagnosis.ranks} == {("in", HUNG)}


# A hang of which a verdict is due before a rank has failed to look for implausibly long.
SOON: dict[str, Any] = {"states": {}, "seconds": 25, "hang_after": 20}


@pytest.mark.parametrize(
    ("looked", "found", "how"),
    [
        ((), [], {"end_unknown"}),
        ((0, 1, 2, 3), [("stuck", ())], {"in"}),
        ((0, 2, 3), [("stuck", ())], {"in", "end_unknown"}),
    ],
)
def test_what_no_rank_has_looked_at_since_is_not_stuck(
    tmp_path: Path, looked: tuple[int, ...], found: list[tuple[str, tuple[int, ...]]], how: set[str]
) -> None:
    """On a busy machine, a call may be older than the threshold before its rank looks at its end.

    ``looked``: the ranks that have looked since they issued the call.
    """
    calls = calls_on_devices((), told=False)
    known = {rank: 24_999 * MS if rank in looked else 2 * MS for rank in WORLD.ranks}
    diagnosis = diagnose_calls(tmp_path, calls, devices_known=known, **SOON)
    assert causes(diagnosis) == found
    assert {row.how for row in diagnosis.ranks} == how


@pytest.mark.parametrize(
    ("started", "relation"),
    [((0, 1, 2, 3), R.STUCK_TRANSFER), ((0, 2, 3), R.START_UNKNOWN)],
)
def test_all_ranks_have_come_only_if_each_has_started(
    tmp_path: Path, started: tuple[int, ...], relation: Relation
) -> None:
    """Rank 1 has not looked since it issued the call, so it does not count as waiting in it."""
    known = {rank: 2 * MS if rank == 1 else 24_999 * MS for rank in WORLD.ranks}
    diagnosis = diagnose_calls(tmp_path, calls_on_devices(started), devices_known=known, **SOON)
    assert causes(diagnosis) == [("stuck", ())]
    (finding,) = diagnosis.findings
    assert (finding.facts[0].relation, finding.victims) == (relation, (0, 2, 3))


def test_looks_that_hang_silence_no_verdict(tmp_path: Path) -> None:
    """A back end that hangs with its device can hold up the looks of all ranks."""
    calls, known = calls_on_devices((), told=False), dict.fromkeys(WORLD.ranks, 2 * MS)
    soon = diagnose_calls(tmp_path / "soon", calls, devices_known=known, **SOON)
    assert causes(soon) == []
    late = diagnose_calls(tmp_path / "late", calls, devices_known=known, states={})
    assert causes(late) == [("stuck", ())]


def test_the_rank_that_others_wait_for_has_not_noticed_an_end(tmp_path: Path) -> None:
    """It is named once it has looked. Until then, nothing is said of the call before."""
    calls = [
        replace(call, end=None) if call.seq == HUNG - 1 else call
        for call in calls_on_devices((), told=False, issued_by=(0, 1, 3))
    ]
    before = diagnose_calls(
        tmp_path / "before", calls, devices_known=dict.fromkeys(WORLD.ranks, 3 * MS), **SOON
    )
    assert causes(before) == []
    after = diagnose_calls(
        tmp_path / "after",
        calls_on_devices((), told=False, issued_by=(0, 1, 3)),
        devices_known=dict.fromkeys(WORLD.ranks, 24_999 * MS),
        **SOON,
    )
    assert causes(after) == [("missing", (2,))]


@pytest.mark.parametrize(
    ("op", "free", "found"),
    [
        ("all_reduce", True, [("missing", (2,))]),
        ("all_reduce", False, []),  # its device may be in another call, in which it waits
        ("broadcast", True, []),  # its root may leave before the others have come
    ],
)
def test_a_call_that_a_rank_has_not_come_to_is_not_over(
    tmp_path: Path, op: str, free: bool, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Rank 2 has looked and goes on. Nobody else can: a tracer holds their threads with the GIL."""
    calls = [
        replace(call, op=op, root=0 if op == "broadcast" else -1)
        for call in calls_on_devices((), told=False, issued_by=(0, 1, 3))
    ]
    if not free:
        other = calls_on_devices((), told=False, group=Group("1", 0, "nccl", "other", (2, 3)), at=9)
        calls += [call for call in other if call.seq <= HUNG]
    known = dict.fromkeys(WORLD.ranks, 2 * MS) | ({2: 24_999 * MS} if free else {})
    diagnosis = diagnose_calls(tmp_path, calls, devices_known=known, **SOON)
    assert causes(diagnosis) == found
    how = "in" if found else "end_unknown"
    assert {row.how for row in diagnosis.ranks if row.rank != 2} == {how}


def test_the_waits_of_halted_ranks_count_if_a_rank_that_goes_on_has_not_come(
    tmp_path: Path,
) -> None:
    """All but rank 2 have run no Python thread for long, and rank 2 has not come to their call."""
    calls = calls_on_devices((), told=False, issued_by=(0, 1, 3))
    beats = dict.fromkeys((0, 1, 3), 8.0)
    known = dict.fromkeys(WORLD.ranks, 69_000 * MS)
    diagnosis = diagnose_calls(tmp_path, calls, states={}, beats=beats, devices_known=known)
    assert ("missing", (2,)) in causes(diagnosis)


@pytest.mark.parametrize("flags", [0, FLAG_DEVICE])
@pytest.mark.parametrize("state", ["gone", "stopped"])
def test_nobody_is_missing_from_a_call_of_a_rank_that_is_dead_or_stopped(
    tmp_path: Path, flags: int, state: str
) -> None:
    """Rank 0 came first and waits no more. The others may take their time before that call."""
    calls = [Call(rank, 1, MS, 2 * MS, group=WORLD, line=7, flags=flags) for rank in WORLD.ranks]
    calls.append(Call(0, 2, 3 * MS, None, group=WORLD, line=7, flags=flags))
    exits = {0: (-9, 1.0)} if state == "gone" else {}
    diagnosis = diagnose_calls(tmp_path, calls, states={0: state}, beats={0: 1.0}, exits=exits)
    assert causes(diagnosis) == [("dead" if state == "gone" else "stopped", (0,))]


def test_a_rank_that_is_stopped_never_looks(tmp_path: Path) -> None:
    """The others have looked, and hang in the call that it has issued."""
    diagnosis = diagnose_calls(
        tmp_path,
        calls_on_devices((), told=False),
        states={1: "stopped"},
        beats={1: 0.01},
        devices_known={0: 69_000 * MS, 1: 2 * MS, 2: 69_000 * MS, 3: 69_000 * MS},
    )
    assert causes(diagnosis) == [("stopped", (1,))]


def test_a_stopped_rank_is_not_shown_in_a_call_that_it_may_have_left(tmp_path: Path) -> None:
    """It has not looked since it was stopped, for however long, and whether it lives or was killed.

    Its position is the last call that it has issued, with an end that is not known.
    """
    calls = [
        replace(call, end=None) if (call.rank, call.seq) == (1, HUNG - 1) else call
        for call in calls_on_devices((), told=False, issued_by=(0, 2, 3))
    ]
    stopped: dict[str, Any] = {
        "beats": {1: 0.01},
        "devices_known": dict.fromkeys(WORLD.ranks, 69_000 * MS) | {1: 2 * MS},
    }
    killed = {
        "states": dict.fromkeys(WORLD.ranks, "gone"),
        "exits": dict.fromkeys(WORLD.ranks, (-9, 70)),
    }
    for name, states in (("alive", {"states": {1: "stopped"}}), ("gone", killed)):
        diagnosis = diagnose_calls(tmp_path / name, calls, **states, **stopped)
        assert ("stopped", (1,)) in causes(diagnosis)
        (position,) = [row for row in diagnosis.ranks if row.rank == 1]
        assert (position.how, position.seq) == ("end_unknown", HUNG - 1)


def test_a_death_does_not_hold_others_in_calls_that_they_may_have_left(tmp_path: Path) -> None:
    """Rank 1 dies half a second after the last calls, and the launcher ends the others.

    No rank has looked at its devices since it issued them, so which of them is over is not known.
    """
    calls = calls_on_devices((), told=False)
    exits = {rank: (-6 if rank == 1 else -15, 0.5 if rank == 1 else 0.6) for rank in WORLD.ranks}
    states = dict.fromkeys(WORLD.ranks, "gone")
    known = dict.fromkeys(WORLD.ranks, 1 * MS)
    ended: dict[str, Any] = {"states": states, "exits": exits, "beats": dict.fromkeys(states, 0.5)}
    diagnosis = diagnose_calls(tmp_path, calls, seconds=1, devices_known=known, **ended)
    (finding,) = diagnosis.findings
    assert (finding.kind, finding.ranks, finding.victims) == ("dead", (1,), ())
    assert {row.how for row in diagnosis.ranks} == {"end_unknown"}


def test_a_call_that_a_lost_device_refuses_is_not_stuck(tmp_path: Path) -> None:
    """Rank 1's process ends of the refusal. The call did not hang, whatever the others were in."""
    calls = [call for call in calls_on_devices((), told=False) if call.seq <= HUNG]
    calls = [
        replace(call, end=300 * MS, status="failed", error="CUDA error")
        if (call.rank, call.seq) == (1, HUNG)
        else call
        for call in calls
    ]
    exits = {rank: (-6 if rank == 1 else -15, 0.5 if rank == 1 else 0.6) for rank in WORLD.ranks}
    states = dict.fromkeys(WORLD.ranks, "gone")
    known = dict.fromkeys(WORLD.ranks, 1 * MS)
    ended: dict[str, Any] = {"states": states, "exits": exits, "beats": dict.fromkeys(states, 0.5)}
    diagnosis = diagnose_calls(tmp_path, calls, seconds=1, devices_known=known, **ended)
    assert causes(diagnosis) == [("dead", (1,))]


def test_a_call_that_others_have_left_behind_replays(tmp_path: Path) -> None:
    """A replay of a captured call is not on record, so beside one the ranks may be out of step."""
    calls = [
        replace(call, end=call.end or 9 * MS) if call.rank != 2 else call
        for call in calls_on_devices((), told=False)
    ]
    captured = [
        replace(call, end=None, flags=FLAG_DEVICE | FLAG_ABANDONED) if call.seq == 2 else call
        for call in calls
    ]
    (plain,) = diagnosed(tmp_path / "plain", calls).findings
    assert (plain.kind, plain.ranks, plain.confidence) == ("alone", (2,), "likely")
    assert "replay" not in plain.advice
    (beside,) = diagnosed(tmp_path / "captured", captured).findings
    assert (beside.kind, beside.ranks, beside.confidence) == ("alone", (2,), "possible")
    assert "compare how often each rank replays it" in beside.advice


@pytest.mark.parametrize("flags", [0, FLAG_DEVICE])
def test_what_the_last_rank_has_just_come_to_is_not_stuck(tmp_path: Path, flags: int) -> None:
    """The others have waited for that rank. Whether the call is stuck shows from then on."""
    call = calls_on_devices((), told=False)
    late = [
        replace(one, at=67_000 * MS) if one.rank == 1 and one.seq >= HUNG else one for one in call
    ]
    messages = [
        Call(0, 1, MS, None, "recv", group=WORLD, peer=1, api="recv"),
        Call(1, 1, 67_000 * MS, None, "send", group=WORLD, peer=0, api="send"),
    ]
    for name, calls in (("call", late), ("message", messages)):
        calls = [replace(one, flags=flags) for one in calls]
        for seconds, found in ((70, []), (400, [("stuck" if flags else "slow_link", ())])):
            folder = tmp_path / f"{name}-{seconds}"
            diagnosis = diagnose_calls(folder, calls, states={}, seconds=seconds)
            kinds = [
                (kind, () if kind == "slow_link" else ranks) for kind, ranks in causes(diagnosis)
            ]
            assert kinds == found, name


def test_a_call_that_has_failed_on_all_ranks_need_not_be_old(tmp_path: Path) -> None:
    """It timed out after 5 s, and calls may take 60: the verdict is given at once."""
    calls = [Call(rank, 1, MS, 2 * MS, group=WORLD) for rank in WORLD.ranks]
    calls += [
        Call(rank, 2, 3 * MS, 5000 * MS, group=WORLD, status="failed") for rank in WORLD.ranks
    ]
    diagnosis = diagnose_calls(tmp_path, calls, states={}, seconds=10)
    assert [finding.kind for finding in diagnosis.findings] == ["slow_link"]


@pytest.mark.parametrize(
    ("started", "told", "relation"),
    [
        ((0, 1, 2, 3), True, R.STUCK_TRANSFER),
        ((), True, R.STARTED_NOWHERE),
        ((), False, R.START_UNKNOWN),
    ],
)
def test_no_rank_is_named_without_a_difference(
    tmp_path: Path, started: tuple[int, ...], told: bool, relation: Relation
) -> None:
    """If no device is behind the others, or none tells, the verdict still stops the job."""
    (finding,) = diagnosed(tmp_path, calls_on_devices(started, told=told)).findings
    assert (finding.kind, finding.ranks, finding.stops) == ("stuck", (), True)
    assert finding.facts[0].relation is relation
    assert finding.victims == (0, 1, 2, 3)


def test_a_member_whose_starts_are_not_told(tmp_path: Path) -> None:
    """What one rank's back end does not tell is unknown, and no rank is named by it."""
    calls = [
        replace(call, started=None, flags=FLAG_DEVICE) if call.rank == 1 else call
        for call in calls_on_devices((0, 2, 3))
    ]
    (finding,) = diagnosed(tmp_path, calls).findings
    assert (finding.kind, finding.ranks) == ("stuck", ())
    assert finding.facts[0].relation is R.START_UNKNOWN


@pytest.mark.parametrize(("over", "found"), [(40, []), (4, [("missing", (2,))])])
def test_hosts_that_ran_ahead_of_devices_that_go_on(
    tmp_path: Path, over: int, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """A call that was issued long ago hangs only if nothing of its group has ended for as long.

    All hosts but rank 2's issued 60 calls in the first 60 ms. Rank 2 issues one in two seconds, and
    the devices follow it. While they go on, rank 0 has not noticed the last end yet.
    """
    calls = []
    for rank in WORLD.ranks:
        for seq in range(1, 61):
            issue = seq * (2000 * MS if rank == 2 else MS)
            is_over = seq <= over - (rank == 0 and not found)
            if rank == 2 and seq > over:
                break
            end = seq * 2000 * MS + MS if is_over else None
            calls.append(Call(rank, seq, issue, end, group=WORLD, flags=FLAG_DEVICE))
    diagnosis = diagnose_calls(tmp_path, calls, states={}, seconds=81)
    assert causes(diagnosis) == found


def test_two_devices_that_have_not_started(tmp_path: Path) -> None:
    """Both are named, in one finding."""
    diagnosis = diagnosed(tmp_path, calls_on_devices((0, 3)))
    assert causes(diagnosis) == [("missing", (1, 2))]


def test_another_group_behind_the_same_device(tmp_path: Path) -> None:
    """What all devices queue behind the stuck one does not hide it."""
    pair = calls_on_devices((0,), group=PAIR, issued_by=(0, 1))
    world = calls_on_devices((), at=20, line=9)
    diagnosis = diagnosed(tmp_path, pair, world)
    assert causes(diagnosis) == [("missing", (1,))]
    assert diagnosis.findings[0].facts[0].relation is R.NOT_STARTED


def test_a_device_that_waits_in_another_group_is_a_victim(tmp_path: Path) -> None:
    """Rank 1's device has not started the pair's call: in the world's, it waits for rank 2."""
    world = calls_on_devices((0, 1, 3), issued_by=(0, 1, 3), line=9)
    pair = calls_on_devices((0,), group=PAIR, at=20)
    assert causes(diagnosed(tmp_path, world, pair)) == [("missing", (2,))]


def in_one_order(rank: int, calls: Iterable[tuple[Group, int, bool]], **fields: Any) -> list[Call]:
    """Return all_reduces of one thread: the group of each, its number, and whether it is over."""
    result = []
    for place, (group, seq, is_over) in enumerate(calls):
        issue, line = place * MS, 7 if group is WORLD else 9
        end = issue + MS if is_over else None
        values = {"thread": 10, "flags": FLAG_DEVICE, **fields}
        result.append(Call(rank, seq, issue, end, group=group, line=line, **values))
    return result


BOTH_OVER = [(PAIR, 1, True), (WORLD, 1, True)]
PAIR_FIRST = [*BOTH_OVER, (PAIR, 2, False), (WORLD, 2, False)]
WORLD_FIRST = [*BOTH_OVER, (WORLD, 2, False), (PAIR, 2, False)]
WORLD_ALONE = [*BOTH_OVER, (WORLD, 2, False)]
ELSEWHERE = [(WORLD, 1, True), (WORLD, 2, False)]


@pytest.mark.parametrize(
    ("first", "fields", "found"),
    [
        (PAIR_FIRST, {}, [("deadlock", (0, 1))]),
        (PAIR_FIRST, {"async_op": 1}, [("stuck", ())]),
        (PAIR_FIRST, {"thread": 0}, [("stuck", ())]),
        (WORLD_FIRST, {}, [("stuck", ())]),
    ],
)
def test_a_call_behind_one_of_another_group(
    tmp_path: Path,
    first: list[tuple[Group, int, bool]],
    fields: dict[str, Any],
    found: list[tuple[str, tuple[int, ...]]],
) -> None:
    """Rank 1 leaves out the pair's call; rank 0's device, which waits there, is not in the world's.

    That holds only if rank 0's stream waits for the pair's call first.
    """
    calls = [in_one_order(0, first, **fields), in_one_order(1, WORLD_ALONE)]
    calls += [in_one_order(rank, ELSEWHERE) for rank in (2, 3)]
    diagnosis = diagnosed(tmp_path, *calls)
    assert causes(diagnosis) == found
    if found[0][0] == "deadlock":
        (finding,) = diagnosis.findings
        assert (finding.confidence, finding.victims) == ("likely", (2, 3))
        steps = [fact for fact in finding.facts if fact.relation is R.WAITS_FOR]
        waiting = {f.ranks.numbers: f.others.numbers for f in steps if f.ranks and f.others}
        assert waiting == {(0,): (1,), (1,): (0,)}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({}, [("deadlock", (0, 1))]),
        ({"async_op": 1}, [("stuck", ())]),
        ({"thread": 0}, [("stuck", ())]),
    ],
)
def test_all_have_issued_two_calls_in_opposite_orders(
    tmp_path: Path, fields: dict[str, Any], found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Each device holds the other one up, if the streams of both ranks wait for their first call.

    Which call a device is in is not known otherwise, so no rank is named.
    """
    calls = [in_one_order(0, PAIR_FIRST, **fields), in_one_order(1, WORLD_FIRST, **fields)]
    calls += [in_one_order(rank, ELSEWHERE) for rank in (2, 3)]
    diagnosis = diagnosed(tmp_path, *calls)
    assert causes(diagnosis) == found
    if found[0][0] == "deadlock":
        (finding,) = diagnosis.findings
        assert (finding.confidence, finding.victims) == ("likely", (2, 3))
        assert waiting_in(finding) == {0: (PAIR.name, 1), 1: (WORLD.name, 0)}


def waiting_in(finding: Finding) -> dict[int, tuple[str, int]]:
    """Return by rank the group of the call that it waits in, and the rank that it waits for."""
    steps = [fact for fact in finding.facts if fact.relation is R.WAITS_FOR]
    return {
        step.ranks.numbers[0]: (step.call.group, step.others.numbers[0])
        for step in steps
        if step.ranks and step.others and step.call
    }


@pytest.mark.parametrize(
    ("orders", "api", "found"),
    [
        # Each sends first: the other's receive is behind its own send.
        ((("send", "recv"), ("send", "recv")), "", [("deadlock", (0, 1))]),
        ((("recv", "send"), ("recv", "send")), "", [("deadlock", (0, 1))]),
        # The orders fit, so something else holds the first message up.
        ((("send", "recv"), ("recv", "send")), "", [("stuck", ())]),
        # Nothing tells in which order a stream comes to these.
        ((("recv", "send"), ("recv", "send")), "irecv", [("stuck", ())]),
        # The messages of a batch run at once, in no order.
        ((("send", "recv"), ("send", "recv")), "batch_isend_irecv", [("stuck", ())]),
    ],
)
def test_messages_in_orders_that_do_not_fit(
    tmp_path: Path,
    orders: tuple[tuple[str, str], ...],
    api: str,
    found: list[tuple[str, tuple[int, ...]]],
) -> None:
    """Two ranks issue a send and a receive each, twice; the second ones hang."""
    calls = [
        Call(
            rank,
            seq,
            (2 * seq + place) * MS,
            (2 * seq + place + 1) * MS if seq == 1 else None,
            op,
            group=group_of(2),
            peer=1 - rank,
            api=api or op,
            flags=FLAG_DEVICE,
            thread=10,
        )
        for rank, order in enumerate(orders)
        for seq in (1, 2)
        for place, op in enumerate(order)
    ]
    assert causes(diagnosed(tmp_path, calls)) == found


@pytest.mark.parametrize(
    ("sends", "receives"),
    [("send", "recv"), ("isend", "irecv"), ("batch_isend_irecv", "batch_isend_irecv")],
)
def test_of_a_message_and_what_it_is_behind_the_latter_is_stuck(
    tmp_path: Path, sends: str, receives: str
) -> None:
    """Ranks 1 and 2 do not get out of a call, and rank 1 has its end of a message behind it."""
    pair = Group("1", 0, "nccl", "pair", (1, 2))
    common: dict[str, Any] = {"flags": FLAG_DEVICE, "thread": 10}
    calls = [
        Call(rank, seq, 9 * seq * MS, 10 * MS if seq == 1 else None, group=pair, **common)
        for rank in pair.ranks
        for seq in (1, 2)
    ]
    common |= {"group": group_of(3)}
    calls += [
        Call(0, 1, MS, 2 * MS, "send", peer=1, api=sends, **common),
        Call(1, 1, MS, 2 * MS, "recv", peer=0, api=receives, **common),
        Call(0, 2, 3 * MS, None, "send", peer=1, api=sends, **common),
        Call(1, 2, 30 * MS, None, "recv", peer=0, api=receives, **common),
    ]
    (finding,) = diagnosed(tmp_path, calls).findings
    assert (finding.kind, finding.group, finding.seq) == ("stuck", "1", 2)


@pytest.mark.parametrize(
    ("api", "found"),
    [
        # The batch and the collective share the group's communicator.
        ("batch_isend_irecv", [("deadlock", (0, 2))]),
        # A message by itself has one of its own, and nothing tells whether a stream waits for it.
        ("irecv", [("stuck", ())]),
    ],
)
def test_a_batch_holds_back_the_collectives_of_its_group(
    tmp_path: Path, api: str, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Rank 0 waits for a message that rank 2 has left out, and all have issued the collective."""
    calls = []
    common: dict[str, Any] = {"group": group_of(3), "flags": FLAG_DEVICE}
    for rank in range(3):
        for seq in (1, 2):
            begun = (10 * seq + rank) * MS
            over = begun + MS
            if (rank, seq) != (2, 2):
                for op, peer in (("send", (rank + 1) % 3), ("recv", (rank - 1) % 3)):
                    end = None if (rank, seq, op) == (0, 2, "recv") else over
                    calls.append(Call(rank, seq, begun, end, op, peer=peer, api=api, **common))
            end = over + 6 * MS if seq == 1 else None
            calls.append(Call(rank, seq, begun + 5 * MS, end, thread=10, **common))
    assert causes(diagnosed(tmp_path, calls)) == found


@pytest.mark.parametrize(
    ("noticed", "looked", "found"),
    [(0, 1000, [("deadlock", (0, 1))]), (990, 1000, []), (0, 5, [])],
)
def test_nothing_is_stuck_while_the_device_may_be_in_the_call_before(
    tmp_path: Path, noticed: int, looked: int, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Rank 1 leaves out a call of the pair and waits in the next one of all, as do the others.

    Rank 0's device is in the pair's call. How long, is known from the last end of the pair's, which
    is noticed by itself, so many ms after that of all. If rank 0 has not looked since it issued
    both, it is in the pair's all the same, to which rank 1 has not come.
    """
    calls = []
    for rank in WORLD.ranks:
        for seq in (1, 2):
            if rank < 2 and (rank, seq) != (1, 2):
                end = 10 + noticed if seq == 1 else None
                calls.append((rank, seq, PAIR, 3 * seq, end))
            calls.append((rank, seq, WORLD, 3 * seq + 1, 10 if seq == 1 else None))
    made = [
        Call(
            rank,
            seq,
            at * MS,
            None if end is None else end * MS,
            group=group,
            line=7,
            flags=FLAG_DEVICE,
            thread=10,
        )
        for rank, seq, group, at, end in calls
    ]
    known = dict.fromkeys(WORLD.ranks, 1000 * MS) | {0: looked * MS}
    diagnosis = diagnose_calls(
        tmp_path, made, states={}, seconds=1, hang_after=0.2, devices_known=known
    )
    assert causes(diagnosis) == found


@pytest.mark.parametrize(("looked", "found"), [((0, 2), []), ((0, 1, 2), [("deadlock", (1, 2))])])
def test_nothing_is_stuck_while_a_rank_may_be_in_another_call(
    tmp_path: Path, looked: tuple[int, ...], found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """Rank 0 waits for rank 1, which with rank 2 is in a circle: its device is looked at last."""
    orders = (
        (("recv", 1),),
        (("recv", 2), ("send", 2), ("send", 0)),
        (("recv", 1), ("send", 1)),
    )
    calls = [
        Call(
            rank,
            seq,
            (seq * 4 + place) * MS,
            (seq * 4 + place + 1) * MS if seq == 1 else None,
            op,
            group=group_of(3),
            peer=peer,
            api=op,
            flags=FLAG_DEVICE,
            thread=10,
        )
        for rank, order in enumerate(orders)
        for seq in (1, 2)
        for place, (op, peer) in enumerate(order)
    ]
    known = {rank: 24_999 * MS if rank in looked else 0 for rank in range(3)}
    diagnosis = diagnose_calls(tmp_path, calls, devices_known=known, **SOON)
    assert causes(diagnosis) == found


@pytest.mark.parametrize("middle", [False, True])
def test_orders_that_fit_in_a_ring_of_groups(tmp_path: Path, middle: bool) -> None:
    """Three pairs of three ranks: only a whole circle of orders that do not fit is a deadlock.

    ``middle``: rank 2 issues the call of the pair with rank 1 first, which breaks the circle.
    """
    pairs = [Group(str(10 + at), 0, "nccl", f"pair {at}", (at, (at + 1) % 3)) for at in range(3)]
    pairs[2] = replace(pairs[2], ranks=(0, 2))
    orders = [(pairs[0], pairs[2]), (pairs[1], pairs[0]), (pairs[2], pairs[1])]
    if middle:
        orders[2] = (pairs[1], pairs[2])
    issued = [
        in_one_order(rank, [(group, seq, seq == 1) for seq in (1, 2) for group in order])
        for rank, order in enumerate(orders)
    ]
    found = causes(diagnosed(tmp_path, *issued))
    assert found == ([("stuck", ())] if middle else [("deadlock", (0, 1, 2))])


def test_a_rank_that_left_out_a_message(tmp_path: Path) -> None:
    """Rank 0's device waits for a message that rank 1 has not sent, before the call of all."""
    message = Call(0, 1, MS, None, "recv", group=WORLD, peer=1, api="recv", line=11)
    message = replace(message, thread=10, flags=FLAG_DEVICE)
    over, behind = in_one_order(0, ELSEWHERE)
    calls = [[over, message, behind], *(in_one_order(rank, ELSEWHERE) for rank in (1, 2, 3))]
    assert causes(diagnosed(tmp_path, *calls)) == [("deadlock", (0, 1))]


def test_a_rank_that_has_not_issued_is_missing_as_before(tmp_path: Path) -> None:
    """The three others' devices have started the call."""
    diagnosis = diagnosed(tmp_path, calls_on_devices((0, 2, 3), issued_by=(0, 2, 3)))
    assert causes(diagnosis) == [("missing", (1,))]
    assert diagnosis.findings[0].facts[0].relation is R.NOT_COME


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("told", [True, False])
def test_messages(tmp_path: Path, culprit: int, told: bool) -> None:
    """One end of a message has started, the other has only been issued."""
    calls = []
    for rank, op in ((0, "send"), (1, "recv")):
        for seq in (1, 2):
            begun = told and (seq == 1 or rank != culprit)
            calls.append(
                Call(
                    rank,
                    seq,
                    seq * MS,
                    2 * MS if seq == 1 else None,
                    op,
                    group=group_of(2),
                    peer=1 - rank,
                    api=op,
                    flags=FLAG_DEVICE | (FLAG_NOT_STARTED if told and not begun else 0),
                    started=seq * MS if begun else None,
                )
            )
    (finding,) = diagnosed(tmp_path, calls).findings
    assert finding.stops
    assert (finding.kind, finding.ranks) == (("missing", (culprit,)) if told else ("stuck", ()))


def messages_between(
    sender: int, receiver: int, issued: Mapping[int, Iterable[int]], over: int, **fields: Any
) -> list[Call]:
    """Return messages from one line; those up to number ``over`` have ended.

    Args:
        sender: The rank that sends them.
        receiver: The rank that receives them.
        issued: By rank, when it issues each one, in ms.
        over: The number of the last one that has ended.
        **fields: Of all calls.
    """
    values = {"group": group_of(3), "line": 7, "flags": FLAG_DEVICE, "thread": 10, **fields}
    return [
        Call(
            rank,
            seq,
            at * MS,
            (at + 1) * MS if seq <= over else None,
            "send" if rank == sender else "recv",
            peer=receiver if rank == sender else sender,
            api="isend" if rank == sender else "irecv",
            **values,
        )
        for rank, times in issued.items()
        for seq, at in enumerate(times, 1)
    ]


@pytest.mark.parametrize("busy", [1, 2])
def test_hosts_of_a_pipeline_that_go_on_issuing(tmp_path: Path, busy: int) -> None:
    """Rank 0 has not come to its fourth message; a host behind it is slow to issue the next steps.

    That this host goes on is no sign that its device does: no call on it has ended for 70 s. And
    what the slow host has not issued yet, the others' devices have not come to.
    """
    early, slow = range(1, 24), [1, 2, 3, *range(3000, 69_000, 3000)]
    steps = {rank: slow if rank == busy else early for rank in (1, 2)}
    gradients = {rank: [at + 1 for at in times] for rank, times in steps.items()}
    if busy == 2:
        gradients[2] = gradients[2][:3]
    calls = [
        *messages_between(0, 1, {0: [1, 2, 3], 1: steps[1]}, 3),
        *messages_between(1, 2, steps, 3),
        *messages_between(2, 1, gradients, 3),
    ]
    diagnosis = diagnosed(tmp_path, sorted(calls, key=lambda call: call.at))
    assert causes(diagnosis) == [("missing", (0,))]
    assert diagnosis.findings[0].seq == 4


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("over", "found"), [(0, []), (1, [("missing", (2,))])])
def test_the_first_gradient_from_the_line_of_the_activations(
    tmp_path: Path, on_device: bool, over: int, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """A line that has ended with other messages may be in its first step all the same."""
    flags = FLAG_DEVICE if on_device else 0
    early, gradients = [1, 2, 3], {1: [4, 5], 2: [4, 5][:over]}
    calls = [
        *messages_between(0, 1, {0: early, 1: early}, 3, flags=flags),
        *messages_between(1, 2, {1: early, 2: early}, 3, flags=flags),
        *messages_between(2, 1, gradients, over, flags=flags),
    ]
    snapshot = diagnosed(tmp_path, sorted(calls, key=lambda call: call.at)).snapshot
    states = [replace(state, steps=0) for state in snapshot.ranks]
    findings = find(replace(snapshot, ranks=states), 60)
    assert [(finding.kind, finding.ranks) for finding in findings] == found


@pytest.mark.parametrize(("on_device", "seconds"), [(False, 60), (True, 300)])
def test_a_host_that_is_steps_ahead_of_the_first_step(
    tmp_path: Path, on_device: bool, seconds: float
) -> None:
    """The device of a rank is in its first step as long as a call of that step is in flight."""
    flags = FLAG_DEVICE if on_device else 0
    ahead = [
        replace(call, flags=flags, step=call.seq // 2)
        for call in messages_between(0, 1, {0: range(1, 9), 1: [1, 2, 3]}, 0)
    ]
    diagnosis = diagnose_calls(tmp_path, ahead, states={})
    snapshot = diagnosis.snapshot
    states = [replace(state, steps=4) for state in snapshot.ranks]
    allowed = patience(replace(snapshot, ranks=states), 60)
    assert allowed[unfinished(snapshot.calls)] == pytest.approx(seconds)


def test_on_the_cpu_a_slow_transfer_stops_nothing(tmp_path: Path) -> None:
    """There, all members have come; Gloo raises at its own timeout."""
    calls = [replace(call, flags=0) for call in calls_on_devices(())]
    (finding,) = diagnosed(tmp_path, calls).findings
    assert (finding.kind, finding.stops) == ("slow_link", False)


@pytest.mark.parametrize("timing", [True, False])
def test_dumps(tmp_path: Path, timing: bool) -> None:
    """With TORCH_NCCL_ENABLE_TIMING=1, the entries of dumps have states and times of starts."""
    members = (0, 1, 2, 3)
    job = simulate(
        4,
        40,
        groups={"world": dict.fromkeys(members, members)},
        program=(Step("world", "all_reduce", 64, 20),),
    )
    for rank in members:
        content = dump_of(job, rank)
        for entry in content["entries"]:
            begun = entry["time_created_ns"] + 1000
            if entry["collective_seq_id"] >= 30:
                entry["state"], entry["retired"] = "scheduled", False
                entry["time_discovered_completed_ns"] = begun = None
                if entry["collective_seq_id"] == 30 and rank != 1 and timing:
                    entry["state"], begun = "started", entry["time_created_ns"] + 1000
            entry["time_discovered_started_ns"] = begun if timing else None
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(content))
    (finding,) = diagnose(load(tmp_path)).findings
    named = ("missing", (1,)) if timing else ("stuck", ())
    assert (finding.kind, finding.ranks, finding.seq) == (*named, 30)
    assert finding.facts[0].relation is (R.NOT_STARTED if timing else R.START_UNKNOWN)


@pytest.mark.parametrize(("last_s", "found"), [(59, []), (30, [("stuck", ())])])
def test_dumps_of_a_call_that_the_last_rank_had_just_come_to(
    tmp_path: Path, last_s: int, found: list[tuple[str, tuple[int, ...]]]
) -> None:
    """The dumps were written 60 s after the others had issued it."""
    members = (0, 1)
    job = simulate(
        2,
        8,
        groups={"world": dict.fromkeys(members, members)},
        program=(Step("world", "all_reduce", 64, 20),),
    )
    for rank in members:
        content = dump_of(job, rank)
        last = content["entries"][-1]
        last["state"], last["retired"] = "scheduled", False
        last["time_discovered_started_ns"] = last["time_discovered_completed_ns"] = None
        written_ns = last["time_created_ns"] + 60_000 * MS
        last["time_created_ns"] += last_s * 1000 * MS * rank
        path = tmp_path / f"rank_{rank}"
        path.write_bytes(pickle.dumps(content))
        os.utime(path, ns=(written_ns, written_ns))
    assert causes(diagnose(load(tmp_path))) == found

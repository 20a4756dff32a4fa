"""How ranks got out of step: a loop that one ran more often, a shift, calls too many, a branch."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import WORLD, diagnose_calls, unfinished
from worlds import MS, Call, group_of

from rankcall.analysis.snapshot import ALIVE


def test_a_shift_needs_several_calls_and_is_only_likely(tmp_path: Path) -> None:
    """Two lines in turn show a shift without its direction; fewer than three calls show none."""

    def skipping(at: int, lines: list[int]) -> list[Call]:
        own = lines[: at - 1] + lines[at:]
        ended = [
            Call(rank, seq, seq * MS, seq * MS + 1, line=line, group=WORLD)
            for rank in range(4)
            for seq, line in enumerate(own if rank == 2 else lines, 1)
            if seq < len(lines)
        ]
        waiting = unfinished(WORLD, len(lines), (0, 1, 3), 99 * MS, line=lines[-1])
        return ended + waiting

    (finding,) = diagnose_calls(tmp_path / "three", skipping(5, [7, 8, 9] * 4), states={}).findings
    assert (finding.kind, finding.seq, finding.confidence) == ("desync", 5, "likely")
    assert "those of the others 1 call later: it likely skipped 1 call before" in finding.summary
    (finding,) = diagnose_calls(tmp_path / "two", skipping(5, [7, 8] * 6), states={}).findings
    assert "likely skipped 1 call or issued 1 call too many" in finding.summary
    (finding,) = diagnose_calls(tmp_path / "late", skipping(11, [7, 8, 9] * 4), states={}).findings
    assert (finding.kind, finding.confidence) == ("desync", "likely")
    assert "likely" not in finding.summary


def stages(world: int, turns: dict[int, int], per_turn: int = 1, rounds: int = 2) -> list[Call]:
    """Return what ranks issue that train and validate in turns, and then come to a barrier.

    A rank makes so many turns of training (12 by default), with ``per_turn`` collectives each at
    the lines 17, 18, ...; then five collectives at line 23, of equal sizes. The barrier has no end.
    """
    group = group_of(world)
    calls = []
    for rank in range(world):
        one = [17 + at for at in range(per_turn)] * turns.get(rank, 12) + [23] * 5
        lines = one * rounds
        for seq, line in enumerate(lines, 1):
            calls.append(Call(rank, seq, seq * MS, seq * MS + 1000, group=group, line=line))
        seq = len(lines) + 1
        calls.append(Call(rank, seq, seq * MS, None, group=group, op="barrier", line=28))
    most = max(call.seq for call in calls)
    # Those that have more to do wait in the call whose number is that of the others' barrier.
    shortest = min(call.seq for call in calls if call.op == "barrier")
    return (
        [
            replace(call, end=None) if call.seq == shortest else call
            for call in calls
            if call.seq <= shortest
        ]
        if most > shortest
        else calls
    )


@pytest.mark.parametrize(
    ("world", "turns", "per_turn", "first", "words"),
    [
        (
            2,
            {1: 11},
            1,
            12,
            "Rank 0 (node-a, pid 1000) ran the loop with all_reduce (train.py:17) once",
        ),
        (2, {1: 9}, 1, 10, "ran the loop with all_reduce (train.py:17) 3 times more"),
        (4, {2: 11}, 3, 34, "Ranks 0-1,3 (node-a) ran the loop with all_reduce (train.py:17) once"),
        (
            4,
            {0: 13},
            2,
            25,
            "Rank 0 (node-a, pid 1000) ran the loop with all_reduce (train.py:17) once",
        ),
    ],
)
def test_uneven_loops_whose_calls_match(
    tmp_path: Path, world: int, turns: dict[int, int], per_turn: int, first: int, words: str
) -> None:
    """The first place at which the lines differ is named, not the one where the job froze.

    The culprit is the rank that is unlike the others; of two ranks, the one that ran out.
    """
    calls = stages(world, turns, per_turn)
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert (finding.kind, finding.seq) == ("desync", first)
    assert finding.ranks == tuple(turns)
    if world == 2:
        assert finding.summary.startswith(
            "Rank 1 (node-a, pid 1001) issued all_reduce (train.py:23)"
        )
    assert "train.py:17" in finding.summary
    assert "train.py:23" in finding.summary
    assert words in finding.summary


def test_lines_that_only_one_rank_has_are_no_first_difference(tmp_path: Path) -> None:
    """Rank 0 may come to the same call by a line of its own; the place where ops differ counts."""
    calls = [
        Call(rank, seq, seq * MS, seq * MS + 1000, group=WORLD, line=5 if rank else 6)
        for seq in range(1, 9)
        for rank in range(4)
    ]
    calls += unfinished(WORLD, 9, (0, 1, 3), 9 * MS, line=7)
    calls += unfinished(WORLD, 9, (2,), 9 * MS, op="barrier", line=30)
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (2,), 9)


BRANCHES = ("half", "rare", "once")


def branching(rng: random.Random, how: str, skipped: int = -1) -> list[list[tuple[str, int]]]:
    """Return the ops and lines of four ranks, whose 40 calls come from one of two lines.

    A healthy program has a branch for a batch without data, say, which leads to the same call.
    ``how``: a rank takes it in half of the steps, rarely, or once; ``skipped`` leaves one call out.
    """
    chance = {"half": 0.5, "rare": 0.05, "once": 0.0}[how]
    once = rng.choice([rank for rank in range(4) if rank != skipped]), rng.randrange(5, 35)
    ranks = []
    for rank in range(4):
        calls = [
            ("all_reduce", 8 if rng.random() < chance or once == (rank, step) else 7)
            for step in range(40)
        ]
        if rank == skipped:
            del calls[35]
        ranks.append([*calls, ("barrier", 30)])
    return ranks


def calls_up_to(ranks: list[list[tuple[str, int]]], last: int, absent: int = -1) -> list[Call]:
    """Return the records of ranks of which none gets out of its call number ``last``."""
    return [
        Call(rank, seq, seq * MS, seq * MS + 1 if seq < last else None, op, group=WORLD, line=line)
        for rank, calls in enumerate(ranks)
        for seq, (op, line) in enumerate(calls[: last - (rank == absent)], 1)
    ]


@pytest.mark.parametrize("how", BRANCHES)
@pytest.mark.parametrize("seed", range(12))
def test_a_branch_to_the_same_call_is_no_desync_of_others(
    tmp_path: Path, how: str, seed: int
) -> None:
    """Of healthy calls from lines that differ, none is blamed for a rank that does not come."""
    rng = random.Random(seed)
    absent = rng.randrange(4)
    calls = calls_up_to(branching(rng, how), 40, absent)
    (finding,) = diagnose_calls(tmp_path, calls, states=dict.fromkeys(range(4), ALIVE)).findings
    assert finding.ranks == (absent,)


@pytest.mark.parametrize("how", BRANCHES)
@pytest.mark.parametrize("seed", range(12))
def test_who_skipped_a_call_beside_branches(tmp_path: Path, how: str, seed: int) -> None:
    """The rank whose op differs is named, although lines differed before on other ranks."""
    rng = random.Random(seed)
    skipped = rng.randrange(4)
    calls = calls_up_to(branching(rng, how, skipped), 40)
    (finding,) = diagnose_calls(tmp_path, calls, states={}).findings
    assert (finding.kind, finding.ranks) == ("desync", (skipped,))


def too_many(count: int, world: int = 4, *, in_turn: bool = False) -> list[list[tuple[str, int]]]:
    """Return what ranks issue, of which rank 0 has some calls more, from a line of its own.

    ``in_turn``: the others' calls come from two lines in turn, else from one.
    """
    usual = [("all_reduce", 9 if in_turn and step % 2 else 7) for step in range(40)]
    return [[*usual[:20], *[("all_reduce", 30)] * count, *usual[20:]], *[usual] * (world - 1)]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("in_turn", [False, True])
def test_calls_too_many_after_which_the_others_ended(
    tmp_path: Path, count: int, in_turn: bool
) -> None:
    """Ranks 1 to 3 are done, and rank 0 waits: calls of its own had met some of theirs."""
    calls = calls_up_to(too_many(count, in_turn=in_turn), 41)
    exits = dict.fromkeys((1, 2, 3), (0, 60.0))
    (finding,) = diagnose_calls(tmp_path, calls, states={0: ALIVE}, exits=exits).findings
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (0,), 21)
    assert "all_reduce (train.py:30) as #21" in finding.summary
    assert "against all_reduce (train.py:7) of ranks 1-3" in finding.summary


def test_calls_too_many_of_one_of_two_ranks(tmp_path: Path) -> None:
    """Which of two is right is not known, so none is named."""
    calls = calls_up_to(too_many(2, world=2), 41)
    exits = {1: (0, 60.0)}
    (finding,) = diagnose_calls(tmp_path, calls, states={0: ALIVE}, exits=exits).findings
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (), 21)


def test_one_step_less_beside_a_branch(tmp_path: Path) -> None:
    """Rank 1 ended a step early. That rank 0 took a branch once has nothing to do with it."""
    ranks = [[("all_reduce", 7)] * 41 for _ in range(4)]
    ranks[0][20] = ("all_reduce", 9)
    calls = calls_up_to(ranks, 41, absent=1)
    states = dict.fromkeys((0, 2, 3), ALIVE)
    (finding,) = diagnose_calls(tmp_path, calls, states=states, exits={1: (0, 60.0)}).findings
    assert (finding.kind, finding.ranks) == ("exhausted", (1,))


def test_a_call_too_many_before_another_op(tmp_path: Path) -> None:
    """The place where the ops differ is far behind the line that is at fault, which is shown."""
    ranks = [[*calls, ("barrier", 30)] for calls in too_many(1)]
    (finding,) = diagnose_calls(tmp_path, calls_up_to(ranks, 41), states={}).findings
    assert (finding.kind, finding.ranks, finding.seq) == ("desync", (0,), 41)
    (line,) = [line for line in finding.evidence if "before, all_reduce #21" in line]
    assert "train.py:30, and from train.py:7 on ranks 1-3" in line

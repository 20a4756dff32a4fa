"""Calls that never end are proved at once, and calls that may end never are.

The model of healthy jobs is in ``schedules``: every call of it ends, so nothing may be proved.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from schedules import (
    NEVER,
    Operation,
    Part,
    Schedule,
    pause,
    random_program,
    reading,
    schedule,
)

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts import find_final
from rankcall.analysis.verdicts.final import proofs_in
from rankcall.record import FLAG_DEVICE, OPS

LOOKS = 6  # in the life of each job


def agreed(made: Schedule, at: float, rng: random.Random, gap: float = 0.25) -> list[Snapshot]:
    """Return two readings, of which the second begins when the first is done."""
    takes = rng.choice((0.001, 0.05, 0.5))
    codes = rng.random() < 0.5
    return [
        reading(made, moment, rng, takes=takes, exit_codes=codes)
        for moment in (at, at + takes + rng.uniform(0.0, gap))
    ]


def proved(snapshots: list[Snapshot]) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kinds and ranks of the findings that two readings prove."""
    proofs = frozenset.intersection(*map(proofs_in, snapshots))
    findings = find_final(snapshots[-1], 3600.0, proofs)
    assert bool(findings) <= bool(proofs)
    return [(finding.kind, finding.ranks) for finding in findings]


def look_at_healthy_jobs(seeds: range) -> None:
    """No reading of any job proves anything."""
    for seed in seeds:
        rng = random.Random(seed)
        made = schedule(*random_program(rng), seed)
        for _ in range(LOOKS):
            snapshots = agreed(made, rng.uniform(0.0, made.span), rng)
            proofs = frozenset.intersection(*map(proofs_in, snapshots))
            assert not proofs, f"seed {seed}: {proofs}"


def test_nothing_is_proved_of_healthy_jobs() -> None:
    """Threads, groups, messages, async calls, roots, pauses of seconds, ranks that end early."""
    look_at_healthy_jobs(range(40))


@pytest.mark.slow
def test_nothing_is_proved_of_2000_healthy_jobs() -> None:
    """The same, of many jobs."""
    look_at_healthy_jobs(range(1000, 3000))


WORLD = (0, 1, 2)


def step(op: str = "all_reduce", **fields: object) -> Operation:
    """Return a call of all ranks."""
    return replace(Operation(op, 0, 0, WORLD), **fields)  # type: ignore[arg-type]


def stuck(faulty: dict[int, list[Operation]], killed: tuple[int, ...] = ()) -> Schedule:
    """Return a job that takes three sound steps in both groups; then each rank's calls hang."""
    before = [step(group=number % 2) for number in range(6)]
    made = schedule([WORLD, WORLD], before, 7)
    begin = max(part.ended for part in made.parts)
    for rank, calls in faulty.items():
        seqs = {0: 3, 1: 3}
        for number, call in enumerate(calls):
            seqs[call.group] += 1
            seq = 1 if call.is_message else seqs[call.group]
            made.parts.append(Part(rank, call, seq, begin + 0.1 * (1 + number)))
    made.over = dict.fromkeys(WORLD, NEVER)
    made.gone = {rank: begin + 0.05 if rank in killed else NEVER for rank in WORLD}
    made.killed = set(killed)
    return made


def hang(made: Schedule, after: float = 1.0) -> list[tuple[str, tuple[int, ...]]]:
    """Return what is proved so many s after the last call of a hang."""
    begin = max(part.issued for part in made.parts)
    return proved(agreed(made, begin + after, random.Random(3)))


def test_a_call_in_which_members_differ() -> None:
    """The op, the size or the root; not the dtype, which a back end lets through."""
    for other, kind in (
        (step("barrier"), "desync"),
        (step(size=128), "mismatch"),
    ):
        assert hang(stuck({0: [step()], 1: [other], 2: [step()]})) == [(kind, (1,))]
    roots = {rank: [step("broadcast", root=2 * (rank == 1))] for rank in WORLD}
    assert hang(stuck(roots)) == [("mismatch", (1,))]
    assert hang(stuck({rank: [step()] for rank in WORLD})) == []


def test_a_large_message_gets_time() -> None:
    """A back end may be on its way with it."""
    large = {rank: [step(size=(100 if rank else 101) * 1_000_000)] for rank in WORLD}
    assert hang(stuck(large)) == []
    assert hang(stuck(large), after=11.0) == [("mismatch", (0,))]


def test_not_before_all_members_are_there() -> None:
    """One that comes later may be the one that the back end waits for."""
    assert hang(stuck({0: [step()], 1: [step("barrier")]})) == []


def test_a_process_that_is_gone() -> None:
    """If it had not come to the call; at once."""
    assert hang(stuck({0: [step()], 2: [step()]}, killed=(1,)), 0.3) == [("dead", (1,))]
    assert hang(stuck({0: [step()]}, killed=(1,)), 0.3) == [("dead", (1,))]
    assert hang(stuck({0: [step()], 2: [step()]})) == []  # it may come


def test_a_process_that_died_in_the_call() -> None:
    """The others may have all that they need, so this takes a second."""
    made = stuck({rank: [step()] for rank in WORLD}, killed=(1,))
    made.gone[1] = max(part.issued for part in made.parts) + 0.05
    assert hang(made, 0.3) == []
    assert hang(made, 2.0) == [("dead", (1,))]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_circle(is_async: bool) -> None:
    """Rank 1 waits for the others in one group, and they for it in another one.

    They go on if the calls are async.
    """
    left, right = (step(group=group, is_async=is_async) for group in (0, 1))
    made = stuck({0: [left], 1: [right], 2: [left]})
    assert hang(made) == ([] if is_async else [("deadlock", WORLD)])


def test_a_circle_of_messages() -> None:
    """Both ranks send first. Of the first messages, a thread that is not known may issue one."""
    there, back = (Operation("message", 0, 0, pair) for pair in ((0, 1), (1, 0)))
    both = stuck({0: [there], 1: [back]})
    assert hang(both) == []
    earlier = [(rank, call) for call in (there, back) for rank in WORLD[:2]]
    for rank, call in earlier:
        both.parts.insert(0, Part(rank, call, 1, 0.0, 0.01))
    for part in both.parts[-2:]:
        part.seq = 2
    assert hang(both) == [("deadlock", (0, 1))]


def test_another_thread_may_come() -> None:
    """A rank whose other thread has used the group may still come to its call."""
    left, right = (step(group=group) for group in (0, 1))
    made = stuck({0: [left], 1: [right], 2: [left]})
    for number, part in enumerate(made.parts):
        if part.rank == 1 and part.operation.group == 0:
            other = replace(part.operation, thread=1)
            made.parts[number] = replace(part, operation=other)
    assert hang(made) == []


def test_calls_on_devices_wait_for_the_threshold() -> None:
    """A host issues long before its device comes to the call. A dead host issues nothing."""
    for made, expected in (
        (stuck({0: [step()], 1: [step("barrier")], 2: [step()]}), []),
        (stuck({0: [step()], 2: [step()]}, killed=(1,)), [("dead", (1,))]),
    ):
        begin = max(part.issued for part in made.parts)
        snapshots = agreed(made, begin + 1.0, random.Random(3))
        for snapshot in snapshots:
            snapshot.calls["flags"] = FLAG_DEVICE
        assert proved(snapshots) == expected


def test_two_readings_must_agree() -> None:
    """A proof names its records: calls that ended in between prove nothing."""
    made = stuck({0: [step()], 1: [step("barrier")], 2: [step()]})
    begin = max(part.issued for part in made.parts)
    first, second = agreed(made, begin + 1.0, random.Random(3))
    assert proofs_in(first)
    second.calls["index"] += 1
    assert not proofs_in(first) & proofs_in(second)


@pytest.mark.parametrize("about", [{"tables_lost": 1}, {"told_s": 2.0}, {"aborted": True}], ids=str)
def test_not_if_too_little_is_known(about: dict[str, object]) -> None:
    """Groups that did not fit into a ring; a job that is being ended."""
    made = stuck({0: [step()], 2: [step()]}, killed=(1,))
    snapshots = agreed(made, max(part.issued for part in made.parts) + 1.0, random.Random(3))
    assert proved(snapshots)
    for snapshot in snapshots:
        snapshot.ranks[2] = replace(snapshot.ranks[2], **about)  # type: ignore[arg-type]
    assert proved(snapshots) == []


def test_a_program_that_an_exception_has_ended() -> None:
    """Its process is there, and closes down."""
    made = stuck({0: [step()], 2: [step()]})
    snapshots = agreed(made, max(part.issued for part in made.parts) + 1.0, random.Random(3))
    for snapshot in snapshots:
        snapshot.ranks[1] = replace(snapshot.ranks[1], failure="ValueError: no more")
    assert proved(snapshots) == [("dead", (1,))]
    (finding,) = find_final(snapshots[1], 60.0, proofs_in(snapshots[1]))
    assert finding.predicate.of_one == "failed"
    assert "failed with ValueError: no more, and is closing down" in finding.summary


def test_the_model_has_what_it_is_about() -> None:
    """Its readings show calls in flight, of several kinds, for longer than a proof needs."""
    seen: set[str] = set()
    waits = 0
    for seed in range(60):
        rng = random.Random(seed)
        made = schedule(*random_program(rng), seed)
        shown = reading(made, rng.uniform(0.0, made.span), rng)
        is_open = np.isnan(shown.calls["ended_s"]) & (shown.calls["age_s"] > 0.5)
        waits += int(is_open.any())
        seen |= {OPS[op] for op in shown.calls["op"][is_open]}
    assert waits > 20
    assert {"send", "recv", "all_reduce", "broadcast", "gather"} <= seen
    assert pause(random.Random(0)) >= 0.0

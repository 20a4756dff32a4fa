"""What ended an attempt, as one node of several sees it: its own records, and those of no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import SECOND, START_EPOCH_NS, THREE_ENDED, WORLD, unfinished
from worlds import MS, write_world

from rankcall.recovery.failures import Attempt, Cause, cause_of
from rankcall.recovery.policy import MACHINE, PROGRAM, UNCLEAR
from rankcall.run.exits import Exit, note_exit

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:4411"


def seen_by_the_first_node(
    folder: Path, failures: dict[int, str], waiting: tuple[int, ...] = (0, 1)
) -> Cause:
    """Return what node-a, with ranks 0 and 1 of four, takes for the cause of their end.

    ``waiting``: its ranks whose fourth call failed. It has no records of ranks 2 and 3.
    """
    last = [
        replace(call, end=2 * SECOND, status="failed")
        for call in unfinished(WORLD, 4, waiting, 5 * MS, line=7)
    ]
    mine = [call for call in THREE_ENDED if call.rank < 2]
    run = write_world(
        folder / "run", [*mine, *last], world_size=4, closed=lambda rank: False, failures=failures
    )
    for rank in (0, 1):
        ended_ns = START_EPOCH_NS + 3 * SECOND + rank
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, 1, ended_ns))
    return cause_of(run, Attempt({0: 1000, 1: 1001}, 4, "node-a", codes={0: 1, 1: 1}))


@pytest.mark.parametrize("failures", [{0: GONE, 1: GONE}, {0: GONE}, {1: GONE}])
def test_ranks_whose_peers_are_gone(tmp_path: Path, failures: dict[int, str]) -> None:
    """Ranks 2 and 3, of a node that was killed, are named; it was the machine, and not this one."""
    cause = seen_by_the_first_node(tmp_path, failures)
    assert cause.culprits == (2, 3)
    assert (cause.family, cause.is_own) == (MACHINE, False)


def test_other_errors_beside_it(tmp_path: Path) -> None:
    """If one of its ranks failed for another reason, a lost peer does not explain the failure."""
    cause = seen_by_the_first_node(tmp_path, {0: GONE, 1: "ValueError: no such sample: 17"})
    assert cause.family != MACHINE


def test_an_exception_instead_of_the_call(tmp_path: Path) -> None:
    """A rank that raised, and so did not come, is at fault, whatever its peer says of it."""
    failures = {0: GONE, 1: "ValueError: no such sample: 17"}
    cause = seen_by_the_first_node(tmp_path, failures, waiting=(0,))
    assert (cause.culprits, cause.family, cause.is_own) == ((1,), PROGRAM, True)


def test_nothing_is_known_of_the_ends(tmp_path: Path) -> None:
    """Without an exception on record, it stays unclear what is at fault."""
    assert seen_by_the_first_node(tmp_path, {}).family == UNCLEAR

"""What ended an attempt, as one node of several sees it: its own records, and those of no other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from diagnosing import SECOND, START_EPOCH_NS, THREE_ENDED, WORLD, unfinished
from worlds import MS, write_world

from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.folders import run_folder
from rankcall.job.sealing import SECRET
from rankcall.recovery.failures import Attempt, Cause, cause_elsewhere, cause_of
from rankcall.recovery.policy import MACHINE, PROGRAM, UNCLEAR
from rankcall.ring.layout import offset_of
from rankcall.run.exits import Exit, note_exit
from rankcall.run.hangs import fill, note_over
from rankcall.run.paths import HANGS

GONE = "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [10.0.0.3]:4411"


MINE = Attempt({0: 1000, 1: 1001}, 4, "node-a", codes={0: 1, 1: 1})


def seen_by_the_first_node(
    folder: Path, failures: dict[int, str], waiting: tuple[int, ...] = (0, 1)
) -> Cause:
    """Return what node-a, with ranks 0 and 1 of four, takes for the cause of their end."""
    return cause_of(run_of_the_first_node(folder, failures, waiting), MINE)


def run_of_the_first_node(
    folder: Path,
    failures: dict[int, str],
    waiting: tuple[int, ...] = (0, 1),
) -> Path:
    """Return the run of node-a, which has no records of ranks 2 and 3.

    ``waiting``: its ranks whose fourth call failed.
    """
    last = [
        replace(call, end=2 * SECOND, status="failed")
        for call in unfinished(WORLD, 4, waiting, 5 * MS, line=7)
    ]
    mine = [call for call in THREE_ENDED if call.rank < 2]
    run = write_world(
        folder / "run",
        [*mine, *last],
        world_size=4,
        closed=lambda rank: False,
        failures=failures,
    )
    for rank in (0, 1):
        ended_ns = START_EPOCH_NS + 3 * SECOND + rank
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, 1, ended_ns))
    return run


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


def keep_from_the_store(run: Path, culprit: int, name: str = "0001") -> None:
    """Keep a verdict that says of a rank that it is missing, as a watcher does that has read it."""
    finding = Finding("missing", (culprit,), op="all_reduce", since_s=10.0)
    verdict = Verdict(str(run), [finding], origin=Origin(name, "boot", 1, time.time_ns(), 4711))
    fill(run_folder(run, HANGS) / name, encode(verdict), "")


def count_verdicts(run: Path, count: int) -> None:
    """Have rank 0 say that it has acted on so many verdicts."""
    (ring,) = (run / "rings").glob("rank-00000.*")
    with ring.open("r+b") as file:
        file.seek(offset_of("verdicts"))
        file.write(count.to_bytes(8, "little"))


@pytest.mark.parametrize("look", [cause_of, lambda *of: cause_elsewhere(*of, "another_node")])
@pytest.mark.parametrize("why", ["nothing", "secret", "acted", "acted before", "whole job"])
def test_a_verdict_that_this_node_has_not_confirmed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
    look: Callable[[Path, Attempt], Cause],
) -> None:
    """Any process may have written it to the store: it explains no later failure.

    With the job's secret only ranks have written it, and a node whose watchers have acted on it had
    confirmed it; not if they have acted on another one, about a hang that passed. If all ranks are
    on this node, nothing came from a store.
    """
    if why == "secret":
        monkeypatch.setenv(SECRET, "a secret of the tests")
    run = run_of_the_first_node(tmp_path, {0: GONE, 1: GONE})
    count_verdicts(run, 1 if why.startswith("acted") else 0)
    if why == "acted before":
        keep_from_the_store(run, 2, "0000")
        note_over(run_folder(run, HANGS) / "0000", 7.0)
    keep_from_the_store(run, 3)
    cause = look(run, replace(MINE, world_size=2) if why == "whole job" else MINE)
    is_taken = why not in ("nothing", "acted before")
    assert (cause.verdict == "0001") == is_taken
    assert (cause.culprits == (3,)) == is_taken


def test_a_verdict_on_this_node_s_own_rank(tmp_path: Path) -> None:
    """A node whose workers another node ended takes a verdict on itself: it may have to leave."""
    run = run_of_the_first_node(tmp_path, {})
    keep_from_the_store(run, 1)
    assert cause_elsewhere(run, MINE, "another_node").culprits == (1,)
    assert cause_of(run, MINE).verdict == ""


@pytest.mark.parametrize("status", ["completed", "failed", "before", "of another rank"])
def test_a_verdict_on_a_rank_that_has_gone_on(tmp_path: Path, status: str) -> None:
    """A later call that the named rank has ended contradicts a verdict that nobody confirmed.

    One that failed does not: a rank that wakes up when the others are gone has such a call.
    """
    run = run_of_the_first_node(tmp_path, {})
    late = replace(unfinished(WORLD, 5, (1,), 8 * SECOND, line=7)[0], end=9 * SECOND)
    late = replace(late, status="failed" if status == "failed" else "completed")
    rank = 0 if status == "of another rank" else 1
    late = replace(late, rank=rank, life=1)
    write_world(tmp_path / "later", [late], world_size=4, closed=lambda rank: False)
    (ring,) = (tmp_path / "later" / "rings").iterdir()
    ring.rename(run / "rings" / f"{ring.name[:-5]}-later.ring")
    keep_from_the_store(run, 1)
    life_ns = START_EPOCH_NS + 10**12
    kept_ns = life_ns + (20 if status == "before" else 5) * SECOND
    os.utime(run_folder(run, HANGS) / "0001" / "verdict.json", ns=(kept_ns, kept_ns))
    cause = cause_elsewhere(run, MINE, "another_node")
    is_taken = status != "completed"
    assert (cause.verdict == "0001", cause.culprits == (1,)) == (is_taken, is_taken)

"""Verdicts against a brute-force model: small worlds run call by call, with planted faults.

The model does not use records or graphs. It runs each rank's program until no rank can go on,
finds by plain reachability which ranks hold up which, and returns the expected causes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rankcall.analysis.snapshot import CALL, RankState, Snapshot, labels_of
from rankcall.analysis.verdicts import find
from rankcall.record import OPS, STATUSES
from rankcall.ring.tables import CallSite, Group

HALTS = {"hang": "missing", "kill": "dead", "stop": "stopped", "leave": "exhausted"}
CHANGES = {"other_op": "desync", "other_size": "mismatch"}


@dataclass(frozen=True)
class Fault:
    """What happens to one rank at call number ``at`` of the job's program."""

    rank: int
    at: int
    kind: str  # of HALTS (before the call) or CHANGES, "in_kill", "in_stop", or "swap"


@dataclass(frozen=True)
class Job:
    """The groups, the group of each call of the program, and the faults."""

    world: int
    groups: list[tuple[int, ...]]
    program: list[int]
    faults: list[Fault]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Make a job of 3 to 6 ranks."""
    world = draw(st.integers(3, 6))
    ranks = st.integers(0, world - 1)
    extra = draw(st.lists(st.sets(ranks, min_size=2), max_size=3))
    groups = [tuple(range(world)), *(tuple(sorted(members)) for members in extra)]
    program = draw(st.lists(st.integers(0, len(groups) - 1), min_size=3, max_size=14))
    kinds = st.sampled_from([*HALTS, *CHANGES, "in_kill", "in_stop", "swap"])
    fault = st.builds(Fault, ranks, st.integers(0, len(program) - 1), kinds)
    faults = draw(st.lists(fault, min_size=0, max_size=2, unique_by=lambda drawn: drawn.rank))
    return Job(world, groups, program, faults)


@dataclass
class Rank:
    """One rank as the model runs it."""

    todo: list[tuple[int, str, int]]  # group, op, size
    fate: dict[int, str]  # by index of the rank's own call: before it, or (in_*) in it
    issued: list[tuple[int, int, str, int]] = field(default_factory=list)  # group, seq, op, size
    done: int = 0
    halted: str = ""

    @property
    def blocked(self) -> bool:
        return self.done < len(self.issued) and not self.halted

    @property
    def finished(self) -> bool:
        return self.done == len(self.todo) and not self.halted

    def count(self, group: int) -> int:
        return sum(call[0] == group for call in self.issued)


def start(job: Job) -> list[Rank]:
    """Give every rank its program and its faults."""
    ranks = []
    for rank in range(job.world):
        own = [i for i, group in enumerate(job.program) if rank in job.groups[group]]
        todo = [(job.program[i], "all_reduce", 64) for i in own]
        fate: dict[int, str] = {}
        for fault in job.faults:
            place = next((n for n, i in enumerate(own) if i >= fault.at), None)
            if fault.rank != rank or place is None:
                continue
            if fault.kind in CHANGES:
                changed = ("barrier", 64) if fault.kind == "other_op" else ("all_reduce", 32)
                todo[place] = (todo[place][0], *changed)
            elif fault.kind == "swap":
                todo[place : place + 2] = todo[place : place + 2][::-1]
            else:
                fate[place] = fault.kind
        ranks.append(Rank(todo, fate))
    return ranks


def run(job: Job) -> list[Rank]:
    """Run until no rank can go on."""
    ranks = start(job)
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= issue(rank)
        for rank in ranks:
            if rank.blocked and complete(job, ranks, rank.issued[-1]):
                rank.done += 1
                moved = True
    return ranks


def issue(rank: Rank) -> bool:
    """Let a rank issue its next call, unless it is in one or a fault halts it first."""
    if rank.halted or rank.done < len(rank.issued) or rank.done == len(rank.todo):
        return False
    fate = rank.fate.get(rank.done, "")
    if fate in HALTS:
        rank.halted = fate
        return False
    group, op, size = rank.todo[rank.done]
    rank.issued.append((group, rank.count(group) + 1, op, size))
    rank.halted = fate.removeprefix("in_")
    return True


def complete(job: Job, ranks: list[Rank], call: tuple[int, int, str, int]) -> bool:
    """Return whether all members are alive in a call and issued the same op and size."""
    members = [ranks[r] for r in job.groups[call[0]]]
    here = [issued for m in members for issued in m.issued if issued[:2] == call[:2]]
    broken = any(
        m.halted and m.done < len(m.issued) and m.issued[-1][:2] == call[:2] for m in members
    )
    return len(here) == len(members) and len(set(here)) == 1 and not broken


def expected(job: Job, ranks: list[Rank]) -> dict[str, set[int]]:
    """Return the culprits that must be found, by kind."""
    by_kind: dict[str, set[int]] = {}
    clashes = clashing(job, ranks)
    for (group, _), (kind, culprits) in clashes.items():
        by_kind.setdefault(kind, set()).update(culprits)
        assert group < len(job.groups)
    blocked = [r for r in range(job.world) if ranks[r].blocked]
    free = {r: direct(job, ranks, r, clashes) for r in blocked}
    reach = {r: reached(free, r) for r in free}
    for r, rank in enumerate(ranks):
        held_up = any(r in waited_for for waited_for in reach.values())
        if rank.halted and (held_up or rank.halted in ("kill", "stop")):
            kind = HALTS[rank.halted]
            by_kind.setdefault(kind, set()).add(r)
        elif rank.finished and held_up:
            by_kind.setdefault("exhausted", set()).add(r)
        elif rank.blocked and r in reach[r]:
            by_kind.setdefault("deadlock", set()).add(r)
    return by_kind


def direct(
    job: Job, ranks: list[Rank], r: int, clashes: dict[tuple[int, int], object] | None = None
) -> set[int]:
    """Return the ranks that a blocked rank waits for; none if a clash explains the wait."""
    group, seq, *_ = ranks[r].issued[-1]
    if any(group == g and seq >= s for g, s in clashes or ()):
        return set()
    members = [m for m in job.groups[group] if m != r]
    absent = {m for m in members if ranks[m].count(group) < seq}
    inside = {
        m
        for m in members
        if ranks[m].halted
        and ranks[m].done < len(ranks[m].issued)
        and ranks[m].issued[-1][:2] == (group, seq)
    }
    return absent | inside


def reached(waits: dict[int, set[int]], start: int) -> set[int]:
    """Return all ranks that a rank waits for, directly or not."""
    seen: set[int] = set()
    todo = [start]
    while todo:
        for blocker in waits.get(todo.pop(), set()) - seen:
            seen.add(blocker)
            todo.append(blocker)
    return seen


def clashing(job: Job, ranks: list[Rank]) -> dict[tuple[int, int], tuple[str, set[int]]]:
    """Return the first call of each group at which members differ, with the minority."""
    clashes: dict[tuple[int, int], tuple[str, set[int]]] = {}
    for group, members in enumerate(job.groups):
        for seq in range(1, len(job.program) + 1):
            sides: dict[tuple[str, int], set[int]] = {}
            for m in members:
                for call in ranks[m].issued:
                    if call[:2] == (group, seq):
                        sides.setdefault(call[2:], set()).add(m)
            ops = {op for op, _ in sides}
            if len(ops) > 1:
                sides = {
                    (op, 0): set().union(*(v for k, v in sides.items() if k[0] == op)) for op in ops
                }
            if len(sides) > 1:
                largest = max(map(len, sides.values()))
                most = [side for side in sides.values() if len(side) == largest]
                culprits = set().union(*sides.values()) - most[0] if len(most) == 1 else set()
                clashes[group, seq] = ("desync" if len(ops) > 1 else "mismatch", culprits)
                break
    return clashes


def snapshot(job: Job, ranks: list[Rank]) -> Snapshot:
    """Return what the rings would hold 70 s after the last call."""
    rows = []
    for r, rank in enumerate(ranks):
        for index, (group, seq, op, size) in enumerate(rank.issued):
            row = np.zeros(1, CALL)[0]
            open_ = index >= rank.done
            row["rank"], row["group"], row["seq"], row["index"] = r, group, seq, index
            row["op"], row["message_bytes"], row["site"] = OPS.index(op), size, 1
            row["status"] = STATUSES.index("started" if open_ else "completed")
            row["age_s"] = 70.0 + len(job.program) - index
            row["ended_s"] = np.nan if open_ else row["age_s"] - 0.5
            row["root"] = row["peer"] = -1
            rows.append(row)
    states = []
    for r, rank in enumerate(ranks):
        gone = rank.halted in ("kill", "leave") or rank.finished
        states.append(
            RankState(
                r,
                "node",
                100 + r,
                state="gone" if gone else "stopped" if rank.halted == "stop" else "alive",
                exit=(-9 if rank.halted == "kill" else 0) if gone else None,
                gone_s=69.0 if gone else None,
                silent_s=69.0 if gone else 0.1,
                steps=1,
            )
        )
    # One more rank, alive and in no group, so that the job counts as live.
    states.append(RankState(job.world, "node", 99, state="alive", silent_s=0.1, steps=1))
    groups = [Group(str(n), 0, "gloo", "", members) for n, members in enumerate(job.groups)]
    calls = np.array(rows, CALL) if rows else np.zeros(0, CALL)
    return Snapshot(
        states,
        calls,
        groups,
        labels_of(groups, states),
        [CallSite("", 0, "", ""), CallSite("train.py", 1, "step", "all_reduce")],
    )


@given(jobs())
def test_verdicts_are_the_models(job: Job) -> None:
    """Every cause of the model is found, no other is, and no victim is named."""
    ranks = run(job)
    findings = find(snapshot(job, ranks), 60.0)
    by_kind: dict[str, set[int]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, set()).update(finding.ranks)
        assert not set(finding.ranks) & set(finding.victims)
    assert by_kind == expected(job, ranks)

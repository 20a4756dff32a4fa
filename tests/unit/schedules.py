"""Models of jobs in time: what each rank would have recorded, if it were read at some moment.

A program is one list of operations that all threads follow in order, each with pauses of its own.
So no rank waits for ever, however long the pauses are, unless a test changes the list for a rank.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from rankcall.analysis.snapshot import ALIVE, BLOCKS, CALL, GONE, RankState, Snapshot, labels_of
from rankcall.record import FROM_ROOT, OPS, STATUSES, TO_ROOT
from rankcall.ring.tables import CallSite, Group

NEVER = float("inf")
SITES = [CallSite("", 0, "", ""), *(CallSite("train.py", 7, "step", api) for api in OPS)]
COLLECTIVES = ("all_reduce", "all_gather", "broadcast", "reduce", "gather", "barrier")


@dataclass(frozen=True)
class Operation:
    """One operation of a program. A message has two members: its source, and its target."""

    op: str
    group: int
    thread: int
    members: tuple[int, ...]
    root: int = -1
    is_async: bool = False
    size: int = 64

    @property
    def is_message(self) -> bool:
        """Whether it is a send and a receive."""
        return self.op == "message"


@dataclass
class Part:
    """A rank's part in an operation."""

    rank: int
    operation: Operation
    seq: int
    issued: float
    ended: float = NEVER


@dataclass
class Schedule:
    """When each rank issues and leaves what, and when its process ends."""

    groups: list[tuple[int, ...]]
    parts: list[Part] = field(default_factory=list)
    over: dict[int, float] = field(default_factory=dict)  # by rank: when it comes to its end
    gone: dict[int, float] = field(default_factory=dict)  # when its process is gone
    killed: set[int] = field(default_factory=set)

    @property
    def span(self) -> float:
        """The time until the last process is gone."""
        return max(moment for moment in self.gone.values() if moment < NEVER)


def random_program(rng: random.Random) -> tuple[list[tuple[int, ...]], list[Operation]]:
    """Return groups and a program: several threads, groups, async calls, messages and roots."""
    world = rng.randint(2, 5)
    everybody = tuple(range(world))
    groups = [everybody]
    for _ in range(rng.randint(0, 3)):
        groups.append(tuple(sorted(rng.sample(everybody, rng.randint(2, world)))))
    threads = rng.randint(1, 2)
    program = []
    for _ in range(rng.randint(3, 25)):
        group = rng.randrange(len(groups))
        members, thread = groups[group], group % threads
        if rng.random() < 0.25:
            pair = tuple(rng.sample(members, 2))
            program.append(Operation("message", group, thread, pair))
            continue
        op = rng.choice(COLLECTIVES)
        root = rng.choice(members) if op in FROM_ROOT + TO_ROOT else -1
        is_async = rng.random() < 0.3
        program.append(Operation(op, group, thread, members, root, is_async))
    return groups, program


def pause(rng: random.Random) -> float:
    """Return a pause: mostly short, sometimes of seconds."""
    return rng.choice((0.0, 0.001, 0.02, rng.uniform(0.0, 0.5), rng.uniform(0.5, 4.0)))


def schedule(groups: list[tuple[int, ...]], program: list[Operation], seed: int) -> Schedule:
    """Let all ranks follow the program, with random pauses before each call."""
    rng = random.Random(seed)
    ranks = range(len(groups[0]))
    made = Schedule(groups)
    ready: Counter[tuple[int, int]] = Counter()  # by rank and thread: when it can go on
    pending: dict[tuple[int, int], float] = {}  # when the async calls of a thread have ended
    seqs: Counter[tuple[object, ...]] = Counter()
    for operation in program:
        key = (operation.group, *(operation.members if operation.is_message else ()))
        seqs[key] += 1
        parts = []
        for rank in operation.members:
            at = (rank, operation.thread)
            if at in pending and rng.random() < 0.5:
                ready[at] = max(ready[at], pending.pop(at))
            issued = ready[at] + pause(rng)
            parts.append(Part(rank, operation, seqs[key], issued))
        for part in parts:
            part.ended = _end(part, parts) + rng.choice((0.0005, 0.01, rng.uniform(0.0, 0.4)))
            at = (part.rank, operation.thread)
            if operation.is_async:
                ready[at] = part.issued
                pending[at] = max(pending.get(at, 0.0), part.ended)
            else:
                ready[at] = part.ended
        made.parts += parts
    for rank in ranks:
        times = [*(t for at, t in ready.items() if at[0] == rank)]
        times += [t for at, t in pending.items() if at[0] == rank]
        made.over[rank] = max(times, default=0.0) + pause(rng)
        made.gone[rank] = made.over[rank] + pause(rng)
    return made


def _end(part: Part, parts: list[Part]) -> float:
    """Return when a rank has all that it waits for."""
    operation = part.operation
    issued = {other.rank: other.issued for other in parts}
    if operation.op in FROM_ROOT:
        return max(part.issued, issued[operation.root])
    if operation.op in TO_ROOT and part.rank != operation.root:
        return part.issued
    return max(issued.values())


def reading(
    made: Schedule, begin: float, rng: random.Random, *, takes: float = 0.1, exit_codes: bool = True
) -> Snapshot:
    """Return what a look that begins at a moment sees: the ranks are read one after the other."""
    ranks = sorted(made.over)
    moments = {rank: begin + rng.uniform(0.0, takes) for rank in ranks}
    now = max(moments.values())
    rows, states = [], []
    for rank, moment in sorted(moments.items()):
        mine = [part for part in made.parts if part.rank == rank and part.issued <= moment]
        mine.sort(key=lambda part: part.issued)
        rows += [_row(index, part, moment, now) for index, part in enumerate(mine)]
        states.append(_state(made, rank, moment, now, exit_codes=exit_codes))
    groups = [Group(str(n), 0, "gloo", "", members) for n, members in enumerate(made.groups)]
    calls = np.array(rows, CALL) if rows else np.zeros(0, CALL)
    return Snapshot(states, calls, groups, labels_of(groups, states), SITES)


def _row(index: int, part: Part, moment: float, now: float) -> np.void:
    row, operation = np.zeros(1, CALL)[0], part.operation
    op = operation.op
    row["peer"] = -1
    if operation.is_message:
        source, target = operation.members
        op = "send" if part.rank == source else "recv"
        row["kind"], row["peer"] = 1, target if part.rank == source else source
    is_open = part.ended > moment
    row["rank"], row["index"], row["group"], row["seq"] = (
        part.rank,
        index,
        operation.group,
        part.seq,
    )
    row["op"], row["site"], row["root"] = OPS.index(op), 1 + OPS.index(op), operation.root
    row["message_bytes"] = row["in_bytes"] = row["out_bytes"] = operation.size
    row["thread"] = 100 * part.rank + operation.thread + 1
    row["flags"] = 0 if operation.is_async or operation.is_message else BLOCKS
    row["status"] = STATUSES.index("started" if is_open else "completed")
    row["age_s"] = now - part.issued
    row["ended_s"] = np.nan if is_open else now - part.ended
    return row


def _state(made: Schedule, rank: int, moment: float, now: float, *, exit_codes: bool) -> RankState:
    is_gone, is_over = moment >= made.gone[rank], moment >= made.over[rank]
    was_killed = rank in made.killed
    code = (-9 if was_killed else 0) if exit_codes else None
    return RankState(
        rank,
        "node",
        100 + rank,
        state=GONE if is_gone else ALIVE,
        exit=code if is_gone else None,
        gone_s=now - made.gone[rank] if is_gone else None,
        silent_s=now - made.gone[rank] if is_gone else 0.1,
        closed=is_over and not was_killed,
        leaving=is_over and not was_killed,
        steps=1,
        started_s=now + 1.0,
    )

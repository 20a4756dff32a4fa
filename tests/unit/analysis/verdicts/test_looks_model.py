"""Whenever ranks look at their devices, no verdict says of a job what is not so.

The model runs a program of collectives on the devices of four ranks, whose hosts run ahead. Then it
hides what no rank has looked at: the ends, and the starts if the back end tells them. At any time,
a diagnosis of what is left may say nothing yet. What it does say must be true of the model.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from diagnosing import SECOND, diagnose_calls
from worlds import Call

from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.record import FLAG_DEVICE, FLAG_NOT_STARTED
from rankcall.ring.tables import Group

R = Relation
RANKS = range(4)
GROUPS = [
    Group("0", 0, "nccl", "default_pg", (0, 1, 2, 3)),
    Group("1", 0, "nccl", "pair", (0, 1)),
    Group("2", 0, "nccl", "pair", (2, 3)),
    Group("3", 0, "nccl", "middle", (1, 2)),
]
# What can be wrong: nothing; a host that goes on to no more calls; a rank that leaves out a call; a
# device that starts no more; a call that no device gets out of.
TROUBLES = ["none", "missing", "skip", "stall", "transfer"]
FIRST_STEP = 5  # times the threshold
FOLLOWED = 0.1 * FIRST_STEP  # of the threshold: a call in flight for less shows nothing
LONGEST_LOOK_S = 25.0  # without a look; after 30 s, a look is taken to hang


@dataclass
class Issued:
    """One call of one rank, with what its device makes of it. Times are in s; None: never."""

    line: int
    group: Group
    seq: int
    at: float
    started: float | None = None
    ended: float | None = None


@dataclass
class World:
    """A job: what each rank issues, which device starts it when, and what is wrong."""

    random: random.Random
    trouble: str
    culprit: int = 0
    calls: dict[int, list[Issued]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Issue the program, and run the devices until nothing goes on."""
        lines = [self.random.choice(GROUPS) for _ in range(self.random.randint(5, 14))]
        lines[:4] = self.random.sample(GROUPS, 4)  # each group has one call that ends, at least
        self.bad_line = self.random.randrange(4, len(lines))
        group = lines[self.bad_line]
        if self.trouble == "skip":  # no later call of the group may take the place of that one
            lines[self.bad_line + 1 :] = [
                other for other in lines[self.bad_line + 1 :] if other is not group
            ]
        self.culprit = self.random.choice(group.ranks)
        for rank in RANKS:
            self.calls[rank] = self._issue(rank, lines)
        self._run()

    def _issue(self, rank: int, lines: list[Group]) -> list[Issued]:
        issued: list[Issued] = []
        seqs = dict.fromkeys((group.name for group in GROUPS), 0)
        now = 0.001
        for line, group in enumerate(lines):
            if rank not in group.ranks:
                continue
            is_bad = line >= self.bad_line and rank == self.culprit
            if is_bad and self.trouble == "missing":
                break
            if is_bad and self.trouble == "skip" and line == self.bad_line:
                continue
            now += self.random.choice([0.0001, 0.003, 0.03, 0.4])
            seqs[group.name] += 1
            issued.append(Issued(line, group, seqs[group.name], now))
        return issued

    def _run(self) -> None:
        """Let each device start its next call once the one before is over."""
        at, free = dict.fromkeys(RANKS, 0), dict.fromkeys(RANKS, 0.0)
        goes_on = True
        while goes_on:
            goes_on = False
            for rank in RANKS:
                call = self.front(rank, at[rank])
                if call is None or call.started is not None or self._stalls(rank, call):
                    continue
                call.started = max(call.at, free[rank])
                goes_on = True
            for group in GROUPS:
                fronts = [self.front(rank, at[rank]) for rank in group.ranks]
                here = [call for call in fronts if call and call.group is group and call.started]
                if len(here) < len(group.ranks) or len({call.seq for call in here}) > 1:
                    continue
                if self.trouble == "transfer" and here[0].line == self.bad_line:
                    continue
                end = max(call.started or 0.0 for call in here) + self.random.choice([1e-4, 0.1])
                for rank, call in zip(group.ranks, here, strict=True):
                    call.ended = free[rank] = end
                    at[rank] += 1
                goes_on = True
        self.at = at

    def _stalls(self, rank: int, call: Issued) -> bool:
        return self.trouble == "stall" and rank == self.culprit and call.line >= self.bad_line

    def front(self, rank: int, at: int) -> Issued | None:
        """Return the call of a rank with this number, if there is one."""
        return self.calls[rank][at] if at < len(self.calls[rank]) else None

    def stands_in(self, rank: int) -> Issued | None:
        """Return the call that a rank's device does not get past."""
        return self.front(rank, self.at[rank])

    @property
    def still_s(self) -> float:
        """When the last thing happened."""
        times = [
            time for mine in self.calls.values() for call in mine for time in (call.at, call.ended)
        ]
        return max(time for time in times if time is not None)


@dataclass
class Looks:
    """When each rank has looked, and what it has seen then."""

    random: random.Random
    world: World
    now: float
    tells_starts: bool

    def __post_init__(self) -> None:
        """Look about once a second, and now and then much later."""
        self.times = {rank: self._times() for rank in RANKS}

    def _times(self) -> list[float]:
        times = [self.random.random()]
        longest = self.random.choice([1.0, 1.0, 5.0, LONGEST_LOOK_S])
        while times[-1] < self.now:
            times.append(times[-1] + self.random.choice([1.0, 1.0, longest]) * self.random.random())
        return times[:-1]

    def known(self, rank: int) -> float:
        """Return when a rank has last looked."""
        return self.times[rank][-1] if self.times[rank] else 0.0

    def record(self, rank: int, call: Issued) -> Call:
        """Return what is on record of a call. Its end was noticed by the next look."""
        known = self.known(rank)
        end = next((at for at in self.times[rank] if at >= (call.ended or math.inf)), None)
        if end is not None:  # each group's back end is asked by itself
            end = min(end + 0.05 * self.random.random(), self.now)
        has_started = self.tells_starts and call.started is not None and call.started <= known
        was_idle = self.tells_starts and not has_started and call.at <= known
        return Call(
            rank,
            call.seq,
            round(call.at * SECOND),
            None if end is None else round(end * SECOND),
            group=call.group,
            line=call.line + 1,
            flags=FLAG_DEVICE | (FLAG_NOT_STARTED if was_idle else 0),
            started=round((call.started or 0.0) * SECOND) if has_started else None,
            thread=10,
        )


@dataclass
class Judged:
    """A diagnosis of what is on record of a world, at some moment."""

    world: World
    looks: Looks
    calls: list[Call]
    hang_after: float
    diagnosis: Diagnosis

    def has_just_come(self, rank: int) -> bool:
        """Tell whether a rank's last look cannot tell yet that it hangs in its call.

        Until its next look, a victim that is waited for may be named as missing: as on the CPU, a
        rank that has only just come to another call is taken to be on its way.
        """
        here = self.world.stands_in(rank)
        if here is None:
            return False
        ends = [c.end for c in self.calls if c.rank == rank and c.end and c.group is here.group]
        came = [c.at for c in self.calls if (c.group, c.seq) == (here.group, here.seq)]
        since = max(*came, *ends) / SECOND
        return self.looks.known(rank) - since < FOLLOWED * self.hang_after


def judge(folder: Path, seed: int) -> Judged:
    """Make a world, and diagnose it at some moment."""
    chance = random.Random(seed)
    world = World(chance, chance.choice(TROUBLES))
    now = round(world.still_s + chance.choice([0.3, 2.5, 10.0, 60.0]) * chance.random() + 1)
    looks = Looks(chance, world, now, chance.random() < 0.5)
    calls = [
        looks.record(rank, call) for rank in RANKS for call in world.calls[rank] if call.at <= now
    ]
    hang_after = chance.choice([0.2, 1.0, 5.0])
    known = {rank: round(looks.known(rank) * SECOND) for rank in RANKS}
    diagnosis = diagnose_calls(
        folder, calls, seconds=now, states={}, hang_after=hang_after, devices_known=known
    )
    return Judged(world, looks, calls, hang_after, diagnosis)


def check(judged: Judged, finding: Finding) -> None:
    """Hold a finding against the model."""
    world = judged.world
    stands = {rank: world.stands_in(rank) for rank in RANKS}
    held = {rank for rank, call in stands.items() if call is not None}
    culprit, trouble = world.culprit, world.trouble
    if finding.kind == "no_progress":
        assert finding.ranks == ()
        return
    assert set(finding.victims) <= held
    place = finding.group, finding.seq
    if finding.kind == "missing":
        others = [rank for rank in finding.ranks if rank != culprit or trouble == "transfer"]
        assert all(judged.has_just_come(rank) for rank in others)
        if others:
            return
        assert trouble in ("missing", "skip", "stall")
        here = stands[culprit]
        if here is not None and (here.group.name, here.seq) == place:  # it has only issued it
            assert trouble == "stall"
            assert here.started is None
    elif finding.kind == "deadlock":
        assert trouble == "skip"
        assert culprit in finding.ranks
        assert set(finding.ranks) <= held
    elif finding.kind == "stuck":
        assert trouble in ("stall", "transfer")
        assert finding.ranks == ()
        relation = finding.facts[0].relation
        members = [
            call
            for rank in RANKS
            for call in world.calls[rank]
            if (call.group.name, call.seq) == place
        ]
        assert {call.line for call in members} == {world.bad_line}
        started = [call for call in members if call.started is not None]
        assert relation is not R.STUCK_TRANSFER or len(started) == len(members)
        assert relation is not R.STARTED_NOWHERE or not started
    else:
        raise AssertionError(finding)


def verify(judged: Judged) -> None:
    """Hold a diagnosis against the model: its findings, and the positions of the ranks."""
    world, looks = judged.world, judged.looks
    for finding in judged.diagnosis.findings:
        check(judged, finding)
    for row in judged.diagnosis.ranks:
        calls, seen = world.calls[row.rank], looks.known(row.rank)
        if row.how == "in":  # or was, when it looked
            (call,) = [
                call for call in calls if (call.group.name, call.seq) == (row.group, row.seq)
            ]
            assert call.ended is None or call.ended > seen
            assert all(other.ended is not None for other in calls if other.line < call.line)
        elif row.how == "left":
            assert world.stands_in(row.rank) is None
    noticed = max(call.end or 0 for call in judged.calls) / SECOND
    seen_for = min(looks.known(rank) for rank in RANKS) - max(world.still_s, noticed)
    if world.trouble != "none" and seen_for > FIRST_STEP * judged.hang_after + 0.1:
        assert len(judged.diagnosis.findings) == 1
        found = judged.diagnosis.findings[0]
        named = "deadlock" if len(found.ranks) > 1 else "missing" if found.ranks else "stuck"
        assert found.kind == named
        is_known = world.trouble != "transfer" and (world.trouble != "stall" or looks.tells_starts)
        assert bool(found.ranks) == is_known


@pytest.mark.parametrize("seed", range(300))
def test_what_a_verdict_says_is_so(tmp_path: Path, seed: int) -> None:
    """Each finding is true, and each position; and nobody is overlooked once all have looked."""
    verify(judge(tmp_path, seed))

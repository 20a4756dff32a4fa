"""Whenever ranks look at their devices, no verdict says of a job what is not so.

The model runs a program on the devices of four ranks, whose hosts run ahead. A group has
collectives, messages or batches of them; streams wait for all calls, or not for some; and NCCL may
keep a message until it is received, so that its send ends at once. Then the model hides what no
rank has looked at: the ends, and the starts if the back end tells them. At any time, a diagnosis of
what is left may say nothing yet. What it does say must be true of the model.
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
from rankcall.record import BATCH, FLAG_DEVICE, FLAG_NOT_STARTED
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
    op: str  # send, recv, a batch of both, or a collective
    holds: bool  # the caller's stream waits for it
    started: float | None = None
    ended: float | None = None


@dataclass
class World:
    """A job: what each rank issues, which device starts it when, and what is wrong."""

    random: random.Random
    trouble: str
    culprit: int = 0
    calls: dict[int, list[Issued]] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)  # by line: when NCCL has kept a message

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
        uses = {
            other.name: self.random.choice(["all_reduce", "all_reduce", "send", BATCH])
            for other in GROUPS[1:]
        }
        self.ops = [uses.get(other.name, "all_reduce") for other in lines]
        self.senders = [self.random.choice(other.ranks) for other in lines]
        self.keeps_messages = self.random.random() < 0.5
        loose = self.random.choice([0.0, 0.0, 0.3])
        self.loose_lines = {line for line in range(len(lines)) if self.random.random() < loose}
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
            op, holds = self._op(rank, line), line not in self.loose_lines
            issued.append(Issued(line, group, seqs[group.name], now, op, holds))
        return issued

    def _op(self, rank: int, line: int) -> str:
        is_receiver = self.ops[line] == "send" and rank != self.senders[line]
        return "recv" if is_receiver else self.ops[line]

    def _run(self) -> None:
        """Let each device start a call once those before it are over, until nothing goes on."""
        goes_on = True
        while goes_on:
            goes_on = False
            for rank in RANKS:
                for call in self.open_calls(rank):
                    ends = [other.ended for other in self._before(rank, call)]
                    if call.started is None and None not in ends and not self._stalls(rank, call):
                        call.started = max(call.at, *(end or 0.0 for end in ends), 0.0)
                        goes_on = True
            for group in GROUPS:
                here = {
                    rank: call
                    for rank in group.ranks
                    for call in self.open_calls(rank)
                    if call.group is group and call.started is not None
                }
                goes = self._going(group, here)
                end = max((here[rank].started or 0.0 for rank in goes), default=0.0)
                end += self.random.choice([1e-4, 0.1])
                for rank in goes:
                    here[rank].ended = max(end, self.kept.get(here[rank].line, 0.0))
                    if self.keeps_messages and here[rank].op == "send":
                        self.kept[here[rank].line] = end
                    goes_on = True

    def _before(self, rank: int, call: Issued) -> list[Issued]:
        """Return the calls that must be over before the device starts one.

        The caller's stream waits for some, and a group's communicator runs its calls in order.
        """
        earlier = [other for other in self.calls[rank] if other.line < call.line]
        return [other for other in earlier if other.holds or other.group is call.group]

    def _going(self, group: Group, here: dict[int, Issued]) -> list[int]:
        """Return the ranks of a group whose calls, which their devices are in, now end."""
        good = {
            rank: call
            for rank, call in here.items()
            if self.trouble != "transfer" or call.line != self.bad_line
        }
        if len(good) == len(group.ranks) and len({call.line for call in good.values()}) == 1:
            return list(good)
        alone = [rank for rank, call in good.items() if self.keeps_messages and call.op == "send"]
        return alone or [rank for rank, call in good.items() if call.line in self.kept]

    def _stalls(self, rank: int, call: Issued) -> bool:
        return self.trouble == "stall" and rank == self.culprit and call.line >= self.bad_line

    def open_calls(self, rank: int) -> list[Issued]:
        """Return the calls of a rank that do not end."""
        return [call for call in self.calls[rank] if call.ended is None]

    def stands_in(self, rank: int) -> list[Issued]:
        """Return the calls that a rank's device does not get past."""
        return [
            call
            for call in self.open_calls(rank)
            if all(other.ended is not None for other in self._before(rank, call))
        ]

    @property
    def hides_an_order(self) -> bool:
        """Whether a rank does not come to a batch: that a stream waits for one is not on record.

        So what the other rank has issued behind its batch may hang by itself.
        """
        return self.trouble in ("skip", "missing") and self.ops[self.bad_line] == BATCH

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

    def records(self, rank: int, call: Issued) -> list[Call]:
        """Return what is on record of a call. Its end was noticed by the next look."""
        known = self.known(rank)
        end = next((at for at in self.times[rank] if at >= (call.ended or math.inf)), None)
        if end is not None:  # each group's back end is asked by itself
            end = min(end + 0.05 * self.random.random(), self.now)
        # No back end tells the starts of messages.
        tells_starts = self.tells_starts and call.op == "all_reduce"
        has_started = tells_starts and call.started is not None and call.started <= known
        was_idle = tells_starts and not has_started and call.at <= known
        api = call.op if call.holds or call.op not in ("send", "recv") else f"i{call.op}"
        return [
            Call(
                rank,
                call.seq,
                round(call.at * SECOND),
                None if end is None else round(end * SECOND),
                group=call.group,
                line=call.line + 1,
                flags=FLAG_DEVICE | (FLAG_NOT_STARTED if was_idle else 0),
                started=round((call.started or 0.0) * SECOND) if has_started else None,
                thread=10,
                op=op,
                api=api,
                peer=-1 if op == "all_reduce" else 1 - call.group.ranks.index(rank),
                async_op=not call.holds,
            )
            for op in (["send", "recv"] if call.op == BATCH else [call.op])
        ]


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
        return any(self._has_just_come_to(rank, call) for call in self.world.stands_in(rank))

    def _has_just_come_to(self, rank: int, here: Issued) -> bool:
        # A group's collectives end in order. A message keeps none: any end may be the one before.
        groups = [here.group] if here.op == "all_reduce" else GROUPS
        ends = [c.end for c in self.calls if c.rank == rank and c.end and c.group in groups]
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
        record
        for rank in RANKS
        for call in world.calls[rank]
        if call.at <= now
        for record in looks.records(rank, call)
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
    held = {rank for rank in RANKS if world.stands_in(rank)}
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
        for here in world.open_calls(culprit):
            if (here.group.name, here.seq) == place:  # it has only issued it
                assert trouble == "stall"
                assert here.started is None
    elif finding.kind == "deadlock":
        assert trouble == "skip"
        assert culprit in finding.ranks
        assert set(finding.ranks) <= held
    elif finding.kind == "stuck":
        assert finding.ranks == ()
        relation = finding.facts[0].relation
        members = [
            call
            for rank in RANKS
            for call in world.calls[rank]
            if (call.group.name, call.seq) == place
        ]
        assert any(call.ended is None for call in members)
        if not world.hides_an_order:
            assert trouble in ("stall", "transfer")
            (line,) = {call.line for call in members}
            # If no device has started it, the verdict says that the cause was issued before it.
            is_behind = relation is R.STARTED_NOWHERE and line > world.bad_line
            assert line == world.bad_line or is_behind
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
            earlier = [other for other in calls if other.line < call.line]
            assert all(other.ended is not None for other in earlier if other.holds)
        elif row.how == "left":
            assert not world.stands_in(row.rank)
    noticed = max(call.end or 0 for call in judged.calls) / SECOND
    seen_for = min(looks.known(rank) for rank in RANKS) - max(world.still_s, noticed)
    if world.trouble != "none" and seen_for > FIRST_STEP * judged.hang_after + 0.1:
        assert len(judged.diagnosis.findings) == 1
        found = judged.diagnosis.findings[0]
        named = "deadlock" if len(found.ranks) > 1 else "missing" if found.ranks else "stuck"
        if not any(world.stands_in(rank) for rank in RANKS):  # the others need no more of it
            named = "no_progress"
        assert found.kind == named
        tells_starts = looks.tells_starts and world.ops[world.bad_line] == "all_reduce"
        is_known = world.trouble != "transfer" and (world.trouble != "stall" or tells_starts)
        assert bool(found.ranks) == (is_known and named != "no_progress") or world.hides_an_order


@pytest.mark.parametrize("seed", range(300))
def test_what_a_verdict_says_is_so(tmp_path: Path, seed: int) -> None:
    """Each finding is true, and each position; and nobody is overlooked once all have looked."""
    verify(judge(tmp_path, seed))

"""What is known of ops on devices, against a model of a back end, its watchdog and its device.

The model issues collectives, blocks of messages and single messages in one group. Collectives and
blocks share a communicator, which runs them one behind the other; a single message has one of its
own. At a random op, the device may hang. Looks, the watchdog's polls, the host and the device take
turns at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from device_bench import Bench, ProcessGroup

LOOKS_AT_THE_END = 5  # after which nothing more is found out


@dataclass
class Op:
    """What one call issues.

    ``kind``: c, a collective; a, one whose future is watched; b, a block of messages; m, a message.
    """

    kind: str
    number: int
    records: list[int]
    hangs: bool = False
    is_over: bool = False  # on the device
    is_found: bool = False  # by the watchdog


@dataclass
class Model:
    """A rank that issues ops, its device, and the back end's watchdog.

    ``waits``: the caller's stream waits for single messages, which so keep their order with the ops
    that are issued behind them.
    """

    bench: Bench
    waits: bool
    ops: list[Op] = field(default_factory=list)
    collectives: int = 0
    messages: int = 0
    records: int = 0
    closed: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)

    def issue(self, kind: str, *, hangs: bool = False, unseen: bool = False) -> None:
        """Issue an op; one that is ``unseen`` was issued before the recording began."""
        p2p = kind in "bm"
        if p2p:
            self.messages += 1
        else:
            self.collectives += 1
        number = self.messages if p2p else self.collectives
        count = 2 if kind == "b" else 1
        op = Op(kind, number, [*range(self.records, self.records + count)], hangs)
        self.records += count
        self.bench.enqueued = number
        self.ops.append(op)
        if unseen:
            op.is_over, op.records = True, []
            return
        for record in op.records:
            own = {"b": {"block": op.records[0]}, "c": {"number": number}}.get(
                kind, {"number": number, "watched": True}
            )
            self.bench.issue(record, p2p=p2p, stream=1, in_stream=kind == "c", **own)

    def run(self, most: int) -> None:
        """Let the device end at most so many of the ops that it can."""
        blocked = False
        for op in self.ops:
            if op.is_over or blocked:
                continue
            if op.hangs or most == 0:
                blocked = self.waits or op.kind != "m"
                continue
            op.is_over = True
            most -= 1

    def poll(self) -> None:
        """Be the watchdog: find what is over, in the order in which it was enqueued."""
        for op in self.ops:
            if op.is_over and not op.is_found:
                op.is_found = True
                self.bench.completed[7] = op.number
                if op.kind in "am":
                    self.bench.end(*op.records)
                    self.ended.update(op.records)

    def look(self) -> None:
        """Look, and hold against the device what is said to have completed."""
        over = {record for op in self.ops if op.is_over for record in op.records}
        for record, completed in self.bench.look():
            if completed:
                assert record in over, f"{record} is still on the device"
                self.ended.add(record)
            else:
                self.closed.add(record)

    @property
    def wrongly_in_flight(self) -> list[int]:
        """The records of ops that are over and said to be in flight."""
        doubtful = {record for record, start in self.bench.starts.items() if start == -2}
        known = self.ended | self.closed | doubtful
        over = [record for op in self.ops if op.is_over for record in op.records]
        return [record for record in over if record not in known]


def play(seed: int, *, new: bool, kinds: str, loop: bool, waits: bool) -> Model:
    """Play one history, with what is issued in a loop or at random, to its end or to a hang."""
    dice = random.Random(seed)
    bench = Bench()
    group = ProcessGroup(7)
    bench.status.add_group(1, group, new=new)
    model = Model(bench, waits)
    bench.completed[7] = 0
    body = [dice.choice(kinds) for _ in range(dice.randint(1, 5))]
    count = dice.randint(1, 60)
    if not new:
        for _ in range(dice.randint(1, 20)):
            model.issue(kinds[0], unseen=True)
        model.poll()
    hang_at = dice.choice([None, dice.randrange(count)])
    at = 0
    while at < count:
        turn = dice.random()
        if turn < 0.6:
            kind = body[at % len(body)] if loop else dice.choice(kinds)
            model.issue(kind, hangs=at == hang_at)
            at += 1
        elif turn < 0.8:
            model.run(dice.randint(1, 10))
        elif turn < 0.9:
            model.poll()
        else:
            model.look()
    model.run(len(model.ops))
    model.poll()
    for _ in range(LOOKS_AT_THE_END):
        model.look()
    return model


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("kinds", ["c", "ca", "cb", "cm", "b", "m", "cabm"])
def test_no_op_is_said_to_be_where_it_is_not(
    waits: bool, new: bool, loop: bool, kinds: str
) -> None:
    """What has completed is no longer in flight, and what is in flight has not completed."""
    for seed in range(100):
        model = play(seed, new=new, kinds=kinds, loop=loop, waits=waits)
        wrong = model.wrongly_in_flight
        assert not wrong, (seed, wrong, [(op.kind, op.number, op.is_over) for op in model.ops])

"""Ranks that use the protocol of ``rankcall.store`` on a simulated store, and what must hold.

The promises of docs/design/store.md, as checks of a ``Simulation``:

* a rank passes a barrier or an exchange only after all ranks have called it;
* a rank that times out names every rank that has not called, and no rank that had arrived when its
  deadline expired;
* the keys of at most four generations exist at any moment (of one more for each planted fault),
  and of two at the end;
* if no fault was planted and every process waits, at least one of them can go on;
* once all have arrived, the end of the store's host keeps no rank from passing. It may only if one
  of the two has waited as long as it may, or if the rank waits at the store and another does not:
  then the rank may be in the log and not be counted yet;
* a barrier whose deadline has expired waits for nothing any more;
* keys that others made are never touched.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

from rankcall.c10d.requests import Steps
from rankcall.store import protocol
from rankcall.store.keys import BARRIER, EXCHANGE, GET_ALL, Keys
from rankcall.testing.simulated_store import (
    Append,
    Arrive,
    Check,
    Checkpoint,
    Counted,
    LostAnswer,
    Mark,
    Process,
    Read,
    Set,
    Simulation,
    StoreGoneError,
    Until,
    Wait,
    World,
)

PREFIX = "p"
THEIRS = {"p": b"kept", "p/rankcall": b"kept", "px/rankcall.0/2/b0/w0": b"7"}
KIND = {"barrier": BARRIER, "exchange": EXCHANGE, "get_all": GET_ALL}
_GENERATION = re.compile(r"p/rankcall\.0/\d+/([bsg])(\d+)/")


class Memory(NamedTuple):
    """What a process remembers between two calls."""

    number: int = 0  # of the call
    attempt: int = 0
    was_late: bool = False  # in this call: so it has arrived
    left_early: int = -1  # the last call that it returned from at its deadline
    uses: int = 0  # of the prefix, each ended by a clean-up
    is_claimed: bool = False
    progress: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    removal: tuple[str, ...] | None = None

    def member(self, plan: Plan) -> protocol.Member:
        """Return the member."""
        nonces = [plan.nonce, *(f"{plan.nonce}{use}" for use in range(1, self.uses + 1))]
        claim = protocol.Claim(plan.rank, plan.world_size, nonces[-1], 1, "host")
        member = protocol.Member(
            claim,
            retired=deque(nonces[:-1]),
            hosts_store=plan.hosts_store,
            is_claimed=self.is_claimed,
        )
        member.progress = {kind: protocol.Progress(*values) for kind, values in self.progress}
        member.removal = None if self.removal is None else list(self.removal)
        return member

    def of(self, member: protocol.Member) -> Memory:
        """Return this with what a member remembers."""
        return self._replace(
            is_claimed=member.is_claimed,
            progress=tuple(
                (kind, astuple(progress)) for kind, progress in sorted(member.progress.items())
            ),
            removal=None if member.removal is None else tuple(member.removal),
        )


@dataclass
class Plan:
    """One process: which rank it is of how many, and its calls, each by name.

    A call that is late or not answered is made again, ``retries`` times.
    """

    rank: int
    world_size: int
    calls: Sequence[str] = ("barrier", "barrier")
    retries: int = 0
    nonce: str = ""
    appends: bool = True
    counts: bool = True
    polls: bool = False  # it does not wait in ``Arrive``, as a client with a short timeout
    hosts_store: bool = False
    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.nonce = self.nonce or f"{self.rank:x}"
        self.name = f"rank{self.rank}.{self.nonce}"

    def process(self) -> Process:
        """Return the process."""
        return Process(self.name, lambda: self.resume(Memory()), self.resume)

    def resume(self, memory: Memory) -> Steps[None]:
        """Make one call, note how it ends, and remember what the next one needs."""
        if memory.number == len(self.calls):
            return
        keys = Keys(PREFIX, 0, self.world_size, self.appends, self.appends and self.counts)
        member = memory.member(self)
        call, number = self.calls[memory.number], memory.number
        after = memory._replace(attempt=memory.attempt + 1)
        times_over: list[bool] = []
        try:
            steps = self._call(call, number, keys, member)
            steps = without_waiting(steps) if self.polls else steps
            outcome = yield from watched(steps, times_over)
        except protocol.NotAllArrived as error:
            yield Mark("late", (number, error.missing))
            after = after._replace(was_late=True)
        except protocol.CleanUpPending as error:
            yield Mark("pending", (number, error.missing))
        except protocol.WorldsDiffer as error:
            yield Mark("worlds differ", (number, error.claims))
            after = after._replace(was_late=True)
        except protocol.RankTaken as error:
            yield Mark("taken", error.holder)
            return
        except protocol.Unconfirmed:
            yield Mark("unconfirmed", number)
            return
        except LostAnswer:
            yield Mark("lost", number)
        except StoreGoneError:
            yield Mark("gone", (number, tuple(times_over[-1:])))
            return
        else:
            yield Mark("passed", (number, outcome))
            after = memory._replace(number=number + 1, attempt=0, was_late=False)
            if any(times_over) and self.hosts_store:
                after = after._replace(left_early=number)
            if call == "clean_up":
                yield Checkpoint(after._replace(uses=after.uses + 1, is_claimed=False, progress=()))
        if after.attempt <= self.retries:
            yield Checkpoint(after.of(member))

    def _call(self, call: str, number: int, keys: Keys, member: protocol.Member) -> Steps[Any]:
        outcome: Any = None
        if call == "clean_up":
            yield from protocol.clean_up(keys, member)
            return None
        if call == "barrier":
            yield from protocol.meet(keys, member)
        elif call == "exchange":
            data = b"%d of %d" % (number, self.rank)
            outcome = tuple((yield from protocol.exchange(keys, member, data, 0)))
        else:
            names = [f"user{rank}" for rank in range(self.world_size)]
            yield Set(names[self.rank], b"u%d" % self.rank)
            values, unread = yield from protocol.gather(keys, member, names, 0)
            if unread:
                raise protocol.NotAllArrived(unread)
            outcome = tuple(values)
        member.of_kind(KIND[call]).advance()
        return outcome


def watched(steps: Steps[Any], times_over: list[bool]) -> Steps[Any]:
    """Make the requests of a process. Note those that wait in vain: True if their time is over."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            request = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        answer, error = None, None
        try:
            answer = yield request
        except (LostAnswer, StoreGoneError) as raised:
            error = raised
        if isinstance(request, Arrive if error else (Arrive, Wait, Until)) and not answer:
            times_over.append(error is None)


def without_waiting(steps: Steps[Any]) -> Steps[Any]:
    """Make the requests of a process that does not wait at the store."""
    answer: Any = None
    error: Exception | None = None
    while True:
        try:
            request = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        answer, error = None, None
        try:
            if isinstance(request, Arrive):
                for key, value in request.instead:
                    yield Append(key, value)
                answer = False
            elif isinstance(request, Wait):
                answer = bool((yield Until(Check(request.keys), bool)))
            else:
                answer = yield request
        except (LostAnswer, StoreGoneError) as raised:
            error = raised


class Checks:
    """What must hold of some plans. With ``strangers``, some call in vain."""

    def __init__(self, plans: Sequence[Plan], strangers: Sequence[Plan] = ()) -> None:
        self._plans = [*plans, *strangers]
        self._is_peaceful = not strangers
        self._faults = 0
        self._checked_store: Any = None

    def simulation(self, **faults: Any) -> Simulation:
        """Return the simulation with these checks."""
        self._faults = faults.get("lost_answers", 0) + faults.get("deaths", 0)
        self._is_peaceful = self._is_peaceful and not self._faults
        return Simulation(
            [plan.process() for plan in self._plans],
            on_mark=self.on_mark,
            always=self.always,
            at_end=self.at_end,
            witness=self.arrived,
            store=THEIRS,
            host=next((plan.name for plan in self._plans if plan.hosts_store), None),
            **faults,
        )

    def _family(self, name: str) -> list[Plan]:
        """Return the plans of the same world size as a process."""
        size = next(plan.world_size for plan in self._plans if plan.name == name)
        return [plan for plan in self._plans if plan.world_size == size]

    def arrived(self, world: World, name: str) -> frozenset[int]:
        """Return the ranks that have arrived for sure in the call that a process is in."""
        number = _call(world, name)
        arrived = set()
        for plan in self._family(name):
            memory = world.memory(plan.name) or Memory()
            is_waiting = _waits_for_others(world.request(plan.name))
            if memory.number > number or (
                memory.number == number
                and number < len(plan.calls)
                and plan.calls[number] in ("barrier", "exchange")
                and (memory.was_late or is_waiting)
            ):
                arrived.add(plan.rank)
        return frozenset(arrived)

    def on_mark(self, world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
        """Check one mark."""
        if mark.name == "gone":
            self._check_gone(world, name, *mark.value)
        if mark.name not in ("passed", "late"):
            return
        family = self._family(name)
        size, (number, outcome) = family[0].world_size, mark.value
        mine = next(plan for plan in family if plan.name == name)
        called = {plan.rank for plan in family if _call(world, plan.name) >= number}
        call = mine.calls[number]
        if mark.name == "passed":
            if call == "clean_up" or (call == "get_all" and mine.rank != 0):
                return
            assert called == set(range(size)), f"{name} passed call {number} before all had called"
            if call == "exchange":
                assert outcome == tuple(b"%d of %d" % (number, rank) for rank in range(size))
            if call == "get_all":
                assert outcome == tuple(b"u%d" % rank for rank in range(size))
        else:
            arrived = next(
                past_mark.value for past_mark in reversed(earlier) if past_mark.name == "expired"
            )
            wrong = sorted(arrived & set(outcome))
            assert not wrong, f"{name} names {wrong}, which had arrived"
            if call != "get_all":
                unnamed = sorted(set(range(size)) - called - set(outcome))
                assert not unnamed, f"{name} does not name {unnamed}"

    def _check_gone(self, world: World, name: str, number: int, in_vain: tuple[bool]) -> None:
        """Check that a process without a store had not arrived where its host has passed."""
        host = next(plan.name for plan in self._plans if plan.hosts_store)
        left, mine = world.memory(host) or Memory(), world.memory(name) or Memory()
        log = world.store.get(f"p/rankcall.0/{len(self._plans)}/b{number}/log", b"")
        is_excused = mine.was_late or left.left_early == number or any(in_vain)
        is_excused = is_excused or (in_vain == (False,) and b"+" in log)
        if world.outcome(host) != "killed" and not is_excused:
            assert left.number <= number, f"the host left {name} behind in call {number}"

    def always(self, world: World) -> None:
        """Check the keys, and that somebody can go on."""
        store = world.store
        if store is not self._checked_store:
            self._checked_store = store
            assert THEIRS.items() <= store.items(), "touched other keys"
            for kind, generations in _generations(world).items():
                numbers = sorted(generations)
                assert len(numbers) <= 4 + self._faults, f"keys of {kind}: {numbers}"
        live = [plan.name for plan in self._plans if world.outcome(plan.name) is None]
        for name in live:
            marks, wait = world.marks(name), world.request(name)
            if (
                marks
                and marks[-1].name == "expired"
                and self._kind_of_call(world, name) == "barrier"
            ):
                # The host stays for a bounded time, and the client lets no wait begin.
                stays = isinstance(wait, Until) and wait.seconds == protocol.STAY_S
                assert stays or not isinstance(wait, (Counted, Wait, Until)), f"{name}: {wait}"
        if (
            self._is_peaceful
            and len(live) == len(self._plans)
            and all(_waits_for_others(world.request(name)) for name in live)
        ):
            assert any(map(world.can_go_on, live)), "all wait in vain"

    def _kind_of_call(self, world: World, name: str) -> str:
        plan = next(plan for plan in self._plans if plan.name == name)
        return plan.calls[_call(world, name)]

    def at_end(self, world: World) -> None:
        """Check what is left once all have made all calls."""
        if world.is_gone or any(world.outcome(plan.name) == "killed" for plan in self._plans):
            return
        if all(_call(world, plan.name) == len(plan.calls) for plan in self._plans):
            for kind, generations in _generations(world).items():
                assert len(generations) <= 2, f"keys of {kind} at the end: {sorted(generations)}"
            if self._plans[0].calls[-1] == "clean_up" and self._is_peaceful:
                left = sorted(set(world.store) - set(THEIRS))
                assert not left, f"left over: {left}"


def _generations(world: World) -> dict[str, set[str]]:
    generations: dict[str, set[str]] = {}
    for key in world.store:
        match = _GENERATION.match(key)
        if match:
            generations.setdefault(match.group(1), set()).add(match.group(2))
    return generations


def _waits_for_others(request: Any) -> bool:
    """Return whether a request waits for all ranks of a barrier or an exchange."""
    if isinstance(request, Until):
        request = request.request
        return isinstance(request, Read) and request.key.endswith("/log")
    return isinstance(request, (Counted, Wait))


def _call(world: World, name: str) -> int:
    """Return the number of the call that a process is in."""
    return int((world.memory(name) or Memory()).number)


def ranks(size: int, **options: Any) -> list[Plan]:
    """Return one plan for each rank."""
    return [Plan(rank, size, **options) for rank in range(size)]


def mixed(size: int, **options: Any) -> list[Plan]:
    """Return one plan for each rank; rank 0 polls, and the others wait in ``Arrive``."""
    return [Plan(rank, size, polls=rank == 0, **options) for rank in range(size)]


def hosted(size: int, polling: Collection[int] = (), host: int = 0, **options: Any) -> list[Plan]:
    """Return one plan for each rank; the store ends with ``host``, and some ranks poll."""
    return [
        Plan(rank, size, polls=rank in polling, hosts_store=rank == host, **options)
        for rank in range(size)
    ]

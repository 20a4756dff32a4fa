"""A simulated c10d store, whose scheduler tries every order of the requests of several processes.

A protocol that agrees through a store has bugs that show once in a thousand runs. Here, write each
process as a generator that yields requests (``Add``, ``Read``, ``Set``, ``Wait``, ...) and receives
their answers. The scheduler decides which process makes its next request. It can also lose answers,
kill processes and let deadlines expire:

    def process(rank):
        value = yield Add("arrived", 1)
        if value == 2:
            yield Set("done", b"1")
        passed = yield Wait(["done"])
        yield Mark("passed" if passed else "timed out")

    simulation = Simulation(
        [Process("zero", lambda: process(0)), Process("one", lambda: process(1))],
        on_mark=check_one_mark, at_end=check_the_end, lost_answers=1, deaths=1,
    )
    simulation.explore()                      # every order, every fault
    simulation.search(100_000, seed=7)        # random orders, for more processes
    simulation.replay(violation.trace)        # one order, as a failed run printed it

A check raises ``AssertionError``. The simulation then raises ``Violation``, whose trace lists the
steps by number. It also raises ``Violation`` if processes wait and none of them can ever go on.

``explore`` visits each state once. A state is the contents of the store and what each process has
been answered so far; as processes are deterministic, that is all that the future depends on. So
leaving out a state that was visited before loses no behaviour. A process that makes several calls
can say with a ``Checkpoint`` what it remembers between them. Then the answers before it do not
count any more, and much fewer states are different.

In the simulation, requests take effect one after the other. ``ReadMany`` reads one key after the
other, and ``Arrive`` appends, counts and waits one after the other. A lost answer raises
``LostAnswer`` in its process; the request may have taken effect or not. A process that is killed
makes no more requests. A deadline may expire at any moment, unless the key that the process waits
for is there. With ``host``, the store ends with that process. Then requests raise
``StoreGoneError`` in the others. But a process whose wait was over by then still gets its answer,
because the store has sent it.
With ``ticks``, a clock goes on by one second at a time, and ``Now`` and ``Sleep`` follow it; each
process may have a clock that started at another time (``clock_offset``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankcall.c10d.requests import (
    Add,
    Append,
    Arrive,
    Check,
    CompareSet,
    Delete,
    ListKeys,
    Now,
    Read,
    ReadMany,
    Set,
    Sleep,
    Steps,
    StoreGoneError,
    Until,
    Wait,
)

__all__ = [
    "Add",
    "Append",
    "Arrive",
    "Check",
    "Checkpoint",
    "CompareSet",
    "Counted",
    "Delete",
    "Explored",
    "ListKeys",
    "LostAnswer",
    "Mark",
    "Now",
    "Process",
    "Read",
    "ReadMany",
    "Set",
    "Simulation",
    "Sleep",
    "Steps",
    "StoreGoneError",
    "Until",
    "Violation",
    "Wait",
    "World",
    "perform",
]

Store = Mapping[str, bytes]
_SHOWN = 60  # characters of an answer in a trace


class LostAnswer(Exception):
    """Raised in a process whose request was not answered; it may have taken effect."""


_RAISED = (LostAnswer, StoreGoneError)  # in a process whose request has no answer


class Violation(AssertionError):
    """Raised if a check failed. ``trace`` lists the steps; ``Simulation.replay`` repeats them."""

    def __init__(self, reason: str, trace: str) -> None:
        super().__init__(f"{reason}\n{trace}")
        self.reason = reason
        self.trace = trace


class Mark(NamedTuple):
    """Not a request: a process notes for the checks what it has come to."""

    name: str
    value: Any = None


class _CountIn(NamedTuple):
    """The second step of ``Arrive``. The answer is the new value of its key."""

    key: str


class Counted(NamedTuple):
    """The last step of ``Arrive``, which waits. The answer is that of ``Arrive``."""

    key: str
    size: int


class Checkpoint(NamedTuple):
    """Not a request: from here on, a process depends on ``memory`` only.

    Its generator is closed, and ``Process.resume(memory)`` makes the one that goes on.
    """

    memory: Any


@dataclass(frozen=True, eq=False)
class Process:
    """One process.

    ``start`` makes its generator, with all state that the process has. ``resume`` makes the one
    that goes on after a ``Checkpoint``. ``clock_offset``, in seconds, is added to what ``Now``
    answers.
    """

    name: str
    start: Callable[[], Steps[Any]]
    resume: Callable[[Any], Steps[Any]] | None = None
    clock_offset: int = 0


def perform(request: Any, held: Store) -> tuple[Any, Store]:
    """Return the answer to a request that does not wait, and the contents of the store after it."""
    if isinstance(request, _CountIn):
        request = Add(request.key, 1)
    if isinstance(request, Add):
        # As in torch's stores, a counter is read up to the first character that is not a digit.
        value = int(held.get(request.key, b"0").split()[0]) + request.amount
        return value, {**held, request.key: b"%d" % value}
    if isinstance(request, Check):
        return all(key in held for key in request.keys), held
    if isinstance(request, Read):
        return held.get(request.key), held
    if isinstance(request, ReadMany):
        return [held.get(key) for key in request.keys], held
    if isinstance(request, Set):
        return None, {**held, request.key: request.value}
    if isinstance(request, CompareSet):
        if held.get(request.key, b"") == request.expected:
            return request.value, {**held, request.key: request.value}
        return held.get(request.key), held
    if isinstance(request, Append):
        return None, {**held, request.key: held.get(request.key, b"") + request.value}
    if isinstance(request, Delete):
        rest = {key: value for key, value in held.items() if key != request.key}
        return None, rest
    if isinstance(request, ListKeys):
        return list(held), held
    raise TypeError(f"{request!r} is no request; see rankcall.testing.simulated_store")


class _Reached(NamedTuple):
    """The result of an answer: the state of its process, and the marks that it made on the way."""

    state: _State
    marks: tuple[Mark, ...]


class _State:
    """The state of one process: a node in the tree of all answers that it may receive."""

    __slots__ = (
        "answer",
        "children",
        "generator",
        "marks",
        "memory",
        "outcome",
        "parent",
        "request",
        "tree",
    )

    def __init__(self, tree: _Tree, parent: _State | None, answer: Any, memory: Any) -> None:
        self.tree = tree
        self.parent = parent
        self.answer = answer
        self.memory = memory  # of the last checkpoint
        self.children: dict[Any, _Reached] = {}
        self.marks: tuple[Mark, ...] = parent.marks if parent else ()  # since the last checkpoint
        self.request: Any = None
        self.outcome: str | None = None  # "returned", "failed" or "killed" once it has ended
        self.generator: Generator[Any, Any, Any] | None = None

    def after(self, answer: Any, marks: tuple[Mark, ...], remember: bool) -> _Reached:
        """Return the result of an answer."""
        key = (type(answer), repr(answer) if isinstance(answer, (list, *_RAISED)) else answer)
        reached = self.children.get((key, marks))
        if reached is None:
            generator, self.generator = self.generator or self._restarted(), None
            state = _State(self.tree, self, answer, self.memory)
            reached = self.tree.run(generator, state, marks, remember)
            if remember:
                self.children[key, marks] = reached
        return reached

    def killed(self) -> _Reached:
        """Return the end of the process."""
        reached = self.children.get("killed")
        if reached is None:
            state = _State(self.tree, self, None, self.memory)
            state.outcome = "killed"
            reached = self.children["killed"] = _Reached(state, ())
        return reached

    def _restarted(self) -> Generator[Any, Any, Any]:
        """Return a generator that has been given all answers since the last checkpoint."""
        answers, node = [], self
        while node.parent is not None:
            answers.append(node.answer)
            node = node.parent
        generator = self.tree.generator(self.memory)
        request = _skip_marks(generator, generator.send(None))
        for answer in reversed(answers):
            if isinstance(answer, _RAISED):
                request = _skip_marks(generator, generator.throw(answer))
            else:
                request = _skip_marks(generator, generator.send(answer))
        assert type(request) is type(self.request), f"{self.tree.name} is not deterministic"
        return generator


class _Tree:
    """All that one process may come to, from its start and from each of its checkpoints."""

    def __init__(self, process: Process) -> None:
        self.name = process.name
        self.clock_offset = process.clock_offset
        self._process = process
        self._roots: dict[Any, _Reached] = {}

    def root(self, memory: Any, remember: bool) -> _Reached:
        """Return the state at the start (no memory), or after a checkpoint."""
        reached = self._roots.get(memory)
        if reached is None:
            state = _State(self, None, None, memory)
            reached = self.run(self.generator(memory), state, (), remember)
            if remember:
                self._roots[memory] = reached
        return reached

    def generator(self, memory: Any) -> Generator[Any, Any, Any]:
        """Return the process's generator from its start, or from a checkpoint on."""
        if memory is None:
            return _one_step_at_a_time(self._process.start())
        assert self._process.resume, f"{self.name} has a checkpoint and cannot resume"
        return _one_step_at_a_time(self._process.resume(memory))

    def run(
        self,
        generator: Generator[Any, Any, Any],
        state: _State,
        marks: tuple[Mark, ...],
        remember: bool,
    ) -> _Reached:
        """Run the process to its next request, or to its end."""
        try:
            if isinstance(state.answer, _RAISED):
                request = generator.throw(state.answer)
            else:
                request = generator.send(state.answer)
            while isinstance(request, Mark):
                marks += (request,)
                request = generator.send(None)
        except StopIteration:
            state.outcome = "returned"
        except _RAISED:
            state.outcome = "failed"
        else:
            if isinstance(request, Checkpoint):
                generator.close()
                after = self.root(request.memory, remember)
                return _Reached(after.state, marks + after.marks)
            state.request = request
            state.generator = generator
        state.marks += marks
        return _Reached(state, marks)


def _skip_marks(generator: Generator[Any, Any, Any], request: Any) -> Any:
    while isinstance(request, Mark):
        request = generator.send(None)
    return request


def _one_step_at_a_time(steps: Steps[Any]) -> Steps[Any]:
    """Make the requests of a process, ``ReadMany`` and ``Arrive`` in several steps."""
    error: Exception | None = None
    answer: Any = None
    while True:
        try:
            request = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        error = None
        try:
            if isinstance(request, ReadMany):
                answer = []
                for key in request.keys:
                    answer.append((yield Read(key)))
            elif isinstance(request, Arrive):
                for key, value in request.appends:
                    yield Append(key, value)
                yield _CountIn(request.key)
                answer = yield Counted(request.key, request.size)
            else:
                answer = yield request
        except _RAISED as raised:
            error = raised


class World(NamedTuple):
    """All there is at one moment."""

    store: Store
    states: tuple[_State, ...]
    lost_answers: int
    deaths: int
    time: int
    wakes: tuple[int, ...]  # when each process's sleep is over
    # Those that wait in ``Arrive``, and that another request lets pass. Once the store has ended:
    # those whose wait was over by then.
    woken: frozenset[int]
    is_gone: bool = False  # the store has ended

    def key(self) -> Any:
        """Return what tells this world apart from others that go on in another way."""
        return frozenset(self.store.items()), self.states, *self[2:]

    def marks(self, name: str) -> tuple[Mark, ...]:
        """Return the marks of a process since its last checkpoint."""
        return self._state(name).marks

    def memory(self, name: str) -> Any:
        """Return the memory of a process's last checkpoint; None if there was none."""
        return self._state(name).memory

    def outcome(self, name: str) -> str | None:
        """Return "returned", "failed" (no answer), "killed", or None if the process goes on."""
        return self._state(name).outcome

    def request(self, name: str) -> Any:
        """Return the request that a process is about to make, or in which it waits."""
        return self._state(name).request

    def can_go_on(self, name: str) -> bool:
        """Return whether the request of a process would be answered now."""
        index = next(at for at, state in enumerate(self.states) if state.tree.name == name)
        request = self.states[index].request
        if self.is_gone and not isinstance(request, (Now, Sleep)):
            return index in self.woken
        if isinstance(request, Wait):
            return all(key in self.store for key in request.keys)
        if isinstance(request, Until):
            return bool(request.is_enough(perform(request.request, self.store)[0]))
        if isinstance(request, Counted):
            count = perform(Add(request.key, 0), self.store)[0]
            return index in self.woken or count >= request.size
        if isinstance(request, Sleep):
            return self.time >= self.wakes[index]
        return True

    def _state(self, name: str) -> _State:
        return next(state for state in self.states if state.tree.name == name)

    @property
    def is_over(self) -> bool:
        """Whether every process has ended."""
        return all(state.outcome is not None for state in self.states)


class Explored(NamedTuple):
    """How much was tried: different states or schedules, and those in which all had ended."""

    states: int
    ends: int


class _Step(NamedTuple):
    """One step of a schedule, and the step before it."""

    before: _Step | None
    name: str
    action: str
    request: Any
    answer: Any


class _Taken(NamedTuple):
    """The result of an action; ``earlier`` are the marks that its process had made before."""

    world: World
    step: _Step | None
    reached: _Reached | None
    earlier: tuple[Mark, ...]


_CLOCK = "clock"
_TRACE_LINE = re.compile(r"^ *\d+\. (\S+): (\S+)", re.MULTILINE)


class Simulation:
    """Processes on one store, and what must be true of them.

    Args:
        processes: The processes; each has a name of its own, without blanks.
        on_mark: Called as ``on_mark(world, name, mark, earlier)`` after each mark; ``earlier`` are
            the marks of the process before it, since its last checkpoint.
        always: Called as ``always(world)`` in every state.
        at_end: Called as ``at_end(world)`` when all processes have ended.
        witness: Called as ``witness(world, name)`` when a deadline of a process expires. The
            process gets a mark "expired" with its result.
        store: The keys that exist at the beginning.
        lost_answers: How many answers may be lost in one schedule.
        deaths: How many processes may be killed in one schedule.
        ticks: How often the clock may go on by one second.
        expiries: Whether deadlines may expire.
        host: The name of the process with which the store ends.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        *,
        on_mark: Callable[[World, str, Mark, tuple[Mark, ...]], None] | None = None,
        always: Callable[[World], None] | None = None,
        at_end: Callable[[World], None] | None = None,
        witness: Callable[[World, str], Any] | None = None,
        store: Store | None = None,
        lost_answers: int = 0,
        deaths: int = 0,
        ticks: int = 0,
        expiries: bool = True,
        host: str | None = None,
    ) -> None:
        self._trees = [_Tree(process) for process in processes]
        self._on_mark = on_mark
        self._always = always
        self._at_end = at_end
        self._witness = witness
        self._store = dict(store or {})
        self._lost_answers = lost_answers
        self._deaths = deaths
        self._ticks = ticks
        self._expiries = expiries
        self._host = host

    def explore(self, most_states: int = 10_000_000) -> Explored:
        """Try every schedule; raise ``Violation`` with the first that breaks a check.

        Raises ``RuntimeError`` if there are more than ``most_states`` states.
        """
        first, states, ends = self._begin(), 0, 0
        seen = {first.key()}
        stack: list[tuple[World, _Step | None]] = [(first, None)]
        while stack:
            world, step = stack.pop()
            states += 1
            ends += world.is_over
            if states > most_states:
                raise RuntimeError(f"more than {most_states:,} states: try fewer faults")
            actions = list(self._actions(world))
            self._refuse_deadlock(world, actions, step)
            for name, action in actions:
                taken = self._take(world, name, action, step, remember=True)
                key = taken.world.key()
                is_new = key not in seen
                self._check(taken, is_new)
                if is_new:
                    seen.add(key)
                    stack.append((taken.world, taken.step))
        return Explored(states, ends)

    def search(self, schedules: int, seed: int = 0) -> Explored:
        """Try random schedules; raise ``Violation`` with the first that breaks a check."""
        states = 0
        for number in range(schedules):
            chance = random.Random(f"{seed}/{number}")
            step: _Step | None = None
            world = self._begin()
            while actions := list(self._actions(world)):
                self._refuse_deadlock(world, actions, step)
                weights = [_WEIGHTS.get(action, 10) for _, action in actions]
                name, action = chance.choices(actions, weights)[0]
                taken = self._take(world, name, action, step, remember=False)
                self._check(taken)
                world, step = taken.world, taken.step
                states += 1
        return Explored(states, schedules)

    def replay(self, trace: str) -> World:
        """Repeat the steps of a trace; raise ``Violation`` as the run that printed it."""
        step: _Step | None = None
        world = self._begin()
        for name, action in _TRACE_LINE.findall(trace):
            if (name, action) not in list(self._actions(world)):
                raise ValueError(f"{name} cannot do {action!r} here; the trace is of other code")
            taken = self._take(world, name, action, step, remember=False)
            self._check(taken)
            world, step = taken.world, taken.step
        self._refuse_deadlock(world, list(self._actions(world)), step)
        return world

    def _begin(self) -> World:
        begun = [tree.root(None, remember=False) for tree in self._trees]
        zeros = (0,) * len(begun)
        states = tuple(reached.state for reached in begun)
        world = World(self._store, states, self._lost_answers, self._deaths, 0, zeros, frozenset())
        for reached in begun:
            self._check(_Taken(world, None, reached, ()))
        return world

    def _actions(self, world: World) -> Iterator[tuple[str, str]]:
        """Yield all that may happen next, as the name of a process and what it does."""
        for state in world.states:
            if state.outcome is not None:
                continue
            name, request = state.tree.name, state.request
            is_local = isinstance(request, (Now, Sleep))
            may_be_lost = world.lost_answers and not is_local and not world.is_gone
            can_go_on = world.can_go_on(name)
            # A ``Wait`` that is over may also find no store: perhaps it had not begun yet.
            if world.is_gone and not is_local and (not can_go_on or isinstance(request, Wait)):
                yield name, "gone"
            if can_go_on:
                yield name, "step"
                if may_be_lost:
                    yield name, "lost-answer"
            elif world.is_gone:
                pass
            elif isinstance(request, Counted):
                if self._expiries:
                    yield name, "give-up"
            elif self._expiries and isinstance(request, (Wait, Until)):
                yield name, "expire"
            if may_be_lost:
                yield name, "lost-request"
            if world.deaths:
                yield name, "kill"
        if world.time < self._ticks and not world.is_over:
            yield _CLOCK, "tick"

    def _refuse_deadlock(
        self, world: World, actions: Sequence[tuple[str, str]], step: _Step | None
    ) -> None:
        """Raise if processes wait, and nothing but a fault can happen any more."""
        live = [state for state in world.states if state.outcome is None]
        if not live or any(action in _PROGRESS for _, action in actions):
            return
        if not any(isinstance(state.request, Sleep) for state in live):
            waits = "; ".join(f"{state.tree.name}: {_shown(state.request)}" for state in live)
            raise Violation(f"no process can go on: {waits}", _trace(step))

    def _take(
        self, world: World, name: str, action: str, step: _Step | None, remember: bool
    ) -> _Taken:
        """Return the result of an action."""
        if name == _CLOCK:
            after = world._replace(time=world.time + 1)
            step = _Step(step, name, action, None, after.time)
            return _Taken(after, step, None, ())
        index = next(number for number, state in enumerate(world.states) if state.tree.name == name)
        state, store = world.states[index], world.store
        if action == "kill":
            step = _Step(step, name, action, None, None)
            reached = state.killed()
            world = world._replace(deaths=world.deaths - 1)
        else:
            answer: Any = None
            marks: tuple[Mark, ...] = ()
            if action == "expire":
                answer = False if isinstance(state.request, Wait) else None
                seen = self._witness(world, name) if self._witness else None
                marks = (Mark("expired", seen),)
            elif action == "gone":
                answer = StoreGoneError()
            elif action not in ("lost-request", "give-up"):
                answer, store = self._answer(world, state, state.request)
                world = _wake(world, state.request)
            if action.startswith("lost"):
                answer = LostAnswer(action)
                world = world._replace(lost_answers=world.lost_answers - 1)
            step = _Step(step, name, action, state.request, answer)
            try:
                reached = state.after(answer, marks, remember)
            except Exception as error:
                raise Violation(f"{name} raised {error!r}", _trace(step)) from error
        wakes = world.wakes
        if isinstance(reached.state.request, Sleep):
            until = world.time + int(reached.state.request.seconds)
            wakes = (*wakes[:index], until, *wakes[index + 1 :])
        states = (*world.states[:index], reached.state, *world.states[index + 1 :])
        woken = world.woken - {index}
        after = world._replace(store=store, states=states, wakes=wakes, woken=woken)
        if name == self._host and reached.state.outcome is not None:
            after = _without_store(after)
        return _Taken(after, step, reached, state.marks)

    def _answer(self, world: World, state: _State, request: Any) -> tuple[Any, Store]:
        if isinstance(request, (Wait, Counted)):
            return True, world.store
        if isinstance(request, Until):
            return perform(request.request, world.store)
        if isinstance(request, Now):
            return world.time + state.tree.clock_offset, world.store
        if isinstance(request, Sleep):
            return None, world.store
        return perform(request, world.store)

    def _check(self, taken: _Taken, is_new: bool = True) -> None:
        world, earlier = taken.world, taken.earlier
        try:
            if self._on_mark is not None and taken.reached is not None:
                for mark in taken.reached.marks:
                    self._on_mark(world, taken.reached.state.tree.name, mark, earlier)
                    earlier += (mark,)
            if self._always is not None and is_new:
                self._always(world)
            if self._at_end is not None and is_new and world.is_over:
                self._at_end(world)
        except AssertionError as error:
            raise Violation(str(error) or repr(error), _trace(taken.step)) from error


def _without_store(world: World) -> World:
    """End the store. It has answered the processes whose wait is over."""
    answered = {
        index
        for index, state in enumerate(world.states)
        if isinstance(state.request, (Wait, Counted)) and world.can_go_on(state.tree.name)
    }
    return world._replace(woken=frozenset(answered), is_gone=True)


def _wake(world: World, request: Any) -> World:
    """Let all processes pass that wait in ``Arrive`` at the key of a request."""
    if isinstance(request, Until):
        request = request.request
    key = getattr(request, "key", None)
    if key is None or isinstance(request, (_CountIn, Counted)):
        return world
    woken = {
        index
        for index, state in enumerate(world.states)
        if isinstance(state.request, Counted) and state.request.key == key
    }
    return world._replace(woken=world.woken | woken) if woken else world


_PROGRESS = ("step", "gone", "expire", "give-up", "tick")
_WEIGHTS = {"expire": 2, "give-up": 2, "lost-answer": 1, "lost-request": 1, "kill": 1, "tick": 4}


def _trace(step: _Step | None) -> str:
    """Write the steps of a schedule, numbered from 1."""
    steps = []
    while step is not None:
        steps.append(step)
        step = step.before
    lines = []
    for number, past_step in enumerate(reversed(steps), 1):
        what = "" if past_step.request is None else f"{_shown(past_step.request)} -> "
        answer = f"{past_step.answer!r:.{_SHOWN}}" if what or past_step.answer is not None else ""
        lines.append(f"{number:3}. {past_step.name}: {past_step.action} {what}{answer}".rstrip())
    return "\n".join(lines)


def _shown(request: Any) -> str:
    if isinstance(request, Until):
        return f"Until({_shown(request.request)})"
    return re.sub(r"\w+=", "", repr(request))

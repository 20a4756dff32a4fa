"""Agree with the other nodes on one verdict, and answer the viewers of their live pages."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from rankcall._requests import (
    Add,
    Check,
    CompareSet,
    Delete,
    Now,
    Read,
    ReadMany,
    Set,
    Sleep,
    Steps,
)
from rankcall.analysis.run_snapshot import RunReader
from rankcall.analysis.snapshot import (
    NodeSnapshot,
    RankState,
    Snapshot,
    decode,
    encode,
    merge,
    no_calls,
    node_snapshot_of,
)
from rankcall.ring import Header
from rankcall.run import TAIL
from rankcall.run.views import Answers, Member, NodeAnswer, ViewerFile

# Agree with the other nodes on one verdict, through the job's store.
#
# While nothing hangs, a node only polls whether the bell has rung: another node has opened a round,
# or has a viewer. A node with an overdue call opens a round. Each node's leader posts its summary.
# The first that posted reads all summaries and judges; if that takes too long, the next one does.
# The others only wait for the verdict, so the store's work grows with the number of nodes, not with
# its square. The first verdict that is published counts for all.
#
# Keys, below the prefix: ``bell``, a count, which each node raises that posts, or begins to ask for
# a viewer; ``latest``, the number of the last round that is over; ``<round>/posts``, a count, with
# which the round begins; ``<round>/post/<number>``; ``<round>/verdict``. ``nodes``, a count, and
# ``node/<number>``: the ranks of a node, written once, so that a verdict can name a lost node. The
# judge of a round removes the keys of the round before last. A node that is so late that its round
# has been removed starts over in the present one.


T = TypeVar("T")
JudgeAll = Callable[[Snapshot, bytes], bytes]
# The time for the other nodes to post: they poll every second, and wait for stacks. A round takes
# all of it only if a node is gone.
SETTLE_S = 6.0
_JUDGE_S = 2.0  # for one node to judge, before the next one does
_JUDGE_RANK_S = 0.001  # and for each rank of the world: several times as long as it takes
_JUDGES = 5  # nodes that judge in turn before a node stops waiting for a verdict
_PROBE_S = 2.0  # for an answer: a store whose host was stopped never gives one
_RETRY_S = 60.0
_MOST_BYTES = 1 << 28  # of a verdict
_POLL_S = 0.05
BELL, ASKED = "bell", "view/asked"
_POLL_RANK_S = 0.00005  # and for each rank of the world, to limit the polls of all nodes together


class Agreed(NamedTuple):
    """The result of a round. If ``by_me``, this rank judged, and so it prints the verdict."""

    verdict: bytes
    by_me: bool


class Unreachable(Exception):
    """The store does not answer."""


class Exchange:
    """One node's side of the rounds. ``job_store`` returns None while there is no store.

    No reference to the store is kept. ``rankcall.store`` makes the requests over a connection of
    its own, and gives up a store that does not answer.
    """

    def __init__(
        self,
        job_store: Callable[[], Any],
        prefix: str = "",
        settle_s: float = SETTLE_S,
        retry_s: float = _RETRY_S,
    ) -> None:
        self._job_store = job_store
        self._prefix = prefix
        self._settle_s = settle_s
        self._retry_s = retry_s
        self._lost_until = 0.0
        self._signed: list[Member] = []
        self._number = 0
        self._rung: bytes | None = None  # the count of the bell that this node has reacted to
        self._is_open = False
        self.question = 0  # the last question of a viewer on another node, as of the last bell

    def asked(self, members: Sequence[Member] = ()) -> bool:
        """Return whether another node has opened a round; register our ranks if they are not yet.

        Raises ``Unreachable`` like ``agree``.
        """
        return self.perform(_PROBE_S, self._ask(list(members)))

    @property
    def signed_on(self) -> bool:
        """Whether this node's ranks are in the store."""
        return bool(self._signed)

    @property
    def number(self) -> int:
        """The number under which this node's ranks are registered; 0: they are not."""
        return self._number

    def agree(self, mine: Snapshot, world_size: int, judge: JudgeAll) -> Agreed:
        """Post the state of our ranks, and return the verdict of all nodes together.

        ``judge`` gets the snapshot of all ranks, and the verdict of the round before or ``b""``.
        Raises ``Unreachable`` if the store is gone or silent.
        """
        self.perform(_PROBE_S, self._latest())
        limit_s = self._settle_s + _JUDGES * _turn_s(world_size)
        return self.perform(limit_s, self.steps(mine, world_size, judge))

    def perform(self, limit_s: float, steps: Steps[T]) -> T:
        """Make requests to the job's store. Raises ``Unreachable`` like ``agree``."""
        from rankcall.store.parts import perform  # here: the launcher imports this without torch

        if time.monotonic() < self._lost_until:
            raise Unreachable("the store did not answer a moment ago")
        try:
            store = self._job_store()
            if store is not None:
                return perform(store, limit_s, steps)
        except Exception as error:
            self._lost_until = time.monotonic() + self._retry_s
            raise Unreachable(str(error) or repr(error)) from error
        raise Unreachable("the default process group has not been made")

    # The protocol: generators of requests.

    def _ask(self, members: list[Member]) -> Steps[bool]:
        if members and members != self._signed:
            number = yield Add(self._key("nodes"), 1)
            yield Set(self._key(f"node/{number}"), json.dumps(members).encode())
            self._signed, self._number = members, number
        rung = yield Read(self._key(BELL))
        if rung != self._rung or self._is_open:
            number = (yield from self._latest()) + 1
            self._is_open = bool((yield Check([self._key(f"{number}/posts")])))
            self.question = int((yield Read(self._key(ASKED))) or 0)
            self._rung = rung
        return self._is_open

    def steps(self, mine: Snapshot, world_size: int, judge: JudgeAll) -> Steps[Agreed]:
        """Do as ``agree`` does, as requests (``rankcall._requests``)."""
        own = node_snapshot_of(mine)
        while True:
            number = (yield from self._latest()) + 1
            proposed, raw = yield from self._one_round(number, own, world_size, judge)
            # The first node that gets here ends the round. If a later round is over as well, this
            # verdict may be one that was published after the round's own had been removed.
            last = b"%d" % number
            if (yield CompareSet(self._key("latest"), _before(number), last)) == last:
                verdict = _unpacked(raw)
                if verdict == proposed and number > 2:
                    yield from self._remove(number - 2)
                return Agreed(verdict, verdict == proposed)
            yield from self._remove(number)

    def _one_round(
        self, number: int, own: NodeSnapshot, world_size: int, judge: JudgeAll
    ) -> Steps[tuple[bytes | None, bytes]]:
        """Return what this node proposed, if it judged, and the verdict of the round, packed."""
        from rankcall.store.parts import publish_once

        post = yield Add(self._key(f"{number}/posts"), 1)
        yield Add(self._key(BELL), 1)
        yield Set(self._key(f"{number}/post/{post}"), encode(own))
        heard, settled = {post: own}, (yield Now()) + self._settle_s
        if post == 1:
            while not _covered(heard, world_size) and (yield Now()) < settled:
                yield Sleep(_POLL_S)
                yield from self._hear(number, heard)
        turn = settled + (post - 1) * _turn_s(world_size) if post > 1 else 0.0
        verdict = self._key(f"{number}/verdict")
        while (raw := (yield Read(verdict))) is None:
            if (yield Now()) >= turn:
                yield from self._hear(number, heard)
                known = yield from self._with_unheard(merge(list(heard.values())))
                before = yield Read(self._key(f"{number - 1}/verdict"))
                proposed = judge(known, _unpacked(before) if before else b"")
                return proposed, (yield from publish_once(verdict, zlib.compress(proposed)))
            yield Sleep(max(_POLL_S, _POLL_RANK_S * world_size))
        return None, raw

    def _latest(self) -> Steps[int]:
        return int((yield Read(self._key("latest"))) or 0)

    def _hear(self, number: int, heard: dict[int, NodeSnapshot]) -> Steps[None]:
        """Read the summaries that were posted since the last call."""
        posts = int((yield Read(self._key(f"{number}/posts"))) or 0)
        fresh = [post for post in range(1, posts + 1) if post not in heard]
        for post in fresh:
            summary = yield Read(self._key(f"{number}/post/{post}"))
            if summary is not None:
                try:
                    heard[post] = decode(summary)
                except ValueError:
                    heard[post] = NodeSnapshot(0, [], no_calls())

    def _remove(self, number: int) -> Steps[None]:
        """Remove the keys of a round, so that a long job does not fill the store."""
        posts = int((yield Read(self._key(f"{number}/posts"))) or 0)
        names = [f"post/{post}" for post in range(1, posts + 1)] + ["verdict", "posts"]
        for name in names:
            yield Delete(self._key(f"{number}/{name}"))

    def _with_unheard(self, snapshot: Snapshot) -> Steps[Snapshot]:
        """Mark the ranks that did not answer, with the host and pid that they registered."""
        silent = {state.rank for state in snapshot.ranks if state.blind}
        places: dict[int, tuple[str, int]] = {}
        last = int((yield Read(self._key("nodes"))) or 0) if silent else 0
        for number in range(last, 0, -1):
            if silent <= places.keys():
                break
            for rank, host, pid in json.loads((yield Read(self._key(f"node/{number}"))) or "[]"):
                places.setdefault(rank, (host, pid))
        ranks = [
            RankState(state.rank, *places.get(state.rank, ("", 0)), blind=True, unheard=True)
            if state.blind
            else state
            for state in snapshot.ranks
        ]
        return replace(snapshot, ranks=ranks)

    def _key(self, name: str) -> str:
        return self._prefix + name


def _before(number: int) -> bytes:
    """Return what ``latest`` holds until a round is over."""
    return b"%d" % (number - 1) if number > 1 else b""


def _turn_s(world_size: int) -> float:
    """Return how many seconds one node has to judge."""
    return _JUDGE_S + _JUDGE_RANK_S * world_size


def _unpacked(verdict: bytes) -> bytes:
    return zlib.decompressobj().decompress(verdict, _MOST_BYTES)


def _covered(heard: dict[int, NodeSnapshot], world_size: int) -> bool:
    return len({state.rank for part in heard.values() for state in part.ranks}) >= world_size > 0


logger = logging.getLogger("rankcall.watch")

# Answer the viewers of the live page on other nodes, through the job's store.
#
# The page of a node asks its leader by a file (``rankcall.run.views``). The leader asks all other
# nodes at once, by one request, and reads what they have answered so far. A node that notices a
# question looks for the next one in each of its turns, until none has come for ``LINGER_S``
# seconds. Without a viewer, the store gets no request for this.
#
# Keys, below the same prefix: ``view/asked``, the number of the last question;
# ``view/answer/<number>``, the newest answer of the node with that number, after the number of the
# question. The first question rings ``bell``, which all nodes poll seldom.
#
# An answer replaces the one before, so keys do not pile up. No node waits for another one.


PAUSES_S = 1.0, 5.0  # between two questions or answers: bounds
LINGER_S = 30.0
_SHARE = 0.002  # of one core of the leader's rank, for its answers
_ASK_S = 2.0  # for all requests of a turn: hangs are judged on the same thread
_NEWEST, _WINDOW = 128, 64  # records read of each ring; calls sent of each rank
_MOST_NODES = 1 << 16
_CHUNK = 64  # keys that are read at once


class Questions:
    """One node's side of questions and answers, as requests."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._nodes: dict[int, tuple[Member, ...]] = {}
        self._unread: list[int] = []
        self._last_node = 0
        self._asked_at = self._began = float("-inf")
        self._first = 0  # the first question since ``_began``: older answers do not count
        self._answered: dict[int, tuple[bytes, float]] = {}  # answer, and since when

    def ask(self, mine: Collection[int]) -> Steps[tuple[NodeAnswer, ...]]:
        """Ask all other nodes; return their newest answers, which may be to earlier questions.

        Args:
            mine: The ranks of this node, which is not asked.
        """
        now = yield Now()
        question = yield Add(self._key(ASKED), 1)
        if now - self._asked_at > LINGER_S / 2:
            yield Add(self._key(BELL), 1)
            self._began, self._first = now, question
        self._asked_at = now
        yield from self._learn_nodes()
        numbers = self._others(mine)
        for at in range(0, len(numbers), _CHUNK):
            part = numbers[at : at + _CHUNK]
            raws = yield ReadMany([self._key(_answer_of(number)) for number in part])
            now = yield Now()
            for number, raw in zip(part, raws, strict=True):
                if raw is not None and self._answered.get(number, (b"", 0.0))[0] != raw:
                    self._answered[number] = raw, now
        return tuple(self._newest(number, now) for number in numbers)

    def _newest(self, number: int, now: float) -> NodeAnswer:
        raw, since = self._answered.get(number, (b"", now))
        question, _, data = raw.partition(b"\n")
        asked_s = now - self._began
        if not question.isdigit() or int(question) < self._first:
            return NodeAnswer(self._nodes[number], 0.0, asked_s)
        return NodeAnswer(self._nodes[number], now - since, asked_s, data)

    def _learn_nodes(self) -> Steps[None]:
        """Read which ranks the nodes have that have registered since the last question."""
        last = min(int((yield Read(self._key("nodes"))) or 0), _MOST_NODES)
        self._unread += range(self._last_node + 1, last + 1)
        self._last_node = max(self._last_node, last)
        for at in range(0, len(self._unread), _CHUNK):
            part = self._unread[at : at + _CHUNK]
            raws = yield ReadMany([self._key(f"node/{number}") for number in part])
            for number, raw in zip(part, raws, strict=True):
                if raw is not None:
                    self._nodes[number] = _members_of(raw)
        self._unread = [number for number in self._unread if number not in self._nodes]

    def _others(self, mine: Collection[int]) -> list[int]:
        """Return the numbers of the other nodes: of each rank, the last one that counts it."""
        owner = {rank: n for n in sorted(self._nodes) for rank, _, _ in self._nodes[n]}
        return sorted({number for rank, number in owner.items() if rank not in mine})

    def question(self) -> Steps[int]:
        """Return the number of the last question."""
        return int((yield Read(self._key(ASKED))) or 0)

    def answer(self, number: int, question: int, data: bytes) -> Steps[None]:
        """Publish the answer of the node ``number`` to a question."""
        yield Set(self._key(_answer_of(number)), b"%d\n" % question + data)

    def _key(self, name: str) -> str:
        return self._prefix + name


def _answer_of(number: int) -> str:
    return f"view/answer/{number}"


def _members_of(raw: bytes) -> tuple[Member, ...]:
    try:
        return tuple((int(rank), str(host), int(pid)) for rank, host, pid in json.loads(raw))
    except (ValueError, TypeError, RecursionError):
        return ()


class NodeViews:
    """The part of a node's leader in what pages show. Only the watcher's thread uses it.

    Args:
        run_dir: The run directory of this node.
        exchange: The node's side of the rounds, which polls the bell.
        requests: Makes requests to the job's store; its failures do not hold up the rounds.
        prefix: That of ``exchange``.
        notice_s: How often a node whose ranks go on polls the bell.
    """

    def __init__(
        self, run_dir: Path, exchange: Exchange, requests: Exchange, prefix: str, notice_s: float
    ) -> None:
        self._run_dir = run_dir
        self._exchange = exchange
        self._requests = requests
        self._questions = Questions(prefix)
        self._notice_s = notice_s
        self._file = ViewerFile(run_dir)
        self._reader = RunReader(_NEWEST)
        self._nodes: tuple[NodeAnswer, ...] = ()
        self._asked_ns = 0  # when the store last answered
        self._has_failed = False
        self._noticed = 0  # the last question that the bell has told of
        self._question = 0  # the last one that was answered
        self._until = float("-inf")  # when to stop looking for questions
        self._next_ask = self._next_answer = 0.0

    def turn(self, headers: Mapping[int, Header], now: float) -> None:
        """Ask the other nodes if this one has a viewer, and answer those that ask. Never raises.

        A failure that is not foreseen ends this, and not the watch for hangs.
        """
        if self._has_failed:
            return
        try:
            self._turn(headers, now)
        except Exception as error:
            self._has_failed = True
            logger.warning("pages on other nodes get no more answers", exc_info=error)

    def _turn(self, headers: Mapping[int, Header], now: float) -> None:
        if not headers or len(headers) >= max(head.world_size for head in headers.values()):
            return  # all ranks are on this node
        if now >= self._next_ask and self._file.is_watched(now):
            self._next_ask = now + PAUSES_S[0]
            self._ask(headers)
        if self._exchange.question != self._noticed:
            self._noticed, self._until = self._exchange.question, now + LINGER_S
        if now < self._until and now >= self._next_answer and self._exchange.number:
            began = time.thread_time()
            with contextlib.suppress(Unreachable, OSError, ValueError):
                if self._answer(headers):
                    self._until = now + LINGER_S
            cost = time.thread_time() - began
            self._next_answer = now + min(max(PAUSES_S[0], cost / _SHARE), PAUSES_S[1])

    def _ask(self, headers: Mapping[int, Header]) -> None:
        problem = ""
        try:
            self._nodes = self._requests.perform(_ASK_S, self._questions.ask(headers))
            self._asked_ns = time.monotonic_ns()
        except Unreachable as error:
            problem = f"the job's store does not answer ({error})"
            self._asked_ns = self._asked_ns or time.monotonic_ns()
        attempt = max(head.attempt for head in headers.values())
        answers = Answers(self._asked_ns, attempt, self._notice_s, problem, self._nodes)
        with contextlib.suppress(OSError):  # the folder may be gone, and the page with it
            self._file.write(answers)

    def _answer(self, headers: Mapping[int, Header]) -> bool:
        """Answer the newest question; return whether there was one."""
        question = self._requests.perform(_ASK_S, self._questions.question())
        if question <= self._question:
            return False
        run = self._reader.load(self._run_dir)
        attempt = max(head.attempt for head in headers.values())
        run.heads = [
            head  # tails are of ranks of other nodes
            for head in run.heads
            if head.header.attempt == attempt and not head.path.name.endswith(TAIL)
        ]
        snapshot = self._reader.snapshot(run, _WINDOW)
        data = encode(node_snapshot_of(snapshot))
        number = self._exchange.number
        self._requests.perform(_ASK_S, self._questions.answer(number, question, data))
        self._question = question
        return True

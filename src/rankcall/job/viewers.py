"""Answer the viewers of the live page on other nodes, through the job's store.

The page of a node asks its leader by a file (``rankcall.run.views``). The leader asks all other
nodes at once, by one request, and reads what they have answered so far. A node that notices a
question looks for the next one in each of its turns, until none has come for ``LINGER_S``
seconds. Without a viewer, the store gets no request for this.

Keys, below the same prefix: ``view/asked``, the number of the last question;
``view/answer/<number>``, the newest answer of the node with that number, after the number of the
question. The first question rings ``bell``, which all nodes poll seldom.

An answer replaces the one before, so keys do not pile up. No node waits for another one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rankcall.analysis.node_snapshot import encode, node_snapshot_of
from rankcall.analysis.run_reader import RunReader
from rankcall.c10d.requests import (
    Add,
    Now,
    Read,
    ReadMany,
    Set,
    Steps,
)
from rankcall.job.counts import most_entries, newest_entries
from rankcall.job.other_nodes import (
    ASKED,
    BELL,
    Exchange,
    Unreachable,
    Untrusted,
    members_from,
)
from rankcall.ring.layout import Header
from rankcall.run.views import Answers, Member, NodeAnswer, ViewerFile
from rankcall.whole_numbers import whole_number

logger = logging.getLogger("rankcall.watch")

PAUSES_S = 1.0, 5.0  # between two questions or answers: bounds
LINGER_S = 30.0
_SHARE = 0.002  # of one core of the leader's rank, for its answers
_ASK_S = 2.0  # for all requests of a turn: hangs are judged on the same thread
_NEWEST, _WINDOW = 128, 64  # records read of each ring; calls sent of each rank
_MOST_BYTES_OF_RANK = 1 << 20  # of an answer, compressed
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

    def ask(self, mine: Collection[int], world_size: int) -> Steps[tuple[NodeAnswer, ...]]:
        """Ask all other nodes; return their newest answers, which may be to earlier questions.

        Args:
            mine: The ranks of this node, which is not asked.
            world_size: The number of ranks of the job.
        """
        now = yield Now()
        question = yield Add(self._key(ASKED), 1)
        if now - self._asked_at > LINGER_S / 2:
            yield Add(self._key(BELL), 1)
            self._began, self._first = now, question
        self._asked_at = now
        yield from self._learn_nodes(world_size)
        numbers = self._others(mine)
        for at in range(0, len(numbers), _CHUNK):
            part = numbers[at : at + _CHUNK]
            raws = yield ReadMany([self._key(_answer_of(number)) for number in part])
            now = yield Now()
            for number, raw in zip(part, raws, strict=True):
                if raw is None or len(raw) > _MOST_BYTES_OF_RANK * len(self._nodes[number]):
                    continue
                if self._answered.get(number, (b"", 0.0))[0] != raw:
                    self._answered[number] = raw, now
        return tuple(self._newest(number, now) for number in numbers)

    def _newest(self, number: int, now: float) -> NodeAnswer:
        raw, since = self._answered.get(number, (b"", now))
        question, _, data = raw.partition(b"\n")
        asked_s = now - self._began
        answered = whole_number(question)
        if answered is None or answered < self._first:
            return NodeAnswer(self._nodes[number], 0.0, asked_s)
        return NodeAnswer(self._nodes[number], now - since, asked_s, data)

    def _learn_nodes(self, world_size: int) -> Steps[None]:
        """Read which ranks the nodes have that have registered since the last question."""
        new = newest_entries((yield Read(self._key("nodes"))), world_size, self._last_node)
        # A number whose node has not written is looked up again, up to as many as there can be.
        self._unread = [*self._unread, *new][-most_entries(world_size) :]
        self._last_node = max([self._last_node, *new[-1:]])
        for at in range(0, len(self._unread), _CHUNK):
            part = self._unread[at : at + _CHUNK]
            raws = yield ReadMany([self._key(f"node/{number}") for number in part])
            for number, raw in zip(part, raws, strict=True):
                if raw is not None:
                    self._nodes[number] = members_from(raw, world_size)
        self._unread = [number for number in self._unread if number not in self._nodes]
        newest = sorted(self._nodes)[-most_entries(world_size) :]
        self._nodes = {number: self._nodes[number] for number in newest}
        self._answered = {n: known for n, known in self._answered.items() if n in self._nodes}

    def _others(self, mine: Collection[int]) -> list[int]:
        """Return the numbers of the other nodes: of each rank, the last one that counts it."""
        owner = {rank: n for n in sorted(self._nodes) for rank, _, _ in self._nodes[n]}
        return sorted({number for rank, number in owner.items() if rank not in mine})

    def question(self) -> Steps[int]:
        """Return the number of the last question."""
        return whole_number((yield Read(self._key(ASKED)))) or 0

    def answer(self, number: int, question: int, data: bytes) -> Steps[None]:
        """Publish the answer of the node ``number`` to a question."""
        yield Set(self._key(_answer_of(number)), b"%d\n" % question + data)

    def _key(self, name: str) -> str:
        return self._prefix + name


def _answer_of(number: int) -> str:
    return f"view/answer/{number}"


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
            world_size = max(head.world_size for head in headers.values())
            steps = self._questions.ask(headers, world_size)
            self._nodes = self._requests.perform(_ASK_S, steps)
            self._asked_ns = time.monotonic_ns()
        except Untrusted as error:
            problem = f"the job's store is not trusted ({error})"
            self._asked_ns = self._asked_ns or time.monotonic_ns()
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
        attempt = max(head.attempt for head in headers.values())
        run = self._reader.load(self._run_dir).only(attempt, tails_of=())
        snapshot = self._reader.snapshot(run, _WINDOW)
        data = encode(node_snapshot_of(snapshot))
        number = self._exchange.number
        self._requests.perform(_ASK_S, self._questions.answer(number, question, data))
        self._question = question
        return True

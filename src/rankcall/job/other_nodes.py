"""Agree with the other nodes on one verdict, and answer the viewers of their live pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from rankcall.analysis.node_snapshot import NodeSnapshot, decode, encode, merge, node_snapshot_of
from rankcall.analysis.snapshot import RankState, Snapshot, no_calls
from rankcall.c10d.requests import (
    Add,
    Check,
    CompareSet,
    Delete,
    Now,
    Read,
    Set,
    Sleep,
    Steps,
)
from rankcall.job.counts import checked_count, most_entries, newest_entries
from rankcall.job.sealing import ForgedError, sealed
from rankcall.packed_json import pack, unpack
from rankcall.run.views import Member
from rankcall.whole_numbers import LARGEST, whole_number

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
_MOST_HOST = 255  # characters of a host's name
_MOST_MEMBER = 2048  # bytes of what a node registers of a rank: JSON writes 6 for some characters
_POLL_S = 0.05
BELL, ASKED = "bell", "view/asked"
_POLL_RANK_S = 0.00005  # and for each rank of the world, to limit the polls of all nodes together


class Agreed(NamedTuple):
    """The result of a round. If ``by_me``, this rank judged, and so it prints the verdict."""

    verdict: bytes
    by_me: bool


class Unreachable(Exception):
    """The store does not answer."""


class Untrusted(Unreachable):
    """The store holds a value that no rank of this job can have written."""


class Exchange:
    """One node's side of the rounds. ``job_store`` returns None while there is no store.

    No reference to the store is kept. ``rankcall.c10d`` makes the requests over a connection of
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

        That is no evidence of a hang: any process that reaches the store can open a round. Raises
        ``Unreachable`` like ``agree``.
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
        Raises ``Unreachable`` if the store is gone or silent, and ``Untrusted`` if a value in it is
        not sealed as this job's are, or is impossible.
        """
        self.perform(_PROBE_S, self._latest())
        limit_s = self._settle_s + _JUDGES * _turn_s(world_size)
        return self.perform(limit_s, self.steps(mine, world_size, judge))

    def perform(self, limit_s: float, steps: Steps[T]) -> T:
        """Make requests to the job's store. Raises ``Unreachable`` like ``agree``."""
        from rankcall.c10d.client import perform  # here: the launcher imports this without torch

        if time.monotonic() < self._lost_until:
            raise Unreachable("the store did not answer a moment ago")
        try:
            store = self._job_store()
            if store is not None:
                return perform(store, limit_s, sealed(steps))
        except ForgedError as error:
            raise Untrusted(str(error)) from error
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
            self.question = whole_number((yield Read(self._key(ASKED)))) or 0
            self._rung = rung
        return self._is_open

    def steps(self, mine: Snapshot, world_size: int, judge: JudgeAll) -> Steps[Agreed]:
        """Do as ``agree`` does, as requests (``rankcall.c10d.requests``)."""
        own = node_snapshot_of(mine)
        while True:
            number = (yield from self._latest()) + 1
            proposed, raw = yield from self._one_round(number, own, world_size, judge)
            # The first node that gets here ends the round. If a later round is over as well, this
            # verdict may be one that was published after the round's own had been removed.
            last = b"%d" % number
            held = yield CompareSet(self._key("latest"), _before(number), last)
            if held == last:
                verdict = self._verdict_in(number, raw, world_size)
                if verdict == proposed and number > 2:
                    yield from self._remove(number - 2, world_size)
                return Agreed(verdict, verdict == proposed)
            yield from self._remove(number, world_size)
            # Another node has ended a later round, or else another process writes there: then to
            # start over would never end.
            if (whole_number(held) or 0) <= number:
                raise ForgedError(f"{self._key('latest')} is not the number of a round")

    def _one_round(
        self, number: int, own: NodeSnapshot, world_size: int, judge: JudgeAll
    ) -> Steps[tuple[bytes | None, bytes]]:
        """Return what this node proposed, if it judged, and the verdict of the round, packed."""
        from rankcall.c10d.parts import publish_once

        posts = self._key(f"{number}/posts")
        post = checked_count(posts, (yield Add(posts, 1)), most_entries(world_size))
        yield Add(self._key(BELL), 1)
        yield Set(self._key(f"{number}/post/{post}"), encode(own))
        heard, settled = {post: own}, (yield Now()) + self._settle_s
        if post == 1:
            while not _covered(heard, world_size) and (yield Now()) < settled:
                yield Sleep(_POLL_S)
                yield from self._hear(number, heard, world_size)
        turn = settled + (post - 1) * _turn_s(world_size) if post > 1 else 0.0
        verdict = self._key(f"{number}/verdict")
        while (raw := (yield Read(verdict))) is None:
            if (yield Now()) >= turn:
                yield from self._hear(number, heard, world_size)
                known = yield from self._with_unheard(merge(list(heard.values())))
                before = yield Read(self._key(f"{number - 1}/verdict"))
                earlier = self._verdict_in(number - 1, before, world_size) if before else b""
                proposed = judge(known, earlier)
                return proposed, (yield from publish_once(verdict, pack(proposed)))
            yield Sleep(max(_POLL_S, _POLL_RANK_S * world_size))
        return None, raw

    def _latest(self) -> Steps[int]:
        return self._count("latest", LARGEST - 1)

    def _count(self, name: str, most: int) -> Steps[int]:
        """Return a counter, 0 if there is none. Raises ``ForgedError``."""
        raw = yield Read(self._key(name))
        return 0 if raw is None else checked_count(self._key(name), whole_number(raw), most)

    def _posts(self, number: int, world_size: int) -> Steps[int]:
        return self._count(f"{number}/posts", most_entries(world_size))

    def _verdict_in(self, number: int, raw: bytes, world_size: int) -> bytes:
        """Return the verdict of a round. Raises ``ForgedError``."""
        try:
            return unpack(raw, world_size)
        except ValueError as error:
            raise ForgedError(f"{self._key(f'{number}/verdict')} is {error}") from error

    def _hear(self, number: int, heard: dict[int, NodeSnapshot], world_size: int) -> Steps[None]:
        """Read the summaries that were posted since the last call."""
        posts = yield from self._posts(number, world_size)
        fresh = [post for post in range(1, posts + 1) if post not in heard]
        for post in fresh:
            summary = yield Read(self._key(f"{number}/post/{post}"))
            if summary is not None:
                try:
                    heard[post] = decode(summary, world_size)
                except ValueError:
                    heard[post] = NodeSnapshot(0, [], no_calls())

    def _remove(self, number: int, world_size: int) -> Steps[None]:
        """Remove the keys of a round, so that a long job does not fill the store."""
        posts = yield from self._posts(number, world_size)
        names = [f"post/{post}" for post in range(1, posts + 1)] + ["verdict", "posts"]
        for name in names:
            yield Delete(self._key(f"{number}/{name}"))

    def _with_unheard(self, snapshot: Snapshot) -> Steps[Snapshot]:
        """Mark the ranks that did not answer, with the host and pid that they registered."""
        silent = {state.rank for state in snapshot.ranks if state.blind and state.exit is None}
        places: dict[int, tuple[str, int]] = {}
        world_size = len(snapshot.ranks)
        nodes = (yield Read(self._key("nodes"))) if silent else None
        for number in reversed(newest_entries(nodes, world_size)):
            if silent <= places.keys():
                break
            raw = yield Read(self._key(f"node/{number}"))
            for rank, host, pid in members_from(raw, world_size):
                places.setdefault(rank, (host, pid))
        ranks = [
            RankState(state.rank, *places.get(state.rank, ("", 0)), blind=True, unheard=True)
            if state.rank in silent
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


def members_from(raw: bytes | None, world_size: int) -> tuple[Member, ...]:
    """Return the ranks that a node has registered; none if these cannot be ranks of the job."""
    if raw is None or len(raw) > _MOST_MEMBER * (1 + max(0, world_size)):
        return ()
    try:
        members = tuple((rank, host, pid) for rank, host, pid in json.loads(raw))
    except (ValueError, TypeError, RecursionError):
        return ()
    sound = all(
        type(rank) is int
        and 0 <= rank < world_size
        and isinstance(host, str)
        and len(host) <= _MOST_HOST
        and type(pid) is int
        and 0 <= pid < 1 << 32
        for rank, host, pid in members
    )
    return members if sound and len({rank for rank, _, _ in members}) == len(members) else ()


def _covered(heard: dict[int, NodeSnapshot], world_size: int) -> bool:
    return len({state.rank for part in heard.values() for state in part.ranks}) >= world_size > 0

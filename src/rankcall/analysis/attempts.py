"""When each attempt of a job worked, and how it ended, as torchrun's agents noted it.

Each node has an agent with a file of its own, and a launcher that is started again has another one.
None of them knows all: the node that failed knows why, another one when its own workers were gone,
and an agent that was killed noted no end. ``merged`` puts together what they say of one attempt.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from rankcall.run.recoveries import (
    FOLLOWS,
    JOINED,
    AttemptEnd,
    AttemptResumed,
    Recoveries,
    read_recoveries,
)


@dataclass(frozen=True)
class Noted:
    """What the nodes noted of one attempt, together. Times are in ns since the epoch.

    Attributes:
        restart: torchrun's count of restarts when it was started.
        began_ns: When the first workers were started; 0: no node noted it.
        end: How it ended, as the node says that decided what followed; None: no node noted an end.
            Its times are those of all nodes: when the first worker ended, when the last was gone.
        resumed: When it was at work again; None: no node noted that.
    """

    restart: int
    began_ns: int
    end: AttemptEnd | None = None
    resumed: AttemptResumed | None = None


@dataclass(frozen=True)
class Attempt:
    """One attempt of a job. Times are in ns since the epoch.

    It worked from ``began_ns`` to ``worked_until_ns``, after which nothing went on until the next
    one began. ``end`` says why; without one, it goes on, has ended well, or its launcher was killed
    before it could note anything.
    """

    restart: int
    began_ns: int
    worked_until_ns: int
    end: AttemptEnd | None = None


@dataclass(frozen=True)
class Attempts:
    """The attempts of a job, oldest first, and until when the line of time goes."""

    attempts: Sequence[Attempt] = ()
    until_ns: int = 0

    @property
    def began_ns(self) -> int:
        """When the job began; 0 without attempts."""
        return self.attempts[0].began_ns if self.attempts else 0

    @property
    def downs_ns(self) -> Sequence[tuple[int, int]]:
        """From when to when nothing went on, in order."""
        begins = [attempt.began_ns for attempt in self.attempts[1:]] + [self.until_ns]
        times = zip((attempt.worked_until_ns for attempt in self.attempts), begins, strict=True)
        return [(begin, end) for begin, end in times if begin < end]

    def down_shares(self, parts: int) -> list[float]:
        """Cut the line of time into equal parts; return the share of each in which nothing went on.

        There is one part at least, and none if the line has no length.
        """
        length = self.until_ns - self.began_ns
        if length <= 0:
            return []
        edges = [length * part // parts for part in range(parts + 1)]
        down_ns = [0] * parts
        for begin, end in self.downs_ns:
            begin, end = begin - self.began_ns, end - self.began_ns
            # Only the parts that it touches: a hostile file can have thousands of attempts.
            for part in range(bisect(edges, begin) - 1, bisect_left(edges, end)):
                down_ns[part] += min(end, edges[part + 1]) - max(begin, edges[part])
        lengths = [until - since for since, until in pairwise(edges)]
        return [down / max(1, whole) for down, whole in zip(down_ns, lengths, strict=True)]


def attempts_of(run_dir: Path, until_ns: int) -> Attempts:
    """Return the attempts of a job that was started with ``--on-hang recover``; else none.

    Args:
        run_dir: The run directory.
        until_ns: The last sign of life of the job, or now if it runs.
    """
    return on_one_line(merged(read_recoveries(run_dir)), until_ns)


def on_one_line(noted: Iterable[Noted], until_ns: int) -> Attempts:
    """Return when each attempt worked; those of which no node noted the start are left out."""
    known = [attempt for attempt in noted if attempt.began_ns]
    if not known:
        return Attempts()
    until_ns = max(until_ns, *map(_last_ns, known))
    begins = [attempt.began_ns for attempt in known[1:]] + [until_ns]
    attempts = []
    for attempt, next_ns in zip(known, begins, strict=True):
        end = attempt.end
        fault_ns = next_ns if end is None else end.fault_ns or end.noticed_ns
        worked_until_ns = min(max(attempt.began_ns, fault_ns), next_ns)
        attempts.append(Attempt(attempt.restart, attempt.began_ns, worked_until_ns, end))
    return Attempts(attempts, until_ns)


def merged(agents: Sequence[Recoveries]) -> list[Noted]:
    """Return the attempts that agents noted, each once, oldest first.

    Agents of one job number an attempt alike, by the round of the rendezvous. Those without a
    rendezvous that all nodes share may note the same attempts by other numbers, so those of them
    that ran beside another one are left out.
    """
    accounts: dict[tuple[str, int], list[_Account]] = {}
    for agent in _one_after_the_other(agents):
        for account in agent:
            accounts.setdefault((account.job, account.restart), []).append(account)
    noted = [_together(of_one) for of_one in accounts.values()]
    return sorted(noted, key=_first_ns)


class _Account(NamedTuple):
    """What one agent noted of one attempt; ``began_ns`` is 0 if that line is gone."""

    job: str
    restart: int
    began_ns: int
    end: AttemptEnd | None
    resumed: Sequence[AttemptResumed] = ()


def _one_after_the_other(agents: Sequence[Recoveries]) -> Iterator[list[_Account]]:
    until_ns = 0
    for agent in agents:  # that with the earliest event first
        accounts = list(_accounts(agent))
        begins = [account.began_ns for account in accounts if account.began_ns]
        is_shared = any(start.job for start in agent.starts)
        if begins and not is_shared and begins[0] < until_ns:
            continue
        yield accounts
        if begins:
            until_ns = max(until_ns, *map(_last_ns, accounts))


def _accounts(agent: Recoveries) -> Iterator[_Account]:
    starts = sorted(agent.starts, key=lambda start: start.epoch_ns)
    ends = sorted(agent.ends, key=lambda end: end.noticed_ns)
    resumed = sorted(agent.resumed, key=lambda event: event.call_ns)
    begins = [start.epoch_ns for start in starts] + [1 << 63]
    noticed, called = [end.noticed_ns for end in ends], [event.call_ns for event in resumed]
    own = str(agent.path)
    # The first line of a long file may be gone, so an end can be known without its start.
    for orphan in ends[: bisect_left(noticed, begins[0])]:
        if orphan.decision != "stop":  # or the launcher noted how its job ended, without a start
            yield _Account(starts[0].job or own if starts else own, orphan.restart, 0, orphan)
    for start, next_ns in zip(starts, begins[1:], strict=True):
        first = bisect_left(noticed, start.epoch_ns)
        end = ends[first] if first < len(ends) and noticed[first] < next_ns else None
        events = resumed[bisect_left(called, start.epoch_ns) : bisect_left(called, next_ns)]
        yield _Account(start.job or own, start.restart, start.epoch_ns, end, events)


def _together(accounts: Sequence[_Account]) -> Noted:
    ends = [account.end for account in accounts if account.end is not None]
    events = [event for account in accounts for event in account.resumed]
    resumed = None
    if events:
        resumed = AttemptResumed(
            accounts[0].restart,
            call_ns=_first(event.call_ns for event in events),
            step_ns=_first(event.step_ns for event in events),
            caught_up_ns=_first(event.caught_up_ns for event in events),
        )
    began_ns = _first(account.began_ns for account in accounts)
    return Noted(accounts[0].restart, began_ns, _one_end(ends) if ends else None, resumed)


def _one_end(ends: Sequence[AttemptEnd]) -> AttemptEnd:
    """Return the end as the node that decided tells it, with what only other nodes know."""
    said = min(ends, key=_authority)
    lost = max(ends, key=lambda end: end.lost)  # the node with the rank that saves knows
    return replace(
        said,
        step=max(end.step for end in ends) if said.step < 0 else said.step,
        steps=lost.steps if lost.lost >= 0 else said.steps,
        lost=lost.lost,
        verdict_ns=_first(end.verdict_ns for end in ends),
        ended_ns=_first(end.ended_ns for end in ends),
        noticed_ns=_first(end.noticed_ns for end in ends),
        stopped_ns=max(end.stopped_ns for end in ends),
    )


def _authority(end: AttemptEnd) -> tuple[bool, bool, int]:
    """Return what sorts the node first that knows best why an attempt ended.

    A node none of whose workers failed only follows. Of the others, one with a verdict of all nodes
    knows more than one that has its own records only; what failed first is the likelier cause.
    """
    return end.rule in (FOLLOWS, JOINED), not end.verdict_ns, end.ended_ns or end.noticed_ns


def _first(times: Iterable[int]) -> int:
    """Return the first of the moments that are known; 0 if none is."""
    return min(filter(None, times), default=0)


def _first_ns(attempt: Noted) -> int:
    return attempt.began_ns or (attempt.end.noticed_ns if attempt.end is not None else 0)


def _last_ns(attempt: Noted | _Account) -> int:
    return max(attempt.began_ns, attempt.end.stopped_ns if attempt.end is not None else 0)

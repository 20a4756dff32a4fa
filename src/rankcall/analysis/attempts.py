"""When each attempt of a job worked, and how it ended, as torchrun's agents noted it."""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rankcall.run.recoveries import AttemptEnd, AttemptStart, Recoveries, read_recoveries


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
    events = [pair for agent in _one_after_the_other(read_recoveries(run_dir)) for pair in agent]
    if not events:
        return Attempts()
    until_ns = max(until_ns, *(_last_ns(*event) for event in events))
    begins = [start.epoch_ns for start, _ in events[1:]] + [until_ns]
    attempts = []
    for (start, end), next_ns in zip(events, begins, strict=True):
        fault_ns = next_ns if end is None else end.fault_ns or end.noticed_ns
        worked_until_ns = min(max(start.epoch_ns, fault_ns), next_ns)
        attempts.append(Attempt(start.restart, start.epoch_ns, worked_until_ns, end))
    return Attempts(attempts, until_ns)


_Event = tuple[AttemptStart, AttemptEnd | None]


def _one_after_the_other(agents: Sequence[Recoveries]) -> list[list[_Event]]:
    """Return the starts with their ends of agents that followed each other, in order.

    Each node has an agent, and they note the same attempts: those that ran beside one that is taken
    are left out. A launcher that is started again has a new one.
    """
    taken: list[list[_Event]] = []
    until_ns = 0
    for agent in agents:
        events = _paired(agent)
        if events and events[0][0].epoch_ns >= until_ns:
            taken.append(events)
            until_ns = max(_last_ns(*event) for event in events)
    return taken


def _paired(agent: Recoveries) -> list[_Event]:
    starts = sorted(agent.starts, key=lambda start: start.epoch_ns)
    begins = [start.epoch_ns for start in starts[1:]] + [1 << 63]
    ends = sorted(agent.ends, key=lambda end: end.noticed_ns)
    noticed = [end.noticed_ns for end in ends]
    pairs: list[_Event] = []
    for start, next_ns in zip(starts, begins, strict=False):  # an agent may have noted no start
        index = bisect_left(noticed, start.epoch_ns)
        pairs.append(
            (start, ends[index] if index < len(ends) and noticed[index] < next_ns else None)
        )
    return pairs


def _last_ns(start: AttemptStart, end: AttemptEnd | None) -> int:
    return max(start.epoch_ns, end.stopped_ns if end is not None else 0)

"""One look serves all viewers: the newest look, and what has changed on the page since.

A look is made if somebody asks and the newest one is too old. All who ask meanwhile get its
result, so 200 viewers cost one look, and an unseen page costs none. A look runs on a thread; if
it takes too long, for example because a network file system hangs, viewers get the last one with
a note.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rankcall.serve.history import History
from rankcall.serve.live_run import LOST, WAITING, LiveRun, Look
from rankcall.serve.view import ranks, sections

LOOK_S = 20.0  # a look that takes longer is not waited for
_LEAST_PAUSE_S = 1.0  # between two looks; a person does not read faster
_SHARE = 0.2  # of one core, for all looks together
_MOST_FOLDED = 16  # versions of one look: a viewer can ask for any text


@dataclass(frozen=True)
class Update:
    """A look with the page's sections as HTML. ``number`` counts the looks, from 1."""

    number: int
    look: Look
    sections: Mapping[str, str]
    digests: Mapping[str, str]
    _events: dict[tuple[str, ...], bytes] = field(default_factory=dict, repr=False)
    _folded: dict[str, Update] = field(default_factory=dict, repr=False)

    def event(self, known: Mapping[str, str]) -> bytes:
        """Return a server-sent event with the sections that differ from the known digests.

        Viewers that know the same sections share one event.
        """
        changed = tuple(name for name, digest in self.digests.items() if known.get(name) != digest)
        if changed not in self._events:
            body = json.dumps({name: self.sections[name] for name in changed})
            self._events[changed] = f"id: {self.number}\ndata: {body}\n\n".encode()
        return self._events[changed]

    def folded(self, by: str) -> Update:
        """Return the same look with the ranks in the rows of a fold; equal viewers share it."""
        if by not in self._folded:
            if len(self._folded) >= _MOST_FOLDED:
                return self
            parts = {**self.sections, "ranks": ranks(self.look, by)}
            self._folded[by] = replace(
                self, sections=parts, digests=_digests(parts), _events={}, _folded={}
            )
        return self._folded[by]


class SharedLook:
    """The newest look at a run, for all viewers. It belongs to one event loop."""

    def __init__(self, run: LiveRun, clock: Callable[[], float] = time.monotonic) -> None:
        self.run = run
        self.history = History()
        self._clock = clock
        self._newest: Update | None = None
        self._fresh_until = 0.0
        self._task: asyncio.Task[Update] | None = None
        self._folding = asyncio.Lock()

    @property
    def pause(self) -> float:
        """Seconds between two looks: longer if a look costs more."""
        cost = self._newest.look.reading_cpu_s if self._newest else 0.0
        return max(_LEAST_PAUSE_S, cost / _SHARE)

    async def newest(self) -> Update:
        """Return a look that is not too old."""
        if self._newest is not None and self._clock() < self._fresh_until:
            return self._newest
        if self._task is None:
            self._task = asyncio.create_task(self._look())
            self._task.add_done_callback(self._done)
        done, _ = await asyncio.wait({self._task}, timeout=LOOK_S)
        if done:
            return next(iter(done)).result()
        return self._late()

    async def folded(self, by: str) -> Update:
        """Return a look that is not too old, with the ranks by host, or in the rows of a fold."""
        update = await self.newest()
        if not by:
            return update
        async with self._folding:
            return await asyncio.to_thread(update.folded, by)

    def forget(self) -> None:
        """Make the next viewer look again, for example because there are new stacks."""
        self._fresh_until = 0.0

    async def _look(self) -> Update:
        return await asyncio.to_thread(self._make)

    def _make(self) -> Update:
        look = self.run.look()
        self.history.add(look.run, look.epoch_s, look.figures)
        parts = sections(look, self.history)
        number = self._newest.number + 1 if self._newest else 1
        return Update(number, look, parts, _digests(parts))

    def _done(self, task: asyncio.Task[Update]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is None:
            self._newest = task.result()
            self._fresh_until = self._clock() + self.pause

    def _late(self) -> Update:
        """Return the last look with a note that the run's files do not answer."""
        problem = f"the run's files have not answered for {LOOK_S:.0f} s, or are still being read"
        if self._newest is None:
            look = Look(WAITING, time.time(), str(self.run.path or ""), problem=problem)
        else:
            look = replace(self._newest.look, state=LOST, problem=problem)
        parts = sections(look, self.history)
        return Update(0, look, parts, _digests(parts))


def _digests(parts: Mapping[str, str]) -> dict[str, str]:
    return {
        name: hashlib.blake2b(html.encode("utf-8", "replace"), digest_size=12).hexdigest()
        for name, html in parts.items()
    }

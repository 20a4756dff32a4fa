"""The protocol: arrive, wait for all, and know at any moment who is missing.

docs/design/store.md has the state machine and why it is right. In short: a rank arrives by one
``add``; whoever sees the last word full sets the key that all wait on; at its deadline any rank
reads the words, so that it needs nobody's help to name who is missing, and lets all pass where
nobody is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import Store

from rankcall.errors import WorldMismatch
from rankcall.store import _messages, _roster, _words
from rankcall.store._keys import Keys, keys_of
from rankcall.store._link import Link
from rankcall.store._member import Call, Member, drop, hold
from rankcall.store._removal import remove
from rankcall.store._roster import Claim, Roster

__all__ = ["Meeting", "View", "meeting"]

_AGAIN_S = 0.01
_SETTLE_S = 1.0
_LARGEST_COPY = 4 << 20  # a TCPStore refuses values above 8 MiB
_COPY, _LARGE = b"=", b"@"  # the data follows; or it stays where it was handed in


@dataclass(frozen=True)
class View:
    """Who is here at one moment."""

    missing: Sequence[int]
    roster: Roster

    @property
    def complete(self) -> bool:
        """Whether all have arrived, beyond doubt."""
        return not self.roster.twice and not self.missing


class Meeting:
    """One rank's way through one generation. ``deadline`` is monotonic seconds."""

    def __init__(
        self,
        link: Link,
        keys: Keys,
        rank: int,
        member: Member,
        call: Call,
        deadline: float,
        data: bool = False,
    ) -> None:
        self.keys = keys
        self.rank = rank
        self.over = False
        self._link = link
        self.member = member
        self._call = call
        self._deadline = deadline
        self._data = data
        self._passed: bytes | None = None  # what all handed in, once this rank has let all pass

    def arrive(self, data: bytes | None = None) -> None:
        """Say once that this rank is here; let all pass if it is the last."""
        member, link = self.member, self._link
        if member.arrived:
            return  # a retry: the arrival stands
        if data is not None:
            if not member.claimed:
                self._put(arriving=False)  # nothing is handed in by a process that is turned away
            link.append(self.keys.data(member.generation), data)
        self.arrived(self._put(arriving=True))

    def arrived(self, value: int) -> None:
        """Let all pass if this rank, whose arrival made its word this value, is the last."""
        size, generation = self.keys.world_size, self.member.generation
        word, _ = _words.place(self.rank)
        if _words.disturbed(value, word, size, generation):
            self._settle(word)
        elif _words.full(value, word, size, generation):
            self._word_full()

    def _put(self, arriving: bool) -> int:
        """Add this rank's claim, if it is the first time, and its arrival to its word."""
        member, link = self.member, self._link
        word, _ = _words.place(self.rank)
        while True:
            delta = _words.arrival(self.rank, member.generation) if arriving else 0
            if not member.claimed:
                link.append(self.keys.roster, member.claim.line())  # twice counts once
                delta += _words.claim(self.rank)
            before, member.unsure = member.unsure, True
            value = link.add(self.keys.words[word], delta)
            member.unsure = False
            fits = self._fits(value - delta)
            if not fits:
                value = self._take_back(word, delta)
            if fits or before:  # the place is taken by this process, which had no answer
                member.claimed = True
                member.arrived = arriving
                return value
            self._pause()

    def _fits(self, before: int) -> bool:
        """Whether the rank's place was free."""
        if not self.member.claimed and _words.is_claimed(before, self.rank):
            return False
        return not _words.was_in(before, self.rank, self.member.generation)

    def _take_back(self, word: int, delta: int) -> int:
        """Undo an addition that did not fit; raise where another process is this rank."""
        member, link = self.member, self._link
        value = link.add(self.keys.words[word], -delta)
        if member.claimed:
            return value
        claims, _ = _roster.parse(link.read_log(self.keys.roster))
        mine = member.claim
        others = [
            one
            for one in claims
            if (one.rank, one.world_size) == (mine.rank, mine.world_size) and one != mine
        ]
        if others:
            link.append(self.keys.roster, mine.line("!"))
            member.claim = _roster.new_claim(mine.rank, mine.world_size)
            raise _messages.claimed_twice(self.keys, [*others, mine])
        return value

    def _pause(self) -> None:
        """Give way: nobody else is this rank, the word is out of order for another one's sake."""
        if time.monotonic() > self._deadline:
            raise WorldMismatch(
                f"{self.keys.prefix!r}: the place of rank {self.rank} of {self.keys.world_size} "
                "stays taken, by a process that has not signed for it. Use another key_prefix"
            )
        time.sleep(_AGAIN_S)

    def _settle(self, word: int) -> None:
        """Wait until a process that claimed a rank once more has taken it back; look again."""
        until = min(self._deadline, time.monotonic() + _SETTLE_S)
        size, generation = self.keys.world_size, self.member.generation
        key = self.keys.words[word]
        while _words.disturbed(self._link.add(key, 0), word, size, generation):
            if time.monotonic() > until:
                return
            time.sleep(_AGAIN_S)
        if self.look().complete:
            self.rescue()

    def _word_full(self) -> None:
        words, generation = len(self.keys.words), self.member.generation
        if words > 1 and self._link.add(self.keys.count(generation), 1) < words:
            return
        # In the first generation a rank's number may have been claimed twice in ways that make
        # the words look full. From the second on, full words cannot lie: see _words.disturbed.
        if generation == 0:
            view = self.look()
            if view.roster.twice:
                raise _messages.claimed_twice(self.keys, view.roster.twice[0])
            if not view.complete:
                return
        self.release()

    def release(self) -> None:
        """Let all pass, being the last; remove what nobody needs any more.

        The last to arrive has no need to wait: what it saves pays for the clean-up.
        """
        link, keys, generation = self._link, self.keys, self.member.generation
        data, value, copied = b"", b"1", False
        if self._data:
            data = link.read_log(keys.data(generation))
            if not data:
                return  # somebody else has let all pass, and removed it
            copied = len(data) <= _LARGEST_COPY
            value = _COPY + data if copied else _LARGE
        link.set(keys.done(generation), value)
        self._passed = data
        if copied:
            link.delete_log(keys.data(generation))
        self._clean(large=self._data and not copied)

    def rescue(self) -> None:
        """Let all pass where whoever should have is gone, or was misled; any number may do it."""
        value = _LARGE if self._data else b"1"
        self._link.set_first(self.keys.done(self.member.generation), value.decode())
        self._clean(large=self._data)

    def _clean(self, large: bool) -> None:
        """All have arrived here, so all have left the generation before: remove its keys."""
        link, keys, generation = self._link, self.keys, self.member.generation
        if len(keys.words) > 1:
            link.delete(keys.count(generation))
        if generation == 0 and keys.attempt > 0:
            self._clean_attempt(keys.attempt - 1)
        if generation > 0:
            link.delete(keys.done(generation - 1))
            if self.member.large:
                link.delete_log(keys.data(generation - 1))
        self.member.large = large

    def _clean_attempt(self, attempt: int) -> None:
        """Remove what an attempt left whose processes the launcher has ended."""
        before = keys_of(self.keys.prefix, self.keys.kind, attempt, self.keys.world_size)
        if self._link.check([before.roster]):
            remove(self._link, self.keys.prefix, attempts_below=self.keys.attempt)

    def wait(self) -> bool:
        """Wait for the last; False where the deadline came first."""
        if self._passed is not None:
            return True
        return self._link.wait([self.keys.done(self.member.generation)], self._deadline)

    def wait_data(self, deadline: float) -> bytes | None:
        """Wait for the last and return what all handed in; None where the deadline came first."""
        if self._passed is not None:
            return self._passed
        generation = self.member.generation
        done, data = self.keys.done(generation), self.keys.data(generation)
        value = self._link.wait_get(done, deadline)
        if value is None:
            return None
        self.member.large = value[:1] == _LARGE
        if self.member.large:
            # Empty: the last one came to copying it after all, between these two reads.
            return self._link.read_log(data) or self._link.get(done)[1:]
        return value[1:]

    @property
    def passed(self) -> bool:
        """Whether this rank was the last, and has let all pass."""
        return self._passed is not None

    @property
    def generation(self) -> int:
        """Which use of the prefix this is, from 0."""
        return self.member.generation

    def leave(self) -> bool:
        """Be done with this generation, unless the call was given up: then the next one is."""
        self.over = True
        if self._call.finish():
            self.member.leave()
        return True

    def look(self) -> View:
        """See who is here."""
        size, generation = self.keys.world_size, self.member.generation
        log, words = self._link.snapshot(self.keys.roster, self.keys.words)
        return View(_words.missing(words, size, generation), _roster.read(log, size))

    def other_worlds(self, claims: Sequence[Claim]) -> list[Claim]:
        """Return the claims of those who wait just now in a world of another size."""
        sizes = {one.world_size for one in claims} - {self.keys.world_size}
        waiting = set()
        for size in sizes:
            words = self.keys.of_world(size).words
            _, values = self._link.snapshot(self.keys.roster, words)
            if _words.is_open(values, size):
                waiting.add(size)
        return [one for one in claims if one.world_size in waiting]


@contextmanager
def meeting(
    store: Store, link: Link, keys: Keys, rank: int, call: Call, until: float, data: bool = False
) -> Iterator[Meeting]:
    """Hold this process's part under the prefix until the call has left or failed."""
    member = hold(store, link, keys, rank, call, until)
    one = Meeting(link, keys, rank, member, call, until, data)
    try:
        yield one
    except BaseException:
        drop(member)
        raise
    if one.over:
        drop(member)

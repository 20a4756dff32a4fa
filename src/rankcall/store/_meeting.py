"""The protocol: arrive, wait for all, and know at any moment who is missing.

docs/design/store.md has the state machine and why it is right. In short: a rank arrives by one
``add``; whoever sees the last word full sets the key that all wait on; at its deadline any rank
reads the words, so that it needs nobody's help to name who is missing, and lets all pass where
nobody is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import Store

from rankcall.store import _messages, _words
from rankcall.store._claiming import AGAIN_S, put
from rankcall.store._keys import Keys, keys_of
from rankcall.store._link import Link
from rankcall.store._member import Call, Member, drop, hold
from rankcall.store._removal import remove
from rankcall.store._sizes import CALLED_OFF, agree, heed
from rankcall.store._view import View, look

__all__ = ["Meeting", "meeting"]

_SETTLE_S = 1.0
_LARGEST_COPY = 4 << 20  # a TCPStore refuses values above 8 MiB
_COPY, _LARGE = b"=", b"@"  # the data follows; or it stays where it was handed in


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
        what: str | None = None,
    ) -> None:
        self.keys = keys
        self.rank = rank
        self.over = False
        self._link = link
        self.member = member
        self._call = call
        self._deadline = deadline
        self._data = data
        self._what = what
        self._passed: bytes | None = None  # what all handed in, once this rank has let all pass

    def arrive(self, data: bytes | None = None) -> None:
        """Say once that this rank is here; let all pass if it is the last."""
        member, link = self.member, self._link
        if member.arrived:
            return  # a retry: the arrival stands
        if data is not None and not member.claimed:
            self._put(arriving=False)  # nothing is handed in by a process that is turned away
        if data is not None and not member.arrived:
            link.append(self.keys.data(member.generation), data)
        value = self._put(arriving=True)
        if value is not None:
            self.arrived(value)
        elif self.look().complete:
            self.rescue()  # the process that this one replaces was the last, and did not say so

    def _put(self, arriving: bool) -> int | None:
        return put(
            self._link, self.keys, self.rank, self.member, self._deadline, self._what, arriving
        )

    def arrived(self, value: int) -> None:
        """Let all pass if this rank, whose arrival made its word this value, is the last."""
        size, generation = self.keys.world_size, self.member.generation
        word, _ = _words.place(self.rank)
        if _words.disturbed(value, word, size, generation):
            self._settle(word)
        elif _words.full(value, word, size, generation):
            self._word_full()

    def _settle(self, word: int) -> None:
        """Wait until a process that claimed a rank once more has taken it back; look again."""
        until = min(self._deadline, time.monotonic() + _SETTLE_S)
        size, generation = self.keys.world_size, self.member.generation
        key = self.keys.words[word]
        while _words.disturbed(self._link.add(key, 0), word, size, generation):
            if time.monotonic() > until:
                return
            time.sleep(AGAIN_S)
        if self.look().complete:
            self.rescue()

    def _word_full(self) -> None:
        words, generation = len(self.keys.words), self.member.generation
        if words > 1 and self._link.add(self.keys.count(generation), 1) < words:
            return
        # In the first generation a rank's number may have been claimed twice in ways that make
        # the words look full. From the second on, full words cannot lie: see _words.disturbed.
        if generation > 0 or self._really_full():
            self.release()

    def _really_full(self) -> bool:
        until = min(self._deadline, time.monotonic() + _SETTLE_S)
        while (view := self.look()).roster.twice:  # until one of them has been turned away
            if time.monotonic() > until:
                raise _messages.claimed_twice(self.keys, view.roster.twice[0], self._what)
            time.sleep(AGAIN_S)
        return view.complete

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
        done, value = self.keys.done(self.member.generation), _LARGE if self._data else b"1"
        if self._link.set_first(done, value.decode()) == CALLED_OFF.decode():
            self._link.replace(done, CALLED_OFF.decode(), value.decode())
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
        if self._link.check([before.sizes]):
            remove(self._link, self.keys.prefix, attempts_below=self.keys.attempt)

    def wait(self) -> bool:
        """Wait for the last; False where the deadline came first."""
        if self._passed is not None:
            return True
        if self.member.generation == 0:
            return self._first(self._deadline) is not None
        return self._link.wait([self.keys.done(self.member.generation)], self._deadline)

    def _first(self, deadline: float) -> bytes | None:
        """Wait in the first generation, where another world's process may call it off."""
        link, member, keys = self._link, self.member, self.keys
        if not member.agreed:
            member.agreed = True
            agree(link, keys, member.claim, member.told, self._what)
        value = link.wait_get(keys.done(0), deadline)
        while value == CALLED_OFF:
            view = self.look()
            if view.complete:
                self.rescue()
            else:
                heed(link, keys, member.claim, view.roster.claims, member.told, self._what)
                if time.monotonic() >= deadline:
                    return None
                time.sleep(AGAIN_S)
            value = link.read(keys.done(0))
        return value

    def wait_data(self, deadline: float) -> bytes | None:
        """Wait for the last and return what all handed in; None where the deadline came first."""
        if self._passed is not None:
            return self._passed
        generation = self.member.generation
        done, data = self.keys.done(generation), self.keys.data(generation)
        if generation == 0:
            value = self._first(deadline)
        else:
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
        return look(self._link, self.keys, self.member.generation)


@contextmanager
def meeting(
    store: Store,
    link: Link,
    keys: Keys,
    rank: int,
    call: Call,
    until: float,
    data: bool = False,
    what: str | None = None,
) -> Iterator[Meeting]:
    """Hold this process's part under the prefix until the call has left or failed."""
    member = hold(store, link, keys, rank, call, until)
    one = Meeting(link, keys, rank, member, call, until, data, what)
    try:
        yield one
    except BaseException:
        drop(member)
        raise
    if one.over:
        drop(member)

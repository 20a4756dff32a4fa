"""The protocol: arrive, wait for all ranks, and know at the deadline which ranks are missing.

docs/design/store.md lists the keys and says why the promises hold. A rank arrives by adding to a
counter. The rank whose arrival fills the last counter sets the key that all wait for. At its
deadline any rank reads the counters itself, so it needs no other rank to name the missing.

This module makes no request. It yields them: see ``rankcall._requests``.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankcall._requests import (
    Add,
    Append,
    Check,
    CompareSet,
    Delete,
    ListKeys,
    Read,
    ReadMany,
    Set,
    Steps,
    Until,
    Wait,
    WaitRead,
)
from rankcall.store._keys import (
    BARRIER,
    CLEAN_UP,
    EXCHANGE,
    GET_ALL,
    MOST_ADDITIONS,
    Keys,
    arrival,
    arrivals,
    counter,
    is_claim,
    is_full,
    missing_ranks,
)

_LARGEST_COPY = 4 << 20  # a TCPStore refuses to set values above 8 MiB
_COPY, _ELSEWHERE = b"=", b"@"  # the data of all ranks follows, or is still where it was handed in
_FRAME = struct.Struct("<II")  # the rank, and how many bytes follow
_MOST_REJECTED = 8  # processes that the register lists
_CLAIMS_READ = 1_500_000  # by all ranks together: some 60 bytes each


class Claim(NamedTuple):
    """A process that says it is a rank. ``nonce`` is unique to it."""

    rank: int
    world_size: int
    nonce: str
    pid: int
    host: str

    @property
    def line(self) -> bytes:
        """The claim as the store has it."""
        return f"{self.rank}/{self.world_size} {self.nonce} {self.pid} {self.host}".encode()

    @classmethod
    def parse(cls, line: bytes) -> Claim:
        """Read a line back."""
        place, nonce, pid, host = line.decode("utf-8", "replace").split(" ", 3)
        rank, world_size = map(int, place.split("/"))
        return cls(rank, world_size, nonce, int(pid), host)


@dataclass
class Progress:
    """How far a process is with one kind of call under one prefix."""

    generation: int = 0
    additions: int = 0  # requests to arrive in this generation, answered or not
    has_arrived: bool = False
    is_settled: bool = False  # this rank's duties after its arrival are done
    frame: bytes | None = None  # the data that was handed in first
    has_signed_off: bool = False  # or has tried to
    leftovers: tuple[tuple[int, str], ...] = ()  # logs to remove two generations after their own

    def leave_behind(self, key: str) -> None:
        """Remember to remove a log of this generation when all ranks have left it."""
        if (self.generation, key) not in self.leftovers:
            self.leftovers += ((self.generation, key),)

    def advance(self) -> None:
        """Go on to the next generation."""
        self.generation += 1
        self.additions = 0
        self.has_arrived = self.is_settled = self.has_signed_off = False
        self.frame = None


@dataclass(eq=False)
class Member:
    """This process as one rank of one world under one prefix.

    ``siblings`` are the other members of this process by nonce, ``retired`` the nonces of members
    that have cleaned up.
    """

    claim: Claim
    siblings: MutableMapping[str, Member] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=deque)
    is_claimed: bool = False
    progress: dict[str, Progress] = field(default_factory=dict)
    removal: list[str] | None = None  # keys that this member has yet to remove

    def of_kind(self, kind: str) -> Progress:
        """Return the progress with one kind of call."""
        progress = self.progress.get(kind)
        return self.progress.setdefault(kind, Progress()) if progress is None else progress


class NotAllArrived(Exception):
    """The deadline came before all ranks. ``missing`` is complete unless ``named`` is false."""

    def __init__(
        self,
        missing: Sequence[int],
        *,
        hosts: Mapping[int, str] | None = None,
        rejected: Sequence[Claim] = (),
        named: bool = True,
    ) -> None:
        super().__init__(missing)
        self.missing = tuple(missing)
        self.hosts = dict(hosts or {})
        self.rejected = tuple(rejected)
        self.named = named


class WorldsDiffer(Exception):
    """Other processes wait in a world of another size."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        super().__init__(claims)
        self.claims = tuple(claims)


class RankTaken(Exception):
    """Another process is this rank."""

    def __init__(self, holder: Claim) -> None:
        super().__init__(holder)
        self.holder = holder


class SameProcess(Exception):
    """This process is this rank already, through another store object."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self.member = member


class CleanUpPending(Exception):
    """This rank has cleaned the prefix up, and others have not."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__(missing)
        self.missing = tuple(missing)


class Unconfirmed(Exception):
    """The answers to too many requests to arrive were lost."""


def claim_rank(keys: Keys, member: Member) -> Steps[None]:
    """Become the one process that is this rank, once for each use of the prefix."""
    if member.is_claimed:
        return
    key, line = keys.claim(member.claim.rank), member.claim.line
    held = yield CompareSet(key, b"", line)
    if held != line:
        holder = Claim.parse(held)
        if holder.nonce in member.retired:
            held = yield Until(CompareSet(key, b"", line), lambda value: bool(value == line))
            if held is None:
                words = yield ReadMany(keys.words(CLEAN_UP, 0))
                raise CleanUpPending(missing_ranks(words, keys.world_size, keys.ranks_per_word))
        elif holder.nonce in member.siblings:
            raise SameProcess(member.siblings[holder.nonce])
        else:
            yield from announce(keys, b"!" + line)
            raise RankTaken(holder)
    member.is_claimed = True


def announce(keys: Keys, entry: bytes) -> Steps[None]:
    """Add a line to the register, unless it is there or the register is full."""
    expected = b""
    while True:
        held = yield CompareSet(keys.register, expected, expected + entry + b"\n")
        if held is None:
            expected = b""
        elif entry in held.split(b"\n") or held.count(b"!") >= _MOST_REJECTED:
            return
        else:
            expected = held


class Round:
    """One rank's way through one generation of barriers or exchanges.

    ``data``, for an exchange, is what this rank hands in. ``release`` is the key that all wait for.
    """

    _blob: bytes | None = None  # the data of all ranks, if this rank has read it

    def __init__(self, keys: Keys, member: Member, kind: str, data: bytes | None = None) -> None:
        self._keys = keys
        self._member = member
        self._rank = member.claim.rank
        self._word, position = divmod(self._rank, keys.ranks_per_word)
        self._arrival = 1 << 2 * position  # what this rank adds to its word
        self._kind = kind
        self._progress = progress = member.of_kind(kind)
        self._number = number = progress.generation
        self.release = keys.release(kind, number)
        if kind == EXCHANGE:
            self._data = keys.data(number)
            if data is not None and progress.frame is None:
                progress.frame = frame(self._rank, data)

    def arrive(self) -> Steps[bool]:
        """Arrive unless this rank has; return whether this rank has let all ranks pass."""
        progress, keys = self._progress, self._keys
        if not self._member.is_claimed:
            yield from claim_rank(keys, self._member)
        if progress.is_settled:
            return False
        is_complete = False
        if progress.additions:
            is_complete = yield from self._arrive_again()
        else:
            value = yield from self._add()
            if value == self._arrival or value == keys.full_value(self._word):
                is_complete = yield from self._follow_up(value)
        if progress.leftovers:
            yield from remove_leftovers(self._keys, progress)
        progress.is_settled = True
        return is_complete

    def _add(self) -> Steps[int]:
        progress = self._progress
        if progress.additions >= MOST_ADDITIONS:
            raise Unconfirmed
        word = self._keys.word(self._kind, self._number, self._word)
        if progress.frame is not None:
            yield from hand_in(self._keys, self._data, self._rank, progress.frame)
        progress.additions += 1
        value: int = yield Add(word, self._arrival)
        progress.has_arrived = True
        return value

    def _arrive_again(self) -> Steps[bool]:
        """Arrive after an answer was lost: the arrival may be there already, or not."""
        keys, progress = self._keys, self._progress
        if not progress.has_arrived:
            value = counter((yield Read(keys.word(self._kind, self._number, self._word))))
            if not arrivals(value, self._rank, keys.ranks_per_word):
                value = yield from self._add()
                if arrivals(value, self._rank, keys.ranks_per_word) == 1:
                    return (yield from self._follow_up(value))
            progress.has_arrived = True
        # No other rank has the duties that follow from this arrival, so do all of them.
        words = yield ReadMany(keys.words(self._kind, self._number))
        is_complete = not missing_ranks(words, keys.world_size, keys.ranks_per_word)
        if is_complete:
            yield from self._let_pass()
            if self._kind == EXCHANGE and (yield Read(self.release))[:1] == _COPY:
                yield from remove_log(keys, self._data)
        yield from self._remove_as_first()
        value = counter(words[self._word])
        if is_full(value, self._word, keys.world_size, keys.ranks_per_word):
            yield from self._remove_as_last(of_all=is_complete)
        return is_complete

    def _follow_up(self, value: int) -> Steps[bool]:
        """Do the duties of the first and of the last rank of a word."""
        keys, is_complete = self._keys, False
        if is_full(value, self._word, keys.world_size, keys.ranks_per_word):
            is_complete = keys.word_count == 1 or keys.word_count == (
                yield Add(keys.full(self._kind, self._number), 1)
            )
            if is_complete:
                yield from self._complete()
            yield from self._remove_as_last(of_all=is_complete)
        if value == self._arrival and (self._word == 0 or self._number == 0):
            yield from self._remove_as_first()
        return is_complete

    def _complete(self) -> Steps[None]:
        """Let all pass, as the rank that arrived last."""
        keys = self._keys
        if self._kind == EXCHANGE:
            self._blob = blob = yield from read_log(keys, self._data)
            is_copied = len(blob) <= _LARGEST_COPY
            yield Set(self.release, _COPY + blob if is_copied else _ELSEWHERE)
            if is_copied:
                yield from remove_log(keys, self._data)
            else:
                self._progress.leave_behind(self._data)
        else:
            yield from self._let_pass()
        if self._number == 0 and keys.attempt > 0:
            # The launcher has ended the processes of earlier attempts: no process reads their keys.
            for key in keys.ours((yield ListKeys()), attempts_below=keys.attempt):
                yield Delete(key)

    def _let_pass(self) -> Steps[None]:
        """Let all pass; any rank that finds all arrived may, as the one that should may be gone."""
        if self._kind == EXCHANGE:
            yield CompareSet(self.release, b"", _ELSEWHERE)
        elif self._keys.appends:
            # Creates the counter, or changes nothing: a counter is read up to the first
            # character that is not a digit. Unlike adding 0, it needs no answer.
            yield Append(self.release, b"\n0")
        else:
            yield Add(self.release, 0)

    def _remove_as_first(self) -> Steps[None]:
        """Remove keys of the generation before last, as the first rank to arrive.

        This rank has passed the last generation. So all ranks had arrived there, and so all of them
        had left the one before.
        """
        if self._number == 0:
            yield from announce(self._keys, b"%d" % self._keys.world_size)
        elif self._number > 1 and self._kind == EXCHANGE:
            yield Delete(self._keys.release(EXCHANGE, self._number - 2))

    def _remove_as_last(self, of_all: bool) -> Steps[None]:
        """Remove counters of the last generation, as the last rank of a word to arrive.

        A rank that is still in the last generation does without them: see ``late``. And all ranks
        have left the generation before that, which counter 0 had released.
        """
        if self._number > 0:
            yield Delete(self._keys.word(self._kind, self._number - 1, self._word))
            if of_all and self._keys.word_count > 1:
                yield Delete(self._keys.full(self._kind, self._number - 1))

    def late(self) -> Steps[None]:
        """Return if all have arrived after all, at the deadline.

        Else raise ``NotAllArrived`` with the ranks that have not, or ``WorldsDiffer``.
        """
        keys, kind = self._keys, self._kind
        words = yield ReadMany(keys.words(kind, self._number))
        # In this order: if a counter has been removed, the release was set before, and it stays
        # until this rank has left.
        if (yield Check((self.release,))):
            return
        missing = missing_ranks(words, keys.world_size, keys.ranks_per_word)
        if not missing:
            yield from self._let_pass()
            yield from self._remove_as_last(of_all=True)
            return
        register = yield Read(keys.register)
        sizes, rejected = registered_sizes(register), _rejected(register)
        claims = yield from _waiting_elsewhere(keys, kind, sizes)
        if claims:
            absentees = set(missing)
            here = [rank for rank in range(keys.world_size) if rank not in absentees]
            raise WorldsDiffer([*(yield from _claims(keys, here)), *claims])
        hosts = {}
        if self._number > 0:  # a rank that has never been here has left no claim
            hosts = {claim.rank: claim.host for claim in (yield from _claims(keys, missing))}
        raise NotAllArrived(missing, hosts=hosts, rejected=rejected)

    def wait_data(self) -> Steps[bytes]:
        """Return the data of all ranks once all have arrived; raises as ``late``."""
        if self._blob is not None:
            return self._blob
        value = yield WaitRead(self.release)
        if value is None:
            yield from self.late()
            value = yield Read(self.release)
        if value[:1] == _ELSEWHERE:
            blob: bytes = yield from read_log(self._keys, self._data)
            # If the last rank copies the data after all, it then removes them here.
            value = yield Read(self.release)
            if value[:1] == _ELSEWHERE:
                self._progress.leave_behind(self._data)
                return blob
        return bytes(value[1:])

    def leave(self, host_rank: int) -> Steps[None]:
        """Sign off; on ``host_rank`` wait until all others have, for its process may end then.

        A rank that dies meanwhile does not matter to this rank's result: no error.
        """
        yield from sign_off(self._keys, self._kind, self._progress, self._rank, host_rank)


def meet(keys: Keys, member: Member, name_missing: bool = True) -> Steps[None]:
    """Go through a barrier."""
    this_round = Round(keys, member, BARRIER)
    if (yield from this_round.arrive()) or (yield Wait((this_round.release,))):
        return
    if not name_missing:
        raise NotAllArrived((), named=False)
    yield from this_round.late()


def exchange(keys: Keys, member: Member, data: bytes, host_rank: int) -> Steps[list[bytes]]:
    """Hand in data; return the data of all ranks."""
    this_round = Round(keys, member, EXCHANGE, data)
    yield from this_round.arrive()
    values = unframe((yield from this_round.wait_data()), keys.world_size)
    yield from this_round.leave(host_rank)
    return values


def gather(
    keys: Keys, member: Member, names: Sequence[str], host_rank: int
) -> Steps[tuple[list[bytes], tuple[int, ...]]]:
    """Wait for keys that the ranks set; return their values, and the ranks that have not read.

    Raises ``NotAllArrived`` with the ranks whose key is missing.
    """
    yield from claim_rank(keys, member)
    yield from remove_leftovers(keys, member.of_kind(GET_ALL))
    while True:
        if not (yield Wait(names)):
            missing = yield from absent(names)
            if missing:
                raise NotAllArrived(missing)
        values = yield ReadMany(names)
        if None not in values:
            break  # else somebody has removed a key in between
    progress = member.of_kind(GET_ALL)
    unread = yield from sign_off(keys, GET_ALL, progress, member.claim.rank, host_rank)
    return values, unread


def clean_up(keys: Keys, member: Member) -> Steps[bool]:
    """Say that this rank has no more use for the prefix; the last one removes all keys.

    Return False, having done nothing, if this member's clean-up is over already.

    Claims are removed last: until its own claim is gone no rank can use the prefix again, so no new
    key is removed. If an answer is lost on the way, no rank removes the keys, and a later use of
    the prefix reports that.
    """
    progress = member.of_kind(CLEAN_UP)
    if progress.additions == 0:
        yield from claim_rank(keys, member)
        progress.additions += 1
        rank = member.claim.rank
        word = keys.word(CLEAN_UP, 0, rank // keys.ranks_per_word)
        value = yield Add(word, arrival(rank, keys.ranks_per_word))
        progress.has_arrived = True
        number = rank // keys.ranks_per_word
        if not is_full(value, number, keys.world_size, keys.ranks_per_word):
            return True
        if keys.word_count > 1 and (yield Add(keys.full(CLEAN_UP, 0), 1)) < keys.word_count:
            return True
        member.removal = keys.ours((yield ListKeys()))
    elif not progress.has_arrived:
        raise Unconfirmed
    elif not member.removal:
        return bool((yield Read(keys.claim(member.claim.rank))) == member.claim.line)
    while member.removal:
        key = member.removal[0]
        if is_claim(key):
            member.removal.pop(0)  # before it is gone: a new use of the prefix may claim it again
            yield Delete(key)
        else:
            yield Delete(key)
            member.removal.pop(0)
    return True


def remove_all(keys: Keys) -> Steps[None]:
    """Remove all keys of the prefix at once. No process may be using it."""
    for key in keys.ours((yield ListKeys())):
        yield Delete(key)


# Logs: one key to which all ranks append, or a key for each rank.


def hand_in(keys: Keys, key: str, rank: int, value: bytes) -> Steps[None]:
    """Add this rank's part to a log."""
    yield Append(key, value) if keys.appends else Set(f"{key}/{rank}", value)


def read_log(keys: Keys, key: str) -> Steps[bytes]:
    """Return all parts of a log."""
    if keys.appends:
        return (yield Read(key)) or b""
    parts = yield ReadMany(keys.parts(key, range(keys.world_size)))
    return b"".join(part or b"" for part in parts)


def remove_log(keys: Keys, key: str) -> Steps[None]:
    """Remove a log."""
    for part in [key] if keys.appends else keys.parts(key, range(keys.world_size)):
        yield Delete(part)


def sign_off(
    keys: Keys, kind: str, progress: Progress, rank: int, host_rank: int
) -> Steps[tuple[int, ...]]:
    """Note that this rank is done; on ``host_rank`` wait for the others, return the rest."""
    number = progress.generation
    key = keys.left(kind, number)
    others = [other for other in range(keys.world_size) if other != host_rank]
    if rank != host_rank:
        if progress.has_signed_off:  # perhaps: then the log may be gone already, and is made again
            progress.leave_behind(key)
        progress.has_signed_off = True
        yield from hand_in(keys, key, rank, b"%d\n" % rank)
        return ()
    absentees: tuple[int, ...] = ()
    if keys.appends:
        wanted = set(others)
        if wanted and ((yield Until(Read(key), lambda value: wanted <= _ranks_in(value))) is None):
            absentees = tuple(sorted(wanted - _ranks_in((yield Read(key)))))
    elif others:
        parts = keys.parts(key, others)
        if not (yield Wait(parts)):
            absentees = tuple(others[position] for position in (yield from absent(parts)))
    progress.leave_behind(key)  # if this call is repeated, it has to find the log again
    return absentees


def remove_leftovers(keys: Keys, progress: Progress) -> Steps[None]:
    """Remove logs of generations that all ranks have left."""
    for number, key in progress.leftovers:
        if number <= progress.generation - 2:
            yield from remove_log(keys, key)
            progress.leftovers = tuple(log for log in progress.leftovers if log[1] != key)


def absent(names: Sequence[str], first: int = 0) -> Steps[list[int]]:
    """Return the positions of the keys that do not exist: few requests if they are neighbours."""
    if (yield Check(names)):
        return []
    if len(names) == 1:
        return [first]
    half = len(names) // 2
    left = yield from absent(names[:half], first)
    return left + (yield from absent(names[half:], first + half))


def frame(rank: int, data: bytes) -> bytes:
    """Return a rank's data so that ``unframe`` can take it out of the data of all ranks."""
    return _FRAME.pack(rank, len(data)) + data


def unframe(blob: bytes, world_size: int) -> list[bytes]:
    """Take the data of all ranks apart. If a rank handed in twice, the first counts."""
    values: dict[int, bytes] = {}
    at = 0
    while at + _FRAME.size <= len(blob):
        rank, size = _FRAME.unpack_from(blob, at)
        at += _FRAME.size
        values.setdefault(rank, blob[at : at + size])
        at += size
    assert len(values) == world_size, "all ranks hand in before they arrive"
    return [values[rank] for rank in range(world_size)]


def _ranks_in(text: bytes | None) -> set[int]:
    return set(map(int, (text or b"").split()))


def registered_sizes(register: bytes | None) -> list[int]:
    """Return the world sizes of the register."""
    return [int(line) for line in (register or b"").split(b"\n") if line.isdigit()]


def _rejected(register: bytes | None) -> list[Claim]:
    """Return the processes of the register whose rank is another one's."""
    lines = (register or b"").split(b"\n")
    return [Claim.parse(line[1:]) for line in lines if line.startswith(b"!")]


def _claims(keys: Keys, ranks: Iterable[int]) -> Steps[list[Claim]]:
    """Return the claims of ranks, of as many as the store can send to all ranks that ask."""
    most = max(16, _CLAIMS_READ // keys.world_size)
    wanted = [keys.claim(rank) for rank in ranks][:most]
    lines: Any = (yield ReadMany(wanted)) if wanted else []
    return [Claim.parse(line) for line in lines if line]


def _waiting_elsewhere(keys: Keys, kind: str, sizes: Iterable[int]) -> Steps[list[Claim]]:
    """Return the claims of the ranks that wait now in a world of another size."""
    claims: list[Claim] = []
    others = [keys.of_size(size) for size in sizes if size != keys.world_size]
    if not others:
        return claims
    listed = yield ListKeys()
    for world in others:
        number = world.newest_generation(kind, listed)
        if number is None or (yield Check((world.release(kind, number),))):
            continue
        words = yield ReadMany(world.words(kind, number))
        missing = set(missing_ranks(words, world.world_size, world.ranks_per_word))
        here = [rank for rank in range(world.world_size) if rank not in missing]
        claims += yield from _claims(world, here)
    return claims

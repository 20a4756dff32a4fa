"""The protocol: arrive, wait for all ranks, and know at the deadline which ranks are missing.

docs/design/store.md lists the keys and says why the promises hold. A rank arrives by adding its
line to a log. Then it waits until all have arrived: the store counts them, or the rank reads the
log. At its deadline any rank reads the log itself, so it needs no other rank to name the missing.

This module makes no request. It yields them: see ``rankcall.c10d.requests``.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rankcall.c10d.requests import (
    Add,
    Append,
    Arrive,
    Check,
    CompareSet,
    Delete,
    ListKeys,
    Read,
    ReadMany,
    Set,
    Steps,
    StoreGoneError,
    Until,
    Wait,
)
from rankcall.ranks import MAX_RANKS
from rankcall.store.keys import (
    BARRIER,
    CLEAN_UP,
    EXCHANGE,
    GET_ALL,
    Keys,
    begins_to_ask,
    ends_to_ask,
    is_asked,
    is_claim,
    line_of,
)
from rankcall.whole_numbers import whole_number

_FRAME = struct.Struct("<II")  # the rank, and how many bytes follow
_MOST_REJECTED = 8  # processes that the register lists: a restart loop must not make it grow
# Claims that all ranks together read at a deadline, of some 60 bytes each. All of 1,024 ranks ask
# at once, and the store has less than a second to answer each of them: it sends no more than 90 MB.
_CLAIMS_READ = 1_500_000
# How long the host of the store stays for ranks that have not noticed yet that all have arrived.
# They ask at least four times a second. One that has died does not hold the host up for longer.
STAY_S = 10.0


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
    has_begun: bool = False  # to arrive; perhaps the requests were not answered
    has_arrived: bool = False  # for sure; only of clean-ups
    asks: bool = False  # this rank has said that it asks the store again and again
    frame: bytes | None = None  # the data that was handed in first
    leftovers: tuple[tuple[int, str], ...] = ()  # keys to remove two generations after their own

    def leave_behind(self, keys: Iterable[str]) -> None:
        """Remember to remove keys of this generation when all ranks have left it."""
        left = [(self.generation, key) for key in keys]
        self.leftovers += tuple(pair for pair in left if pair not in self.leftovers)

    def advance(self) -> None:
        """Go on to the next generation."""
        self.generation += 1
        self.has_begun = self.has_arrived = self.asks = False
        self.frame = None


@dataclass(eq=False)
class Member:
    """This process as one rank of one world under one prefix.

    ``siblings`` are the other members of this process by nonce, ``retired`` the nonces of members
    that have cleaned up. ``hosts_store`` says that the store ends with this process.
    """

    claim: Claim
    siblings: MutableMapping[str, Member] = field(default_factory=dict)
    retired: deque[str] = field(default_factory=deque)
    hosts_store: bool = False
    is_claimed: bool = False
    progress: dict[str, Progress] = field(default_factory=dict)
    removal: list[str] | None = None  # keys that this member has yet to remove
    # What this rank adds to a log: if it waits for one answer, and if it asks again and again.
    line: bytes = field(init=False)
    asking_line: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.line = line_of(self.claim.rank)
        self.asking_line = begins_to_ask(self.claim.rank)

    def of_kind(self, kind: str) -> Progress:
        """Return the progress with one kind of call."""
        progress = self.progress.get(kind)
        return self.progress.setdefault(kind, Progress()) if progress is None else progress


class ProtocolError(Exception):
    """Raised in a protocol; ``store.calls`` says the same to the user, with names and hosts."""


class NotAllArrived(ProtocolError):
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


class WorldsDiffer(ProtocolError):
    """Other processes wait in a world of another size."""

    def __init__(self, claims: Sequence[Claim]) -> None:
        super().__init__(claims)
        self.claims = tuple(claims)


class RankTaken(ProtocolError):
    """Another process is this rank."""

    def __init__(self, holder: Claim) -> None:
        super().__init__(holder)
        self.holder = holder


class SameProcess(Exception):
    """This process is this rank already, through another store object. It goes on as ``member``."""

    def __init__(self, member: Member) -> None:
        super().__init__(member)
        self.member = member


class CleanUpPending(ProtocolError):
    """This rank has cleaned the prefix up, and others have not."""

    def __init__(self, missing: Sequence[int]) -> None:
        super().__init__(missing)
        self.missing = tuple(missing)


class Unconfirmed(ProtocolError):
    """The answer to a request was lost that must not be made twice."""


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
                raise CleanUpPending((yield from _missing(keys, CLEAN_UP, 0)))
        elif holder.nonce in member.siblings:
            raise SameProcess(member.siblings[holder.nonce])
        else:
            yield from announce(keys, b"!" + line)
            raise RankTaken(holder)
    yield from announce(keys, b"%d" % keys.world_size)
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


def meet(keys: Keys, member: Member, name_missing: bool = True) -> Steps[None]:
    """Go through a barrier."""
    progress = member.of_kind(BARRIER)
    if not (yield from _arrive_and_wait(keys, member, progress, BARRIER)):
        if not name_missing:
            raise NotAllArrived((), named=False)
        yield from _late(keys, BARRIER, progress.generation)
    try:
        if progress.asks:
            log = keys.log(BARRIER, progress.generation)
            yield Append(log, ends_to_ask(member.claim.rank))
        if member.hosts_store and keys.world_size > 1:
            yield from _see_others_off(keys.log(BARRIER, progress.generation))
        yield from _remove_old_keys(keys, member, BARRIER, progress.generation)
    except StoreGoneError:
        return  # all have arrived: the rest was for others, and for tidiness


def _see_others_off(log: str) -> Steps[None]:
    """On the host of the store, return when its end can keep no other rank from passing.

    The store answers one request after the other. So when it answers the first of these, it has
    let pass all that wait for it. Those that ask again and again say so in the log.
    """
    yield Until(Read(log), lambda held: not is_asked(held), STAY_S)


def exchange(keys: Keys, member: Member, data: bytes, host_rank: int) -> Steps[list[bytes]]:
    """Hand in data; return the data of all ranks."""
    progress, rank = member.of_kind(EXCHANGE), member.claim.rank
    if progress.frame is None:
        progress.frame = frame(rank, data)
    if not (yield from _arrive_and_wait(keys, member, progress, EXCHANGE)):
        yield from _late(keys, EXCHANGE, progress.generation)
    data_key = keys.data(progress.generation)
    blob = (yield Read(data_key)) if keys.appends else (yield from read_parts(keys, data_key))
    try:
        yield from sign_off(keys, EXCHANGE, progress, member, host_rank)
        yield from _remove_old_keys(keys, member, EXCHANGE, progress.generation)
    except StoreGoneError:
        pass  # this rank has all it needs
    return unframe(blob, keys.world_size)


def _arrive_and_wait(keys: Keys, member: Member, progress: Progress, kind: str) -> Steps[bool]:
    """Arrive; return True once all ranks have, and False at the deadline.

    The data of an exchange is handed in before: the data of all ranks that have arrived is there.
    """
    number, rank = progress.generation, member.claim.rank
    if not member.is_claimed:
        yield from claim_rank(keys, member)
    log = keys.log(kind, number)
    # After an exchange, each rank says when it makes no more requests. After a barrier, only a rank
    # that does not just wait for an answer of the store: else each barrier would take longer.
    says_when_done = kind == BARRIER and keys.appends
    asking_line = member.asking_line if says_when_done else member.line
    if keys.counts and not progress.has_begun:
        progress.has_begun = True
        data = () if progress.frame is None else ((keys.data(number), progress.frame),)
        has_passed = yield Arrive(
            (*data, (log, member.line)),
            keys.turnstile(kind, number),
            keys.world_size,
            instead=(*data, (log, asking_line)),
        )
        if has_passed:
            return True
        progress.asks = says_when_done
        if has_passed is None and says_when_done:  # it has waited, and asks from now on
            yield Append(log, asking_line)
    else:
        progress.asks = says_when_done
        if progress.has_begun:
            yield from _arrive_again(keys, progress, log, rank, asking_line)
        else:
            progress.has_begun = True
            if progress.frame is not None:
                yield hand_in(keys, keys.data(number), rank, progress.frame)
            yield hand_in(keys, log, rank, asking_line)
            has_passed = yield from _count_and_wait(keys, kind, number)
            if has_passed is not None:
                return bool(has_passed)
    return (yield from _read_until_full(keys, kind, number))


def _arrive_again(keys: Keys, progress: Progress, log: str, rank: int, line: bytes) -> Steps[None]:
    """Arrive unless the log shows that an earlier try has, with the same line.

    A rank is counted at its first try only: if it was counted twice, the others could pass too
    early. From its second try on, it reads the log.
    """
    if keys.appends:
        has_arrived = line.strip() in ((yield Read(log)) or b"").split()
    else:
        has_arrived = yield Check(keys.parts(log, [rank]))
    if not has_arrived:
        if progress.frame is not None:
            yield hand_in(keys, keys.data(progress.generation), rank, progress.frame)
        yield hand_in(keys, log, rank, line)


def _count_and_wait(keys: Keys, kind: str, number: int) -> Steps[bool | None]:
    """Wait on a store that does not take ``Arrive``; None if it is better to read the log."""
    if not keys.appends:
        return None
    count = yield Add(keys.count(kind, number), 1)
    if count < keys.world_size:
        return bool((yield Wait((keys.release(kind, number),))))
    yield from _let_pass(keys, kind, number)
    return True


def _read_until_full(keys: Keys, kind: str, number: int) -> Steps[bool]:
    """Return True once the log names all ranks, and False at the deadline."""
    log = keys.log(kind, number)
    if not keys.appends:
        return bool((yield Wait(keys.parts(log, range(keys.world_size)))))
    if (yield Until(Read(log), keys.is_full)) is None:
        return False
    yield from _let_pass(keys, kind, number)
    return True


def _let_pass(keys: Keys, kind: str, number: int) -> Steps[None]:
    """Let all ranks pass; any rank that finds all in the log may, and more than one rank does."""
    with suppress(StoreGoneError):  # another rank has let all pass, or the host would be here
        if keys.counts:
            yield Set(keys.turnstile(kind, number), b"%d" % keys.world_size)
        elif keys.appends:
            yield Set(keys.release(kind, number), b"1")


def _late(keys: Keys, kind: str, number: int) -> Steps[None]:
    """Return if all have arrived after all, at the deadline.

    Else raise ``NotAllArrived`` with the ranks that have not, or ``WorldsDiffer``.
    """
    missing = yield from _missing(keys, kind, number)
    if not missing:
        yield from _let_pass(keys, kind, number)
        return
    register = yield Read(keys.register)
    sizes, rejected = registered_sizes(register), _rejected(register)
    claims = yield from _waiting_elsewhere(keys, kind, sizes)
    if claims:
        here = sorted(keys.all_ranks.difference(missing))
        raise WorldsDiffer([*(yield from _claims(keys, here)), *claims])
    hosts = {}
    if number > 0:  # a rank that has never been here has left no claim
        hosts = {claim.rank: claim.host for claim in (yield from _claims(keys, missing))}
    raise NotAllArrived(missing, hosts=hosts, rejected=rejected)


def _remove_old_keys(keys: Keys, member: Member, kind: str, number: int) -> Steps[None]:
    """Remove this rank's share of the keys of earlier generations.

    All ranks have arrived in this one, so they have left the earlier ones.
    """
    for key in keys.to_remove(kind, number, member.claim.rank):
        yield Delete(key)
    if number == 0 and member.claim.rank == 0 and keys.attempt > 0:
        # The launcher has ended the processes of earlier attempts: no process reads their keys.
        for key in keys.ours((yield ListKeys()), attempts_below=keys.attempt):
            yield Delete(key)


def _missing(keys: Keys, kind: str, number: int) -> Steps[tuple[int, ...]]:
    """Return the ranks that have not arrived in a generation, sorted."""
    log = keys.log(kind, number)
    if keys.appends:
        return keys.missing((yield Read(log)))
    return tuple((yield from absent(keys.parts(log, range(keys.world_size)))))


def gather(
    keys: Keys, member: Member, names: Sequence[str], host_rank: int
) -> Steps[tuple[list[bytes], tuple[int, ...]]]:
    """Wait for keys that the ranks set; return their values, and the ranks that have not read.

    Raises ``NotAllArrived`` with the ranks whose key is missing.
    """
    yield from claim_rank(keys, member)
    yield from remove_leftovers(member.of_kind(GET_ALL))
    while True:
        if not (yield Wait(names)):
            missing = yield from absent(names)
            if missing:
                raise NotAllArrived(missing)
        values = yield ReadMany(names)
        if None not in values:
            break  # else somebody has removed a key in between
    progress = member.of_kind(GET_ALL)
    unread: tuple[int, ...] = ()
    with suppress(StoreGoneError):  # this rank has all it needs
        unread = yield from sign_off(keys, GET_ALL, progress, member, host_rank)
    return values, unread


def clean_up(keys: Keys, member: Member) -> Steps[bool]:
    """Say that this rank has no more use for the prefix; the last one removes all keys.

    Return False, having done nothing, if this member's clean-up is over already.

    Claims are removed last: until its own claim is gone no rank can use the prefix again, so no new
    key is removed. If an answer is lost on the way, no rank removes the keys, and a later use of
    the prefix reports that.
    """
    progress, rank = member.of_kind(CLEAN_UP), member.claim.rank
    if not progress.has_begun:
        yield from claim_rank(keys, member)
        progress.has_begun = True
        yield hand_in(keys, keys.log(CLEAN_UP, 0), rank, member.line)
        count = yield Add(keys.count(CLEAN_UP, 0), 1)
        progress.has_arrived = True
        if count < keys.world_size:
            return True
        member.removal = keys.ours((yield ListKeys()))
    elif not progress.has_arrived:
        raise Unconfirmed
    elif not member.removal:
        return bool((yield Read(keys.claim(rank))) == member.claim.line)
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


def hand_in(keys: Keys, key: str, rank: int, value: bytes) -> Append | Set:
    """Return the request that adds this rank's part to a log."""
    return Append(key, value) if keys.appends else Set(f"{key}/{rank}", value)


def read_parts(keys: Keys, key: str) -> Steps[bytes]:
    """Return all parts of a log, on a store that cannot append."""
    parts = yield ReadMany(keys.parts(key, range(keys.world_size)))
    return b"".join(part or b"" for part in parts)


def sign_off(
    keys: Keys, kind: str, progress: Progress, member: Member, host_rank: int
) -> Steps[tuple[int, ...]]:
    """Note that this rank is done; on ``host_rank`` wait for the others, return the rest.

    If another rank hosts the store than ``host_rank`` says, that one waits as well. So each rank
    notes that it is done before it waits.
    """
    key, rank = keys.left(kind, progress.generation), member.claim.rank
    yield hand_in(keys, key, rank, member.line)
    if rank != host_rank:
        if member.hosts_store:
            yield Until(Read(key), keys.is_full)
        return ()
    absentees: tuple[int, ...] = ()
    parts = keys.parts(key, range(keys.world_size))
    if keys.world_size > 1 and keys.appends:
        if (yield Until(Read(key), keys.is_full)) is None:
            absentees = keys.missing((yield Read(key)))
    elif keys.world_size > 1 and not (yield Wait(parts)):
        absentees = tuple((yield from absent(parts)))
    if kind == GET_ALL:  # if this call is repeated, it has to find the log again
        progress.leave_behind([key] if keys.appends else parts)
    return absentees


def remove_leftovers(progress: Progress) -> Steps[None]:
    """Remove keys of generations that all ranks have left."""
    for number, key in progress.leftovers:
        if number <= progress.generation - 2:
            yield Delete(key)
            progress.leftovers = tuple(pair for pair in progress.leftovers if pair[1] != key)


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
    at, last = 0, len(blob) - _FRAME.size
    while at <= last:
        rank, size = _FRAME.unpack_from(blob, at)
        at += _FRAME.size + size
        if rank not in values:
            values[rank] = blob[at - size : at]
    assert len(values) == world_size, "all ranks hand in before they arrive"
    return [values[rank] for rank in range(world_size)]


def registered_sizes(register: bytes | None) -> list[int]:
    """Return the world sizes of the register."""
    lines = (register or b"").split(b"\n")
    sizes = (whole_number(line, least=1, most=MAX_RANKS) for line in lines)
    return [size for size in sizes if size is not None]


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
        if number is None:
            continue
        missing = yield from _missing(world, kind, number)
        if missing:
            claims += yield from _claims(world, sorted(world.all_ranks.difference(missing)))
    return claims

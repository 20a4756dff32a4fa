"""The workers of a group: a fixed number that come up together, or a log of who came and went.

All keys are below an epoch: ``epoch-<n>/rank/<rank>`` says which process has a rank. A process that
calls ``init_rpc`` again moves the group to the next epoch, and workers that have not come up in the
previous one begin again there. So workers that retry meet, whenever each of them began.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.rpc import _delete_all_user_and_unforked_owner_rrefs

from rankcall._requests import Append, CompareSet, Read, Set, Steps, Until, Wait
from rankcall.errors import RpcTimeout
from rankcall.process import DEAD, Process
from rankcall.rpc.backends import bounded, seconds_left, wait_idle
from rankcall.store import BarrierTimeout, StoreLost, synchronize
from rankcall.store.parts import perform, publish_once

# The members of a dynamic group: a log in the store, to which workers add that they come and go.
#
# Adding a line is one atomic request, so joining takes no lock, and a worker that dies while it
# joins blocks no other. The order of the log says who was there before whom. Unlike the entries of
# ``rankcall.store.parts.Log``, all lines are in one key: one request reads them, and a log can be
# closed and begun anew.


WorkerRecord = Mapping[str, Any]
Present = dict[int, WorkerRecord]
_LOG, _NEWEST = "members", "members/newest"
_END = {"end": True}
_LINES = 256  # a longer log, most of it about workers that have left, is closed
_LEAVE_S = 5.0  # for the line that a worker has left


class MemberLog:
    """The members of one group, by their records; a record has the worker's name and ``session``.

    A log that has grown long is closed by a last line; the next log begins with the members at that
    point, and a worker that wrote behind the last line writes again. Every call ends by its
    deadline (monotonic seconds) or raises ``StoreLost``.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._number: int | None = None  # of the newest log that is known; it only grows

    def enter(self, record: WorkerRecord, deadline: float) -> list[WorkerRecord]:
        """Add a worker; return the records of those that came before it and have not left."""
        return perform(self._store, seconds_left(deadline), self.entering(record))

    def members(self, deadline: float) -> list[WorkerRecord]:
        """Return the records of those that have not left."""
        return perform(self._store, seconds_left(deadline), self.reading())

    def leave(self, session: int, deadline: float | None = None, by: int | None = None) -> None:
        """Add that a worker has left or was lost. Doing so twice is harmless.

        ``by`` is the session of the member that lost it. The line has no effect if that member has
        itself been lost before: a worker that was stopped for long takes all others for lost.
        """
        left = min(_LEAVE_S, seconds_left(deadline)) if deadline else _LEAVE_S
        perform(self._store, left, self.leaving(session, by))

    # The protocol: generators of requests.

    def entering(self, record: WorkerRecord) -> Steps[list[WorkerRecord]]:
        """Do as ``enter`` does."""
        lines = yield from self._add({"in": record})
        own_index = [line.get("in", {}).get("session") for line in lines].index(record["session"])
        before, now = _present(lines[:own_index]), _present(lines)
        if len(lines) > max(_LINES, 4 * len(now)):
            yield from self._add(_END)
        return [member for session, member in before.items() if session in now]

    def reading(self) -> Steps[list[WorkerRecord]]:
        """Do as ``members`` does."""
        number = yield from self._newest()
        while _is_closed(lines := (yield from self._read(number))):
            number = yield from self._begin_next(number, lines)
        return list(_present(lines).values())

    def leaving(self, session: int, by: int | None = None) -> Steps[None]:
        """Do as ``leave`` does."""
        yield from self._add({"out": session} if by is None else {"out": session, "by": by})

    def _add(self, entry: Mapping[str, Any]) -> Steps[list[Any]]:
        """Append to the newest log; return its lines, including the new one."""
        number = yield from self._newest()
        while True:
            yield Append(f"{_LOG}/{number}", _line(entry))
            lines = yield from self._read(number)
            if not _is_closed(lines):
                return lines
            number = yield from self._begin_next(number, lines)
            if entry == _END:
                return lines

    def _read(self, number: int) -> Steps[list[Any]]:
        """Return a log's lines, up to the one that closes it."""
        lines = []
        for line in ((yield Read(f"{_LOG}/{number}")) or b"").splitlines():
            lines.append(json.loads(line))
            if "end" in lines[-1]:
                break
        return lines

    def _begin_next(self, closed: int, lines: list[Any]) -> Steps[int]:
        """Return the number of the log after a closed one. The first worker here begins it."""
        if lines != [_END]:  # else another worker has begun it, and cleared the closed one
            begin = b"".join(_line({"in": record}) for record in _present(lines).values())
            yield from publish_once(f"{_LOG}/{closed + 1}", begin or b"{}\n")
            yield Set(_NEWEST, b"%d" % (closed + 1))
            yield Set(f"{_LOG}/{closed}", _line(_END))
        self._number = closed + 1
        return closed + 1

    def _newest(self) -> Steps[int]:
        if self._number is None:
            self._number = int((yield Read(_NEWEST)) or 0)
        return self._number


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _is_closed(lines: list[Any]) -> bool:
    return bool(lines) and "end" in lines[-1]


def _present(lines: Iterable[Any]) -> Present:
    present: Present = {}
    for entry in lines:
        if "in" in entry:
            present[entry["in"]["session"]] = entry["in"]
        elif "out" in entry and entry.get("by", entry["out"]) in present:
            present.pop(entry["out"], None)
    return present


def is_dead(record: WorkerRecord) -> bool:
    """Return whether the worker's process is known to have ended."""
    return Process(**record["process"]).liveness() == DEAD


def find_conflict(record: WorkerRecord, others: Iterable[WorkerRecord]) -> WorkerRecord | None:
    """Return a member that has the newcomer's name or rank."""
    name, rank = record["node"]["name"], record["rank"]
    return next((o for o in others if o["node"]["name"] == name or o["rank"] == rank), None)


def check_unique(record: WorkerRecord, others: Iterable[WorkerRecord]) -> None:
    """Raise ``RuntimeError`` if a member has the newcomer's name or rank."""
    member = find_conflict(record, others)
    if member is None:
        return
    name = record["node"]["name"]
    if member["node"]["name"] == name:
        host = member["host"].split()[0]
        raise RuntimeError(f"worker name {name!r} is not unique: a member on {host} has it")
    raise RuntimeError(
        f"rank {record['rank']} of worker {name!r} is not unique: "
        f"worker {member['node']['name']!r} has it"
    )


_ASK_S = 1.0  # how often a waiting worker looks for peers that died or started again
_NAMING_S = 2.0  # of shutdown's time: kept to find out who is missing

# The last epoch that this process took part in, by the identity of the store.
_last_epochs: dict[str, int] = {}

T = TypeVar("T")


class _BeginAgain(Exception):
    """Another worker has called ``init_rpc`` again, in a later epoch."""


class StaticMembership:
    """This worker's rank in a static group, and the group's exchanges over the store.

    Every worker calls the same methods in the same order. Each ends by its deadline (seconds on the
    monotonic clock).
    """

    def __init__(self, store: Store, name: str, rank: int, world_size: int) -> None:
        self._store, self._name = store, name
        self.rank, self.world_size = rank, world_size
        self._epoch = 0
        self._names: list[str] = []
        self._processes: list[Process] = []
        self.is_up = False  # all workers have come up: too late to begin again
        # Returns the reasons why workers are known to be gone, by name.
        self.gone: Callable[[], Mapping[str, str]] = dict

    @property
    def store(self) -> Store:
        """The store for keys of this attempt to form the group."""
        return PrefixStore(f"epoch-{self._epoch}", self._store)

    def introduce(self, worker: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        """Give this worker's record to all; return the records of all, in rank order.

        ``worker["node"]["name"]`` is the worker's name. Raises ``RuntimeError`` if two workers have
        the same name, ``RpcTimeout`` that names the missing workers, ``StoreLost``.
        """
        own_record = {**worker, "process": _process_record()}
        records: list[dict[str, Any]] = self.exchange("init", own_record, deadline)
        names = [record["node"]["name"] for record in records]
        check_names(names)
        self._names = names
        self._processes = [Process(**record["process"]) for record in records]
        return records

    def exchange(self, label: str, value: Any, deadline: float) -> list[Any]:
        """Give ``value``, which JSON can carry, to all; return the values of all, in rank order.

        Raises ``RpcTimeout`` that names the missing workers, also before the deadline if one of
        them is known to be gone; ``StoreLost``.
        """
        data = json.dumps(value).encode()
        patience = _ASK_S
        while True:
            left = min(seconds_left(deadline, 0.01), patience)
            try:
                values = synchronize(
                    self._store, data, self.rank, self.world_size, self._key(label), left
                )  # called again after a timeout, it goes on waiting
                return [json.loads(encoded) for encoded in values]
            except StoreLost as lost:
                if not lost.is_silent or time.monotonic() >= deadline:
                    raise
                patience *= 2  # the line to the store may be busy, or lose packets
            except BarrierTimeout as late:
                if gone := self._reasons_gone(late.missing_ranks):
                    # The others may only be late, and are not blamed.
                    raise self._timeout(label, late, "; ".join(gone.values()), list(gone)) from late
                if time.monotonic() >= deadline:
                    raise self._timeout(label, late, "", late.missing_ranks) from late
                if perform(self._store, seconds_left(deadline), _current_epoch()) != self._epoch:
                    if not self.is_up:
                        raise _BeginAgain from late
                    reason = "a worker has called init_rpc again; do the same here"
                    raise self._timeout(label, late, reason, late.missing_ranks) from late

    def farewell(self, deadline: float) -> None:
        """Let rank 0 leave last: it may host the store that the others still read."""
        gone = [self._key(f"gone/{rank}") for rank in range(1, self.world_size)]

        def steps() -> Steps[None]:
            if self.rank:
                yield Set(gone[self.rank - 1], b"")
            elif gone:
                yield Wait(gone)

        with contextlib.suppress(RuntimeError):
            perform(self._store, seconds_left(deadline, 0.01), steps())

    def describe(self, rank: int) -> str:
        """Return a worker's name and rank, as far as they are known."""
        return f"{self._names[rank]!r} (rank {rank})" if self._names else f"rank {rank}"

    def _reasons_gone(self, missing_ranks: Iterable[int]) -> dict[int, str]:
        """Return for each of the missing that will not come why, by rank."""
        gone, reasons = self.gone(), {}
        for rank in missing_ranks if self._processes else ():
            name, process = self._names[rank], self._processes[rank]
            if name in gone:
                reasons[rank] = gone[name]
            elif process.liveness() == DEAD:
                reasons[rank] = f"worker {name!r} is gone: its process {process.pid} has ended"
        return reasons

    def _timeout(
        self, label: str, late: BarrierTimeout, reason: str, missing: Sequence[int]
    ) -> RpcTimeout:
        names = ", ".join(map(self.describe, missing)) or "not known"
        return RpcTimeout(
            f"RPC {label} on {self.describe(self.rank)}: {late.arrived} of {self.world_size} "
            f"workers arrived{' (' + reason + ')' if reason else ' in time'}; missing: {names}",
            missing_ranks=missing,
            arrived=late.arrived,
            world_size=self.world_size,
            hosts=late.hosts,
            rank=self.rank,
            what=label,
        )

    def claim_rank(self, deadline: float) -> None:
        """Enter the current epoch and claim the rank there; -1 claims the first that is free."""
        perform(self._store, seconds_left(deadline), self._claim())

    def _claim(self) -> Steps[None]:
        record = {"name": self._name, **_process_record()}
        while True:
            self._epoch = yield from _enter_epoch()
            size = yield from self._agree_on_size()
            self._check_size(size)
            holder: dict[str, Any] = {}
            for rank in range(size) if self.rank == -1 else [self.rank]:
                claim = json.dumps(record).encode()
                text = yield from publish_once(self._key(f"rank/{rank}"), claim)
                if text == claim:
                    self.rank, self.world_size = rank, size
                    return
                holder = json.loads(text)
            name = holder.pop("name")
            if Process(**holder).liveness() != DEAD:
                break
            yield from _end_epoch(self._epoch)  # it died in its init_rpc
        if self.rank == -1:
            raise RuntimeError(f"all {size} ranks of the group are taken: none for {self._name!r}")
        raise RuntimeError(
            f"rank argument {self.rank} of worker {self._name!r} is not unique: "
            f"worker {name!r} has rank {self.rank}"
        )

    def _agree_on_size(self) -> Steps[int]:
        key = self._key("size")
        if self.world_size != -1:
            return int((yield from publish_once(key, b"%d" % self.world_size)))
        # Not a Wait: a TCPStore without libuv does not wake one for a key made by compare_set.
        size = yield Until(Read(key), bool)
        if size is None:
            raise RpcTimeout("no worker of the group has said how many workers there are")
        return int(size)

    def _key(self, name: str) -> str:
        return f"epoch-{self._epoch}/{name}"

    def _check_size(self, size: int) -> None:
        if self.world_size not in (-1, size):
            raise RuntimeError(
                f"world_size argument {self.world_size} of worker {self._name!r} doesn't match "
                f"group size {size}"
            )
        if not -1 <= self.rank < size:
            raise RuntimeError(
                f"rank argument {self.rank} of worker {self._name!r} doesn't match "
                f"group size {size}"
            )


def form_group(
    join: Callable[[StaticMembership], T],
    store: Store,
    name: str,
    rank: int,
    world_size: int,
    deadline: float,
) -> T:
    """Claim a rank in the group, and return ``join(membership)``, which brings the agent up.

    If another worker begins again in the meantime, so does this one. A rank or world size of -1 is
    taken from the group. Raises ``RuntimeError`` if either disagrees with the group, ``RpcTimeout``
    if no worker says how many there are, ``StoreLost``.
    """
    while True:
        membership = StaticMembership(PrefixStore("static", store), name, rank, world_size)
        membership.claim_rank(deadline)
        with contextlib.suppress(_BeginAgain):
            return join(membership)


class StaticGroup:
    """A group whose members all come, and all go, together."""

    def __init__(self, agent: Any, membership: StaticMembership, store: Store) -> None:
        self._agent, self._membership, self._store = agent, membership, store
        membership.is_up = True

    def leave(self, deadline: float) -> None:
        """Wait until every member leaves and no call is in flight anywhere.

        Raises ``RpcTimeout`` that names the members that did not leave.
        """
        self._membership.exchange("shutdown", None, deadline)
        _delete_all_user_and_unforked_owner_rrefs(timedelta(seconds=seconds_left(deadline)))
        wait_idle(self._agent, deadline)
        self._join(deadline)
        self._membership.farewell(deadline)

    def _join(self, deadline: float) -> None:
        """Have the agent wait until no call is in flight; torch's waits in the store."""
        join_until = deadline - min(_NAMING_S, seconds_left(deadline) / 2)
        left = seconds_left(join_until)
        self._store.set_timeout(timedelta(seconds=left))
        try:
            bounded(lambda: self._agent.join(shutdown=True, timeout=left), join_until, "shutdown")
        except RpcTimeout:
            raise
        except RuntimeError as error:
            self._membership.exchange("shutdown, cut short", None, deadline)
            raise RpcTimeout(f"RPC shutdown did not end in time: {error}") from error


def check_names(names: Iterable[str]) -> None:
    """Raise ``RuntimeError`` that names the ranks with the same name."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        ranks.setdefault(name, []).append(rank)
    for name, owners in ranks.items():
        if len(owners) > 1:
            shared = " and ".join(map(str, owners))
            raise RuntimeError(f"worker name {name!r} is not unique: ranks {shared} have it")


def _process_record() -> dict[str, Any]:
    return dataclasses.asdict(Process.current())


def _current_epoch() -> Steps[int]:
    return int((yield from publish_once("epoch", b"0")))


def _end_epoch(epoch: int) -> Steps[None]:
    """Move the group on, unless another worker has done so already."""
    yield CompareSet("epoch", b"%d" % epoch, b"%d" % (epoch + 1))


def _enter_epoch() -> Steps[int]:
    """Return the current epoch; a process takes part in each epoch once."""
    identity = (yield from publish_once("identity", secrets.token_hex(8).encode())).decode()
    epoch = yield from _current_epoch()
    if epoch == _last_epochs.get(identity):
        yield from _end_epoch(epoch)
        epoch = yield from _current_epoch()
    _last_epochs[identity] = epoch
    return epoch

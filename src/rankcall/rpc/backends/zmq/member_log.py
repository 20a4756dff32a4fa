"""The members of a dynamic group: a log in the store, to which workers add that they come and go.

Adding a line is one atomic request, so joining takes no lock, and a worker that dies while it
joins blocks no other. The order of the log says who was there before whom. Unlike the entries of
``rankcall.c10d.parts.Log``, all lines are in one key: one request reads them, and a log can be
closed and begun anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from rankcall.c10d.client import perform
from rankcall.c10d.parts import publish_once
from rankcall.c10d.requests import Append, Read, Set, Steps
from rankcall.process import DEAD, Process
from rankcall.rpc.deadlines import seconds_left
from rankcall.rpc.rank_claims import stored_number

WorkerRecord = Mapping[str, Any]
Present = dict[int, WorkerRecord]
_LOG, _NEWEST = "members", "members/newest"
_END = {"end": True}
# A log of more lines than this, and most of them about workers that have left, is closed. Every
# newcomer reads the whole log: 256 lines of some 600 bytes are one request of 150 KB.
_LINES = 256
_LEAVE_S = 5.0  # for the line that a worker has left: nobody should wait longer for a courtesy


class MemberLog:
    """The members of one group, by their records; a record has the worker's name and ``session``.

    A log that has grown long is closed by a last line; the next log begins with the members at that
    point, and a worker that wrote behind the last line writes again. Every call ends by its
    deadline (monotonic seconds) or raises ``StoreLostError``.
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
            lines.append(_entry(f"{_LOG}/{number}", line))
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
            self._number = stored_number(_NEWEST, (yield Read(_NEWEST)) or b"0")
        return self._number


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry).encode() + b"\n"


def _entry(key: str, line: bytes) -> dict[str, Any]:
    """Return an entry of a log. Raises ``RuntimeError`` if no worker can have written it."""
    try:
        entry = json.loads(line)
        record = entry.get("in", {"session": 0})
        if type(record["session"]) is int:
            return dict(entry)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise RuntimeError(f"{key!r} in the job's store has a line of another program")


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

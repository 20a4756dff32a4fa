"""The members of a dynamic group: a log in the store, to which workers add that they come and go.

Adding a line is one atomic operation, so joining takes no lock, and a worker that dies while it
joins blocks no other. The order of the log says who was there before whom.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist

from rankcall.process import DEAD, Process
from rankcall.rpc._group import bounded

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
        self._store: Any = store  # torch's types lack append()
        self._number: int | None = None  # of the newest log that is known; it only grows

    def enter(self, record: WorkerRecord, deadline: float) -> list[WorkerRecord]:
        """Add a worker; return the records of those that came before it and have not left."""
        return bounded(lambda: self._enter(record), deadline, "join")

    def members(self, deadline: float) -> list[WorkerRecord]:
        """Return the records of those that have not left."""
        return list(bounded(self._present, deadline, "join").values())

    def leave(self, session: int, deadline: float | None = None, by: int | None = None) -> None:
        """Add that a worker has left or was lost. Doing so twice is harmless.

        ``by`` is the session of the member that lost it. The line has no effect if that member has
        itself been lost before: a worker that was stopped for long takes all others for lost.
        """
        until = time.monotonic() + _LEAVE_S
        entry = {"out": session} if by is None else {"out": session, "by": by}
        bounded(lambda: self._add(entry), min(until, deadline or until), "leave")

    def _enter(self, record: WorkerRecord) -> list[WorkerRecord]:
        lines = self._add({"in": record})
        own = [line.get("in", {}).get("session") for line in lines].index(record["session"])
        before, now = _present(lines[:own]), _present(lines)
        if len(lines) > max(_LINES, 4 * len(now)):
            self._add(_END)
        return [other for session, other in before.items() if session in now]

    def _present(self) -> Present:
        number = self._newest()
        while _is_closed(lines := self._read(number)):
            number = self._begin_next(number, lines)
        return _present(lines)

    def _add(self, entry: Mapping[str, Any]) -> list[Any]:
        """Append to the newest log; return its lines, including the new one."""
        number = self._newest()
        while True:
            self._store.append(f"{_LOG}/{number}", json.dumps(entry) + "\n")
            lines = self._read(number)
            if not _is_closed(lines):
                return lines
            number = self._begin_next(number, lines)
            if entry == _END:
                return lines

    def _read(self, number: int) -> list[Any]:
        """Return a log's lines, up to the one that closes it."""
        key = f"{_LOG}/{number}"
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        lines = []
        for line in text.splitlines():
            lines.append(json.loads(line))
            if "end" in lines[-1]:
                break
        return lines

    def _begin_next(self, closed: int, lines: list[Any]) -> int:
        """Return the number of the log after a closed one. The first worker here begins it."""
        if lines != [_END]:  # else another worker has begun it, and cleared the closed one
            begin = "".join(json.dumps({"in": each}) + "\n" for each in _present(lines).values())
            self._store.compare_set(f"{_LOG}/{closed + 1}", "", begin or "{}\n")
            self._store.set(_NEWEST, str(closed + 1))
            self._store.set(f"{_LOG}/{closed}", json.dumps(_END) + "\n")
        self._number = closed + 1
        return closed + 1

    def _newest(self) -> int:
        if self._number is None:
            is_known = self._store.check([_NEWEST])
            self._number = int(self._store.get(_NEWEST)) if is_known else 0
        return self._number


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
    other = find_conflict(record, others)
    if other is None:
        return
    name = record["node"]["name"]
    if other["node"]["name"] == name:
        host = other["host"].split()[0]
        raise RuntimeError(f"worker name {name!r} is not unique: a member on {host} has it")
    raise RuntimeError(
        f"rank {record['rank']} of worker {name!r} is not unique: "
        f"worker {other['node']['name']!r} has it"
    )

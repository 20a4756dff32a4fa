"""Who is in a dynamic group: a log in the store, to which workers add that they come and go.

Adding is one atomic operation, so that coming takes no lock and a worker that dies in it wedges
nobody: the log's order says who was there before whom.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any

import torch.distributed as dist

from rankcall.errors import RpcTimeout
from rankcall.ring.writer import process_start
from rankcall.rpc._bounded import bounded

Card = Mapping[str, Any]
Present = dict[int, Card]
_LOG, _NEWEST = "members", "members/newest"
_END = {"end": True}
_LINES = 256  # a log of more, most of them of workers that have left, is closed
_LEAVE_S = 5.0  # what noting that a worker has left may take


class MemberLog:
    """The members of one group, by their cards; a card names its worker and its ``session``.

    A log that has grown long is closed by a last line that counts; the next one begins with who
    was there. What was written behind that line is written again by whoever wrote it. Every call
    ends by its deadline (monotonic seconds) or raises ``StoreLost``.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store  # torch's types know no append()
        self._lock = Lock()  # the agent's threads note who was lost
        self._number: int | None = None  # of the newest log that is known

    def enter(self, card: Card, deadline: float) -> list[Card]:
        """Add a worker; return the cards of those who came before it and have not left."""
        return bounded(lambda: self._enter(card), deadline, "join")

    def members(self, deadline: float) -> list[Card]:
        """Return the cards of those who have not left."""
        return list(bounded(self._present, deadline, "join").values())

    def leave(self, session: int, deadline: float | None = None) -> None:
        """Note that a worker has left, or is no more. Twice is once."""
        until = time.monotonic() + _LEAVE_S
        bounded(lambda: self._add({"out": session}), min(until, deadline or until), "leave")

    def _enter(self, card: Card) -> list[Card]:
        lines = self._add({"in": card})
        mine = [each.get("in", {}).get("session") for each in lines].index(card["session"])
        before, now = _present(lines[:mine]), _present(lines)
        if len(lines) > max(_LINES, 4 * len(now)):
            self._add(_END)
        return [each for session, each in before.items() if session in now]

    def _present(self) -> Present:
        with self._lock:
            while _ends(lines := self._read()):
                self._go_on(lines)
            return _present(lines)

    def _add(self, entry: Mapping[str, Any]) -> list[Any]:
        """Append to the newest log; return its lines, the new one among them."""
        with self._lock:
            while True:
                self._store.append(self._newest(), json.dumps(entry) + "\n")
                lines = self._read()
                if not _ends(lines):
                    return lines
                self._go_on(lines)
                if entry == _END:
                    return lines

    def _read(self) -> list[Any]:
        """Return the newest known log's lines, up to one that closes it."""
        key = self._newest()
        text = self._store.get(key).decode() if self._store.check([key]) else ""
        lines = []
        for line in text.splitlines():
            lines.append(json.loads(line))
            if "end" in lines[-1]:
                break
        return lines

    def _go_on(self, lines: list[Any]) -> None:
        """Go on to the next log. Whoever is first to come here writes its beginning."""
        closed = self._newest()
        self._number = (self._number or 0) + 1
        if lines != [_END]:  # else the next has been begun, and the closed one cleared
            begin = "".join(json.dumps({"in": card}) + "\n" for card in _present(lines).values())
            self._store.compare_set(self._newest(), "", begin or "{}\n")
            self._store.set(_NEWEST, str(self._number))
            self._store.set(closed, json.dumps(_END) + "\n")

    def _newest(self) -> str:
        """Return the key of the newest log that is known."""
        if self._number is None:
            told = self._store.check([_NEWEST])
            self._number = int(self._store.get(_NEWEST)) if told else 0
        return f"{_LOG}/{self._number}"


def _ends(lines: list[Any]) -> bool:
    return bool(lines) and "end" in lines[-1]


def _present(lines: Iterable[Any]) -> Present:
    present: Present = {}
    for entry in lines:
        if "in" in entry:
            present[entry["in"]["session"]] = entry["in"]
        elif "out" in entry:
            present.pop(entry["out"], None)
    return present


def life() -> dict[str, int]:
    """Return what tells this process from a later one with its pid."""
    return {"pid": os.getpid(), "born": process_start(os.getpid()) or 0}


def is_dead(card: Card, host: str) -> bool:
    """Whether a worker is known to be no more: it was on this host, and is not there now."""
    return bool(card["host"] == host and process_start(card["pid"]) != card["born"])


def check_unique(card: Card, others: list[Card]) -> None:
    """Raise ``RuntimeError`` where a member has the newcomer's name or rank."""
    for other in others:
        if other["node"]["name"] == card["node"]["name"]:
            raise RuntimeError(
                f"worker name {card['node']['name']!r} is not unique: a member on "
                f"{other['host'].split()[0]} has it"
            )
        if other["rank"] == card["rank"]:
            raise RuntimeError(
                f"rank {card['rank']} of worker {card['node']['name']!r} is not unique: "
                f"worker {other['node']['name']!r} has it"
            )


class Lease:
    """A token in the store that one worker at a time holds, and loses when it stops renewing it.

    Nobody's clock is compared with another's: a waiter takes the token over when it has seen it
    unchanged for ``lasts_s`` seconds.
    """

    def __init__(self, store: dist.Store, holder: str, lasts_s: float = 5.0) -> None:
        self._store, self._holder, self._lasts_s = store, holder, lasts_s
        self._beat = 0
        self._mine = ""

    @contextmanager
    def held(self, deadline: float) -> Iterator[None]:
        """Hold the token for a block. Raises ``RpcTimeout`` that names who holds it."""
        bounded(lambda: self._take(deadline), deadline, "join or leave")
        done = Event()
        renewing = Thread(target=self._renew, args=(done,), name="rankcall-rpc-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            with suppress(RuntimeError):  # the store may be gone
                bounded(lambda: self._release(renewing), time.monotonic() + _LEAVE_S, "leave")

    def _take(self, deadline: float) -> None:
        seen, since = "", time.monotonic()
        while True:
            self._beat += 1
            mine = f"{self._holder} {os.getpid()} {self._beat}"
            expired = time.monotonic() - since > self._lasts_s
            found = self._store.compare_set("lease", seen if expired else "", mine).decode()
            if found == mine:
                self._mine = mine
                return
            if found != seen:
                seen, since = found, time.monotonic()
            if time.monotonic() > deadline:
                raise RpcTimeout(
                    f"worker {self._holder!r} could not join or leave: "
                    f"worker {seen.split(' ')[0]!r} has been at it all the time"
                )
            time.sleep(0.01)

    def _release(self, renewing: Thread) -> None:
        renewing.join(_LEAVE_S)
        self._store.compare_set("lease", self._mine, "")

    def _renew(self, done: Event) -> None:
        while not done.wait(self._lasts_s / 4):
            self._beat += 1
            renewed = f"{self._holder} {os.getpid()} {self._beat}"
            with suppress(RuntimeError):
                if self._store.compare_set("lease", self._mine, renewed).decode() == renewed:
                    self._mine = renewed

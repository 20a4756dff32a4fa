"""Who is in a dynamic group: a log in the store, to which workers add that they come and go.

Adding is one atomic operation, so that coming takes no lock and a worker that dies in it wedges
nobody: the log's order says who was there before whom.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Thread
from typing import Any

import torch.distributed as dist

from rankcall.errors import RpcTimeout
from rankcall.ring.writer import process_start

Card = Mapping[str, Any]
_LOG = "members"


class MemberLog:
    """The members of one group, by their cards; a card names its worker and its ``session``."""

    def __init__(self, store: dist.Store) -> None:
        self._store: Any = store  # torch's types know no append()

    def enter(self, card: Card) -> list[Card]:
        """Add a worker; return the cards of those who came before it and have not left."""
        self._store.append(_LOG, json.dumps({"in": card}) + "\n")
        return self._read(until=card["session"])

    def members(self) -> list[Card]:
        """Return the cards of those who have not left."""
        return self._read() if self._store.check([_LOG]) else []

    def leave(self, session: int) -> None:
        """Note that a worker has left, or is no more. Twice is once."""
        self._store.append(_LOG, json.dumps({"out": session}) + "\n")

    def _read(self, until: int | None = None) -> list[Card]:
        present: dict[int, Card] = {}
        before: list[Card] | None = None
        for line in self._store.get(_LOG).decode().splitlines():
            entry = json.loads(line)
            if "out" in entry:
                present.pop(entry["out"], None)
            elif entry["in"]["session"] == until:
                before = list(present.values())
            else:
                present[entry["in"]["session"]] = entry["in"]
        if before is None:
            return list(present.values())
        return [card for card in before if card["session"] in present]


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
        self._take(deadline)
        done = Event()
        renewing = Thread(target=self._renew, args=(done,), name="rankcall-rpc-lease", daemon=True)
        renewing.start()
        try:
            yield
        finally:
            done.set()
            renewing.join()
            with suppress(RuntimeError):  # the store may be gone
                self._store.compare_set("lease", self._mine, "")

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

    def _renew(self, done: Event) -> None:
        while not done.wait(self._lasts_s / 4):
            self._beat += 1
            renewed = f"{self._holder} {os.getpid()} {self._beat}"
            with suppress(RuntimeError):
                if self._store.compare_set("lease", self._mine, renewed).decode() == renewed:
                    self._mine = renewed

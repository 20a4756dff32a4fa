"""What is sent to a store, and over which connection.

A link is either a clone of the caller's store, whose socket has a receive timeout and which no
other thread uses, so that it may block; or the caller's store itself, which is only ever asked what
it answers at once. The caller's timeout is never touched, nor another thread held up.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, HashStore, Store, TCPStore

from rankcall.store._errors import StoreLost

__all__ = [
    "Link", "Local", "answers_slowly", "borrowed", "local", "lost", "on_fork", "own", "where",
]  # fmt: skip

_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 0.001, 0.25, 0.1
_LONGEST_S = 1e6  # a wait goes down to poll(), whose milliseconds are an int
_SNAPSHOTS = 20
_READ = timedelta(seconds=1)  # of a key that is known to be there
T = TypeVar("T")


class Link:
    """One way to a store, for one thread at a time.

    ``operations`` counts what was sent, ``round_trips`` those that had to be answered.
    """

    def __init__(self, client: Store, sock: socket.socket | None = None) -> None:
        self._client: Any = client  # torch's types leave out append, clone and timeout
        self._socket = sock
        self._blocking = sock is not None or isinstance(root_of(client), HashStore)
        self._extended = bool(root_of(client).has_extended_api())  # type: ignore[attr-defined]
        self._bound = 0.0
        self.where = where(client)
        self.broken = False
        self.operations = 0
        self.round_trips = 0

    def bound(self, seconds: float) -> None:
        """Let no answer take longer than this from now on, on a connection of our own."""
        if self._socket is not None and seconds != self._bound:
            whole, part = divmod(max(seconds, 0.001), 1.0)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._bound = seconds

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value. Adding 0 reads it."""
        return int(self._ask(self._client.add, key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys are there."""
        return bool(self._ask(self._client.check, list(keys)))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return bytes(self._ask(self._client.get, key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are there."""
        if self._extended:
            return list(self._ask(self._client.multi_get, list(keys)))
        return [self.get(key) for key in keys]

    def set(self, key: str, value: bytes) -> None:
        """Set a key. Returns before the store has it; nothing is said where the host is dead."""
        self.round_trips -= 1
        self._ask(self._client.set, key, value)

    def set_first(self, key: str, value: str) -> str:
        """Set a key unless it is there; return what it holds then."""
        return bytes(self._ask(self._client.compare_set, key, "", value)).decode()

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return bool(self._ask(self._client.delete_key, key))

    def list_keys(self) -> list[str]:
        """Return all keys of the store, of its prefix if it has one."""
        return list(self._ask(self._client.list_keys))

    def append(self, key: str, value: bytes) -> None:
        """Append to a log. No answer is waited for where the store can append."""
        if self._extended:
            self.round_trips -= 1
            self._ask(self._client.append, key, value)
        else:
            self.set(f"{key}/{self.add(f'{key}/n', 1)}", value)

    def read_log(self, key: str) -> bytes:
        """Return all that was appended; nothing where nothing was."""
        if self._extended:
            return self.get(key) if self.check([key]) else b""
        if not self.check([f"{key}/n"]):
            return b""
        slots = [f"{key}/{slot}" for slot in range(1, self.add(f"{key}/n", 0) + 1)]
        return b"".join(self.get(slot) for slot in slots if self.check([slot]))

    def delete_log(self, key: str) -> None:
        """Remove a log."""
        if self._extended:
            self.delete(key)
        elif self.check([f"{key}/n"]):
            for slot in range(1, self.add(f"{key}/n", 0) + 1):
                self.delete(f"{key}/{slot}")
            self.delete(f"{key}/n")

    def absent(self, keys: Sequence[str]) -> list[int]:
        """Return the positions of the keys that are not there."""
        there = set(self.present(keys))
        return [at for at in range(len(keys)) if at not in there]

    def present(self, keys: Sequence[str]) -> list[int]:
        """Return the positions of the keys that are there: few round trips at any number."""
        return self._present(list(range(len(keys))), keys)

    def _present(self, positions: list[int], keys: Sequence[str]) -> list[int]:
        """Halve until all of a part are there: a read of a key never written would block."""
        if not positions or self.check([keys[at] for at in positions]):
            return positions
        if len(positions) == 1:
            return []
        half = len(positions) // 2
        return self._present(positions[:half], keys) + self._present(positions[half:], keys)

    def snapshot(self, log: str, counters: Sequence[str]) -> tuple[bytes, dict[int, int]]:
        """Return a log and counters as they were at one moment.

        A TCPStore answers a ``multi_get`` in one go. Elsewhere the log is read before and after:
        whoever touches one of the counters has written to the log first.
        """
        present = self.present(counters)
        names = [counters[at] for at in present]
        for _ in range(_SNAPSHOTS):
            if self._extended and self.check([log]):
                before, *values, after = self.multi_get([log, *names, log])
            else:
                before = self.read_log(log)
                values = self.multi_get(names) if names else []
                after = self.read_log(log)
            if before == after:
                break
        return after, {at: int(value) for at, value in zip(present, values, strict=True)}

    def wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Wait until all keys are there; False where the deadline (monotonic) came first."""
        if self._blocking:
            return self._blocked(self._client.wait, list(keys), deadline)
        began = time.monotonic()
        while not self.check(keys):
            now = time.monotonic()
            if now >= deadline:
                return False
            pause = min(max((now - began) * _POLL_SHARE, _SHORTEST_POLL_S), _LONGEST_POLL_S)
            time.sleep(min(pause, deadline - now))
        return True

    def wait_get(self, key: str, deadline: float) -> bytes | None:
        """Wait for a key and return its value; None where the deadline came first."""
        if self._socket is None:
            return self.get(key) if self.wait([key], deadline) else None
        got: list[bytes] = []

        def get(key: str, left: timedelta) -> None:
            self._client.set_timeout(left)  # the clone's own: nobody else sees it
            got.append(self._client.get(key))

        try:
            return got[0] if self._blocked(get, key, deadline) else None
        finally:
            self._client.set_timeout(_READ)

    def _blocked(self, call: Callable[[Any, timedelta], None], what: Any, deadline: float) -> bool:
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                self._ask(call, what, timedelta(seconds=min(left, _LONGEST_S)))
                return True
            except DistStoreError:
                if time.monotonic() >= deadline:
                    return False

    def _ask(self, call: Callable[..., T], *arguments: Any) -> T:
        self.operations += 1
        self.round_trips += 1
        try:
            return call(*arguments)
        except DistStoreError:
            raise
        except (DistNetworkError, RuntimeError) as error:  # RuntimeError: a FileStore without file
            self.broken = True
            raise lost(self.where, str(error)) from error

    def close(self) -> None:
        """Let go of the connection."""
        self.broken = True
        if self._socket is not None:
            self._socket.close()
        self._client = None

    def __del__(self) -> None:
        if hasattr(self, "broken"):
            self.close()  # with the store it was made from


def root_of(store: Store) -> Store:
    """Return the store below all prefixes."""
    below: Store = getattr(store, "_underlying_non_prefix_store", store)
    return below


def where(store: Store) -> str:
    """Say where a store is, without its repr: that resolves addresses, which may take seconds."""
    root = root_of(store)
    if isinstance(root, TCPStore):
        return f"at {root.host}:{root.port}"
    path = getattr(root, "path", None)
    return f"in {path}" if path else f"({type(root).__name__})"


def answers_slowly(store: Store) -> bool:
    """Whether calls may take longer than they were given; see ``_bounded``."""
    return isinstance(root_of(store), TCPStore)


def lost(place: str, reason: str) -> StoreLost:
    """Return the error that says that the store's host is gone."""
    silent = "Timeout" in reason or "no answer" in reason
    state = "does not answer (its host is stopped, or cut off)" if silent else "is gone"
    return StoreLost(
        f"the store {place} {state}: {reason.splitlines()[0]}. Look at the process that hosts it; "
        "with rankcall.store.failover() a job goes on without it",
        host=place.removeprefix("at "),
    )


def _socket_of(client: Store) -> socket.socket | None:
    """Return a second handle on a TCPStore client's socket."""
    root = root_of(client)
    found = re.search(r"fd=(\d+)", repr(root))
    if isinstance(root, TCPStore) and found:
        with suppress(OSError):
            sock = socket.socket(fileno=os.dup(int(found.group(1))))
            if sock.getpeername()[1] == root.port:
                return sock
            sock.close()
    return None


def _closed(store: Store) -> bool:
    """Whether the other end has closed the caller's connection."""
    sock = _socket_of(store)
    if sock is None:
        return False
    with sock:
        try:
            return sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _connect(store: Store, seconds: float) -> Link:
    """Clone a store's connection. Connecting to a stopped host blocks: not on this thread."""
    made: list[Link | BaseException] = []

    def clone() -> None:
        try:
            if _closed(store):  # connecting would be tried for as long as the store's timeout
                made.append(lost(where(store), "it closed the connection"))
                return
            client = store.clone()  # type: ignore[attr-defined]
            client.set_timeout(_READ)
            made.append(Link(client, _socket_of(client)))
        except BaseException as error:
            made.append(error)

    thread = threading.Thread(target=clone, name="rankcall-store-connect", daemon=True)
    thread.start()
    thread.join(seconds)
    outcome = made[0] if made else lost(where(store), f"no answer within {seconds:.0f} s")
    if isinstance(outcome, StoreLost):
        raise outcome
    if isinstance(outcome, BaseException):
        raise lost(where(store), str(outcome)) from outcome
    return outcome


@dataclass
class Local:
    """What this process keeps for a store object, and not longer than that lives."""

    idle: list[Link] = field(default_factory=list)
    identity: str | None = None
    seats: dict[Any, Any] = field(default_factory=dict)  # see ``_again``


_locals: weakref.WeakKeyDictionary[Store, Local] = weakref.WeakKeyDictionary()
_forgotten: list[Callable[[], None]] = []
_watching: list[bool] = []


def local(store: Store) -> Local:
    """Return what this process keeps for a store object."""
    found = _locals.get(store)
    if found is None:
        if not _watching:
            _watching.append(True)
            os.register_at_fork(after_in_child=_after_fork)
        found = _locals.setdefault(store, Local())
    return found


def on_fork(forget: Callable[[], None]) -> None:
    """Call ``forget`` in a forked child, once any store has been used."""
    _forgotten.append(forget)


def _after_fork() -> None:
    for forget in _forgotten:
        forget()


on_fork(_locals.clear)  # a child must not talk on its parent's connection


@contextmanager
def own(store: Store, seconds: float) -> Iterator[Link]:
    """Lend a connection that no other thread uses meanwhile; connect in ``seconds`` if need be."""
    idle = local(store).idle
    try:
        link = idle.pop()
    except IndexError:
        link = _connect(store, seconds)
    link.bound(seconds)
    try:
        yield link
    finally:
        if link.broken:
            link.close()
        else:
            idle.append(link)


@contextmanager
def borrowed(store: Store) -> Iterator[Link]:
    """Use the caller's connection, for nothing that blocks."""
    local(store)
    yield Link(store)

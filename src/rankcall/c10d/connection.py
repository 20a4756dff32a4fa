"""One connection to a c10d store: each request (``rankcall.c10d.requests``) as a method."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

from torch.distributed import DistStoreError, HashStore, Store

from rankcall.c10d.errors import StoreLostError, lost
from rankcall.c10d.location import has_ended, root_of, where
from rankcall.c10d.requests import Arrive

LONGEST_S = 1e6  # a wait goes down to poll(), which takes milliseconds as an int
_ABSENT = "rankcall: no such key"


class Clock:
    """The only clock of stores. Tests put another one in its place."""

    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)


clock = Clock()


class Connection:
    """One way to a store, for one thread at a time. Its methods are the requests.

    ``heard`` is when the last answer came.
    """

    def __init__(self, client: Store, own_socket: socket.socket | None = None) -> None:
        self._client: Any = client  # torch's types leave out append, clone and timeout
        self._socket = own_socket
        self._extended = bool(root_of(client).has_extended_api())  # type: ignore[attr-defined]
        self._reads_many = self._extended and (
            own_socket is not None or isinstance(root_of(client), HashStore)
        )
        self.limited_to = 0.0  # seconds for an answer
        self.where = where(client)
        self.is_broken = False
        self.heard = 0.0

    @property
    def appends(self) -> bool:
        """Whether the store can append to a key."""
        return self._extended

    def limit(self, seconds: float) -> None:
        """Let no answer take longer than this from now on, on a connection of our own."""
        if self._socket is not None and seconds != self.limited_to:
            whole, part = divmod(min(max(seconds, 0.001), LONGEST_S), 1.0)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.limited_to = seconds

    def add(self, key: str, amount: int) -> int:
        return self._client.add(key, amount)  # type: ignore[no-any-return]

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._client.check(list(keys)))

    def read(self, key: str) -> bytes | None:
        # One round trip that never waits, unlike get().
        value = bytes(self._client.compare_set(key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

    def read_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if len(keys) < 2 or not self._reads_many:
            return [self.read(key) for key in keys]
        if self.check(keys):
            try:
                return list(self._client.multi_get(list(keys)))
            except DistStoreError:
                return [self.read(key) for key in keys]  # one was removed in between
        half = len(keys) // 2
        return self.read_many(keys[:half]) + self.read_many(keys[half:])

    def set(self, key: str, value: bytes) -> None:
        self._client.set(key, value)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes | None:
        held = bytes(self._client.compare_set(key, expected, value))
        # An absent key is answered with what was expected; a key that held that has been set.
        return None if expected and held == expected != value else held

    def append(self, key: str, value: bytes) -> None:
        self._client.append(key, value)

    def delete(self, key: str) -> None:
        self._client.delete_key(key)

    def list_keys(self) -> list[str]:
        return list(self._client.list_keys())

    def now(self) -> float:
        return clock.monotonic()

    def sleep(self, seconds: float) -> None:
        clock.sleep(seconds)

    def block(self, keys: Sequence[str], seconds: float) -> bool:
        """Wait for keys as long as the store allows; return whether they are there."""
        try:
            self._client.wait(keys, _span(int(seconds) or max(seconds, 0.001)))
        except DistStoreError:
            return False
        return True

    def arrive(self, request: Arrive, seconds: float) -> bool:
        """Append, count this process in, and return whether all are in, in that time."""
        for key, value in request.appends:
            self._client.append(key, value)
        try:
            self._client.barrier(request.key, request.size, _span(int(seconds) or seconds))
        except DistStoreError:
            return False
        return True

    def lost(self, error: Exception, name: str = "") -> StoreLostError:
        """Return the error for a request that failed; the connection is of no more use.

        ``name`` is the call for which the request was made.
        """
        self.is_broken = True
        # torch raises one type for a timed-out answer and for a closed connection, and tells them
        # apart in its text only. The socket knows: if the other end has not closed it, the receive
        # timeout has expired. Without a socket of our own there is no receive timeout.
        is_silent = self._socket is not None and not has_ended(self._socket)
        return lost(self.where, str(error), is_silent=is_silent, name=name)

    def shut_down(self) -> None:
        """Let a thread that waits for an answer go on, with an error."""
        self.is_broken = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection."""
        self.is_broken = True
        if self._socket is not None:
            self._socket.close()
        self._client = None

    def __del__(self) -> None:
        if hasattr(self, "is_broken"):
            self.close()


@lru_cache(maxsize=64)
def _span(seconds: float) -> timedelta:
    """Return a time in the store's type. It takes long to make, so waits are in whole seconds."""
    return timedelta(seconds=min(seconds, LONGEST_S))

"""What is sent to a store: few round trips, and errors that say where the store was."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, HashStore, Store, TCPStore

from rankcall.store._errors import StoreLost

__all__ = ["READ", "Link", "lost", "root_of", "where"]

_SHORTEST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 0.001, 0.25, 0.1
_LONGEST_S = 1e6  # a wait goes down to poll(), whose milliseconds are an int
_SNAPSHOTS = 20
_ABSENT = "rankcall: no such key"
READ = timedelta(seconds=1)  # of a key that is known to be there
T = TypeVar("T")


class Link:
    """One way to a store, for one thread at a time.

    ``operations`` counts what was sent, ``round_trips`` those that had to be answered; ``heard`` is
    when the last answer came (monotonic).
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
        self.heard = 0.0

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

    def read(self, key: str) -> bytes | None:
        """Return the value of a key, None where it is not there.

        One round trip, where ``get`` takes two and would wait.
        """
        value = bytes(self._ask(self._client.compare_set, key, _ABSENT, _ABSENT))
        return None if value == _ABSENT.encode() else value

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
        return self.replace(key, "", value)

    def replace(self, key: str, before: str, value: str) -> str:
        """Set a key that holds ``before``; return what it holds then."""
        return bytes(self._ask(self._client.compare_set, key, before, value)).decode()

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
            return self.read(key) or b""
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

    def counters(self, keys: Sequence[str]) -> dict[int, int]:
        """Return the counters that are there, by position."""
        there = self.present(keys)
        values = self.multi_get([keys[at] for at in there]) if there else []
        return {at: int(value) for at, value in zip(there, values, strict=True)}

    def read_logs(self, keys: Sequence[str]) -> bytes:
        """Return several logs, one behind the other."""
        if self._extended:
            there = self.present(keys)
            return b"".join(self.multi_get([keys[at] for at in there])) if there else b""
        return b"".join(self.read_log(key) for key in keys)

    def snapshot(
        self, logs: Sequence[str], counters: Sequence[str]
    ) -> tuple[bytes, dict[int, int]]:
        """Return logs and counters as they were at one moment.

        The logs are read before and after: whoever touches one of the counters has written to one
        of the logs first.
        """
        after = self.read_logs(logs)
        for _ in range(_SNAPSHOTS):
            before, values = after, self.counters(counters)
            after = self.read_logs(logs)
            if before == after:
                break
        return after, values

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

    def block(self, key: str, span: timedelta) -> bool:
        """Wait for a key, on a connection of our own; False where it did not come in time."""
        try:
            self._ask(self._client.wait, [key], span)
        except DistStoreError:
            return False
        return True

    def wait_get(self, key: str, deadline: float) -> bytes | None:
        """Wait for a key and return its value; None where the deadline came first."""
        if self._socket is None:
            return self.read(key) if self.wait([key], deadline) else None
        got: list[bytes] = []

        def get(key: str, left: timedelta) -> None:
            self._client.set_timeout(left)  # the clone's own: nobody else sees it
            got.append(self._client.get(key))

        try:
            return got[0] if self._blocked(get, key, deadline) else None
        finally:
            self._client.set_timeout(READ)

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
            answer = call(*arguments)
            self.heard = time.monotonic()
            return answer
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


def lost(place: str, reason: str) -> StoreLost:
    """Return the error that says that the store's host is gone."""
    silent = "Timeout" in reason or "no answer" in reason
    state = "does not answer (its host is stopped, or cut off)" if silent else "is gone"
    return StoreLost(
        f"the store {place} {state}: {reason.splitlines()[0]}. Look at the process that hosts it; "
        "with rankcall.store.failover() a job goes on without it",
        host=place.removeprefix("at "),
    )

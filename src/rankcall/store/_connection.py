"""Over which connection a store is asked.

Either a clone of the caller's store, whose socket has a receive timeout and which no other thread
uses, so that it may block; or the caller's store itself, which is only ever asked what it answers
at once. The caller's timeout is never touched, nor another thread held up.
"""

from __future__ import annotations

import os
import re
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import Store, TCPStore

from rankcall.background import BackgroundCall
from rankcall.store._errors import StoreLost
from rankcall.store._link import READ, Link, lost, root_of, where

__all__ = ["Local", "answers_slowly", "borrowed", "local", "on_fork", "own"]


def answers_slowly(store: Store) -> bool:
    """Whether calls may take longer than they were given; see ``_bounded``."""
    return isinstance(root_of(store), TCPStore)


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

    def clone() -> Link:
        if _closed(store):  # connecting would be tried for as long as the store's timeout
            raise lost(where(store), "it closed the connection")
        client = store.clone()  # type: ignore[attr-defined]
        client.set_timeout(READ)
        return Link(client, _socket_of(client))

    helper = BackgroundCall(clone, "rankcall-store-connect")
    if not helper.ended(seconds):
        raise lost(where(store), f"no answer within {seconds:.0f} s")
    try:
        return helper.outcome()
    except StoreLost:
        raise
    except Exception as error:
        raise lost(where(store), str(error)) from error


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

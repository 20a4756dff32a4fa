"""Stores of every kind for tests, and threads that act as ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

KINDS = ("tcp", "tcp-without-libuv", "prefix", "file", "hash")
WAIT_S = 30.0


def stores_of(kind: str, count: int, folder: Path) -> list[Store]:
    """Return ``count`` clients of one store."""
    if kind == "hash":
        return [HashStore()] * count
    if kind == "file":
        return [FileStore(str(folder / "store"), -1) for _ in range(count)]
    libuv = kind != "tcp-without-libuv"
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    others = [
        TCPStore("127.0.0.1", master.port, is_master=False, wait_for_workers=False)
        for _ in range(count - 1)
    ]
    clients: list[Store] = [master, *others]
    if kind == "prefix":
        return [PrefixStore("outer", PrefixStore("inner", client)) for client in clients]
    return clients


def keys_of(store: Store) -> list[str]:
    """Return the keys of a store that are ours or the user's."""
    listed: list[str] = store.list_keys()
    return sorted(key for key in listed if "efcount" not in key)


def threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread of its own; return what it returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:
            results[at] = error

    running = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for each in running:
        each.start()
    for each in running:
        each.join(WAIT_S)
        assert not each.is_alive(), "a rank hangs"
    return results


def ranks(call: Callable[[int], Any], which: Sequence[int] | int) -> list[Any]:
    """Run ``call(rank)`` for each rank at once."""
    numbers = range(which) if isinstance(which, int) else which
    return threads([lambda rank=rank: call(rank) for rank in numbers])


@contextmanager
def meanwhile(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call beside the block; its outcome is in the list after it."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.extend(threads([call])), daemon=True)
    thread.start()
    yield outcome
    thread.join(WAIT_S)
    assert not thread.is_alive()

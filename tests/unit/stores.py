"""What the tests of stores share: stores of every kind, and threads that act as ranks."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lag import stopwatch
from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore

import rankcall
from rankcall.c10d import client as c10d_client

KINDS = ("tcp", "tcp-without-libuv", "prefix", "file", "hash")
N = 4
WAIT_S = 120.0


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Run on every kind of store."""
    return str(request.param)


@pytest.fixture
def clients(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """Return four clients of one store.

    The store is sound. So if a call waits long for its answer, the machine is busy: the call must
    not say that the store is lost.
    """
    monkeypatch.setattr(c10d_client, "BEYOND_S", WAIT_S)
    return stores_of(kind, N, tmp_path)


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


def generations(store: Store, kind: str) -> set[str]:
    """Return the generations that have keys: of barriers (``b``) or of exchanges (``s``)."""
    matches = (re.search(rf"/rankcall\.0/\d+/{kind}(\d+)/", key) for key in keys_of(store))
    return {match.group(1) for match in matches if match}


def until_key(store: Store, part: str) -> None:
    """Wait until there is a key that contains ``part``: another thread has come."""
    deadline = time.monotonic() + WAIT_S
    while not any(part in key for key in keys_of(store)):
        assert time.monotonic() < deadline, f"no key contains {part!r}"
        time.sleep(0.001)


def threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run each call in a thread of its own; return what it returned or raised."""
    results: list[Any] = [None] * len(calls)

    def run(at: int) -> None:
        try:
            results[at] = calls[at]()
        except BaseException as error:
            results[at] = error

    running = [threading.Thread(target=run, args=(at,), daemon=True) for at in range(len(calls))]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(WAIT_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def ranks(call: Callable[[int], Any], which: Sequence[int] | int) -> list[Any]:
    """Run ``call(rank)`` for each rank at once."""
    numbers = range(which) if isinstance(which, int) else which
    return threads([lambda rank=rank: call(rank) for rank in numbers])


@contextlib.contextmanager
def meanwhile(call: Callable[[], Any]) -> Iterator[list[Any]]:
    """Run a call beside the block; its outcome is in the list after it."""
    outcome: list[Any] = []
    thread = threading.Thread(target=lambda: outcome.extend(threads([call])), daemon=True)
    thread.start()
    yield outcome
    thread.join(WAIT_S)
    assert not thread.is_alive()


def come(call: Callable[[int], Any], which: Sequence[int]) -> list[Any]:
    """Let each rank time out at a barrier once, then call again: by then all have arrived."""
    for rank in which:
        with contextlib.suppress(
            rankcall.errors.BarrierTimeout, rankcall.errors.WorldMismatchError
        ):
            call(rank)
    return ranks(call, which)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call raised, and after how long on an idle machine."""
    with stopwatch() as took, pytest.raises(rankcall.errors.BarrierTimeout) as caught:
        call()
    return caught.value, took[0]

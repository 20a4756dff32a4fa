"""A rank notices that it waits for the job's store, or that it uses no CPU."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, PrefixStore, TCPStore
from world import wait_until

from rankcall.job.standstill import Standstill, waits_for_port
from rankcall.ring.layout import HEADER_BYTES, offset_of

LONG = timedelta(seconds=120)


@contextmanager
def thread_in(call: Callable[[], object], end: Callable[[], object]) -> Iterator[int]:
    """Run a call on a thread, whose kernel id this is, until ``end`` is called."""
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert thread.native_id is not None
        yield thread.native_id
    finally:
        end()
        thread.join(60)
        assert not thread.is_alive()


def field(ring: mmap.mmap, name: str) -> int:
    """Return a field of a ring's header."""
    at = offset_of(name)
    return int.from_bytes(ring[at : at + 8], "little")


@pytest.fixture
def store() -> TCPStore:
    """Return the store of a job, hosted here."""
    return TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("wait", [lambda store: store.wait(["a"], LONG), lambda s: s.get("a")])
def test_a_thread_that_waits_for_a_key(store: TCPStore, wait: Callable[[object], object]) -> None:
    """Its wait is seen, only on the store's own port, and lasts until the key is there."""
    other = TCPStore("localhost", store.port)  # a client holds its lock while it waits
    ring = mmap.mmap(-1, HEADER_BYTES)
    standstill = Standstill(ring, lambda: store.port)
    prefix = PrefixStore("job", other)

    def arrive() -> None:
        store.set("job/a", "1")

    with thread_in(lambda: wait(prefix), arrive) as thread:
        wait_until(lambda: waits_for_port(thread, store.port), 60)
        assert not waits_for_port(thread, store.port + 1)
        assert not waits_for_port(thread, 0)
        standstill.note(thread, is_silent=True)
        since = field(ring, "in_store_ns")
        assert 0 < since <= time.monotonic_ns()
        standstill.note(thread, is_silent=True)
        assert field(ring, "in_store_ns") == since
        standstill.note(thread, is_silent=False)
        assert field(ring, "in_store_ns") == 0
    standstill.note(thread, is_silent=True)  # a thread that has ended
    assert field(ring, "in_store_ns") == 0


def test_other_waits_are_none(store: TCPStore) -> None:
    """A thread in a lock does not wait for the store, nor one that runs."""
    event = threading.Event()
    with thread_in(event.wait, event.set) as thread:
        assert not waits_for_port(thread, store.port)
    assert not waits_for_port(threading.get_native_id(), store.port)
    with pytest.raises(DistStoreError):
        store.wait(["never"], timedelta(milliseconds=1))


def test_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is idle from the last second in which it used a tenth of a core or more."""
    clock, used = [1000.0], [50.0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: int(clock[0] * 1e9))
    monkeypatch.setattr(time, "process_time", lambda: used[0] + 3.0)
    monkeypatch.setattr(time, "thread_time", lambda: 3.0)
    ring = mmap.mmap(-1, HEADER_BYTES)
    standstill = Standstill(ring, lambda: 0)
    idle_s = []
    for seconds in (0.01, 0.0, 0.05, 0.2, 0.01, 0.01):
        clock[0], used[0] = clock[0] + 1.0, used[0] + seconds
        standstill.note(0, is_silent=True)
        since = field(ring, "idle_ns")
        idle_s.append(round(clock[0] - since / 1e9) if since else None)
    assert idle_s == [1, 2, 3, None, 1, 2]

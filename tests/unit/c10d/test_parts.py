"""The log and the value of one of many keep their promises in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores import kind, ranks, stores_of

from rankcall.c10d.client import perform
from rankcall.c10d.parts import Log, publish_once
from rankcall.c10d.requests import Steps
from rankcall.testing.simulated_store import (
    LostAnswer,
    Mark,
    Process,
    Simulation,
    World,
)

__all__ = ["kind"]  # fixture


def again(call: Callable[[], Steps[Any]], times: int = 2) -> Steps[Any]:
    """Make a call, and make it again if its answer was lost."""
    for _ in range(times - 1):
        try:
            return (yield from call())
        except LostAnswer:
            pass
    return (yield from call())


# --- a log ---


def _entries(world: World) -> list[bytes]:
    entries = []
    while (value := world.store.get(f"l/log/{len(entries)}")) is not None:
        entries.append(value.partition(b" ")[2])
    return entries


def _writer(name: str) -> Process:
    def start() -> Steps[None]:
        log = Log("l", nonce=name.encode())
        for number in range(2):
            entry = b"%s %d" % (name.encode(), number)
            yield Mark("appends", entry)
            yield from again(lambda entry=entry: log.append(entry))
            yield Mark("appended", entry)
        assert (yield from again(log.length)) >= 2, "its own entries are there"
        read: list[bytes] = []
        for _ in range(2):
            read += yield from again(log.read)
            yield Mark("read", tuple(read))

    return Process(name, start)


def _check_read(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
    entries = _entries(world)
    for writer in ("a", "b", "c"):
        mine = [entry for entry in entries if entry.startswith(writer.encode())]
        assert mine == sorted(set(mine)), "an entry is there twice, or out of order"
    if mark.name == "appended":
        assert mark.value in entries
    if mark.name == "read":
        read = list(mark.value)
        assert read == entries[: len(read)], "it read other entries than there are"
        own = [earlier_mark.value for earlier_mark in earlier if earlier_mark.name == "appended"]
        assert set(own) <= set(read), "it did not read what it had appended itself"


@pytest.mark.parametrize(
    "faults",
    [{"lost_answers": 1}, {"deaths": 1}, pytest.param({"lost_answers": 2}, marks=pytest.mark.slow)],
)
def test_a_log(faults: dict[str, int]) -> None:
    """Each entry is there once; all read the same, without gaps; a death hides no later entry."""
    processes = [_writer("a"), _writer("b")]
    explored = Simulation(processes, on_mark=_check_read, **faults).explore()
    assert explored.ends


# --- one value ---


def test_a_value_of_one_of_many() -> None:
    """All get the same value, which one of them published."""

    def publisher(name: str) -> Process:
        def start() -> Steps[None]:
            value = yield from again(lambda: publish_once("v", name.encode()))
            yield Mark("published", value)

        return Process(name, start)

    def check(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
        assert mark.value == world.store["v"]
        assert mark.value in (b"a", b"b", b"c")

    processes = [publisher(name) for name in "abc"]
    assert Simulation(processes, on_mark=check, lost_answers=1, deaths=1).explore().ends


# --- on real stores ---


def test_parts_on_real_stores(kind: str, tmp_path: Path) -> None:
    """The same on every kind of store."""
    clients = stores_of(kind, 3, tmp_path)

    def use(rank: int) -> Any:
        store = clients[rank]
        log = Log("here")
        for number in range(4):
            perform(store, 20, log.append(b"%d %d\xff" % (rank, number)))
        value = perform(store, 20, publish_once("value", b"from %d" % rank))
        return value, log

    results = ranks(use, 3)
    values, logs = zip(*results, strict=True)
    assert len(set(values)) == 1
    entries = [perform(clients[0], 20, log.read()) for log in logs]
    assert entries[0] == entries[1] == entries[2]
    assert sorted(entries[0]) == sorted(
        b"%d %d\xff" % (rank, number) for rank in range(3) for number in range(4)
    )
    perform(clients[2], 20, logs[0].remove())
    assert perform(clients[1], 20, Log("here").read()) == []


def test_waiting_for_an_entry(kind: str, tmp_path: Path) -> None:
    """A reader is woken by the next entry, and gets nothing at its deadline."""
    clients = stores_of(kind, 2, tmp_path)
    reader, writer = Log("here"), Log("here")
    assert perform(clients[0], 1.0, reader.wait()) == []
    got = ranks(
        lambda rank: (
            perform(clients[0], 20, reader.wait())
            if rank == 0
            else perform(clients[1], 20, writer.append(b"x"))
        ),
        2,
    )
    assert got == [[b"x"], 0]

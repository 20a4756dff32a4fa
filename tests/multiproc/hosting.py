"""A store hosted by a process of its own, for tests that stop or kill it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lag import stopwatch

from rankcall.testing.spawn import fork_server

LONG = 60.0  # s; far more than a barrier that all come to takes


def _serve(pipe: Any, libuv: bool) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    pipe.send(store.port)
    pipe.poll(None)


@contextmanager
def hosted(libuv: bool = True) -> Iterator[tuple[int, int]]:
    """Host a store in a process of its own; yield its port and the process's id."""
    context = fork_server()
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, libuv), daemon=True)
    process.start()
    try:
        assert mine.poll(60), "no store"
        yield mine.recv(), process.pid
    finally:
        process.kill()  # also a stopped one
        process.join(20)
        process.close()
        mine.close()
        theirs.close()


def connect(port: int) -> Any:
    """Return a client of a hosted store, whatever the launcher's own is."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def attempt(call: Callable[[], Any]) -> tuple[str, str, float]:
    """Return the name of what a call raised, its words, and how long it took.

    On a busy machine what that adds is taken off, as far as it is known.
    """
    name, text = "", ""
    with stopwatch() as took:
        try:
            call()
        except Exception as error:
            name, text = type(error).__name__, str(error)
    return name, text, took[0]


def all_at(folder: str, point: str, rank: int, world_size: int) -> None:
    """Wait until all ranks are at a point of the test, without a store."""
    (Path(folder) / f"{point}.{rank}").touch()
    await_ranks(folder, point, world_size)


def await_ranks(folder: str, point: str, count: int) -> None:
    """Wait until so many ranks are at a point of the test."""
    deadline = time.monotonic() + 60
    while len(list(Path(folder).glob(f"{point}.*"))) < count:
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def stop(pid: int) -> None:
    """Stop a process; return once none of its threads runs, so that it answers no request."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 20
    while any(_state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, "it does not stop"
        time.sleep(0.002)


def _state(process: Path) -> str:
    return (process / "stat").read_text().rpartition(")")[2].split()[0]


def dead(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    try:
        return _state(Path(f"/proc/{pid}")) in "ZX"
    except OSError:
        return True

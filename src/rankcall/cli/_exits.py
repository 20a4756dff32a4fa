"""Note how each worker ends, in the run directory, while the launcher runs.

Workers are the launcher's children that torchrun gave a RANK. A descriptor of each (pidfd) wakes
one thread when it ends; its status is looked at without taking it from torchrun, which reaps it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rankcall.processes import LAUNCHER, Exit, note_exit

_LOOK_S = 0.1  # a worker needs longer than that to import torch
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT
_ENDED_BY_TORCHRUN = (-15, -9)
_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True)
class _Worker:
    pid: int
    rank: int
    attempt: int


class ExitWatch:
    """Watches the children of this process from a thread of its own."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir, self._host = run_dir, host
        self._known: set[int] = set()
        self._told = False  # to stop: the workers end with the launcher
        self._failed = False  # one has: torchrun ends the others
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="rankcall-exits", daemon=True)

    def start(self) -> None:
        """Begin to watch, from the main thread: Python wakes us by a byte for each signal."""
        here, self._signals = socket.socketpair()
        for end in (here, self._signals):
            end.setblocking(False)
        self._selector.register(here, selectors.EVENT_READ)
        self._woken_before = signal.set_wakeup_fd(self._signals.fileno(), warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Note who has ended since the last look, and end."""
        signal.set_wakeup_fd(self._woken_before)
        self._stopping.set()
        self._thread.join(timeout=5)
        self._signals.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._look(_LOOK_S)
            self._look(0)
        except OSError:
            return  # no descriptors left, or a kernel without them: the job goes on
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is None:
                    key.fileobj.close()  # type: ignore[union-attr]
                else:
                    os.close(key.fd)
            self._selector.close()

    def _look(self, seconds: float) -> None:
        for pid in _children() - self._known:
            worker = _worker(pid)
            if worker is not None:
                self._known.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, worker)
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._note_signals(os.read(key.fd, 64))
            else:
                self._note(key.data)
                self._forget(key.fd)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _note_signals(self, arrived: bytes) -> None:
        """Note that the launcher is told to stop: its workers end because of that."""
        for number in _TO_STOP.intersection(arrived):
            if not self._told:
                self._told = True
                self.write(LAUNCHER, 0, os.getpid(), -number)

    def _note(self, worker: _Worker) -> None:
        try:
            status = os.waitid(os.P_PID, worker.pid, _PEEK)
        except ChildProcessError:
            return  # torchrun was faster, and tells in the end
        if status is None:
            return
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        by_launcher = self._failed and code in _ENDED_BY_TORCHRUN
        self._failed = self._failed or code != 0
        self.write(worker.rank, worker.attempt, worker.pid, code, by_launcher=by_launcher)

    def write(
        self, rank: int, attempt: int, pid: int, code: int, *, by_launcher: bool = False
    ) -> None:
        """Note one end; where the run directory cannot be written, it is lost."""
        ended = Exit(rank, attempt, self._host, pid, code, time.time_ns(), by_launcher)
        with contextlib.suppress(OSError):
            note_exit(self._run_dir, ended)


def _children() -> set[int]:
    """Return this process's children; none on a kernel that does not list them."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found.update(map(int, (task / "children").read_text().split()))
    return found


def _worker(pid: int) -> _Worker | None:
    """Return who a child is; None before it has become a worker, or where it is none."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in environ.split(b"\0"))
    found = {name: value for name, _, value in pairs if name in _WANTED}
    try:
        rank, attempt = (int(found[name]) for name in _WANTED)
    except (KeyError, ValueError):
        return None
    return _Worker(pid, rank, attempt)


_WANTED = (b"RANK", b"TORCHELASTIC_RESTART_COUNT")


@contextlib.contextmanager
def noting_exits(run_dir: Path, host: str) -> Iterator[ExitWatch]:
    """Note how the workers end, until the block is left."""
    watch = ExitWatch(run_dir, host)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()

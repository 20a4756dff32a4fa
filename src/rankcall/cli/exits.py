"""Watch the workers of a launcher, and note in the run how each of them ended.

A worker is a child of the launcher to which torchrun gave a RANK. A pidfd of each worker wakes one
thread when the worker ends. The thread reads the exit status and leaves it there for torchrun,
which reaps the worker. If torchrun was faster, the status is gone, and it is noted as unknown.
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

from rankcall.analysis.verdicts.ends import KILLED_LATER_S
from rankcall.cli.torchrun import TERMINATED
from rankcall.run.exits import LAUNCHER, Exit, note_exit

_POLL_S = 0.1  # a worker needs longer than that to import torch
# WNOWAIT leaves the process to be reaped by torchrun, which else could not tell how it ended.
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT

_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True)
class _Worker:
    pid: int
    rank: int
    attempt: int


class ExitWatch:
    """Watches the children of this process, from its own thread."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir, self._host = run_dir, host
        self._known: set[int] = set()
        self._stop_noted = False  # the launcher got a signal to stop, and its workers end with it
        self._failed_s: float | None = (
            None  # when a worker may have failed, and torchrun ends the others
        )
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="rankcall-exits", daemon=True)

    def start(self) -> None:
        """Begin to watch. Call it on the main thread, because Python requires that for signals."""
        reading, self._signals = socket.socketpair()
        for end in (reading, self._signals):
            end.setblocking(False)
        self._selector.register(reading, selectors.EVENT_READ)
        # Python writes one byte into the descriptor for each signal that arrives.
        self._wakeup_before = signal.set_wakeup_fd(
            self._signals.fileno(), warn_on_full_buffer=False
        )
        self._thread.start()

    def stop(self) -> None:
        """Note the workers that ended since the last poll, and stop watching."""
        signal.set_wakeup_fd(self._wakeup_before)
        self._stopping.set()
        # It may hang in a network file system; the notes are lost then.
        self._thread.join(timeout=5)
        self._signals.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._poll(_POLL_S)
            self._poll(0)
        except OSError:
            return  # no free descriptor, or a kernel without pidfds; the job goes on
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is None:
                    key.fileobj.close()  # type: ignore[union-attr]
                else:
                    os.close(key.fd)
            self._selector.close()

    def _poll(self, seconds: float) -> None:
        for pid in _children() - self._known:
            worker = _worker(pid)
            if worker is not None:
                self._known.add(pid)
                try:
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, worker)
                except ProcessLookupError:
                    self._note(worker)
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
        """Note that the launcher got a signal to stop, which is why its workers end."""
        for number in _TO_STOP.intersection(arrived):
            if not self._stop_noted:
                self._stop_noted = True
                self._write(LAUNCHER, 0, os.getpid(), -number)

    def _note(self, worker: _Worker) -> None:
        """Note a worker's exit. After the job, ``note_failures`` adds codes that torchrun knows."""
        try:
            status = os.waitid(os.P_PID, worker.pid, _PEEK)
        except ChildProcessError:  # torchrun has reaped the worker already
            # It may have failed, and then torchrun ends the others now. To take them for the cause
            # would name a wrong rank.
            self._failed_s = self._failed_s or time.monotonic()
            self._write(worker.rank, worker.attempt, worker.pid, None)
            return
        if status is None:
            return
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        by_launcher = self._is_by_torchrun(code)
        if code != 0 and self._failed_s is None:
            self._failed_s = time.monotonic()
        self._write(worker.rank, worker.attempt, worker.pid, code, by_launcher=by_launcher)

    def _is_by_torchrun(self, code: int) -> bool:
        """Tell whether torchrun ended a worker with this status, because another had failed.

        It sends SIGTERM at once, and SIGKILL to those that are left 30 s later. An earlier SIGKILL
        comes from elsewhere: a kernel out of memory kills several workers of a group together.
        """
        if self._failed_s is None:
            return False
        since_s = time.monotonic() - self._failed_s
        return code == TERMINATED or (code == -signal.SIGKILL and since_s > KILLED_LATER_S)

    def _write(
        self, rank: int, attempt: int, pid: int, code: int | None, *, by_launcher: bool = False
    ) -> None:
        ended = Exit(rank, attempt, self._host, pid, code, time.time_ns(), by_launcher)
        with contextlib.suppress(OSError):  # the run directory cannot be written: the note is lost
            note_exit(self._run_dir, ended)


def _children() -> set[int]:
    """Return the pids of this process's children; empty if the kernel does not list them."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            children.update(map(int, (task / "children").read_text().split()))
    return children


def _worker(pid: int) -> _Worker | None:
    """Return the worker that a child is, or None if it is not a worker, or not yet."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in environ.split(b"\0"))
    values = {name: value for name, _, value in pairs if name in _WANTED}
    try:
        rank, attempt = (int(values[name]) for name in _WANTED)
    except (KeyError, ValueError):
        return None
    return _Worker(pid, rank, attempt)


# torchrun sets both for a worker. Its own helper processes have no RANK.
_WANTED = (b"RANK", b"TORCHELASTIC_RESTART_COUNT")


@contextlib.contextmanager
def noting_exits(run_dir: Path, host: str) -> Iterator[ExitWatch]:
    """Note how the workers end, until the end of the block."""
    watch = ExitWatch(run_dir, host)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()

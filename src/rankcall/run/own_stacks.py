"""Ranks dump their own Python stacks on a signal, for other processes of their host.

A rank that the watcher observes has a memory file. On ``STACK_SIGNAL``, ``faulthandler`` writes the
stack of the thread that gets the signal into it. A process that may read the rank's memory may read
this file, through /proc. The signal goes to the main thread, to the thread that trains if that is
another one, and to other threads whose calls have not ended. The signal handler is C code, so a
rank that holds the GIL or waits in a collective answers, too. A stopped rank does not: ``stacks``
asks py-spy first, which needs no answer.

The stack of the thread that trains comes first and has ``TRAINS`` in its first line, if it is not
the main thread; those of other threads have another mark. ``frames`` says where a rank
stands by such a text.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import itertools
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rankcall.ring.layout import Header
from rankcall.ring.writer import put
from rankcall.run.stack_text import (
    TRAINS,
    mark_thread,
    mark_training_thread,
    with_names,
)

# The number is fixed: a ring file, which any user may have written, does not choose the signal. It
# is in the middle of the real-time signals, because glibc uses the first ones. Schedulers use
# SIGUSR1 and SIGUSR2 to announce the end of a job.
STACK_SIGNAL = signal.SIGRTMIN + 16
WITHOUT_STACKS = -1  # in a ring's stack_fd: the process is watched, but cannot dump its stacks
WAIT_S = 3.0  # on a machine with more processes than cores, some answer late
_POLL_S = 0.01
_MOST_OTHERS = 4  # threads of a rank that are asked besides the main and the training one
_MOST_BYTES = 1 << 18  # of one answer; faulthandler writes 100 frames of a thread at most
_MOST_KEPT = 1 << 22  # bytes of a rank's memory file, which is emptied before it gets larger
_WHOLE = re.compile(r"Stack \(most recent call first\):\n +File ")

_fd = 0


def register_stack_dump(ring: mmap.mmap) -> None:
    """Make this process dump its stacks on ``STACK_SIGNAL``, and write where into its ring."""
    global _fd
    try:
        if not _fd:
            _fd = os.memfd_create("rankcall-stacks")
            fcntl.fcntl(_fd, fcntl.F_SETFL, os.O_APPEND)
            _ignore_signal()
        if _fd > 0:
            # Only the stack of the thread that gets the signal: walking the frames of a running
            # thread can crash.
            faulthandler.register(STACK_SIGNAL, _fd, all_threads=False, chain=False)
    except (OSError, RuntimeError, AttributeError):
        _fd = WITHOUT_STACKS
    put(ring, "stack_fd", _fd)


def _ignore_signal() -> None:
    """Have ``STACK_SIGNAL`` ignored once ``faulthandler`` has taken its handler out.

    It restores what was there before. That was the default, which ends the process: a request for
    stacks that came then killed 12 of 60 ranks that were ending well. ``signal.signal`` works in
    the main thread only, and the watcher may be started in another one, so this is libc's.
    """
    ignored = ctypes.CDLL(None, use_errno=True).signal
    ignored.argtypes, ignored.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    ignored(STACK_SIGNAL, int(signal.SIG_IGN))


def unregister_stack_dump(ring: mmap.mmap) -> None:
    """Answer no more requests, and write that into the ring.

    The handler goes now, and not when the interpreter has ended all else: ``faulthandler`` frees
    its memory then, and a thread that has just got the signal would read it (SIGSEGV).
    """
    put(ring, "stack_fd", 0)
    if _fd > 0:
        faulthandler.unregister(STACK_SIGNAL)


def request_stacks(
    headers: Iterable[Header], others: Mapping[int, Mapping[int, str]] | None = None
) -> dict[int, str]:
    """Return the stacks of the ranks of this host that dump them, by rank.

    The call takes at most ``WAIT_S`` seconds. A rank that does not answer in time is left out.

    Args:
        headers: The headers of the ranks' rings.
        others: By rank, the kernel's ids of threads that are asked besides the main and the
            training thread, each with its mark (``stack_text``).
    """
    files: dict[int, _Dump] = {}
    for header in headers:
        if header.stack_fd > 0 and _answers(header):
            dump = _Dump(header, others or {})
            if dump.ask():
                files[header.rank] = dump
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not _all_over(files.values()):
        time.sleep(_POLL_S)
    return {rank: text for rank, dump in files.items() if (text := dump.text())}


def _answers(header: Header) -> bool:
    """Return whether the ring's process runs, belongs to this user, and handles the signal."""
    if header.process_state() != "alive":
        return False  # a stopped process would answer only after it continues
    try:
        if Path(f"/proc/{header.pid}").stat().st_uid != os.getuid():
            return False
        for line in Path(f"/proc/{header.pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    except (OSError, ValueError):
        pass
    return False


def _all_over(dumps: Iterable[_Dump]) -> bool:
    return min([dump.is_over() for dump in dumps], default=True)  # a list: is_over signals threads


class _Dump:
    """The parts of a process's memory file that its threads write after the signal.

    They get the signal one after another: ``faulthandler`` writes line by line, and the lines of
    two stacks would mix. A thread that does not answer takes half of ``WAIT_S`` at most.
    """

    def __init__(self, header: Header, others: Mapping[int, Mapping[int, str]]) -> None:
        self._pid = header.pid
        self._path = f"/proc/{header.pid}/fd/{header.stack_fd}"
        self._trains = training_thread_of(header)
        self._others = other_threads_of(header, others)
        self._left = [self._pid]  # the threads without the signal so far
        if self._pid != os.getpid():
            self._left += [*([self._trains] if self._trains else []), *self._others]
        self._threads = list(self._left)
        self._share_s = WAIT_S / min(2, len(self._left))  # most answer at once
        self._texts: list[str] = []
        self._from = self._last = 0
        self._steady, self._until = 0, 0.0

    def ask(self) -> bool:
        """Signal the next thread. Return False if it is gone, or the file is not its own."""
        thread = self._left.pop(0)
        self._steady, self._until = 0, time.monotonic() + self._share_s
        try:
            if not os.readlink(self._path).startswith("/memfd:rankcall-stacks"):
                return False
            # The rank opened the file for appending, so its next answer begins at the new end.
            if self._size() > _MOST_KEPT:
                os.truncate(self._path, 0)
            self._from = self._last = self._size()
            if self._pid == os.getpid():
                # This thread holds the GIL, so no other thread's frames change meanwhile.
                faulthandler.dump_traceback(_fd, all_threads=True)
            elif thread == self._pid:
                os.kill(self._pid, STACK_SIGNAL)
            else:
                _tgkill(self._pid, thread, STACK_SIGNAL)
            return True
        except OSError:
            return False

    def is_over(self) -> bool:
        """Return whether every thread has answered, or has had its time; ask the next one."""
        if self._until == 0.0:
            return True
        if not self._has_answered() and time.monotonic() < self._until:
            return False
        self._texts.append(self._read())
        if self._left and self.ask():
            return False
        self._until = 0.0
        return True

    def _has_answered(self) -> bool:
        """Return whether the thread has written something, and nothing more for two polls."""
        size = self._size()
        self._steady = self._steady + 1 if size == self._last and size > self._from else 0
        self._last = size
        return self._steady >= 2

    def text(self) -> str:
        """Return the stacks that were written, the training thread's first."""
        texts = [*self._texts, self._read()] if self._until else self._texts
        if self._pid == os.getpid():
            text = mark_training_thread(with_names(texts[0]), _pthread_id(self._trains))
            for thread, mark in self._others.items():
                text = mark_thread(text, _pthread_id(thread), mark)
            return text
        # An answer does not name its thread. If an earlier one was late, this may be its answer.
        main = texts[0]
        if len(texts) < 2 or not main:
            return main
        marks = {self._trains: TRAINS, self._pid: "(", **self._others}
        names = {self._pid: ' "MainThread"'}
        stacks = {
            thread: f"Thread {thread} {marks[thread]}most recent call first):"
            f"{names.get(thread, '')}\n{text.partition(chr(10))[2]}"
            for thread, text in zip(self._threads, texts, strict=False)
            if thread == self._pid or _WHOLE.match(text)
        }
        if len(stacks) < 2:
            return main
        order = (self._trains, self._pid, *self._others)
        return "\n\n".join(stacks[thread] for thread in order if thread in stacks)

    def _read(self) -> str:
        try:
            with open(self._path, "rb") as file:
                file.seek(self._from)
                return file.read(_MOST_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            return ""

    def _size(self) -> int:
        try:
            return os.stat(self._path).st_size
        except OSError:
            return self._last


def training_thread_of(header: Header) -> int:
    """Return the thread that trains, if it is not the main thread and still runs; else 0."""
    thread = header.train_thread
    is_other = thread not in (0, header.pid) and Path(f"/proc/{header.pid}/task/{thread}").exists()
    return thread if is_other else 0


def other_threads_of(header: Header, others: Mapping[int, Mapping[int, str]]) -> dict[int, str]:
    """Return a few of a rank's threads that still run, and neither are the main one nor train."""
    tasks, known = Path(f"/proc/{header.pid}/task"), (0, header.pid, header.train_thread)
    running = (
        (thread, mark)
        for thread, mark in others.get(header.rank, {}).items()
        if thread not in known and (tasks / str(thread)).exists()
    )
    return dict(itertools.islice(running, _MOST_OTHERS))


def _tgkill(pid: int, thread: int, number: int) -> None:
    """Send a signal to one thread of a process. Raises ``OSError``."""
    try:
        send = ctypes.CDLL(None, use_errno=True).tgkill
    except AttributeError:
        raise OSError("this C library has no tgkill") from None
    if send(pid, thread, number):
        raise OSError(ctypes.get_errno(), "tgkill")


def _pthread_id(thread: int) -> str:
    """Return how ``faulthandler`` writes a thread of this process; empty if it is not known."""
    idents = (
        python_thread.ident
        for python_thread in threading.enumerate()
        if python_thread.native_id == thread
    )
    return next((f"{ident:#018x}" for ident in idents if thread and ident), "")

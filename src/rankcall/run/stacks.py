"""Python stacks of a rank, read from another process without the rank's GIL.

A rank that the watcher observes has a memory file. On ``STACK_SIGNAL``, ``faulthandler`` writes the
rank's stacks into it. A process that may read the rank's memory may read this file, through /proc.
The signal handler is C code on the main thread, so a rank that holds the GIL or waits in a
collective answers, too. A stopped rank does not. py-spy, if it is installed, needs no such answer.
"""

from __future__ import annotations

import faulthandler
import fcntl
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rankcall.ring.layout import Header
from rankcall.ring.writer import put
from rankcall.run.load import load

# The number is fixed: a ring file, which any user may have written, does not choose the signal. It
# is in the middle of the real-time signals, because glibc uses the first ones. Schedulers use
# SIGUSR1 and SIGUSR2 to announce the end of a job.
STACK_SIGNAL = signal.SIGRTMIN + 16
WITHOUT_STACKS = -1  # in a ring's stack_fd: the process is watched, but cannot dump its stacks
WAIT_S = 3.0  # on a machine with more processes than cores, some answer late
_POLL_S = 0.01
_MOST_BYTES = 1 << 18
_MOST_KEPT = 1 << 22
_PY_SPY_TIMEOUT_S = 30.0
_MOST_SPIED = 8
_MOST_PY_SPY_CHARS = 1 << 16
_THREADS = re.compile(r"\n(?=Thread |Current thread )")
_MAIN = re.compile(r"<module>|^Thread .*\"MainThread\"$", re.MULTILINE)
# The files whose functions are the outermost of rankcall's own threads, which only observe.
OWN_FILES = (
    "watch/_loop",
    "capture/recording",
    "capture/own_ring",
    "dispatch",
    "cli/_worker_exits",
)
_OURS = re.compile(rf"rankcall/({'|'.join(OWN_FILES)})\.py")

_fd = 0


def register_stack_dump(ring: mmap.mmap) -> None:
    """Make this process dump its stacks on ``STACK_SIGNAL``, and write where into its ring.

    The handler stays until the process ends: without it, a late signal would kill the process.
    """
    global _fd
    if not _fd:
        try:
            _fd = os.memfd_create("rankcall-stacks")
            fcntl.fcntl(_fd, fcntl.F_SETFL, os.O_APPEND)
            # Only the stack of the thread that gets the signal, which is the main thread: walking
            # the frames of a running thread can crash.
            faulthandler.register(STACK_SIGNAL, _fd, all_threads=False, chain=False)
        except (OSError, RuntimeError, AttributeError):
            _fd = WITHOUT_STACKS
    put(ring, "stack_fd", _fd)


def unregister_stack_dump(ring: mmap.mmap) -> None:
    """Write into the ring that the process answers no more requests."""
    put(ring, "stack_fd", 0)


def request_stacks(headers: Iterable[Header]) -> dict[int, str]:
    """Return the stacks of the ranks of this host that dump them, by rank.

    The call takes at most ``WAIT_S`` seconds. A rank that does not answer in time is left out.
    """
    files: dict[int, _Dump] = {}
    for header in headers:
        if header.stack_fd > 0 and _answers(header):
            dump = _Dump(header)
            if dump.ask():
                files[header.rank] = dump
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and not _all_settled(files.values()):
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


def _all_settled(dumps: Iterable[_Dump]) -> bool:
    return min([dump.settled() for dump in dumps], default=True)


class _Dump:
    """The part of a process's memory file that is written after the signal."""

    def __init__(self, header: Header) -> None:
        self._pid = header.pid
        self._path = f"/proc/{header.pid}/fd/{header.stack_fd}"
        self._from = self._last = 0
        self._steady = 0

    def ask(self) -> bool:
        """Send the signal. Return False if the process is gone, or the file is not its own."""
        try:
            if not os.readlink(self._path).startswith("/memfd:rankcall-stacks"):
                return False
            if self._size() > _MOST_KEPT:
                os.truncate(self._path, 0)
            self._from = self._last = self._size()
            if self._pid == os.getpid():
                # This thread holds the GIL, so no other thread's frames change meanwhile.
                faulthandler.dump_traceback(_fd, all_threads=True)
            else:
                os.kill(self._pid, STACK_SIGNAL)
            return True
        except OSError:
            return False

    def settled(self) -> bool:
        """Return whether the process has written something, and has stopped writing."""
        size = self._size()
        self._steady = self._steady + 1 if size == self._last and size > self._from else 0
        self._last = size
        return self._steady >= 2

    def text(self) -> str:
        """Return the stacks that were written."""
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


# --- from py-spy, or else from the rank itself ---


def stacks_of(where: Path, ranks: Sequence[int]) -> dict[int, str]:
    """Return the stacks of those of the ranks that run on this host and can be inspected.

    py-spy, if it is installed, inspects the first ranks; it takes a second for each. The others
    dump their stacks themselves.
    """
    if not where.is_dir():
        return {}
    wanted = set(ranks)
    headers = [head.header for head in load(where).heads if head.header.rank in wanted]
    here = [header for header in headers if header.process_state() in ("alive", "stopped")]
    stacks: dict[int, str] = {}
    spy = _py_spy()
    if spy is not None and here:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(4) as pool:
            first = sorted(here, key=lambda header: ranks.index(header.rank))[:_MOST_SPIED]
            texts = pool.map(lambda header: _spied(spy, header), first)
            for header, text in zip(first, texts, strict=True):
                if text:
                    stacks[header.rank] = text
    stacks.update(request_stacks([header for header in here if header.rank not in stacks]))
    return {rank: tidy(stacks[rank]) for rank in ranks if rank in stacks}


def tidy(text: str) -> str:
    """Put the main thread first, and leave out rankcall's own threads, which only watch."""
    threads = [stack.rstrip() for stack in _THREADS.split(text) if not _OURS.search(stack)]
    threads.sort(key=lambda stack: _MAIN.search(stack) is None)
    return "\n\n".join(threads) or text


def _py_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _spied(spy: str, header: Header) -> str:
    """Dump one process, with native frames if that works; return "" if it is not allowed.

    py-spy pauses a process while it reads the stacks. It cannot pause a stopped process, so that
    one is read without a pause and without native frames.
    """
    stopped = header.process_state() == "stopped"
    for options in [["--nonblocking"]] if stopped else [["--native"], []]:
        try:
            done = subprocess.run(
                [spy, "dump", *options, "--pid", str(header.pid)],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PY_SPY_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            _, begins, threads = done.stdout.partition("\nThread ")  # after the command line
            return (begins + threads).strip()[:_MOST_PY_SPY_CHARS]
    return ""

"""Keep the end of what each rank writes to stderr, while it goes where it went before.

torchrun asks its ``LogsSpecs`` where the output of each rank is to go; ours, which torchrun finds
by the entry point ``rankcall``, sends it into a file in memory. A thread of the launcher copies
from there to the launcher's own stderr, and into a small file of the run (``run.stderr_tails``).

A rank must never wait for this thread, or fail because of it, so it writes into a file and not into
a pipe: a pipe without a reader ends its writer, and a full one blocks it. The file is a memfd,
because /dev/shm or a disk can be full. What was copied is cut out of it, so it stays small. If the
launcher is killed, the ranks go on writing into memory, as with torchrun's own ``--tee``.

A terminal is left alone: programs ask whether stderr is one, and draw bars or colours there.
"""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rankcall.background import EXIT_S, at_exit, join
from rankcall.folders import run_folder
from rankcall.process import host_name
from rankcall.run.stderr_tails import KEPT, STDERR, TailFile

NAME, _GROUP = "rankcall", "torchrun.logs_specs"
FOLDER = "RANKCALL_STDERR_DIR"  # the run directory, or one in its place, that gets the tails
SWITCH = "RANKCALL_KEEP_STDERR"  # 0: leave the ranks' stderr alone
_FILE = "RANKCALL_STDERR_FILE"  # tells the rank which file it is: see ``_rankcall_hook``
OWN = 2  # the launcher's own stderr
_LOOK_S = 0.05
_PIECE = 4096  # PIPE_BUF: if a pipe is writable, so much can be written without waiting
_MOST_BEHIND = 16 << 20  # bytes of a rank that nobody has read: older ones are left out
_MOST_RESTARTS = 4  # whose tails are kept
_KEEP_SIZE_AND_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_OPTIONS = ("--logs-specs", "--logs_specs", "--run-path", "--run_path")

_copies: list[_Copies] = []


def options_for(argv: Sequence[str]) -> list[str]:
    """Return the option by which torchrun uses ours, if it can and the user has no other one.

    Args:
        argv: torchrun's options, the script and its arguments.
    """
    # With --run-path, torchrun opens the file in the rank, which may not be allowed to.
    named = any(argument.partition("=")[0] in _OPTIONS for argument in argv)
    is_off = os.environ.get(SWITCH) == "0"
    if named or is_off or not entry_points(group=_GROUP, name=NAME):
        return []
    return [f"--logs-specs={NAME}"]


def logs_specs(**options: Any) -> Any:
    """Return torchrun's own ``LogsSpecs``, except that the end of each rank's stderr is kept."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

    class StderrSpecs(DefaultLogsSpecs):
        """Sends the stderr of ranks that torchrun would let inherit ours into files in memory."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            """Return where the output of each rank goes, by its local rank."""
            destinations = super().reify(envs)
            keep(destinations.stderrs, envs)
            return destinations

    return StderrSpecs(**options)


def keep(stderrs: dict[int, str], envs: Mapping[int, dict[str, str]]) -> None:
    """Copy the stderr of ranks that are about to be started.

    Args:
        stderrs: By local rank, the file that stderr goes to; empty if it is inherited, which this
            changes.
        envs: The environment variables of each rank.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    if not _copies:
        _copies.append(_Copies(Path(folder)))
        at_exit(finish)
    _copies[0].add(stderrs, envs)


def finish() -> None:
    """Copy what is left, and stop. Waits for a reader of our stderr, but not for long."""
    while _copies:
        _copies.pop().stop()


class _Copies:
    """The thread that copies the stderr of all ranks of this node."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._streams: list[_Stream] = []
        self._made: list[list[Path]] = []  # the tails of each start of the ranks
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankcall-stderr", daemon=True)
        self._thread.start()

    def add(self, stderrs: dict[int, str], envs: Mapping[int, dict[str, str]]) -> None:
        """Take the ranks that are about to be started in place of those before."""
        streams = [
            stream
            for local_rank, variables in envs.items()
            if (stream := self._stream(stderrs, local_rank, variables)) is not None
        ]
        with self._lock:
            for old in self._streams:
                old.copy(last=True)
                old.close()
            self._streams = streams
        self._made.append([stream.tail.path for stream in streams if stream.tail])
        for path in self._made.pop(0) if len(self._made) > _MOST_RESTARTS else ():
            path.unlink(missing_ok=True)

    def _stream(
        self, stderrs: dict[int, str], local_rank: int, variables: dict[str, str]
    ) -> _Stream | None:
        inherited = not stderrs.get(local_rank)
        if inherited and not _can_be_copied():
            return None
        try:
            stream = _Stream(None if inherited else Path(stderrs[local_rank]))
        except OSError:
            return None  # no memfd, or no /proc: the rank inherits our stderr as ever
        if inherited:
            stderrs[local_rank], variables[_FILE] = stream.name, stream.inode
        try:
            rank, restart = (int(variables.get(name, 0)) for name in ("RANK", _RESTARTS))
            folder = run_folder(self._run_dir, STDERR)
            stream.tail = TailFile(folder, rank, restart, host_name())
        except (OSError, ValueError):
            pass  # nothing is kept; the rank's words still go where they went
        return stream

    def stop(self) -> None:
        """Copy what is left, and close the files."""
        self._stopping.set()
        join(self._thread, 2 * EXIT_S)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            self._copy(last=False)
        deadline = time.monotonic() + EXIT_S
        while not self._copy(last=True) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        with self._lock:
            for stream in self._streams:
                stream.close()
            self._streams = []

    def _copy(self, *, last: bool) -> bool:
        with self._lock:
            copied = [stream.copy(last=last) for stream in self._streams]
        return all(copied)


_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


class _Stream:
    """What one rank writes to stderr.

    Args:
        path: The file that torchrun sends it to, if the user asked for that. Otherwise the rank
            gets a file in memory, which is copied to our own stderr.
    """

    def __init__(self, path: Path | None) -> None:
        self.tail: TailFile | None = None
        self.name, self.inode = "", ""
        self._path, self._fd = path, -1
        self._kept = self._sent = self._punched = self._size = 0
        self._has_holes = False
        if path is None:
            self._fd = os.memfd_create("rankcall-stderr", os.MFD_CLOEXEC)
            try:
                self.name = f"/proc/self/fd/{self._fd}"
                status = os.fstat(self._fd)
                self.inode = f"{status.st_dev}:{status.st_ino}"
                os.close(os.open(self.name, os.O_WRONLY | os.O_CLOEXEC))
                os.write(self._fd, bytes(_PIECE))
                _punch(self._fd, _PIECE)
                os.truncate(self._fd, 0)
            except OSError:
                os.close(self._fd)
                raise

    def copy(self, *, last: bool) -> bool:
        """Copy what is new; return whether all of it was. ``last``: no more will come.

        If the file cannot be read now, the next call tries again: without the thread that calls
        this, nothing more of the rank's would be seen.
        """
        try:
            return self._copy(last=last)
        except OSError:
            return False

    def _copy(self, *, last: bool) -> bool:
        if self._fd < 0 and not self._open():
            return True
        size = os.fstat(self._fd).st_size
        if size < self._kept or self._was_emptied():
            self._kept = self._sent = self._punched = self._size = 0
            self._has_holes = True
        grew, self._size = size > self._size, size
        self._keep(size)
        if self._path is not None:
            return True
        self._send(size, wait_for_line=grew and not last)
        done = min(self._kept, self._sent)
        if done > self._punched:
            _punch(self._fd, done)
            self._punched = done
        return self._sent >= size

    def _was_emptied(self) -> bool:
        """Tell whether a program has emptied the file, as a shell does for ``> /dev/stderr``.

        What was copied has been replaced by zeros. If the file does not begin with one any more, it
        was emptied, and has been written to since.
        """
        return self._punched > 0 and self._read(0, 1) != b"\0"

    def close(self) -> None:
        """Close the files."""
        if self._fd >= 0:
            os.close(self._fd)
        if self.tail is not None:
            self.tail.close()
        self._fd, self.tail = -1, None

    def _open(self) -> bool:
        assert self._path is not None
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False  # torchrun makes it when it starts the rank
        return True

    def _keep(self, size: int) -> None:
        self._kept = max(self._kept, size - KEPT)
        while self._kept < size:
            data = self._read(self._kept, min(KEPT, size - self._kept))
            if not data:
                return
            self._kept += len(data)
            if self.tail is None:
                continue
            try:
                self.tail.write(self._without_holes(data))
            except OSError:  # the disk is full
                self.tail.close()
                self.tail = None

    def _send(self, size: int, *, wait_for_line: bool) -> None:
        if size - self._sent > _MOST_BEHIND:
            left_out = size - KEPT - self._sent
            if _write(
                f"[rankcall: {left_out:,} bytes of a rank's stderr left out here]\n".encode()
            ):
                self._sent += left_out
        while self._sent < size:
            data = self._read(self._sent, min(_PIECE, size - self._sent))
            if len(data) < _PIECE and wait_for_line:
                # The rank may be in the middle of a line, and other ranks write here as well.
                data = data[: 1 + max(data.rfind(b"\n"), data.rfind(b"\r"))]
            written = _write(self._without_holes(data)) if data else 0
            if not written:
                return
            self._sent += len(data) if written < 0 or self._has_holes else written

    def _read(self, at: int, length: int) -> bytes:
        return os.pread(self._fd, length, at)

    def _without_holes(self, data: bytes) -> bytes:
        """Return the data without the zeros between an emptied file and the rank's own position."""
        return data.replace(b"\0", b"") if self._has_holes else data


def _can_be_copied() -> bool:
    """Tell whether our own stderr is open, and no terminal."""
    try:
        os.fstat(OWN)
        return not os.isatty(OWN)
    except OSError:
        return False


def _write(data: bytes) -> int:
    """Write to stderr; return how much, 0 if that would wait, -1 if nobody will ever read it."""
    try:
        poll = select.poll()
        poll.register(OWN, select.POLLOUT)
        if not poll.poll(0):
            return 0
        return os.write(OWN, data) or -1
    except BlockingIOError:
        return 0
    except OSError:
        return -1


def _punch(fd: int, length: int) -> None:
    """Replace the first bytes of a file by zeros that take no memory. Raises ``OSError``."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if fallocate(fd, _KEEP_SIZE_AND_PUNCH, 0, length):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))

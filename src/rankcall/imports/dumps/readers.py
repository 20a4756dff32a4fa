"""Read many dumps in several processes.

They are new interpreters that run only this package, and not forks of this process: a program
that loads a run may have threads. Each gets a list of files, and writes one answer for each of
them to a pipe: the length in eight bytes, and a pickle of a ``DumpAnswer``.

A process that a file ends, or holds up, is replaced, and the file is left out. So a worker may
read files that would not be safe to read in this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from rankcall.imports.dumps.files import (
    DumpAnswer,
    contents_of_dump,
)
from rankcall.interpreter import run_function
from rankcall.problems import Problem, ProblemKind

_SMALL_BYTES = 2 << 20  # of all dumps: a process takes as long to start as these to read
_MOST_WORKERS = 8  # their results all come through this one process
_BYTES_OF_WORKER = 4 << 20  # each has at least so much to read
_SECONDS, _SECONDS_OF_BYTE = 60.0, 2e-6  # for a file: far more than it takes on a slow machine
_MOST_ENDED = 8  # files that end a worker, before the rest is left out
_COLLECT_EVERY = 64  # files; in between, the garbage collector is off
_CHUNK = 1 << 20  # more than a pipe holds, so that one read empties it

File = tuple[int, Path]  # a rank, and its dump


def read_contents(files: Sequence[File]) -> Iterator[tuple[File, DumpAnswer]]:
    """Yield the contents of each dump, in any order. Several processes read them if they are many.

    Args:
        files: The dumps, by rank.
    """
    sizes = [_size(path) for _, path in files]
    count = min(_available_cores(), _MOST_WORKERS, 1 + sum(sizes) // _BYTES_OF_WORKER)
    if sum(sizes) <= _SMALL_BYTES:
        count = 0
    unread = list(files)
    if count:
        unread = yield from _read_in_workers([files[at::count] for at in range(count)])
    for number, file in enumerate(unread):
        yield file, contents_of_dump(file[1])
        if number % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            gc.collect()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_in_workers(
    parts: Sequence[Sequence[File]],
) -> Generator[tuple[File, DumpAnswer], None, list[File]]:
    """Yield answers of workers; return the files that no worker can read."""
    unread: list[File] = []
    ended = 0
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as workers:

        def start(files: Sequence[File]) -> None:
            try:
                worker = workers.enter_context(_Reader(files))
            except (OSError, ValueError, TypeError):
                unread.extend(files)  # no process can be made
                return
            selector.register(worker.pipe, selectors.EVENT_READ, worker)

        for part in parts:
            start(part)
        while selector.get_map():
            ready = {key.data for key, _ in selector.select(timeout=1.0)}
            for worker in [key.data for key in selector.get_map().values()]:
                if worker in ready:
                    yield from worker.answers()
                elif time.monotonic() > worker.deadline:
                    worker.end("it takes too long to read")
                if worker.why_ended is None:
                    continue
                selector.unregister(worker.pipe)
                worker.close()
                left = list(worker.waiting)
                if left and not worker.has_begun:
                    unread.extend(left)  # this interpreter cannot run the package
                elif left:
                    ended += 1
                    yield left[0], _left_out(left[0], f"damaged: {worker.why_ended}")
                    if ended < _MOST_ENDED:
                        start(left[1:])
                        continue
                    for file in left[1:]:
                        yield file, _left_out(file, "not read, because of other damaged dumps")
    return unread


def _left_out(file: File, why: str) -> DumpAnswer:
    return DumpAnswer([], [Problem(ProblemKind.LEFT_OUT, f"{file[1]}: {why}")])


class _Reader:
    """A process that reads some files, in order."""

    def __init__(self, files: Sequence[File]) -> None:
        self.waiting = deque(files)
        self.has_begun = False  # it has written its first answer
        self.why_ended: str | None = None
        self._received = bytearray()
        self.pipe, theirs = os.pipe()
        try:
            with tempfile.TemporaryFile() as listed:
                listed.write(json.dumps([str(path) for _, path in files]).encode())
                listed.seek(0)
                self._process = subprocess.Popen(
                    run_function(__name__, answer_parent.__name__, str(theirs)),
                    stdin=listed,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs],
                    # A pool of threads for linear algebra would only cost time.
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                )
        except BaseException:
            os.close(self.pipe)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(self.pipe, False)
        self._set_deadline()

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.end("it is not needed any more")
        self.close()

    def _set_deadline(self) -> None:
        size = _size(self.waiting[0][1]) if self.waiting else 0
        self.deadline = time.monotonic() + _SECONDS + _SECONDS_OF_BYTE * size

    def answers(self) -> Iterator[tuple[File, DumpAnswer]]:
        """Yield the answers that have come."""
        try:
            chunk = os.read(self.pipe, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self.end("")
            return
        self._received += chunk
        while len(self._received) >= 8:
            length = int.from_bytes(self._received[:8], "little")
            if len(self._received) < 8 + length:
                break
            answer: DumpAnswer | None = pickle.loads(self._received[8 : 8 + length])
            del self._received[: 8 + length]
            if answer is None:
                self.has_begun = True
            else:
                yield self.waiting.popleft(), answer
            self._set_deadline()

    def end(self, why: str) -> None:
        """End the process, and say why; without a reason, it has ended already."""
        if self.why_ended is not None:
            return
        if why:
            self._process.kill()
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it does not end while a file system does not answer
            status = 0
        self.why_ended = why or f"the process that read it ended with status {status}"

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


def answer_parent(descriptor: str) -> None:
    """Read the files that are listed on stdin, and write the answers to a pipe: a worker's program.

    The first answer is None: this process can run the package. ``descriptor`` is the pipe's number.
    """
    pipe = int(descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.disable()  # it would visit all new objects again and again
    with open(pipe, "wb", buffering=0) as out:
        _write(out.fileno(), None)
        for number, path in enumerate(json.loads(sys.stdin.buffer.read())):
            _write(out.fileno(), contents_of_dump(Path(path), isolated=True))
            if number % _COLLECT_EVERY == _COLLECT_EVERY - 1:
                gc.collect()


def _write(pipe: int, answer: DumpAnswer | None) -> None:
    raw = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
    left = memoryview(len(raw).to_bytes(8, "little") + raw)
    while left:
        left = left[os.write(pipe, left) :]

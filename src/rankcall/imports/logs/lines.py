"""The lines of a log that can tell why a job failed: from the words of a line to a fact.

docs/log-messages.md says in which versions each wording was seen. Ranks in a message are often
those within a process group, so each fact keeps the source of its line: ``log_facts`` finds out
which process wrote it, and the analysis decides which ranks can be believed.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

import zstandard

from rankcall.errors import CorruptRunError
from rankcall.files import clean
from rankcall.ranks import MAX_RANKS

# The lines of a log that can tell why a job failed, and which rank wrote each of them.
#
# A log can have gigabytes, and few of its lines are about a failure. So this module reads a log in
# blocks, and parses only lines with one of ``_MARKERS``. If a message has several lines, it also
# parses the lines after that. It never holds more than two blocks in memory.


__all__ = ["STDIN", "Line", "Log", "Source", "logs_of"]

STDIN = Path("-")
_BLOCK = 1 << 22
_MOST_BYTES = 1 << 36  # of one log; a small compressed file can hold any number
_MOST_LINES = 150_000  # of one log that are parsed; 1,024 ranks write about 10,000
_MOST_LINE = 1 << 14  # bytes of a line; the longest message lists the shapes of a collective
_TRACEBACK, _SUMMARY, _REPORT = 300, 2000, 40  # lines of messages that have several

# A line of interest contains one of these; so many of the lines after it belong to the message.
# Each is searched for separately: that takes about 0.3 s for 1 GB, a regular expression 16 s.
_MARKERS = (
    (b"Watchdog caught", 0),  # NCCL's watchdog
    (b"ast enqueued", 0),  # the state of a group, in all versions
    (b"lagging", _REPORT),  # TORCH_NCCL_DESYNC_DEBUG
    (b"Detected mismatch between", 0),  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    (b"monitoredBarrier", 0),
    (b"store based barrier", 0),
    (b"onnection closed by peer", 0),  # Gloo
    (b"onnection reset by peer", 0),
    (b"Timed out waiting", 0),
    (b"Traceback (most recent call last)", _TRACEBACK),
    (b"Failures:", _SUMMARY),  # torchrun's report
    (b"Root Cause (first observed", _SUMMARY),
    (b" signal SIG", 0),  # a worker that torchrun ends
    (b"Unable to shutdown process", 0),
    (b"failed (exitcode: ", 0),
    (b"will restart worker group", 0),
    (b"exited on signal", 0),  # mpirun
    (b"srun: error:", 0),
)

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# torch writes ``[rank3]:`` before its messages; some versions garble the bracket.
_RANK = re.compile(r"\[rank(\d{1,7})\[?\]:\s?")
_MPI = re.compile(r"\[(?:\d+,)?(\d{1,7})\]<std(?:err|out)>:\s?")
_TORCHRUN = re.compile(r"\[([A-Za-z_][A-Za-z_\-]*\d+)\]:\s?")
_SRUN = re.compile(r"\s*(\d{1,7}):(?: |$)")
_NAMED_RANK = re.compile(r"rank[_\-.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_FAR = 200  # characters before ``[rank3]:``: a time, a pod, the name of an actor


class Source(NamedTuple):
    """The writer of a line, as far as its prefix and its file tell.

    Attributes:
        file: The index of the log.
        stream: The launcher's prefix; empty without one.
        rank: The rank that torch put before the line, or -1.
        task: The number that srun or mpirun put before it, or -1.
    """

    file: int
    stream: str
    rank: int = -1
    task: int = -1


class Line(NamedTuple):
    """A line of interest, without its prefixes and colours."""

    source: Source
    number: int  # in its log, from 1
    text: str


class Log:
    """One log: a file, which may be compressed, or stdin."""

    def __init__(self, path: Path, index: int = 0) -> None:
        self.path, self.index = path, index
        self.count = 0  # lines read so far
        self.cut = False  # it has more than this module looks at
        self.looked_at = 0

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        return "stdin" if self.path == STDIN else clean(self.path.name)

    @property
    def named_rank(self) -> int:
        """The rank in the file's name, or -1."""
        numbers = _NAMED_RANK.findall(self.path.name)
        return int(numbers[-1]) if numbers and int(numbers[-1]) < MAX_RANKS else -1

    def lines(self) -> Iterator[Line]:
        """Yield the lines of interest.

        Raises:
            CorruptRunError: The log cannot be read, or is no text.
        """
        try:
            with _opened(self.path) as file:
                for number, raw in self._of_interest(file):
                    self.looked_at += 1
                    if self.looked_at > _MOST_LINES:
                        self.cut = True
                        return
                    yield _line(raw, number, self.index)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise CorruptRunError(
                f"{clean(str(self.path))}: cannot be read: {clean(why)}"
            ) from error

    def _of_interest(self, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield lines with their numbers; ``left`` counts the lines that a message still has."""
        left, size = 0, 0
        for block in _blocks(file):
            size += len(block)
            if size > _MOST_BYTES:
                self.cut = True
                return
            at = 0
            for start, follow in _hits(block):
                while left and at < start:
                    end = _end(block, at)
                    self.count += 1
                    left -= 1
                    yield self.count, block[at : min(end, at + _MOST_LINE)]
                    at = end
                if start < at:  # a second marker in a line, or a line of a message
                    left = max(left, follow)
                    continue
                self.count += block.count(b"\n", at, start) + 1
                at = _end(block, start)
                left = max(left, follow)
                yield self.count, block[start : min(at, start + _MOST_LINE)]
            while left and at < len(block):
                end = _end(block, at)
                self.count += 1
                left -= 1
                yield self.count, block[at : min(end, at + _MOST_LINE)]
                at = end
            self.count += block.count(b"\n", at)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a log; the first bytes tell whether it is compressed."""
    if path == STDIN:
        yield sys.stdin.buffer
        return
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise CorruptRunError(f"{clean(str(path))}: not a file")
    with path.open("rb") as file:
        head = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
        if head[:2] == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif head == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as inner:
                yield cast(IO[bytes], inner)
        else:
            yield file


def _blocks(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the bytes of a log in blocks that end with a line; a line longer than a block is cut.

    A carriage return alone begins a line again, as progress bars do. It is left in the line.
    """
    rest = b""
    while block := file.read(_BLOCK):
        cut = block.rfind(b"\n") + 1
        if not cut and len(rest) < _BLOCK:
            rest += block
            continue
        yield rest + block[:cut] if cut else rest
        rest = block[cut:]
    if rest:
        yield rest


def _hits(block: bytes) -> list[tuple[int, int]]:
    """Return where lines with a marker begin, in order, and how many lines belong to each."""
    hits = []
    for marker, follow in _MARKERS:
        at = block.find(marker)
        while at >= 0:
            hits.append((block.rfind(b"\n", 0, at) + 1, follow))
            at = block.find(marker, _end(block, at))
            if len(hits) > _MOST_LINES:
                break
    return sorted(hits)


def _end(block: bytes, at: int) -> int:
    """Return where the line after the one at ``at`` begins."""
    return (block.find(b"\n", at) + 1) or len(block)


def _line(raw: bytes, number: int, file: int) -> Line:
    text = raw.decode("utf-8", "replace").rstrip("\r\n")
    # A progress bar and a message can share a line.
    text = text.rpartition("\r")[2] if "\r" in text else text
    text = _COLOUR.sub("", text) if "\x1b" in text else text
    stream, task = "", -1
    for pattern in (_MPI, _TORCHRUN, _SRUN):
        match = pattern.match(text)
        if match and not _RANK.match(text):
            stream = match[0].strip()
            task = int(match[1]) if match[1].isdigit() else -1
            text = text[match.end() :]
            break
    rank = -1
    match = _RANK.search(text[:_FAR])
    if match:
        rank, text = int(match[1]), text[match.end() :]
    source = Source(file, stream, rank if rank < MAX_RANKS else -1, task)
    return Line(source, number, text)


def logs_of(paths: Sequence[Path]) -> list[Log]:
    """Return the logs of some files; a folder stands for the files in it."""
    files: dict[Path, None] = {}
    for path in paths:
        if path != STDIN and path.is_dir():
            files.update((file, None) for file in sorted(path.rglob("*")) if file.is_file())
        else:
            files[path] = None
    return [Log(path, index) for index, path in enumerate(files)]

"""Find the lines of a log that may tell why a job failed, and the lines beside them.

A log can have gigabytes, and few of its lines are about a failure. So this module reads a log in
blocks and keeps only *excerpts*: the lines that contain a marker of a known message
(``rankcall.imports.logs.sources``), the lines of a message that has several, and three lines before
and after each of them, because a terminal may have wrapped the message. Everything that is kept of
one log is bounded by a number of lines and of bytes.
"""

from __future__ import annotations

import codecs
import contextlib
import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple, cast

import zstandard

from rankcall.errors import CorruptRunError
from rankcall.imports.dumps.files import looks_like_dumps
from rankcall.printable import clean
from rankcall.ring.layout import MAGIC

__all__ = ["STDIN", "Log", "Marker", "RawLine", "Repeated", "Search", "is_log", "logs_of"]

STDIN = Path("-")
_BLOCK = 1 << 22  # bytes that are searched at once: a search has a cost of its own
_ROW = 1 << 16  # bytes of it that polars gets as one string
_MOST_WORDS = 64  # that polars searches for in one pass with vector instructions
_MOST_BYTES = 1 << 36  # of one log; a small compressed file can hold any number
_MOST_LINES = 400_000  # of one log that are kept; 1,024 ranks write about 40,000 with their context
_MOST_KEPT = 1 << 26  # bytes of them
_MOST_SEEN = 20 * _MOST_LINES  # lines of interest, kept or not: what it takes to find them
_MOST_TOGETHER = 1 << 12  # adjacent ones that are kept or left out together
_MOST_LINE = 1 << 14  # bytes of a line; the longest message lists the shapes of a collective
_LONGEST_PIECE = 1 << 24  # of a line that is searched at once; nobody reads longer lines
_HEAD_LINES = 1000  # of the beginning, from which the prefixes of a log are learnt
_HEAD_BYTES = 1 << 17
_BEFORE, _AFTER = 3, 3  # lines beside one with a marker
_MOST_REPEATED = 1 << 15  # lines of such a message in a block; each has 130 bytes and more
_MOST_RECENT = 1 << 24  # bytes of the blocks with such lines that are kept as they are
_SAMPLE = 1 << 16  # bytes, which tell whether a file is text
_NO_TEXT = re.compile(r"[^\t\n\f\r\x07\x08\x1b -\x7e\x80-\U0010ffff]")


class Marker(NamedTuple):
    """Words that only a message of interest contains, and how many lines after it belong to it."""

    words: str
    follow: int = 0


class Repeated(NamedTuple):
    """A message that healthy jobs write all the time; only its newest lines are kept.

    ``newest_of`` says of which process, for example, for a block of a log and a match in it.
    """

    pattern: re.Pattern[bytes]
    newest_of: Callable[[bytes, re.Match[bytes]], Hashable]


class RawLine(NamedTuple):
    """A line as it stands in the log. ``number`` counts from 1."""

    number: int
    text: str


@dataclass
class Log:
    """One log: a file, which may be compressed, or stdin.

    Attributes:
        count: The lines read so far.
        cut: Whether the log has more than this module looks at.
        left_out: The lines of interest in its middle that are too many.
        damage: Why its end cannot be read. A compressed log may be one that is still written.
        head: The first lines that are not empty, from which ``prefixes`` learns what stands before
            each line, and ``wrapping`` whether they are wrapped.
        is_short: Whether ``head`` has all lines that are not empty.
        newest: The newest lines of messages that come again and again, in order.
    """

    path: Path
    index: int = 0
    count: int = 0
    cut: bool = False
    left_out: int = 0
    damage: str = ""
    head: list[RawLine] = field(default_factory=list)
    is_short: bool = False
    newest: list[RawLine] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name by which messages call it."""
        return "stdin" if self.path == STDIN else clean(self.path.name)

    def excerpts(
        self, markers: Sequence[Marker], repeated: Sequence[Repeated] = (), most: int = 0
    ) -> Iterator[list[RawLine]]:
        """Yield runs of adjacent lines that contain a marker or stand beside one, in order.

        Args:
            markers: Words of the lines of interest.
            repeated: Lines of which only the newest are; ``newest`` has them at the end.
            most: How many of these to keep.

        Raises:
            CorruptRunError: The log cannot be read.
        """
        try:
            with _opened(self.path) as file:
                newest = _Newest(repeated, most)
                yield from self._runs(self._of_interest(file, Search(markers), newest))
                self.newest = newest.lines()
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise CorruptRunError(
                f"{clean(str(self.path))}: cannot be read: {clean(why)}"
            ) from error

    def _runs(self, lines: Iterator[RawLine]) -> Iterator[list[RawLine]]:
        """Put adjacent lines together; of too many, leave those in the middle out.

        A job may write exceptions all along that it catches, and says at the end why it failed.
        """
        newest: deque[list[RawLine]] = deque()
        kept = size = 0  # of the first half of what may be kept, then of the newest runs
        seen, is_first = 0, True
        for run in _adjacent(lines):
            seen += len(run)
            if seen > _MOST_SEEN:
                self.cut = True
                break
            kept, size = kept + len(run), size + sum(len(line.text) for line in run)
            if is_first:
                yield run
                if kept > _MOST_LINES // 2 or size > _MOST_KEPT // 2:
                    is_first, kept, size = False, 0, 0
                continue
            newest.append(run)
            while len(newest) > 1 and (kept > _MOST_LINES // 2 or size > _MOST_KEPT // 2):
                oldest = newest.popleft()
                kept, size = kept - len(oldest), size - sum(len(line.text) for line in oldest)
                self.left_out += len(oldest)
        yield from newest

    def _of_interest(self, file: IO[bytes], search: Search, newest: _Newest) -> Iterator[RawLine]:
        """Yield the lines to keep. ``left`` counts the lines that a message still has."""
        left, size = 0, 0
        before: list[bytes] = []  # the last lines of the block before that were not kept
        for block in self._blocks(file):
            size += len(block)
            if size > _MOST_BYTES:
                self.cut = True
                return
            if len(self.head) < _HEAD_LINES:
                self._learn(block)
            newest.take(block, self.count)
            at = 0
            for start, follow in search.hits(block):
                while left and at < start:
                    end = _end(block, at)
                    self.count += 1
                    left -= 1
                    yield RawLine(self.count, _text(block, at, end))
                    at = end
                if start < at:  # a second marker in a line, or a line of a message
                    left = max(left, follow)
                    continue
                context = _lines_before(block, at, start)
                missing = _BEFORE - block.count(b"\n", context, start)
                if context == 0 and missing:
                    for back, line in enumerate(before[-missing:], -len(before[-missing:]) + 1):
                        yield RawLine(self.count + back, _text(line, 0, len(line)))
                self.count += block.count(b"\n", at, context)
                while context < start:
                    end = _end(block, context)
                    self.count += 1
                    yield RawLine(self.count, _text(block, context, end))
                    context = end
                self.count += 1
                at = _end(block, start)
                left = max(left, follow, _AFTER)
                yield RawLine(self.count, _text(block, start, at))
            while left and at < len(block):
                end = _end(block, at)
                self.count += 1
                left -= 1
                yield RawLine(self.count, _text(block, at, end))
                at = end
            rest = block[_lines_before(block, at, len(block)) :].splitlines(keepends=True)
            before = rest if at else [*before, *rest][-_BEFORE:]
            self.count += block.count(b"\n", at)
            if not block.endswith(b"\n") and at < len(block):
                self.count += 1
        self.is_short = size <= _HEAD_BYTES and len(self.head) < _HEAD_LINES

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        """Yield the bytes in blocks that end with a line; a line longer than a block is cut.

        A carriage return alone begins a line again, as progress bars do. It is left in the line.
        """
        rest = b""
        for block in self._filled(cast(io.BufferedReader, file)):
            cut = block.rfind(b"\n") + 1
            if not cut and len(rest) < _LONGEST_PIECE:
                rest += block
                continue
            yield rest + block[:cut] if cut else rest
            rest = block[cut:]
        if rest:
            yield rest

    def _filled(self, file: io.BufferedReader) -> Iterator[bytes]:
        """Yield the bytes in blocks of one size, up to where the file is damaged."""
        pieces: list[bytes] = []
        size, is_empty = 0, True
        while not self.damage:
            try:
                piece = file.read1(_BLOCK - size)
            except (EOFError, zlib.error, zstandard.ZstdError) as error:
                if is_empty and not pieces:
                    raise
                piece, self.damage = b"", str(error)
            pieces.append(piece)
            size += len(piece)
            if size == _BLOCK or not piece:
                if size:
                    yield b"".join(pieces)
                pieces, size, is_empty = [], 0, False
                if not piece:
                    return

    def _learn(self, block: bytes) -> None:
        """Keep the first lines."""
        lines = block[:_HEAD_BYTES].split(b"\n")[: _HEAD_LINES - len(self.head)]
        self.head += [
            RawLine(self.count + number, _text(line, 0, len(line)))
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]


class Search:
    """Finds the lines that contain a marker.

    polars searches for several words at once. With at most 64 of them, and if the leftmost match
    wins, it compares 16 or 32 bytes at a time (the algorithm is called Teddy); with more words, it
    follows a table of states, byte by byte, which takes five times as long. So all words are
    searched for in a few passes; three took 1.7 s of processor time for a gigabyte, and two 1.55 s.
    ``bytes.find`` for each marker takes ten times as long as both.
    """

    def __init__(self, markers: Sequence[Marker]) -> None:
        import polars

        self._polars = polars
        words = [marker.words for marker in markers]
        passes = -(-len(words) // _MOST_WORDS)
        self._passes = [words[start::passes] for start in range(passes)]
        self._long = [(marker.words.encode(), marker.follow) for marker in markers if marker.follow]

    def hits(self, block: bytes) -> list[tuple[int, int]]:
        """Return where lines with a marker begin, in order, and how many lines follow each."""
        # All markers are ASCII. Latin-1 keeps every byte, but polars wants UTF-8, in which bytes
        # above 127 take two: so places are looked up in what polars saw.
        seen = block if block.isascii() else block.decode("latin-1").encode("ascii", "replace")
        hits: list[tuple[int, int]] = []
        end = -1
        for at in self._places(seen):
            if at < end:
                continue
            start = seen.rfind(b"\n", 0, at) + 1
            end = _end(seen, at)
            follow = max(
                (lines for words, lines in self._long if seen.find(words, start, end) >= 0),
                default=0,
            )
            hits.append((start, follow))
        return hits

    def _places(self, seen: bytes) -> list[int]:
        """Return where a marker stands, in order.

        polars takes as long again for one row of 4 MiB as for 64 rows of 64 KiB.
        """
        starts, rows = [], []
        at = 0
        while at < len(seen):
            starts.append(at)
            at = _end(seen, at + _ROW)
            rows.append(seen[starts[-1] : at])
        # A cast from bytes checks them; made from ``str``, the series would hold one more copy.
        series = self._polars.Series(rows, dtype=self._polars.Binary).cast(self._polars.String)
        places: list[int] = []
        for words in self._passes:
            offsets_by_row = series.str.find_many(words, leftmost=True)
            for start, offsets in zip(starts, offsets_by_row.to_list(), strict=True):
                places += [start + offset for offset in offsets or ()]
        return sorted(places)


def _adjacent(lines: Iterator[RawLine]) -> Iterator[list[RawLine]]:
    """Yield runs of adjacent lines, each of a bounded length."""
    run: list[RawLine] = []
    for line in lines:
        if run and (line.number != run[-1].number + 1 or len(run) >= _MOST_TOGETHER):
            yield run
            run = []
        run.append(line)
    if run:
        yield run


class _Places(NamedTuple):
    """Where lines of such a message are in a block, of each process that writes them."""

    block: bytes
    lines_before: int
    starts: dict[Hashable, list[int]]


class _Newest:
    """The newest lines of messages that come again and again, of each process that writes them.

    A process has an equal share of the lines that are kept, so memory is bounded however many there
    are, and a process that stopped long before the others keeps its last lines. A log may have
    millions of such lines. So the newest blocks are kept as they are, and when a block is dropped,
    only the lines of processes that have few in the newer ones are looked at.
    """

    def __init__(self, repeated: Sequence[Repeated], most: int) -> None:
        self._repeated, self._most = repeated, most
        self._blocks: deque[_Places] = deque()
        self._size = 0  # of the blocks
        self._newer: Counter[Hashable] = Counter()  # the lines of each process in the blocks
        self._kept: dict[Hashable, deque[RawLine]] = {}

    def take(self, block: bytes, count: int) -> None:
        """Take a block; so many lines stand before it."""
        for pattern, newest_of in self._repeated:
            starts: dict[Hashable, list[int]] = defaultdict(list)
            for seen, match in enumerate(pattern.finditer(block)):
                if seen > _MOST_REPEATED:
                    starts.clear()  # no program writes such lines
                    break
                starts[newest_of(block, match)].append(match.start())
            if starts:
                self._blocks.append(_Places(block, count, dict(starts)))
                self._newer.update({key: len(places) for key, places in starts.items()})
                self._size += len(block)
        while self._size > _MOST_RECENT:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        block, count, starts = self._blocks.popleft()
        self._size -= len(block)
        self._newer.subtract({key: len(places) for key, places in starts.items()})
        self._newer = +self._newer
        share = self._share(len(self._newer.keys() | starts.keys() | self._kept.keys()))
        wanted: dict[int, Hashable] = {}
        for key, places in starts.items():
            few = share - self._newer[key]
            wanted.update(dict.fromkeys(places[-few:] if few > 0 else (), key))
        last = 0
        for at in sorted(wanted):
            begin = block.rfind(b"\n", 0, at) + 1
            count += block.count(b"\n", last, begin)
            last = begin
            line = RawLine(count + 1, _text(block, begin, _end(block, begin)))
            self._keep(wanted[at], line, share)

    def _share(self, processes: int) -> int:
        return max(1, self._most // max(1, processes))

    def _keep(self, key: Hashable, line: RawLine, share: int) -> None:
        kept = self._kept.pop(key, None)  # the one that wrote last is the last
        if kept is None:
            kept = deque()
            if len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
            if len(self._kept).bit_count() == 1:
                for lines in self._kept.values():
                    _shorten(lines, share)
        self._kept[key] = kept
        kept.append(line)
        _shorten(kept, share)

    def lines(self) -> list[RawLine]:
        """Return the lines, in order."""
        while self._blocks:
            self._drop_oldest()
        for lines in self._kept.values():
            _shorten(lines, self._share(len(self._kept)))
        return sorted(line for lines in self._kept.values() for line in lines)


def _shorten(lines: deque[RawLine], most: int) -> None:
    while len(lines) > most:
        lines.popleft()


def is_log(path: Path) -> bool:
    """Tell whether a file can only be a log: text, plain or compressed, and no dump in JSON.

    A file of another kind is never taken for a log: it has a NUL or other bytes that are no text.
    """
    if not path.is_file() or path.suffix == ".ring":  # a FIFO could not be read a second time
        return False
    try:
        with _opened(path) as file:
            raw = cast(io.BufferedReader, file).read1(_SAMPLE)  # its end may be missing
        text = codecs.getincrementaldecoder("utf-8")().decode(raw)  # the last character may be cut
    except (OSError, EOFError, zlib.error, zstandard.ZstdError, CorruptRunError, UnicodeError):
        return False
    if not text.strip() or _NO_TEXT.search(text) or raw.startswith(MAGIC):
        return False
    lines = text.split("\n", 2)
    is_json_lines = lines[0].rstrip().endswith("}") and len(lines) > 1 and lines[1][:1] == "{"
    return is_json_lines or not looks_like_dumps(path)


def _has_no_name(pipe: int) -> bool:
    return os.readlink(f"/proc/self/fd/{pipe}").startswith("pipe:")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a log; the first bytes tell whether it is compressed."""
    if path == STDIN:
        yield sys.stdin.buffer
        return
    # Without O_NONBLOCK, opening a FIFO that nobody writes to would block for ever. With it, such a
    # FIFO is empty, and that of a shell's ``<(zcat job.log.gz)`` has its writer already. One with a
    # name in a folder is refused: whoever holds its other end could hold the reader up for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or (stat.S_ISFIFO(mode) and _has_no_name(descriptor))):
            raise CorruptRunError(f"{clean(str(path))}: not a file")
        os.set_blocking(descriptor, True)
        head = file.peek(4)[:4] if isinstance(file, io.BufferedReader) else b""
        if head[:2] == b"\x1f\x8b":
            with gzip.open(file) as unpacked:
                yield cast(IO[bytes], unpacked)
        elif head == b"\x28\xb5\x2f\xfd":
            with zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True) as inner:
                yield cast(IO[bytes], inner)
        else:
            yield file


def _end(block: bytes, at: int) -> int:
    """Return where the line after the one at ``at`` begins."""
    return (block.find(b"\n", at) + 1) or len(block)


def _lines_before(block: bytes, at: int, start: int) -> int:
    """Return where the third line before ``start`` begins, not before ``at``."""
    place = start
    for _ in range(_BEFORE):
        if place <= at:
            return at
        place = max(at, block.rfind(b"\n", at, place - 1) + 1)
    return place


def _text(block: bytes, begin: int, end: int) -> str:
    """Decode a line without its end.

    A message can share a line with hours of a progress bar, which writes itself anew after each
    carriage return. Then the message is at the end of that line, and all before it is left out.
    """
    if end - begin > _MOST_LINE:
        begin = max(begin, block.rfind(b"\r", begin, end - 2) + 1)
    return block[begin : min(end, begin + _MOST_LINE)].decode("utf-8", "replace").rstrip("\r\n")


def logs_of(paths: Sequence[Path]) -> list[Log]:
    """Return the logs of some files; a folder stands for the files in it."""
    files: dict[Path, None] = {}
    for path in paths:
        if path != STDIN and path.is_dir():
            files.update((file, None) for file in sorted(path.rglob("*")) if file.is_file())
        else:
            files[path] = None
    return [Log(path, index) for index, path in enumerate(files)]

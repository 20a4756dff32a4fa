"""Damage to the bytes of anything: a fuzzer that starts from sound inputs and knows no format.

It changes, inserts, removes and copies pieces, and puts in texts and numbers that readers stumble
over. The inputs depend on the seed alone, and, if it is guided, on what the reader does with them.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import resource
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rankcall

ODD = (
    *(b"0", b"-1", b"1e999", b"1" * 400, b"9" * 19, b"9223372036854775808", b"NaN", b"null"),
    *(b"[]", b"{}", b"[[0, 1048576, 1]]", b"[" * 500, b'"', b"\\ud800", b"\x1b[31m", b"\x00"),
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff\xff\xff\xff\xff", "²".encode(), b"\r", b"\n" * 50),
    *(b"rank 99999999999", b"rank 1048576", b"[rank-1]", b"rankcall-hmac\n"),
)
_MOST_BYTES = 1 << 20
_MOST_S = 30.0  # of this process's time, for one input
_MOST_RSS = 1 << 30  # bytes by which the process may grow
_MOST_KEPT = 512  # inputs that are damaged further
_OURS = str(Path(rankcall.__file__).parent)


def damaged(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return one of the inputs with one to eight changes."""
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(len(data) + 1)
        until = min(len(data), at + chance.choice((1, 1, 2, 4, 8, 64, 4096)))
        match chance.randrange(7):
            case 0:
                data[at:until] = chance.randbytes(until - at)
            case 1:
                data[at:until] = b""
            case 2:
                data[at:at] = chance.choice(ODD)
            case 3:
                data[at:until] = chance.choice(ODD)
            case 4:
                other = chance.choice(seeds)
                start = chance.randrange(len(other) + 1)
                data[at:until] = other[start : start + chance.choice((4, 64, 4096))]
            case 5:
                data[at:at] = data[at:until] * chance.choice((1, 2, 50))
            case 6:
                del data[at + chance.randrange(max(1, len(data))) :]
    return bytes(data[:_MOST_BYTES])


class Reached:
    """The lines of some code, by default rankcall's, that have been reached.

    It uses Python's tracing, which makes a reader slower.
    """

    def __init__(self, place: str = _OURS) -> None:
        self._place = place
        self.lines: set[tuple[CodeType, int]] = set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note the lines that this thread reaches in the block."""
        before = sys.gettrace()
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(self._place) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code, frame.f_lineno))
        return self._on_line


def fuzz(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    allowed: tuple[type[Exception], ...],
    times: int = 0,
    seconds: float = 0.0,
    seed: int = 1,
    reached: Reached | None = None,
    corpus: list[bytes] | None = None,
) -> int:
    """Read damaged inputs, so many or for so long; return how many.

    With ``reached``, an input that leads to lines that no other has reached is damaged further.
    The inputs in ``corpus`` come first, as they are; such inputs are added to it.

    Raises ``AssertionError`` with the input if the reader raises anything that is not allowed, if
    it takes long, or if the process has grown. The whole input is the
    error's second argument.
    """
    chance, count, until = random.Random(seed), 0, time.monotonic() + seconds
    corpus = [] if corpus is None else corpus
    before, kept, as_they_are = _most_rss(), [*seeds, *corpus], list(corpus)
    watching = reached.watching if reached is not None else contextlib.nullcontext
    while as_they_are or count < times or time.monotonic() < until:
        data = as_they_are.pop() if as_they_are else damaged(chance, kept)
        began, known = time.process_time(), len(reached.lines) if reached is not None else 0
        try:
            with watching():
                read(data)
        except allowed:
            pass
        except BaseException as error:
            raise AssertionError(f"input {count} of seed {seed}: {data!r:.4000}", data) from error
        took, grown = time.process_time() - began, _most_rss() - before
        if took >= _MOST_S or grown >= _MOST_RSS:
            cost = f"{took:.0f} s and {grown:,} bytes"
            raise AssertionError(f"input {count} of seed {seed} took {cost}: {data!r:.4000}", data)
        if reached is not None and len(reached.lines) > known and data not in kept:
            if len(kept) >= _MOST_KEPT:  # one of those that are not the seeds
                kept.pop(chance.randrange(len(seeds), len(kept)))
            kept.append(data)
            corpus.append(data)
        count += 1
    return count


def minimised(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    allowed: tuple[type[Exception], ...],
    corpus: Sequence[bytes],
) -> list[bytes]:
    """Return inputs of the corpus, small ones first, that reach all lines that it reaches."""
    reached, chosen = Reached(), []
    for number, data in enumerate([*seeds, *sorted(corpus, key=len)]):
        known = len(reached.lines)
        with contextlib.suppress(*allowed), reached.watching():
            read(data)
        if number >= len(seeds) and len(reached.lines) > known:
            chosen.append(data)
    return chosen


def read_corpus(path: Path) -> list[bytes]:
    """Return the inputs that earlier runs kept, or nothing."""
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(name) for name in archive.namelist()]


def write_corpus(path: Path, corpus: Sequence[bytes]) -> None:
    """Keep inputs for later runs: the same inputs give the same file."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for data in sorted(set(corpus), key=lambda data: (len(data), data)):
            name = hashlib.sha256(data).hexdigest()[:16]
            archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED, 9)


def _most_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

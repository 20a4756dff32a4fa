"""Damage to the bytes of anything: a fuzzer that starts from sound inputs and knows no format.

It changes, inserts, removes and copies pieces, and puts in texts and numbers that readers stumble
over. The inputs depend on the seed alone.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence

ODD = (
    *(b"0", b"-1", b"1e999", b"1" * 400, b"9" * 19, b"9223372036854775808", b"NaN", b"null"),
    *(b"[]", b"{}", b"[[0, 1048576, 1]]", b"[" * 500, b'"', b"\\ud800", b"\x1b[31m", b"\x00"),
    *(b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff\xff\xff\xff\xff", "²".encode(), b"\r", b"\n" * 50),
    *(b"rank 99999999999", b"rank 1048576", b"[rank-1]", b"rankcall-hmac\n"),
)
_MOST_BYTES = 1 << 20
_MOST_S = 30.0  # of this process's time, for one input
_MOST_RSS = 1 << 30  # bytes by which the process may grow


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


def fuzz(
    read: Callable[[bytes], object],
    seeds: Sequence[bytes],
    allowed: tuple[type[Exception], ...],
    times: int = 0,
    seconds: float = 0.0,
    seed: int = 1,
) -> int:
    """Read damaged inputs, so many or for so long; return how many.

    Raises ``AssertionError`` with the input if the reader raises anything that is not allowed, if
    it takes long, or if the process has grown.
    """
    chance, count, until = random.Random(seed), 0, time.monotonic() + seconds
    before = _most_rss()
    while count < times or time.monotonic() < until:
        data = damaged(chance, seeds)
        began = time.process_time()
        try:
            read(data)
        except allowed:
            pass
        except BaseException as error:
            raise AssertionError(f"input {count} of seed {seed}: {data!r:.4000}") from error
        took = time.process_time() - began
        assert took < _MOST_S, f"input {count} of seed {seed} took {took:.0f} s: {data!r:.4000}"
        grown = _most_rss() - before
        assert grown < _MOST_RSS, f"input {count} of seed {seed} took {grown:,} bytes"
        count += 1
    return count


def _most_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

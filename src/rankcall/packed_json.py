"""Compressed JSON about the ranks of a job, which another process wrote: ``pack``, ``unpack``.

A few hundred bytes can be inflated to gigabytes, and two bytes of JSON, ``[]``, become an object of
56. So both the text and the values in it have bounds, by the number of ranks that it is about.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

# A rank's state takes some 1 KiB; one that has enqueued 16,384 calls on a device, some 3 MiB.
_FIRST_BYTES, _BYTES_OF_RANK, _MOST_BYTES = 8 << 20, 2 << 20, 1 << 26
# A position of a rank in a verdict has 33 commas, colons and brackets, and a stack some hundreds.
_FIRST_VALUES, _VALUES_OF_RANK, _MOST_VALUES = 1 << 18, 1 << 10, 1 << 23


def pack(text: bytes) -> bytes:
    """Return a JSON text, compressed."""
    return zlib.compress(text)


def unpack(data: bytes, ranks: int) -> bytes:
    """Return a JSON text that any process may have compressed.

    Args:
        data: What ``pack`` returned.
        ranks: The number of ranks of the job, which the text is about.

    Raises:
        ValueError: The data is damaged, or stands for more than so many ranks need.
    """
    most = min(_MOST_BYTES, _FIRST_BYTES + _BYTES_OF_RANK * max(0, ranks))
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"damaged: {error}") from error
    if len(text) > most:
        raise ValueError(f"damaged: it stands for more than {most:,} bytes")
    if not unpacker.eof:
        raise ValueError("damaged: its end is missing")
    # Each value is followed by one of these, unless it is the last one of all. Those inside of
    # strings are counted as well: to tell them apart would be to read the JSON.
    values = sum(text.count(mark) for mark in (b",", b":", b"[", b"{"))
    most = min(_MOST_VALUES, _FIRST_VALUES + _VALUES_OF_RANK * max(0, ranks))
    if values > most:
        raise ValueError(f"damaged: it stands for more than {most:,} values")
    return text


def load(data: bytes, ranks: int) -> Any:
    """Return what compressed JSON stands for. Raises ``ValueError`` as ``unpack``."""
    try:
        return json.loads(unpack(data, ranks))
    except RecursionError:
        raise ValueError("damaged: it is nested too deeply") from None

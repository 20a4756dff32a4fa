"""Protobuf's wire format, for one message and for a whole column of messages at once.

A varint may be longer than necessary, because its top bit only says that another byte follows. So
all messages of one layout can have the same length, and become the rows of a matrix. Source:
https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """Encode a non-negative number in as few bytes as possible."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(tag: int, value: int) -> bytes:
    """Encode a field with a number."""
    return varint(tag << 3 | _VARINT) + varint(value)


def message(tag: int, *parts: bytes) -> bytes:
    """Encode a field with a message that consists of encoded fields."""
    body = b"".join(parts)
    return varint(tag << 3 | _LENGTH) + varint(len(body)) + body


def text(tag: int, value: str) -> bytes:
    """Encode a field with a string; characters that UTF-8 cannot encode become question marks."""
    return message(tag, value.encode("utf-8", "replace"))


@dataclass
class Messages:
    """Messages of one layout, one per row. Each method adds a field to all of them."""

    count: int
    _parts: list[Bytes] = field(default_factory=list)
    width: int = 0

    def constant(self, raw: bytes) -> Messages:
        """Add the same bytes to each message."""
        return self._add(np.broadcast_to(np.frombuffer(raw, np.uint8), (self.count, len(raw))))

    def numbers(self, tag: int, values: npt.NDArray[Any]) -> Messages:
        """Add a number to each message; all have as many bytes as the largest needs."""
        values = values.astype(np.uint64)
        bits = int(values.max()).bit_length() if len(values) else 0
        width = max(1, -(-bits // 7))
        shifts = np.arange(0, 7 * width, 7, dtype=np.uint64)
        more = np.full(width, 0x80, np.uint8)
        more[-1] = 0
        self.constant(varint(tag << 3 | _VARINT))
        return self._add((values[:, None] >> shifts).astype(np.uint8) & np.uint8(0x7F) | more)

    def fixed64(self, tag: int, values: npt.NDArray[np.uint64]) -> Messages:
        """Add eight bytes to each message."""
        raw = np.ascontiguousarray(values, dtype="<u8").view(np.uint8).reshape(-1, 8)
        return self.constant(varint(tag << 3 | _FIXED64))._add(raw)

    def messages(self, tag: int, inner: Messages) -> Messages:
        """Add an inner message to each message."""
        self.constant(varint(tag << 3 | _LENGTH) + varint(inner.width))
        for part in inner._parts:
            self._add(part)
        return self

    def matrix(self) -> Bytes:
        """Return the bytes of all messages as ``[row, byte]``."""
        return np.concatenate(self._parts, axis=1)

    def _add(self, part: Bytes) -> Messages:
        self._parts.append(part)
        self.width += part.shape[1]
        return self

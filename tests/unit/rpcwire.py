"""Messages of the RPC agents, written from the description of their format in ``wire.h``."""

from __future__ import annotations

import struct

HEADER = struct.Struct("<4sB3xQQQqQQiIII")
SLOT = struct.Struct("<IIQQQ")
CHUNK = struct.Struct("<4sIQQQQ")
PACKED, PART, SHARED, RETURNED = 0, 1, 2, 3


def build(
    payload: bytes, pickle: bytes, buffers: list[tuple[int, bytes]], kind: int = 1, call: int = 7
) -> list[bytes]:
    """Return the frames of a message."""
    slots = b"".join(SLOT.pack(where, 0, len(data), 5, 6) for where, data in buffers)
    packed = b"".join(data for where, data in buffers if where == PACKED)
    header = HEADER.pack(
        b"RKR2", kind, 1, 2, call, 3, len(payload), len(pickle), 0x102, len(buffers), 0, 0
    )
    frames = [data for where, data in buffers if where == PART]
    return [header + slots + payload + pickle + packed, *frames]


def cut(frames: list[bytes], transfer: int, size: int, session: int = 9) -> list[list[bytes]]:
    """Return a message in chunks of at most ``size`` bytes."""
    return [
        [
            CHUNK.pack(b"RKC2", part, session, transfer, offset, len(data)),
            data[offset : offset + size],
        ]
        for part, data in enumerate(frames)
        for offset in range(0, max(len(data), 1), size)
    ]

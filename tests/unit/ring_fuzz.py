"""Sound ring files to start from, and ways to damage them."""

from __future__ import annotations

import functools
import struct
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from rankcall.record import OPS, RECORD, STATUSES
from rankcall.ring.layout import HEADER, Geometry
from rankcall.ring.tables import CallSite, Group
from rankcall.ring.writer import BODY_NAMES, Identity, PythonRing, create

SHAPE = Geometry(capacity=64, inflight_capacity=8, tables_bytes=2048)
COMPLETED = STATUSES.index("completed")


def body(**fields: float) -> tuple[float, ...]:
    """Return a record's body for ``PythonRing.issue``: zeros but for ``fields``."""
    values: list[float] = []
    for name in BODY_NAMES:
        width = RECORD[name].shape[0] if RECORD[name].subdtype else 1
        values += [fields.get(name, 0)] * width
    return tuple(values)


def write_sound(path: Path, records: int = 80, unfinished: tuple[int, ...] = (3, 75)) -> None:
    """Write a ring of ``records`` all_reduces by a group of four; some never finish."""
    mapped = create(path, Identity(rank=1, world_size=4, host="node-a"), SHAPE)
    ring = PythonRing(mapped, SHAPE)
    group = ring.group(Group("0", 0, "gloo", "default_pg", (0, 1, 2, 3)))
    site = ring.site(CallSite("train.py", 12, "step", "all_reduce"))
    variant = ring.string("c10d::allreduce_")
    for i in range(records):
        now = 1_000_000 + i * 1000
        index = ring.issue(
            body(
                seq=i + 1,
                enqueued_ns=now,
                started_ns=now,
                message_bytes=64,
                in_bytes=64,
                out_bytes=64,
                group=group,
                call_site=site,
                variant=variant,
                op=OPS.index("all_reduce"),
                status=1,
                root=-1,
                peer=-1,
                step=i // 10,
            )
        )
        if i not in unfinished:
            ring.finish(index, completed_ns=now + 500, status=COMPLETED)
    mapped.close()


@functools.cache
def sound_bytes() -> bytes:
    """Return one sound ring file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound.ring"
        write_sound(path)
        return path.read_bytes()


@dataclass(frozen=True)
class Damage:
    """One change to a file: its bytes from ``at`` on become ``data``; or it ends there."""

    at: int
    data: bytes | None


def _field(name: str, number: int) -> Damage:
    kind, offset = HEADER.fields[name][:2]  # type: ignore[index]
    width = kind.itemsize
    return Damage(offset, (number % (1 << (8 * width))).to_bytes(width, "little"))


_SIZE = SHAPE.file_bytes
_ODD = [0, 1, 2, 63, 64, 65, 127, 255, 4096, 1 << 20, (1 << 24) - 1, 1 << 24, 1 << 31]
_NUMBERS = st.one_of(
    st.sampled_from([*_ODD, -1, -2, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1]),
    st.integers(0, (1 << 64) - 1),
)
_NAMES = st.sampled_from(list(HEADER.names or ()))
_JSON = [
    b'{"name": "0", "epoch": 0, "backend": "", "description": "", "ranks": [[0, 1048576, 1]]}',
    b'{"name": 1, "epoch": 1e999, "backend": null, "description": [], "ranks": [[0, -1, 1]]}',
    b'{"file": "\\u001b[31m", "line": "x", "function": {}, "api": 0}',
    b"[" * 300,
    b'{"name": "0", "epoch": 99999999999999999999, "backend": "", "description": "", "ranks": []}',
]


def _entry(number: int, kind: int, payload: bytes) -> Damage:
    """Return a side-table entry with a right checksum: only what is in it can be wrong."""
    head = struct.pack("<IIII", number, kind, len(payload), zlib.crc32(payload))
    return Damage(SHAPE.tables_offset, head + payload)


def _record_field(slot: int, name: str, number: int) -> Damage:
    kind, offset = RECORD.fields[name][:2]  # type: ignore[index]
    data = (number % (1 << (8 * kind.itemsize))).to_bytes(kind.itemsize, "little")
    return Damage(SHAPE.records_offset + slot * RECORD.itemsize + offset, data)


_SPLICE = st.builds(
    lambda source, at, length: Damage(at, sound_bytes()[source : source + length]),
    st.integers(0, _SIZE - 1),
    st.integers(0, _SIZE - 1),
    st.integers(1, 2000),
)
damages = st.one_of(
    st.builds(Damage, st.integers(0, _SIZE - 1), st.binary(min_size=1, max_size=16)),
    st.builds(Damage, st.integers(0, _SIZE), st.none()),
    _SPLICE,
    st.builds(_field, _NAMES, _NUMBERS),
    st.builds(
        _record_field, st.integers(0, 63), st.sampled_from(list(RECORD.names or ())), _NUMBERS
    ),
    st.builds(_entry, st.integers(0, 2), st.integers(0, 4), st.sampled_from(_JSON) | st.binary()),
)


def apply(changes: list[Damage]) -> bytes:
    """Return a sound ring file with some damage done, in order."""
    data = bytearray(sound_bytes())
    for change in changes:
        if change.data is None:
            del data[change.at :]
        elif change.at < len(data):
            data[change.at : change.at + len(change.data)] = change.data
    return bytes(data)

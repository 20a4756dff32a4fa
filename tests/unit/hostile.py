"""Files that stand for far more than they hold, and the memory that reading them takes."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

from rankcall.ring.layout import Geometry, make_header
from rankcall.ring.tables import ENTRY_GROUP

_READ = """
import sys
from rankcall.analysis.summary import summarise
from rankcall.analysis.verdicts import diagnose
from rankcall.errors import RankcallError
from rankcall.run.opening import open_run

try:
    run = open_run(sys.argv[1])
    diagnose(run), summarise(run), run.dropped
    print(len(run.heads))
except RankcallError:
    print(0)
with open("/proc/self/status") as file:
    print(next(int(line.split()[1]) >> 10 for line in file if line.startswith("VmHWM")))
"""


def entry(number: int, kind: int, payload: bytes) -> bytes:
    """Return an entry of a side table, with a right checksum."""
    head = struct.pack("<IIII", number, kind, len(payload), zlib.crc32(payload))
    return head + payload + b"\0" * (-len(payload) % 8)


def group(name: str, ranks: str) -> bytes:
    """Return the side-table payload of a group; ``ranks`` are its runs as JSON."""
    text = json.dumps({"name": name, "epoch": 0, "backend": "gloo", "description": "", "ranks": 0})
    return text.replace('"ranks": 0', f'"ranks": {ranks}').encode()


def write_ring(
    path: Path,
    rank: int,
    world_size: int,
    payloads: Iterable[bytes] = (),
    *,
    kind: int = ENTRY_GROUP,
    shape: Geometry | None = None,
    **header: int,
) -> None:
    """Write a ring without records. If ``shape`` is larger than its content, the rest is a hole."""
    tables = b"".join(entry(number, kind, payload) for number, payload in enumerate(payloads, 1))
    shape = shape or Geometry(64, 0, -(-len(tables) // 8) * 8)
    about = {"rank": rank, "world_size": world_size, "pid": 1 + rank, "closed_ns": 5}
    about |= {"host": b"node-a", "boot_id": b"x", "tables_used": len(tables), "capture": 1}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(make_header(shape, about | header))
        file.seek(shape.tables_offset)
        file.write(tables)
    os.truncate(path, shape.file_bytes)


def peak_of_reading(run: Path) -> tuple[int, int]:
    """Read and judge a run in a new process; return its number of rings, and its peak in MiB.

    The peak is that of the process's own memory: ``ru_maxrss`` would begin with its parent's.
    """
    command = [sys.executable, "-c", _READ, str(run)]
    output = subprocess.check_output(command, text=True, timeout=240)
    rings, peak = map(int, output.split())
    return rings, peak

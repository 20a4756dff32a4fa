"""Move or remove the ring of a process that has ended: who may, under which lock, and how.

``settle`` does it for one run, and ``clean_up`` for all runs of this user on this host.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from rankcall.errors import CorruptRunError
from rankcall.files import open_file, replacing
from rankcall.folders import UnsafeFolderError
from rankcall.process import ALIVE, DEAD, UNKNOWN
from rankcall.ring.layout import HEADER_BYTES, Header, offset_of, parse_header
from rankcall.ring.lock import try_lock
from rankcall.run.paths import VIEWS, files_in, tail_name

_SILENT_S = 60.0  # a ring without a lock is left alone for so long after its last heartbeat
_RETRY_S = 0.01  # a mover holds the lock for the milliseconds that a copy takes


def claim_ring(
    ring: Path, held: contextlib.ExitStack, deadline: float
) -> tuple[BinaryIO | None, Header | None]:
    """Open and lock a ring that may be moved or removed; the file is None if it may not.

    A ring may be moved if it is closed, or if its writer is not known to be alive and its lock is
    free. A writer in another pid namespace is not visible, but it holds the lock. Rings of
    rankcall 0.1 have no lock; they are left alone for a minute after their last sign of life.

    If the writer has ended, the only possible holder of the lock is another process that moves the
    ring. This function waits for that process until ``deadline`` (on ``time.monotonic``).

    Returns:
        The open file, and the header (None if it is damaged).
    """
    file = held.enter_context(open_file(ring))
    _check_own(file, ring)
    try:
        header = parse_header(file.read(HEADER_BYTES), str(ring))
    except CorruptRunError:
        # A damaged header does not tell the writer. If it lives, it holds the lock.
        return (file, None) if try_lock(file.fileno()) else (None, None)
    state = DEAD if header.closed_ns else header.process.liveness()
    if state == ALIVE:
        return None, header
    if (
        state == UNKNOWN
        and not header.locked
        and age_s(header.last_sign_epoch_ns / 1e9) < _SILENT_S
    ):
        return None, header
    # flock cannot wait with a deadline, and a mover may hang in a network file system.
    while not try_lock(file.fileno()):
        if state == UNKNOWN or time.monotonic() > deadline:
            return (file if header.closed_ns else None), header
        time.sleep(_RETRY_S)
    if not ring.exists():
        raise FileNotFoundError(errno.ENOENT, "moved by another process", str(ring))
    # The header may have changed between the first look and the lock.
    file.seek(0)
    return file, parse_header(file.read(HEADER_BYTES), str(ring))


def _check_own(file: BinaryIO, ring: Path) -> None:
    owner = os.fstat(file.fileno()).st_uid
    if owner != os.geteuid():
        raise UnsafeFolderError(ring, f"belongs to user {owner}, not to user {os.geteuid()}")


def move_ring(source: BinaryIO, ring: Path, target: Path) -> None:
    """Copy a ring without its unused end, and then remove the original.

    The copy gets its name when it is complete, and the original goes last. So a reader finds the
    ring at every moment, in one place or in both, and a crash in between loses nothing.
    """
    source.seek(0)
    with replacing(target) as moved:
        shutil.copyfileobj(source, moved, 1 << 20)
        cut_unused_end(moved)
    ring.unlink()
    target.with_name(tail_name(ring.name)).unlink(missing_ok=True)


def cut_unused_end(file: BinaryIO) -> None:
    """Cut off the records that were never written, and write the new size into the header."""
    file.flush()
    file.seek(0)
    header = parse_header(file.read(HEADER_BYTES), file.name)
    size = header.used_bytes
    if size < header.geometry.file_bytes:
        file.seek(offset_of("file_bytes"))
        file.write(size.to_bytes(8, "little"))
        file.truncate(size)


def age_s(epoch_s: float) -> float:
    """Return how long ago a moment was, by this host's wall clock."""
    return time.time() - epoch_s


def remove_empty_folders(folder: Path) -> None:
    """Remove the folder of a run's live rings, and that of all runs, unless a ring is left."""
    if not files_in(folder, ".ring"):
        shutil.rmtree(folder / VIEWS, ignore_errors=True)
    for directory in (folder, folder.parent):
        try:
            directory.rmdir()
        except OSError:
            break

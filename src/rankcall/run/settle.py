"""Settle a run: move the rings of its ended processes from shared memory into the run directory.

The launcher settles its run after the job, and a command the run that it reads. A process settles
its own ring when the recording ends. A ring whose process may still run is never touched.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from pathlib import Path

from rankcall.errors import CorruptRunError
from rankcall.files import replacing
from rankcall.folders import run_folder
from rankcall.run.hangs import settle_hangs
from rankcall.run.moving import claim_ring, cut_unused_end, move_ring, remove_empty_folders
from rankcall.run.paths import (
    files_in,
    live_dir,
    trusted_live_dirs,
    unused_ring,
)

_MOVER_SECONDS = 5.0  # how long to wait for another process that moves the same ring


def settle(path: Path, wait_s: float = _MOVER_SECONDS) -> list[Path]:
    """Move the rings of ended processes of this host into the run directory; return their paths.

    The ring of a process that may still run stays: see ``moving.claim_ring``. A ring that cannot be
    moved can still be loaded from its old place. Only this user's rings are moved.

    Args:
        path: The run directory.
        wait_s: How long to wait for other processes that move the same rings.
    """
    moved: list[Path] = []
    source = live_dir(path)
    if source not in trusted_live_dirs(path):
        return moved
    deadline = time.monotonic() + wait_s
    for ring in files_in(source, ".ring"):
        with contextlib.suppress(OSError, CorruptRunError):
            target = _move(ring, path, deadline)
            if target is not None:
                moved.append(target)
    if not files_in(source, ".ring"):
        settle_hangs(source, path)
    remove_empty_folders(source)
    return moved


def settle_ring(ring: Path, run_dir: Path) -> None:
    """Move one finished ring into its run directory. If that fails, it stays readable.

    The rings of other ranks that ended without moving theirs, because they were killed or forked,
    are moved as well.
    """
    with contextlib.suppress(OSError, CorruptRunError):
        if _move(ring, run_dir, time.monotonic() + _MOVER_SECONDS) is not None:
            settle(run_dir, wait_s=0.0)
            remove_empty_folders(ring.parent)


def save_ring(ring: mmap.mmap, run_dir: Path, name: str) -> Path:
    """Write a ring that was kept in memory into the run directory. Raises ``OSError``."""
    folder = run_folder(run_dir, "rings")
    target = folder / unused_ring(name, folder)
    with replacing(target) as file, memoryview(ring) as data:
        file.write(data)
        cut_unused_end(file)
    return target


def _move(ring: Path, run_dir: Path, deadline: float) -> Path | None:
    """Move a ring into its run directory. Return its new path, or None if it may not be moved."""
    target = run_dir / "rings" / ring.name
    if target.exists() and target.samefile(ring):
        return target  # no tmpfs: it was written here. It is not cut: it may still be mapped
    run_folder(run_dir, "rings")
    with contextlib.ExitStack() as held:
        file, header = claim_ring(ring, held, deadline)
        if file is None or header is None:
            return None
        move_ring(file, ring, target)
    return target

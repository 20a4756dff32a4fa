"""How a run's processes ended, and where their rings go: into the run directory, or away.

``settle`` does this for one run. ``clean_up`` does it for all runs of this user on this host, and
removes rings whose run directory is gone. A ring whose process may still run is never touched.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from rankcall.errors import CorruptRunError
from rankcall.files import UnsafeFolderError, check_folder, open_file, replacing, run_folder
from rankcall.process import ALIVE, DEAD, UNKNOWN
from rankcall.ring.layout import HEADER_BYTES, Header, offset_of, parse_header, read_header
from rankcall.ring.lock import try_lock
from rankcall.ring.tail import tail_of
from rankcall.run.exits import STATES, describe_states, states_name
from rankcall.run.hangs import settle_hangs
from rankcall.run.paths import (
    HANGS,
    VIEWS,
    files_in,
    live_base,
    live_dir,
    tail_name,
    trusted_live_dirs,
    unused_ring,
)

_RPC = "rpc"  # the RPC back end's folder, which is beside those of the runs
_OLD_SECONDS = 86_400.0
_OVER_SECONDS = 60.0  # a launcher that ends with its ranks has moved their rings by then
_MOVER_SECONDS = 5.0  # how long to wait for another process that moves the same ring
_MOST_CLEANED = 256


def settle(path: Path, wait_s: float = _MOVER_SECONDS) -> list[Path]:
    """Move the rings of ended processes of this host into the run directory; return their paths.

    The ring of a process that may still run stays: see ``_claim``. A ring that cannot be moved can
    still be loaded from its old place. Only this user's rings are moved.

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
    _remove_empty(source)
    return moved


def settle_ring(ring: Path, run_dir: Path) -> None:
    """Move one finished ring into its run directory. If that fails, it stays readable.

    The rings of other ranks that ended without moving theirs, because they were killed or forked,
    are moved as well.
    """
    with contextlib.suppress(OSError, CorruptRunError):
        if _move(ring, run_dir, time.monotonic() + _MOVER_SECONDS) is not None:
            settle(run_dir, wait_s=0.0)
            _remove_empty(ring.parent)


def keep_tails(run_dir: Path) -> None:
    """Write the tails of this host's live rings into the run, so that a copy of it has evidence.

    The states of their processes are noted as well. The rings stay in memory, because the ranks
    that still run read them there. Raises ``OSError``.
    """
    folder = live_dir(run_dir)
    if folder not in trusted_live_dirs(run_dir):
        return
    rings = files_in(folder, ".ring")
    for ring in rings:
        with contextlib.suppress(CorruptRunError):  # for example, it was moved meanwhile
            keep_tail(run_dir, ring.name, tail_of(ring))
    headers = [header for header in map(read_header, rings) if header is not None]
    with replacing(run_folder(run_dir, STATES) / states_name()) as file:
        file.write(describe_states(headers))


def keep_tail(run_dir: Path, name: str, tail: bytes) -> None:
    """Write the tail of a ring of this name into the run. Raises ``OSError``."""
    with replacing(run_folder(run_dir, "rings") / tail_name(name)) as file:
        file.write(tail)


def save_ring(ring: mmap.mmap, run_dir: Path, name: str) -> Path:
    """Write a ring that was kept in memory into the run directory. Raises ``OSError``."""
    folder = run_folder(run_dir, "rings")
    target = folder / unused_ring(name, folder)
    with replacing(target) as file, memoryview(ring) as data:
        file.write(data)
        _cut(file)
    return target


def _claim(
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
        return (file, None) if try_lock(file.fileno()) else (None, None)
    state = DEAD if header.closed_ns else header.process.liveness()
    if state == ALIVE:
        return None, header
    if state == UNKNOWN and not header.locked and _age_s(header.last_sign_epoch_ns / 1e9) < 60:
        return None, header
    while not try_lock(file.fileno()):
        if state == UNKNOWN or time.monotonic() > deadline:
            return (file if header.closed_ns else None), header
        time.sleep(0.01)
    if not ring.exists():
        raise FileNotFoundError(errno.ENOENT, "moved by another process", str(ring))
    # The header may have changed between the first look and the lock.
    file.seek(0)
    return file, parse_header(file.read(HEADER_BYTES), str(ring))


def _check_own(file: BinaryIO, ring: Path) -> None:
    owner = os.fstat(file.fileno()).st_uid
    if owner != os.geteuid():
        raise UnsafeFolderError(ring, f"belongs to user {owner}, not to user {os.geteuid()}")


def _move(ring: Path, run_dir: Path, deadline: float) -> Path | None:
    """Move a ring into its run directory. Return its new path, or None if it may not be moved."""
    target = run_dir / "rings" / ring.name
    if target.exists() and target.samefile(ring):
        return target  # no tmpfs: it was written here. It is not cut: it may still be mapped
    run_folder(run_dir, "rings")
    with contextlib.ExitStack() as held:
        file, header = _claim(ring, held, deadline)
        if file is None or header is None:
            return None
        _copy(file, ring, target)
    return target


def _copy(source: BinaryIO, ring: Path, target: Path) -> None:
    """Copy a ring without its unused end, and then remove the original."""
    source.seek(0)
    with replacing(target) as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        _cut(copy)
    ring.unlink()
    target.with_name(tail_name(ring.name)).unlink(missing_ok=True)


def _cut(file: BinaryIO) -> None:
    """Cut off the records that were never written, and write the new size into the header."""
    file.flush()
    file.seek(0)
    header = parse_header(file.read(HEADER_BYTES), file.name)
    size = header.used_bytes
    if size < header.geometry.file_bytes:
        file.seek(offset_of("file_bytes"))
        file.write(size.to_bytes(8, "little"))
        file.truncate(size)


def clean_up(everything: bool = False, most: int = _MOST_CLEANED) -> list[str]:
    """Free the memory that the rings of this user's dead processes take on this host.

    A ring is moved if its run directory still exists, and removed if not. A ring is left alone
    while its process may be alive, and for a day after its last sign of life. If all processes of
    its job on this host are known to have ended, it is moved after a minute.

    Args:
        everything: Do not wait for a day.
        most: The largest number of rings to look at.

    Returns:
        A line for each run, with the number of rings that were moved or removed.
    """
    base = live_base() / f"rankcall-{os.geteuid()}"
    try:
        check_folder(base)
        folders = sorted(folder for folder in base.iterdir() if folder.name != _RPC)
    except OSError:
        return []
    lines: list[str] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            check_folder(folder)
            rings = files_in(folder, ".ring")[: max(0, most)]
            most -= len(rings)
            lines += _clean_folder(folder, rings, everything)
    with contextlib.suppress(OSError):
        base.rmdir()
    return lines


def _clean_folder(folder: Path, rings: list[Path], everything: bool) -> list[str]:
    moved: dict[str, int] = {}
    removed, freed, run_dir = 0, 0, Path()
    is_over = all(map(_is_over, rings))
    for ring in rings:
        with contextlib.suppress(OSError, CorruptRunError), contextlib.ExitStack() as held:
            file, header = _claim(ring, held, deadline=0.0)
            has_run = header is not None and header.run_dir and _is_run(Path(header.run_dir))
            may_go = everything or _is_old(ring, header) or (is_over and has_run)
            if file is None or not may_go:
                continue
            size = os.fstat(file.fileno()).st_blocks * 512
            if header is not None and has_run:
                run_dir = Path(header.run_dir)
                try:
                    _copy(file, ring, run_folder(run_dir, "rings") / ring.name)
                except (OSError, CorruptRunError):
                    continue  # for example, the disk is full: the ring stays, and can be read
                moved[header.run_dir] = moved.get(header.run_dir, 0) + 1
            else:
                ring.unlink()
                removed += 1
            freed += size
    if not files_in(folder, ".ring"):
        if moved:
            settle_hangs(folder, run_dir)
        elif removed or _age_s(folder.stat().st_mtime) > _OLD_SECONDS:
            shutil.rmtree(folder / HANGS, ignore_errors=True)
        _remove_empty(folder)
    lines = [f"moved {_rings(count)} of a killed job to {place}" for place, count in moved.items()]
    if removed:
        lines.append(f"removed {_rings(removed)} of a killed job from {folder}")
    if freed:
        lines[-1] += f" ({freed / 1e6:,.1f} MB of memory freed)"
    return lines


def _rings(count: int) -> str:
    return "1 ring" if count == 1 else f"{count:,} rings"


def has_old_rings(run_dir: Path) -> bool:
    """Return whether ``clean_up`` may find rings of other runs. It only lists one folder."""
    own = live_dir(run_dir)
    try:
        with os.scandir(own.parent) as entries:
            ages = [
                _age_s(entry.stat(follow_symlinks=False).st_mtime)
                for entry in entries
                if entry.name not in (own.name, _RPC)
            ]
    except OSError:
        return False
    return max(ages, default=0.0) > _OVER_SECONDS


def _is_run(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()


def _is_old(ring: Path, header: Header | None) -> bool:
    """Return whether the last sign of life of a ring's process is more than a day old."""
    last_sign = ring.lstat().st_mtime if header is None else header.last_sign_epoch_ns / 1e9
    return _age_s(last_sign) > _OLD_SECONDS


def _is_over(ring: Path) -> bool:
    """Return whether a ring's process is known to have ended more than a minute ago."""
    header = read_header(ring)
    if header is None or header.process.liveness() != DEAD:
        return False
    return _age_s(header.last_sign_epoch_ns / 1e9) > _OVER_SECONDS


def _age_s(epoch_s: float) -> float:
    return time.time() - epoch_s


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a run's live rings, and that of all runs, unless a ring is left."""
    if not files_in(folder, ".ring"):
        shutil.rmtree(folder / VIEWS, ignore_errors=True)
    for directory in (folder, folder.parent):
        try:
            directory.rmdir()
        except OSError:
            break

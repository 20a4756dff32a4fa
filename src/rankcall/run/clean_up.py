"""Free the memory that killed jobs left on this host: rings and RPC's blocks, of this user.

If a job is killed together with its launcher, and no command ever reads its run, nothing settles
it, and its rings stay in shared memory until the machine is started again. So do the blocks in
which RPC workers pass tensors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

from rankcall.errors import CorruptRunError
from rankcall.folders import check_folder, run_folder
from rankcall.process import DEAD
from rankcall.ring.layout import Header, read_header
from rankcall.run import worker_dirs
from rankcall.run.hangs import settle_hangs
from rankcall.run.moving import age_s, claim_ring, move_ring, remove_empty_folders
from rankcall.run.paths import HANGS, files_in, live_base, live_dir

# A process whose state cannot be known, for example in another pid namespace, gives a sign of life
# twice a second. One that has given none for a day has ended.
_OLD_SECONDS = 86_400.0
_OVER_SECONDS = 60.0  # a launcher that ends with its ranks has moved their rings by then
_MOST_CLEANED = 256  # rings: commands clean up before their own work, which must not wait long


def clean_up(everything: bool = False, most: int = _MOST_CLEANED) -> list[str]:
    """Free the memory that this user's dead processes take on this host.

    A ring is moved if its run directory still exists, and removed if not. A ring is left alone
    while its process may be alive, and for a day after its last sign of life. If all processes of
    its job on this host are known to have ended, it is moved after a minute. The directory of an
    RPC worker is removed if no process holds its lock.

    Args:
        everything: Do not wait for a day.
        most: The largest number of rings to look at.

    Returns:
        A line for each run, with the number of rings that were moved or removed, and one for RPC.
    """
    base = live_base() / f"rankcall-{os.geteuid()}"
    try:
        check_folder(base)
        folders = sorted(folder for folder in base.iterdir() if folder.name != worker_dirs.NAME)
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
        lines += _clean_rpc(base / worker_dirs.NAME)
        base.rmdir()
    return lines


def _clean_rpc(folder: Path) -> list[str]:
    if not folder.exists():
        return []
    check_folder(folder)
    count, freed = worker_dirs.remove_unheld(folder)
    remove_empty_folders(folder)
    if not count:
        return []
    whose = "1 killed RPC worker" if count == 1 else f"{count:,} killed RPC workers"
    return [f"removed what {whose} left in {folder} ({freed / 1e6:,.1f} MB of memory freed)"]


def _clean_folder(folder: Path, rings: list[Path], everything: bool) -> list[str]:
    moved: dict[str, int] = {}
    removed, freed, run_dir = 0, 0, Path()
    is_over = all(map(_is_over, rings))
    for ring in rings:
        with contextlib.suppress(OSError, CorruptRunError), contextlib.ExitStack() as held:
            file, header = claim_ring(ring, held, deadline=0.0)
            has_run = header is not None and header.run_dir and _is_run(Path(header.run_dir))
            may_go = everything or _is_old(ring, header) or (is_over and has_run)
            if file is None or not may_go:
                continue
            size = os.fstat(file.fileno()).st_blocks * 512
            if header is not None and has_run:
                run_dir = Path(header.run_dir)
                try:
                    move_ring(file, ring, run_folder(run_dir, "rings") / ring.name)
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
        elif removed or age_s(folder.stat().st_mtime) > _OLD_SECONDS:
            shutil.rmtree(folder / HANGS, ignore_errors=True)
        remove_empty_folders(folder)
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
                age_s(entry.stat(follow_symlinks=False).st_mtime)
                for entry in entries
                if entry.name not in (own.name, worker_dirs.NAME)
            ]
    except OSError:
        return False
    return max(ages, default=0.0) > _OVER_SECONDS


def _is_run(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()


def _is_old(ring: Path, header: Header | None) -> bool:
    """Return whether the last sign of life of a ring's process is more than a day old."""
    last_sign = ring.lstat().st_mtime if header is None else header.last_sign_epoch_ns / 1e9
    return age_s(last_sign) > _OLD_SECONDS


def _is_over(ring: Path) -> bool:
    """Return whether a ring's process is known to have ended more than a minute ago."""
    header = read_header(ring)
    if header is None or header.process.liveness() != DEAD:
        return False
    return age_s(header.last_sign_epoch_ns / 1e9) > _OVER_SECONDS

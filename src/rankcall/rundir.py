"""The run directory: where rings live while a job runs, and where they go after.

::

    rankcall-runs/latest -> 20261121T034130-train_digits
    rankcall-runs/20261121T034130-train_digits/
        run.json                                    what was started, where and when
        rings/rank-00003.attempt-0.node-a.4711.ring one file per rank and attempt
        hangs/0001/                                 what the watcher said of a hang
    /dev/shm/rankcall-<uid>/<run>-<hash>/           the same files while their processes live

Rings are written on tmpfs, because a page of a disk file can block its writer; ``settle`` moves
those whose process has ended into the run directory. ``clean_up`` does so for all runs of this
user, and removes rings that have no run directory any more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from rankcall._hangs import HANGS, Object, kept, settle_hangs
from rankcall._redact import redact_command
from rankcall._version import __version__
from rankcall.errors import CorruptRun, RunNotFound
from rankcall.files import (
    UnsafeFolder,
    check_file,
    check_folder,
    make_folder,
    open_file,
    reason,
    replacing,
    run_folder,
    scratch_beside,
)
from rankcall.process import ALIVE, DEAD, UNKNOWN
from rankcall.record import RECORD
from rankcall.ring.header import Header, parse_header
from rankcall.ring.layout import HEADER_BYTES, offset_of
from rankcall.ring.lock import try_lock

RUNS = "rankcall-runs"
RUN_SCHEMA = 1
_RPC = "rpc"  # beside the runs' folders; the RPC back end keeps and clears it
_OLD_SECONDS = 86_400.0
_MOVER_SECONDS = 5.0  # how long to wait for another process that moves the same rings
_MOST_CLEANED = 256


def host_name() -> str:
    """Return what this host is called in a run: ``RANKCALL_HOST``, or its host name."""
    return os.environ.get("RANKCALL_HOST") or socket.gethostname()


def default_run_dir(script: str, started: datetime | None = None) -> Path:
    """Return ``rankcall-runs/<UTC time>-<script>`` below the working directory."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(script).stem).strip("._") or "python"
    moment = (started or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%S")
    return Path(RUNS) / f"{moment}-{stem}"


def create_run(path: Path, about: dict[str, Any]) -> Path:
    """Make a run directory (0700), write ``run.json`` if it has none, point ``latest`` at it.

    A directory that is there already keeps its mode: it may be a folder that others use, too.
    """
    if not path.is_dir():
        with contextlib.suppress(UnsafeFolder):  # another rank was first; "rings" is checked below
            make_folder(path, private=False)
    run_folder(path, "rings")
    meta = path / "run.json"
    if not meta.exists():
        text = json.dumps({"schema": RUN_SCHEMA, "name": path.name, **about}, indent=1)
        with replacing(meta) as file:
            file.write(text.encode() + b"\n")
    if path.parent.name == RUNS:
        link = path.parent / "latest"
        scratch = scratch_beside(link)
        scratch.symlink_to(path.name)
        scratch.replace(link)
    return path


def about_job(command: Sequence[str], torch: str, **more: Any) -> dict[str, Any]:
    """Return what ``run.json`` says of a job that this process starts or is part of.

    Secrets in the command line are left out: a run directory is kept, copied and sent.
    """
    return {
        "created_epoch_ns": time.time_ns(),
        "command": redact_command(command),
        "cwd": str(Path.cwd()),
        "host": host_name(),
        **more,
        "torch": torch,
        "python": sys.version.split()[0],
        "rankcall": __version__,
    }


def live_base() -> Path:
    """Return the tmpfs that live rings are kept on: ``RANKCALL_SHM``, or /dev/shm."""
    return Path(os.environ.get("RANKCALL_SHM") or "/dev/shm")


def live_dir(path: Path) -> Path:
    """Return where this user's processes keep the live rings of a run on this host."""
    return _live_dir_of(path, os.geteuid())


def make_live_dir(path: Path) -> Path:
    """Make or check the folder of a run's live rings, and return it. Raises ``OSError``."""
    folder = live_dir(path)
    make_folder(folder.parent)
    make_folder(folder)
    return folder


def _live_dir_of(path: Path, owner: int) -> Path:
    real = path.resolve()
    digest = hashlib.sha1(str(real).encode(), usedforsecurity=False).hexdigest()[:8]
    return live_base() / f"rankcall-{owner}" / f"{real.name}-{digest}"


def _owners(path: Path) -> set[int]:
    """Return whose live rings and verdicts are believed to be of a run: ours, its owner's."""
    try:
        return {os.geteuid(), path.stat().st_uid}
    except OSError:
        return {os.geteuid()}


def _live_dirs(path: Path, problems: list[str] | None = None) -> list[Path]:
    """Return the folders of a run's live rings that no other user could have written.

    ``problems`` gets a line for each that is left out.
    """
    owners, found = _owners(path), []
    for owner in sorted(owners):
        folder = _live_dir_of(path, owner)
        try:
            for each in (folder.parent, folder):
                check_folder(each, owners)
        except FileNotFoundError:
            continue
        except OSError as error:
            if problems is not None:
                problems.append(f"{reason(error)}: live rings and verdicts in it are ignored")
            continue
        found.append(folder)
    return found


def ring_name(rank: int, attempt: int, host: str, pid: int) -> str:
    """Return a ring file's name. The header is the authority; the name is for people."""
    who = f"rank-{rank:05d}" if rank >= 0 else "rank-unknown"
    return f"{who}.attempt-{attempt}.{re.sub(r'[^A-Za-z0-9_-]+', '_', host)}.{pid}.ring"


def unused_ring(name: str, *folders: Path) -> str:
    """Return a ring's name, with a number if one of the folders has a ring of that name.

    A process that records, stops and records again has several rings in one run.
    """
    stem, number, candidate = name.removesuffix(".ring"), 1, name
    while any((folder / candidate).exists() for folder in folders):
        number += 1
        candidate = f"{stem}-{number}.ring"
    return candidate


def settle(path: Path) -> list[Path]:
    """Move the rings of ended processes of this host into the run directory; return their paths.

    The ring of a process that may still run is left alone: see ``_claim``. A ring that cannot be
    moved can still be loaded. Only this user's rings are moved.
    """
    moved: list[Path] = []
    source = live_dir(path)
    if source not in _live_dirs(path):
        return moved
    deadline = time.monotonic() + _MOVER_SECONDS
    for ring in sorted(source.glob("*.ring")):
        with contextlib.suppress(OSError, CorruptRun):
            target = _move(ring, path, deadline)
            if target is not None:
                moved.append(target)
    with contextlib.suppress(FileNotFoundError):  # another process has settled it meanwhile
        if not any(source.glob("*.ring")):
            settle_hangs(source, path)
    _remove_empty(source)
    return moved


def settle_ring(ring: Path, run_dir: Path) -> None:
    """Move one finished ring into its run directory; if that fails it stays readable."""
    with contextlib.suppress(OSError, CorruptRun):
        if _move(ring, run_dir, time.monotonic() + _MOVER_SECONDS) is not None:
            _remove_empty(ring.parent)


def save_ring(ring: mmap.mmap, run_dir: Path, name: str) -> Path:
    """Write a ring that was kept in memory into its run directory. Raises ``OSError``."""
    folder = run_folder(run_dir, "rings")
    target = folder / unused_ring(name, folder)
    with replacing(target) as file, memoryview(ring) as data:
        file.write(data)
        _cut(file)
    return target


def clean_up(everything: bool = False, most: int = _MOST_CLEANED) -> list[str]:
    """Free the memory that rings of dead processes of this user take on this host.

    A ring is moved if its run directory still exists, and removed if not. Nothing is touched while
    its process may be alive, or for a day after it was last heard of.

    Args:
        everything: Do not wait for a day.
        most: Look at so many rings at most.

    Returns:
        A line for each run, with the number of rings that were moved or removed.
    """
    base = live_base() / f"rankcall-{os.geteuid()}"
    try:
        check_folder(base)
        folders = sorted(each for each in base.iterdir() if each.name != _RPC)
    except OSError:
        return []
    said: list[str] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            check_folder(folder)
            rings = sorted(folder.glob("*.ring"))[: max(0, most)]
            most -= len(rings)
            said += _clean_folder(folder, rings, everything)
    with contextlib.suppress(OSError):
        base.rmdir()
    return said


def _clean_folder(folder: Path, rings: list[Path], everything: bool) -> list[str]:
    moved: dict[str, int] = {}
    removed, freed, run_dir = 0, 0, Path()
    for ring in rings:
        with contextlib.suppress(OSError, CorruptRun), contextlib.ExitStack() as held:
            file, header = _claim(ring, held, deadline=0.0)
            if file is None or not (everything or _is_old(ring, header)):
                continue
            size = os.fstat(file.fileno()).st_blocks * 512
            if header is not None and header.run_dir and _is_run(Path(header.run_dir)):
                run_dir = Path(header.run_dir)
                try:
                    _copy(file, ring, run_folder(run_dir, "rings") / ring.name)
                except (OSError, CorruptRun):
                    continue  # for example, the disk is full: the ring stays, and can still be read
                moved[header.run_dir] = moved.get(header.run_dir, 0) + 1
            else:
                ring.unlink()
                removed += 1
            freed += size
    if not any(folder.glob("*.ring")):
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
    """Return whether ``clean_up`` may find something of other runs: one look at the folders."""
    own = live_dir(run_dir)
    try:
        with os.scandir(own.parent) as entries:
            ages = [
                _age_s(each.stat(follow_symlinks=False).st_mtime)
                for each in entries
                if each.name not in (own.name, _RPC)
            ]
    except OSError:
        return False
    return max(ages, default=0.0) > _OLD_SECONDS


def _is_run(path: Path) -> bool:
    return path.is_absolute() and path.is_dir()


def _is_old(ring: Path, header: Header | None) -> bool:
    """Tell whether a ring's process was last heard of more than a day ago."""
    heard_of = ring.lstat().st_mtime if header is None else header.last_sign_epoch_ns / 1e9
    return _age_s(heard_of) > _OLD_SECONDS


def _age_s(epoch_s: float) -> float:
    return time.time() - epoch_s


def _remove_empty(folder: Path) -> None:
    for each in (folder, folder.parent):
        try:
            each.rmdir()
        except OSError:
            break


def _claim(
    ring: Path, held: contextlib.ExitStack, deadline: float
) -> tuple[BinaryIO | None, Header | None]:
    """Open and lock a ring that may be moved or removed; None and its header if it may not.

    A ring may be moved if it is closed, or if its writer is not known to live and its lock is
    free. A writer in another pid namespace is not visible, but it holds the lock. Rings of
    rankcall 0.1 have none; they are left for a minute after their last sign of life.

    If the writer is done, only another process that moves the ring can hold the lock: that is
    waited for until ``deadline`` (``time.monotonic``). A file that is damaged has no header.
    """
    file = held.enter_context(open_file(ring))
    _check_own(file, ring)
    try:
        header = parse_header(file.read(HEADER_BYTES), str(ring))
    except CorruptRun:
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
        raise UnsafeFolder(ring, f"belongs to user {owner}, not to user {os.geteuid()}")


def _move(ring: Path, run_dir: Path, deadline: float) -> Path | None:
    """Move a ring into its run directory; return its new path, None if it may not be moved."""
    target = run_dir / "rings" / ring.name
    if target.exists() and target.samefile(ring):
        return target  # without a tmpfs it was written there; uncut, for it may still be mapped
    run_folder(run_dir, "rings")
    with contextlib.ExitStack() as held:
        file, header = _claim(ring, held, deadline)
        if file is None or header is None:
            return None
        _copy(file, ring, target)
    return target


def _copy(source: BinaryIO, ring: Path, target: Path) -> None:
    """Copy a ring without its unused end, then remove the original; never half a file."""
    source.seek(0)
    with replacing(target) as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        _cut(copy)
    ring.unlink()


def _cut(file: BinaryIO) -> None:
    """Drop the records that were never written, and say so in the header."""
    file.flush()
    file.seek(0)
    header = parse_header(file.read(HEADER_BYTES), file.name)
    size = used_bytes(header)
    if size < header.geometry.file_bytes:
        file.seek(offset_of("file_bytes"))
        file.write(size.to_bytes(8, "little"))
        file.truncate(size)


def used_bytes(header: Header) -> int:
    """Return how many bytes of a ring's file can hold something."""
    shape = header.geometry
    return shape.records_offset + min(header.head + 64, shape.capacity) * RECORD.itemsize


def find_run(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the directory of a run; the latest below the working directory without a path.

    Raises ``RunNotFound`` with what was looked for, and where.
    """
    if path is None:
        latest = Path(RUNS) / "latest"
        if not latest.exists():
            raise RunNotFound(
                f"no run given and no {latest} here ({Path.cwd()}): "
                "start one with 'rankcall run script.py', or name a run directory"
            )
        return latest.resolve()
    found = Path(path)
    if not found.exists():
        raise RunNotFound(f"no such run: {found}")
    return found


def ring_paths(path: Path, problems: list[str] | None = None) -> list[Path]:
    """Return the ring files of a run (or the one file that ``path`` is), moved and live.

    Live rings that another user could have put there are left out; ``problems`` says so.
    """
    if path.is_file():
        return [path]
    found: dict[str, Path] = {}
    for place in (path / "rings", path):
        if place.is_dir():
            for ring in sorted(place.glob("*.ring")):
                found.setdefault(ring.name, ring)
    owners = _owners(path)
    for place in _live_dirs(path, problems):
        for ring in sorted(place.glob("*.ring")):
            try:
                check_file(ring, owners)
            except FileNotFoundError:
                continue  # it was moved meanwhile
            except OSError as error:
                if problems is not None:
                    problems.append(f"{reason(error)}: it is ignored")
            else:
                found.setdefault(ring.name, ring)
    return list(found.values())


def kept_hangs(path: Path) -> list[Object]:
    """Return the verdicts that a job's watcher kept, oldest first; see ``_hangs``."""
    return kept(path, *_live_dirs(path)) if path.is_dir() else []


def run_about(path: Path, problems: list[str]) -> dict[str, Any]:
    """Return what ``run.json`` says; empty where it says nothing, and ``problems`` why."""
    try:
        about = json.loads((path / "run.json").read_text()) if path.is_dir() else {}
        return about if isinstance(about, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path / 'run.json'}: cannot be read: {error}")
        return {}

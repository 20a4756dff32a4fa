"""The run directory: where rings live while a job runs, and where they go after.

::

    rankcall-runs/latest -> 20261121T034130-train_digits
    rankcall-runs/20261121T034130-train_digits/
        run.json                                    what was started, where and when
        rings/rank-00003.attempt-0.node-a.4711.ring one file per rank and attempt
        hangs/0001/                                 what the watcher said of a hang
    /dev/shm/rankcall-<uid>/<run>-<hash>/           the same files while their processes live

Rings are written on tmpfs, because a page of a disk file can block its writer; ``settle`` moves
those whose process has ended into the run directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from rankcall._hangs import Object, kept, settle_hangs
from rankcall.errors import CorruptRun, RunNotFound
from rankcall.record import RECORD
from rankcall.ring.header import parse_header
from rankcall.ring.layout import HEADER_BYTES, offset_of
from rankcall.ring.writer import boot_id, process_start

RUNS = "rankcall-runs"
RUN_SCHEMA = 1


def host_name() -> str:
    """Return what this host is called in a run: ``RANKCALL_HOST``, or its host name."""
    return os.environ.get("RANKCALL_HOST") or socket.gethostname()


def default_run_dir(script: str, started: datetime | None = None) -> Path:
    """Return ``rankcall-runs/<UTC time>-<script>`` below the working directory."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(script).stem).strip("._") or "python"
    moment = (started or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%S")
    return Path(RUNS) / f"{moment}-{stem}"


def create_run(path: Path, about: dict[str, Any]) -> Path:
    """Make a run directory (0700), write ``run.json`` if it has none, point ``latest`` at it."""
    (path / "rings").mkdir(parents=True, exist_ok=True, mode=0o700)
    path.chmod(0o700)
    meta = path / "run.json"
    if not meta.exists():
        text = json.dumps({"schema": RUN_SCHEMA, "name": path.name, **about}, indent=1)
        scratch = path / f".run.json.{os.getpid()}"
        scratch.write_text(text + "\n")
        scratch.replace(meta)
    if path.parent.name == RUNS:
        link, scratch = path.parent / "latest", path.parent / f".latest.{os.getpid()}"
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(path.name)
        scratch.replace(link)
    return path


def about_job(command: Sequence[str], torch: str, **more: Any) -> dict[str, Any]:
    """Return what ``run.json`` says of a job that this process starts or is part of."""
    from rankcall import __version__

    return {
        "created_epoch_ns": time.time_ns(),
        "command": list(command),
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
    """Return where the rings of a run's living processes are on this host."""
    real = path.resolve()
    owner = path.stat().st_uid if path.exists() else os.getuid()
    digest = hashlib.sha1(str(real).encode(), usedforsecurity=False).hexdigest()[:8]
    return live_base() / f"rankcall-{owner}" / f"{real.name}-{digest}"


def ring_name(rank: int, attempt: int, host: str, pid: int) -> str:
    """Return a ring file's name. The header is the authority; the name is for people."""
    who = f"rank-{rank:05d}" if rank >= 0 else "rank-unknown"
    return f"{who}.attempt-{attempt}.{re.sub(r'[^A-Za-z0-9_-]+', '_', host)}.{pid}.ring"


def settle(path: Path) -> list[Path]:
    """Move the rings of ended processes of this host into the run directory; return their paths.

    Rings of processes that still run stay where they are. A ring that cannot be moved stays too
    and can still be loaded.
    """
    moved = []
    source = live_dir(path)
    for ring in sorted(source.glob("*.ring")) if source.is_dir() else []:
        try:
            if not _writer_lives(ring):
                moved.append(_move(ring, path / "rings" / ring.name))
        except (OSError, CorruptRun):
            continue
    with contextlib.suppress(FileNotFoundError):  # another process has settled it meanwhile
        if not any(source.glob("*.ring")):
            settle_hangs(source, path)
    for folder in (source, source.parent):
        try:
            folder.rmdir()
        except OSError:
            break
    return moved


def settle_ring(ring: Path, run_dir: Path) -> None:
    """Move one finished ring into its run directory; where it cannot be moved it stays readable."""
    try:
        _move(ring, run_dir / "rings" / ring.name)
        ring.parent.rmdir()
        ring.parent.parent.rmdir()
    except (OSError, CorruptRun):
        return


def _writer_lives(ring: Path) -> bool:
    with ring.open("rb") as file:
        header = parse_header(file.read(HEADER_BYTES), str(ring))
    if header.closed_ns:
        return False
    if header.boot_id != boot_id():
        return False
    return process_start(header.pid) == header.process_start


@contextlib.contextmanager
def _held(ring: Path) -> Iterator[BinaryIO]:
    """Open a ring that nobody else moves meanwhile: a host's launchers may all end at once."""
    with ring.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not ring.exists():
            raise FileNotFoundError(errno.ENOENT, "moved by another process", str(ring))
        yield file


def _move(ring: Path, target: Path) -> Path:
    """Copy a ring without its unused end, then remove the original; never half a file."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if target.exists() and target.samefile(ring):
        return target  # without a tmpfs it was written there; uncut, for it may still be mapped
    scratch = target.with_suffix(".moving")
    with _held(ring) as source:
        try:
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            _cut(scratch)
            scratch.replace(target)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        ring.unlink()
    return target


def _cut(ring: Path) -> None:
    """Drop the records that were never written, and say so in the header."""
    with ring.open("r+b") as file:
        header = parse_header(file.read(HEADER_BYTES), str(ring))
        shape = header.geometry
        used = min(header.head + 64, shape.capacity)
        size = shape.records_offset + used * RECORD.itemsize
        if size < shape.file_bytes:
            file.seek(offset_of("file_bytes"))
            file.write(size.to_bytes(8, "little"))
            file.truncate(size)


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


def ring_paths(path: Path) -> list[Path]:
    """Return the ring files of a run (or the one file that ``path`` is), moved and live."""
    if path.is_file():
        return [path]
    places = [path / "rings", path, live_dir(path)]
    found: dict[str, Path] = {}
    for place in places:
        if place.is_dir():
            for ring in sorted(place.glob("*.ring")):
                found.setdefault(ring.name, ring)
    return list(found.values())


def kept_hangs(path: Path) -> list[Object]:
    """Return the verdicts that a job's watcher kept, oldest first; see ``_hangs``."""
    return kept(path, live_dir(path)) if path.is_dir() else []


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

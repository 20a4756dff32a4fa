"""The ring that this process writes: make it, name it, and move it into the run at the end.

A ring belongs in shared memory, because no disk holds up its writer there. It moves into the run
directory when the recording ends, unless a launcher does that. If there is little room for all
ranks of the host, the rings are smaller. If there is no room or no safe folder, the ring is in the
run directory, or else in memory only. One line on stderr says so.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rankcall.background import exit_budget
from rankcall.capture.settings import Settings
from rankcall.errors import local_rank, local_world_size, warn_once
from rankcall.file_systems import check_mappable, is_local
from rankcall.folders import check_folder, make_folder, reason
from rankcall.ring.layout import DEFAULT_SAMPLES, Geometry
from rankcall.ring.lock import WriterLock
from rankcall.ring.writer import (
    Identity,
    create,
    create_locked,
    create_unnamed,
    name_file,
    put,
    put_run_dir,
    set_identity,
)
from rankcall.run.clean_up import clean_up, has_old_rings
from rankcall.run.exits import EXITS, exits_name
from rankcall.run.paths import (
    about_job,
    create_run,
    live_base,
    make_live_dir,
    ring_name,
    unused_ring,
)
from rankcall.run.settle import save_ring, settle_ring

_FRACTIONS = (1, 4, 16, 64)  # a ring that finds no room is tried at these fractions of its size
MORE_ROOM = (
    "give the container more shared memory (docker: --shm-size=1g), or set RANKCALL_SHM to a "
    "folder of a local disk"
)
_MEMORY_ONLY = (
    "recording goes on in memory only, where the watcher and other commands do not see it before "
    "it ends"
)
# For a run directory on a network. A ring has 4 MiB, unless the user wants more: a file system that
# needs longer for it does not answer, and the job goes on.
_MOVE_SECONDS = 10.0
_Made = TypeVar("_Made")


class OwnRing:
    """The ring that this process writes.

    Attributes:
        map: The mapped memory.
        geometry: The ring's sizes.
        identity: The rank and host that the ring belongs to, as far as they are known.
        run_dir: The run that it belongs to; None while it belongs to none.
        path: The file; None if it has no name, or is in memory only.
        has_local_run: Whether the run directory is known to be on a disk of this host.
    """

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self.identity = identity
        self.geometry = Geometry(settings.capacity, sample_capacity=DEFAULT_SAMPLES)
        self._settled_run = settings.settled_run
        self.run_dir: Path | None = None
        self._why_in_memory = ""
        # Found out early: at the end, a network may not answer.
        self.has_local_run = False
        self.path: Path | None = None
        self._fd = -1
        self._lock = WriterLock(-1)
        self._mover: Mover | None = None
        run_dir = settings.run_dir
        self.map = self._make_unnamed() if run_dir is None else self._make(run_dir)

    def _make_unnamed(self) -> mmap.mmap:
        """Make a ring of no run. It vanishes with the process, unless ``move_to`` names it."""
        base = live_base()
        try:
            check_mappable(base)
            ring, self._fd, self._lock = self._make_fitting(
                base, lambda geometry: create_unnamed(base, self.identity, geometry)
            )
        except OSError as error:
            self._why_in_memory = reason(error)
            return create(None, self.identity, self.geometry)
        return ring

    def _make(self, run_dir: Path) -> mmap.mmap:
        """Make a ring of a run: in shared memory, or else in the run directory, or in memory."""
        self.run_dir = run_dir
        unwritable = self._prepare(run_dir)
        try:
            folder = _memory_folder(run_dir)
            ring = self._make_in(folder, run_dir)
        except OSError as error:
            why = reason(error)
        else:
            if unwritable:
                warn_once(f"{unwritable}: records stay in {folder}")
            return ring
        try:
            folder = _disk_folder(run_dir)  # a file on a local disk is better than nothing
            ring = self._make_in(folder, run_dir)
        except OSError as error:
            warn_once(f"{why}; {unwritable or reason(error)}: {_MEMORY_ONLY}")
        else:
            warn_once(f"{why}: the ring is kept in {folder}")
            return ring
        self.path = None
        self._mover = self._mover or Mover(run_dir)
        return create(None, self.identity, self.geometry)

    def _make_in(self, folder: Path, run_dir: Path) -> mmap.mmap:
        return self._make_fitting(
            folder, lambda geometry: self._make_file(folder, geometry, run_dir)
        )

    def _make_fitting(self, folder: Path, make: Callable[[Geometry], _Made]) -> _Made:
        """Make a ring of the largest size for which a folder has room. Raises ``OSError``.

        The ranks of a host start together and share the room. A rank that took all of it would
        leave the others unseen.
        """
        sizes = ring_sizes(self.geometry)
        share = shutil.disk_usage(folder).free // (local_world_size() or 1)
        last = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for geometry in [size for size in sizes if size.file_bytes <= share] or sizes[-1:]:
            try:
                made = make(geometry)
            except OSError as error:
                last = error
                continue
            if geometry != self.geometry:
                records = f"each ring holds {geometry.capacity:,} records"
                warn_once(f"little room in {folder}: {records}; {MORE_ROOM}")
            self.geometry = geometry
            return made
        raise OSError(last.errno, f"{folder} cannot hold a ring ({last.strerror}); {MORE_ROOM}")

    def _make_file(self, folder: Path, geometry: Geometry, run_dir: Path) -> mmap.mmap:
        try:
            path = self._file_in(folder, run_dir)
            ring, self._lock = create_locked(path, self.identity, geometry, run_dir)
        except FileNotFoundError:
            # Another launcher on this host has just moved its rings and removed the folder.
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            make_folder(folder)
            path = self._file_in(folder, run_dir)
            ring, self._lock = create_locked(path, self.identity, geometry, run_dir)
        return ring

    def _prepare(self, run_dir: Path) -> str:
        """Make the run directory; return why it cannot be written, or an empty text."""
        import torch

        unwritable = ""
        try:
            create_run(run_dir, about_job(sys.argv, torch.__version__))
            self.has_local_run = is_local(run_dir)
        except OSError as error:
            unwritable = f"the run directory {run_dir} cannot be written ({error.strerror})"
        if local_rank() <= 0 and has_old_rings(run_dir):
            threading.Thread(target=clean_up, name="rankcall-clean", daemon=True).start()
        if self._settled_run != str(run_dir):
            self._mover = self._mover or Mover(run_dir)
        return unwritable

    def _file_in(self, folder: Path, run_dir: Path) -> Path:
        self.path = folder / unused_ring(self._name(), folder, run_dir / "rings")
        return self.path

    def _name(self) -> str:
        identity = self.identity
        return ring_name(identity.rank, identity.attempt, identity.host, os.getpid())

    def move_to(self, run_dir: Path) -> bool:
        """Give an unnamed ring a place in a run; return False if it can have none."""
        if self._fd < 0:
            return False
        unwritable = self._prepare(run_dir)
        put_run_dir(self.map, run_dir)
        try:
            folder = _memory_folder(run_dir)
            name_file(self._fd, self._file_in(folder, run_dir))
        except OSError as error:
            self.path, self._why_in_memory = None, reason(error)
            return False
        if unwritable:
            warn_once(f"{unwritable}: records stay in {folder}")
        self.run_dir = run_dir
        os.close(self._fd)
        self._fd = -1
        return True

    def enter(self, run_dir: Path) -> None:
        """Put a ring of no run into one. If it can have no name, it is saved there at the end."""
        if not self.move_to(run_dir):
            self.run_dir = run_dir
            self._mover = self._mover or Mover(run_dir)
            warn_once(f"{self._why_in_memory}: {_MEMORY_ONLY}")

    def set_identity(self, identity: Identity) -> None:
        """Note the rank once the process knows it, in the ring and in the file's name."""
        self.identity = identity
        set_identity(self.map, identity)
        if self.path is not None and self.run_dir is not None:
            old = self.path
            new = self._file_in(old.parent, self.run_dir)
            try:
                os.rename(old, new)
            except OSError:
                self.path = old

    def close(self) -> None:
        """Note in the ring that it is complete, and move it into the run unless a launcher will."""
        put(self.map, "closed_ns", time.monotonic_ns())
        self._release()
        ring, path, run_dir = self.map, self.path, self.run_dir
        if self._mover is None or run_dir is None:
            return
        if path is None:
            self._mover.move(lambda: save_ring(ring, run_dir, self._name()))
        else:
            self._mover.move(lambda: settle_ring(path, run_dir))

    def exit_note(self) -> tuple[Path, str] | None:
        """Return the file for a note of the exit status, and the other fields of the note as JSON.

        None if the run is on a network, which may not answer.
        """
        if self.run_dir is None or not self.has_local_run:
            return None
        mine = self.identity
        about = {"rank": mine.rank, "attempt": mine.attempt, "host": mine.host, "pid": os.getpid()}
        return self.run_dir / EXITS / exits_name(mine.host), json.dumps(about)[1:-1]

    def discard(self) -> None:
        """Remove a ring that nothing will be recorded in."""
        self._release()
        if self._mover is not None:
            self._mover.discard()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()


def ring_sizes(wanted: Geometry) -> list[Geometry]:
    """Return the sizes that a ring is tried in, the largest first."""
    return [wanted.shrunk(fraction) for fraction in _FRACTIONS]


def _memory_folder(run_dir: Path) -> Path:
    """Make or check the folder of a run's rings in shared memory. Raises ``OSError``."""
    check_mappable(live_base())
    return make_live_dir(run_dir)


def _disk_folder(run_dir: Path) -> Path:
    """Check the folder of a run's rings on disk. Raises ``OSError``."""
    folder = run_dir / "rings"
    check_mappable(folder)
    check_folder(folder)
    return folder


class Mover:
    """Moves a finished ring into its run directory: at once, or on a thread with a deadline.

    A network file system may never answer, so its work is done on a daemon thread. The thread
    starts with the recording, because Python 3.12 starts none while the interpreter exits.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._work: Callable[[], object] | None = None
        self._wanted, self._done = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        if not is_local(run_dir):
            self._thread = threading.Thread(target=self._wait, name="rankcall-keep", daemon=True)
            self._thread.start()

    def move(self, work: Callable[[], object]) -> None:
        """Do the work; warn if it fails, or takes longer than ten seconds (at exit, two)."""
        if self._thread is None:
            self._do(work)
            return
        self._work = work
        self._wanted.set()
        if not exit_budget.spend(self._done.wait, _MOVE_SECONDS):
            warn_once(
                f"the run directory {self._run_dir} does not answer in time: "
                "the process goes on without having moved its records there"
            )

    def discard(self) -> None:
        """End without any work."""
        self._wanted.set()

    def _wait(self) -> None:
        self._wanted.wait()
        if self._work is not None:
            self._do(self._work)
        self._done.set()

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            with contextlib.suppress(OSError):  # stderr may be closed
                warn_once(f"the records of this rank cannot be kept: {reason(error)}")

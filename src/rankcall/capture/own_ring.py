"""The ring that this process writes: make it, name it, and move it into the run at the end.

A ring belongs in shared memory, because no disk holds up its writer there. It moves into the run
directory when the recording ends, unless a launcher does that. If there is no room or no safe
folder, the ring is smaller, or in the run directory, or in memory only, and one line on stderr says
so.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rankcall.background import exit_budget
from rankcall.capture.settings import Settings
from rankcall.errors import local_rank, warn_once
from rankcall.file_systems import check_local, is_local
from rankcall.folders import check_folder, make_folder, reason
from rankcall.ring.layout import Geometry
from rankcall.ring.lock import WriterLock
from rankcall.ring.writer import (
    Identity,
    create,
    create_locked,
    create_unnamed,
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

_SMALLER = (1, 4, 16, 64)  # a ring that finds no room is tried at these fractions of its size
_MOVE_SECONDS = 10.0


class OwnRing:
    """The ring that this process writes.

    Attributes:
        map: The mapped memory.
        geometry: The ring's sizes.
        identity: The rank and host that the ring belongs to, as far as they are known.
        run_dir: The run that it belongs to; None while it belongs to none.
        path: The file; None if it has no name, or is in memory only.
    """

    def __init__(self, settings: Settings, identity: Identity) -> None:
        self.identity = identity
        self.geometry = Geometry(settings.capacity)
        self._settled_run = settings.settled_run
        self.run_dir: Path | None = None
        self._is_local = False  # the run; found out early: at the end, a network may not answer
        self.path: Path | None = None
        self._fd = -1
        self._lock = WriterLock(-1)
        self._mover: Mover | None = None
        run_dir = settings.run_dir
        self.map = self._make_unnamed() if run_dir is None else self._make(run_dir)

    def _make_unnamed(self) -> mmap.mmap:
        """Make a ring of no run. It vanishes with the process, unless ``move_to`` names it."""
        if not is_local(live_base()):
            return create(None, self.identity, self.geometry)
        ring, self._fd, self._lock = create_unnamed(live_base(), self.identity, self.geometry)
        return ring

    def _make(self, run_dir: Path) -> mmap.mmap:
        self.run_dir = run_dir
        folder = self._prepare(run_dir)
        if folder is not None:
            failure = ""
            for fraction in _SMALLER:
                geometry = self._shrunk(fraction)
                try:
                    ring = self._make_file(folder, geometry, run_dir)
                except OSError as error:
                    failure, self.path = str(error.strerror), None
                    continue
                if fraction > 1:
                    warn_once(
                        f"little room in {folder}: the ring holds {geometry.capacity:,} records"
                    )
                self.geometry = geometry
                return ring
            warn_once(
                f"no ring can be kept in {folder} ({failure}): recording goes on in memory only"
            )
        self._mover = self._mover or Mover(run_dir)
        return create(None, self.identity, self.geometry)

    def _shrunk(self, fraction: int) -> Geometry:
        if fraction == 1:
            return self.geometry
        return Geometry.fitting(self.geometry.file_bytes // fraction)

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

    def _prepare(self, run_dir: Path) -> Path | None:
        """Make the run directory; return the folder for the ring, or None: in memory only."""
        import torch

        unwritable = ""
        try:
            create_run(run_dir, about_job(sys.argv, torch.__version__))
            self._is_local = is_local(run_dir)
        except OSError as error:
            unwritable = f"the run directory {run_dir} cannot be written ({error.strerror})"
        if local_rank() <= 0 and has_old_rings(run_dir):
            threading.Thread(target=clean_up, name="rankcall-clean", daemon=True).start()
        if self._settled_run != str(run_dir):
            self._mover = self._mover or Mover(run_dir)
        try:
            check_local(live_base())
            folder = make_live_dir(run_dir)
            if unwritable:
                warn_once(f"{unwritable}: records stay in {folder}")
            return folder
        except OSError as error:
            why = reason(error)
        folder = run_dir / "rings"  # a file on a local disk is better than nothing
        try:
            check_local(folder)
            check_folder(folder)
        except OSError as error:
            also = unwritable or reason(error)
            warn_once(f"{why}; {also}: recording goes on in memory only")
            return None
        warn_once(f"{why}: the ring is kept in {folder}")
        return folder

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
        folder = self._prepare(run_dir)
        if folder is None:
            return False
        put_run_dir(self.map, run_dir)
        try:
            # The path is absolute: a descriptor only makes CPython call linkat, which follows.
            os.link(
                f"/proc/self/fd/{self._fd}",
                self._file_in(folder, run_dir),
                src_dir_fd=self._fd,
                follow_symlinks=True,
            )
        except OSError:
            self.path = None
            return False
        self.run_dir = run_dir
        os.close(self._fd)
        self._fd = -1
        return True

    def enter(self, run_dir: Path) -> None:
        """Put a ring of no run into one. If it can have no name, it is saved there at the end."""
        if not self.move_to(run_dir):
            self.run_dir = run_dir
            self._mover = self._mover or Mover(run_dir)

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
        if self.run_dir is None or not self._is_local:
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

"""One process's recording: its ring, its capture, and where the ring goes in the end."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rankcall import background
from rankcall._handle import Scoped
from rankcall.capture import declared
from rankcall.capture.device_status import POLL_SECONDS, DeviceOp, DeviceStatus
from rankcall.capture.keeper import Keeper
from rankcall.capture.marks import Marks
from rankcall.capture.notices import say
from rankcall.capture.source import SourceLines
from rankcall.errors import CaptureUnavailable
from rankcall.files import UnsafeFolder, check_folder, file_system, is_local, make_folder, reason
from rankcall.ring.layout import CAPTURES, Geometry
from rankcall.ring.lock import WriterLock
from rankcall.ring.tables import Group
from rankcall.ring.writer import (
    Identity,
    PythonRing,
    create,
    create_locked,
    create_unnamed,
    put,
    put_run_dir,
    set_identity,
)
from rankcall.rundir import (
    about_job,
    clean_up,
    create_run,
    has_old_rings,
    host_name,
    live_base,
    make_live_dir,
    ring_name,
    save_ring,
    settle_ring,
    unused_ring,
)

ARM = "RANKCALL_ARM"  # set by the launcher, which settles rings itself
_HEARTBEAT_SECONDS = 0.5
_DRAIN_SECONDS = 0.1
_SMALLER = (1, 4, 16, 64)  # a ring that finds no room is tried at these fractions of its size


class Capture(Protocol):
    """What the native and the Python capture have in common."""

    name: str

    @property
    def make_statuses(self) -> Callable[..., list[Any]] | None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...
    def forget(self) -> None: ...
    def drained(self) -> bool: ...
    def counts(self) -> tuple[int, int]: ...
    def sleep(self, fd: int, wanted: int) -> None: ...
    def add_group(self, group: Group, me: int) -> int: ...
    def take_device_ops(self) -> list[DeviceOp]: ...
    def end_device_ops(self, records: list[int], time_ns: int) -> None: ...
    def reading_status(self) -> AbstractContextManager[bool]: ...
    def add_line(self, site: int, text: str) -> None: ...
    def mark(self, marks: Marks | None) -> None: ...
    def learn_spans(self, marks: Marks) -> None: ...
    def step(self) -> None: ...


class Recording(Scoped):
    """One process's recording. Also a context manager: ``with rankcall.enable(): ...``."""

    def __init__(
        self,
        run_dir: Path | None,
        capture: str,
        capacity: int | None,
        call_sites: bool,
        leave: Callable[[Recording], None],
    ) -> None:
        self.run_dir: Path | None = None
        self.path: Path | None = None
        self.geometry = Geometry(capacity) if capacity else Geometry()
        self._identity = _identity()
        self._fd = -1
        self._lock = WriterLock(-1)
        self._keeper: Keeper | None = None
        self._leave = leave
        self.ring = self._make_ring(run_dir)
        try:
            self.capture: Capture = self._make_capture(capture, call_sites)
        except BaseException:
            self._discard()
            raise
        put(self.ring, "capture", CAPTURES.index(self.capture.name))
        self._devices = DeviceStatus(self.capture)
        self._stopped = threading.Event()
        self._left = self._is_started = False
        self._heart = threading.Thread(target=self._beat, name="rankcall-heart", daemon=True)
        self._lines = SourceLines(self.ring, self.geometry, self.capture.add_line)
        self._step_handle: Any = None
        self.claims: set[str] = set()

    @property
    def host(self) -> str:
        """What this host is called in the run."""
        return self._identity.host

    @property
    def identity(self) -> Identity:
        """Whose recording it is, as far as is known."""
        return self._identity

    def rank(self) -> int:
        """Return this process's rank, -1 while nobody knows it."""
        return self._identity.rank

    def _end(self) -> None:
        self._leave(self)

    # --- making the ring ---

    def _make_ring(self, run_dir: Path | None) -> mmap.mmap:
        if run_dir is None:
            if not is_local(live_base()):
                return create(None, self._identity, self.geometry)
            ring, self._fd, self._lock = create_unnamed(live_base(), self._identity, self.geometry)
            return ring
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
                    say(f"little room in {folder}: the ring holds {geometry.capacity:,} records")
                self.geometry = geometry
                return ring
            say(f"no ring can be kept in {folder} ({failure}): recording goes on in memory only")
        self._keeper = self._keeper or Keeper(run_dir)
        return create(None, self._identity, self.geometry)

    def _make_file(self, folder: Path, geometry: Geometry, run_dir: Path) -> mmap.mmap:
        try:
            path = self._file_in(folder, run_dir)
            ring, self._lock = create_locked(path, self._identity, geometry, run_dir)
        except FileNotFoundError:
            # Another launcher of this host has just settled its rings and removed the folder.
            folder.parent.mkdir(mode=0o700, exist_ok=True)
            make_folder(folder)
            path = self._file_in(folder, run_dir)
            ring, self._lock = create_locked(path, self._identity, geometry, run_dir)
        return ring

    def _discard(self) -> None:
        """Leave no ring behind that nothing will be recorded in."""
        if self._fd >= 0:
            os.close(self._fd)
        self._lock.release()
        if self._keeper is not None:
            self._keeper.discard()
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def move_to(self, run_dir: Path) -> bool:
        """Give an unnamed ring (hooks only) a place in a run; False where it can have none."""
        if self._fd < 0:
            return False
        folder = self._prepare(run_dir)
        if folder is None:
            return False
        put_run_dir(self.ring, run_dir)
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

    def _shrunk(self, fraction: int) -> Geometry:
        if fraction == 1:
            return self.geometry
        return Geometry.fitting(self.geometry.file_bytes // fraction)

    def _prepare(self, run_dir: Path) -> Path | None:
        """Make the run directory and return where its ring goes; None: in memory only.

        Says so if one of them cannot be used.
        """
        import torch

        unwritable = ""
        try:
            create_run(run_dir, about_job(sys.argv, torch.__version__))
        except OSError as error:
            unwritable = f"the run directory {run_dir} cannot be written ({error.strerror})"
        if os.environ.get("LOCAL_RANK", "0") == "0" and has_old_rings(run_dir):
            threading.Thread(target=clean_up, name="rankcall-clean", daemon=True).start()
        if not os.environ.get(ARM):
            self._keeper = self._keeper or Keeper(run_dir)
        try:
            _check_local(live_base())
            folder = make_live_dir(run_dir)
            if unwritable:
                say(f"{unwritable}: records stay in {folder}")
            return folder
        except OSError as error:
            why = reason(error)
        folder = run_dir / "rings"  # a local disk file is better than nothing
        try:
            _check_local(folder)
            check_folder(folder)
        except OSError as error:
            also = unwritable or reason(error)
            say(f"{why}; {also}: recording goes on in memory only")
            return None
        say(f"{why}: the ring is kept in {folder}")
        return folder

    def _file_in(self, folder: Path, run_dir: Path) -> Path:
        self.path = folder / unused_ring(self._name(), folder, run_dir / "rings")
        return self.path

    def _name(self) -> str:
        who = self._identity
        return ring_name(who.rank, who.attempt, who.host, os.getpid())

    def _make_capture(self, wanted: str, call_sites: bool) -> Capture:
        from rankcall.capture.python import PythonCapture

        if wanted != "python":
            try:
                from rankcall.capture.native import NativeCapture

                native = NativeCapture(self.ring, self.geometry, call_sites)
                if not native.has_call_sites:
                    say(f"call sites are off: Python {sys.version.split()[0]} is not known")
                return native
            except CaptureUnavailable as error:
                if wanted == "native":
                    raise
                say(f"the native recorder is not available, recording in Python: {error}")
        return PythonCapture(PythonRing(self.ring, self.geometry), call_sites)

    # --- running ---

    def start(self) -> None:
        """Record ops, and watch groups and optimizer steps."""
        from rankcall.capture.groups import watch

        self.capture.start()
        declared.publish(ring=self.ring)
        watch.add(self._on_group)  # which reports the groups that exist
        self._is_started = True
        self._step_handle = _count_steps(self.capture)
        self._heart.start()
        self._lines.start()

    def stop(self) -> bool:
        """Stop recording; tell whether the ring is closed, or still awaits ends of ops in flight.

        An op's waiter may run before its end has been written, so that is waited for a moment.
        """
        from rankcall.capture.groups import watch

        watch.remove(self._on_group)
        self._step_handle.remove()
        self.capture.stop()
        self._note_leaving()
        self._stopped.set()
        background.join(self._heart, 2.0)
        if not self._heart.is_alive():
            self._follow_devices(self._devices.close)
        self._lines.stop()
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not self.capture.drained() and time.monotonic() < deadline:
            time.sleep(0.001)
        if self.capture.drained():
            self.close()
            return True
        return False

    def close(self) -> None:
        """Say in the ring that it is complete; move it to the run unless the launcher will."""
        put(self.ring, "closed_ns", time.monotonic_ns())
        self._lock.release()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        ring, path, run_dir = self.ring, self.path, self.run_dir
        if self._keeper is None or run_dir is None:
            return
        if path is None:
            self._keeper.keep(lambda: save_ring(ring, run_dir, self._name()))
        else:
            self._keeper.keep(lambda: settle_ring(path, run_dir))

    def forget(self) -> None:
        """Touch the ring no more: this is a forked child, and it is its parent's."""
        self.capture.forget()
        if self._step_handle is not None:
            self._step_handle.remove()

    def _on_group(self, process_group: Any, group: Group) -> None:
        if group.description == "default_pg" or self._identity.rank < 0:
            self._learn_rank(process_group, group)
        number = self.capture.add_group(group, process_group.rank())
        self._devices.add_group(number, process_group, new=self._is_started)

    def _learn_rank(self, process_group: Any, group: Group) -> None:
        rank = group.ranks[process_group.rank()]
        if (rank, len(group.ranks)) == (self._identity.rank, self._identity.world_size):
            return
        if group.description != "default_pg":
            return
        self._identity = _identity(rank, len(group.ranks))
        set_identity(self.ring, self._identity)
        if self.path is not None and self.run_dir is not None:
            old = self.path
            new = self._file_in(old.parent, self.run_dir)
            try:
                os.rename(old, new)
            except OSError:
                self.path = old

    def _beat(self) -> None:
        next_look = time.monotonic() + POLL_SECONDS
        while not self._stopped.is_set():
            put(self.ring, "python_heartbeat_ns", time.monotonic_ns())
            self._note_leaving()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + POLL_SECONDS
                self._follow_devices(self._devices.poll)
            self._stopped.wait(_HEARTBEAT_SECONDS)

    def _follow_devices(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            say(f"cannot learn what has completed on devices: {type(error).__name__}: {error}")

    def _note_leaving(self) -> None:
        """Say in the ring that the program has come to its end: closing down can take for ever."""
        failed = getattr(sys, "last_value", None) is not None
        if not self._left and not threading.main_thread().is_alive() and not failed:
            self._left = True
            put(self.ring, "left_ns", time.monotonic_ns())


def _check_local(folder: Path) -> None:
    """Raise ``UnsafeFolder`` if a page of a file in a folder could wait for another host."""
    if not is_local(folder):
        kind = file_system(folder) or "unknown"
        raise UnsafeFolder(folder, f"is on a file system that is not local ({kind})")


def _identity(rank: int | None = None, world_size: int | None = None) -> Identity:
    import torch.distributed as dist

    def number(name: str, default: int = -1) -> int:
        text = os.environ.get(name, "")
        return int(text) if text.lstrip("-").isdigit() else default

    if rank is None and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    return Identity(
        rank=number("RANK") if rank is None else rank,
        world_size=number("WORLD_SIZE") if world_size is None else world_size,
        local_rank=number("LOCAL_RANK"),
        node=number("GROUP_RANK"),
        attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
        host=host_name(),
    )


def _count_steps(capture: Capture) -> Any:
    """Count optimizer steps; not those of compiled optimizers, whose graph a hook would break."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # ZeRO's optimizer steps another one inside: counted once.
        if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
            capture.step()

    return register_optimizer_step_post_hook(stepped)

"""The recording of this process, from start to stop: its ring, capture, threads and claims.

One of these threads writes the text of each line that issues ops into the ring, from the process's
own source files (``SourceLines``). A reader of the run on another machine does not have the source,
and must not open files that a run names. A file on a network may take long to read, and neither
training nor the heartbeat may wait for it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rankcall import background
from rankcall.capture import phases
from rankcall.capture.own_ring import OwnRing
from rankcall.capture.source_lines import SourceLines
from rankcall.capture.training_thread import TrainingThread
from rankcall.errors import CaptureUnavailableError, local_rank, warn_once
from rankcall.handles import Handle
from rankcall.process import host_name
from rankcall.ring.layout import CAPTURES, Geometry
from rankcall.ring.tables import Group
from rankcall.ring.writer import Identity, PythonRing, put, put_text
from rankcall.run.redaction import redact_text

if TYPE_CHECKING:
    from rankcall.capture.interface import Capture


_HEARTBEAT_SECONDS = 0.5
_DRAIN_SECONDS = 0.1


class Placement(Protocol):
    """Gives a recording its run once the job has chosen one (``rankcall.job.attach``)."""

    def name_in_time(self) -> None:
        """Give the run a name also if no group is created for a while."""

    def finish(self) -> None:
        """Place the records now: the recording ends."""

    def leave(self, failed: bool) -> None:
        """Send the newest records to another node, because the process ends."""

    def stay(self) -> None:
        """Send nothing: the recording has ended before the process."""


class Recording(Handle):
    """The recording of one process. Also a context manager: ``with rankcall.enable(): ...``."""

    def __init__(
        self,
        run_dir: Path | None,
        capture: str,
        capacity: int | None,
        call_sites: bool,
        leave: Callable[[Recording], None],
    ) -> None:
        from rankcall.capture.device_status import DeviceStatus

        self._own_ring = OwnRing(run_dir, _identity(), Geometry(capacity or Geometry().capacity))
        try:
            self.capture: Capture = self._make_capture(capture, call_sites)
        except BaseException:
            self._own_ring.discard()
            raise
        put(self.ring, "capture", CAPTURES.index(self.capture.name))
        self._leave = leave
        self._devices = DeviceStatus(self.capture)
        self._stopped = threading.Event()
        self._left = self._has_failed = self._is_started = False
        self._heart = threading.Thread(target=self._beat, name="rankcall-heart", daemon=True)
        self._lines = SourceLines(self.ring, self.geometry, self.capture.add_line)
        self._training_thread = TrainingThread(self.ring, self.geometry)
        self._step_handle: Any = None
        self.claims: set[str] = set()
        self.placement: Placement | None = None
        self._first_attempt = 0

    @property
    def ring(self) -> mmap.mmap:
        """The mapped memory of the ring."""
        return self._own_ring.map

    @property
    def geometry(self) -> Geometry:
        """The sizes of the ring."""
        return self._own_ring.geometry

    @property
    def path(self) -> Path | None:
        """The ring's file; None if it has no name, or is in memory only."""
        return self._own_ring.path

    @property
    def run_dir(self) -> Path | None:
        """The run that the ring belongs to; None if only hooks or traces record."""
        return self._own_ring.run_dir

    @property
    def identity(self) -> Identity:
        """The rank and host of this process, as far as they are known."""
        return self._own_ring.identity

    @property
    def host(self) -> str:
        """The name of this host in the run."""
        return self.identity.host

    def rank(self) -> int:
        """Return this process's rank; -1 while it is not known."""
        return self.identity.rank

    def move_to(self, run_dir: Path) -> bool:
        """Put a recording that belongs to no run into one; return False if that is not possible."""
        return self._own_ring.move_to(run_dir)

    def place(self, run_dir: Path, attempt: int) -> None:
        """Put the ring into a run, unless it is in one, and note the attempt that it belongs to."""
        if self.run_dir is None:
            self._own_ring.enter(run_dir)
        self._first_attempt = attempt
        fresh = replace(self.identity, attempt=attempt + restart_count())
        if fresh != self.identity:
            self._own_ring.set_identity(fresh)

    def expect_rank(self, rank: int, world_size: int) -> None:
        """Note the rank that this process will have; its group, once created, corrects it."""
        if self.identity.rank < 0 <= rank:
            self._own_ring.set_identity(_identity(rank, world_size, self._first_attempt))

    def stop(self) -> None:
        """Do the same as ``rankcall.disable()``, if this is the recording that is on."""
        self._leave(self)

    def _make_capture(self, wanted: str, call_sites: bool) -> Capture:
        from rankcall.capture.fallback.capture import FallbackCapture

        if wanted != "python":
            try:
                from rankcall.capture.native import NativeCapture

                native = NativeCapture(self.ring, self.geometry, call_sites)
                if not native.has_call_sites:
                    version = sys.version.split()[0]
                    warn_once(f"call sites are off: Python {version} is not known")
                return native
            except CaptureUnavailableError as error:
                if wanted == "native":
                    raise
                warn_once(f"the native recorder is not available, recording in Python: {error}")
        return FallbackCapture(PythonRing(self.ring, self.geometry), call_sites)

    def start(self) -> None:
        """Record ops, and watch groups and optimizer steps."""
        from rankcall.capture.hosts import watch

        self.capture.start()
        phases.publish_to(self.ring)
        watch.add(self._on_group)  # which reports the groups that exist
        self._is_started = True
        self._step_handle = _count_steps(self.capture, self._training_thread)
        self._heart.start()
        self._lines.start()

    def end(self) -> bool:
        """Stop recording; return whether the ring is closed, or still awaits ends of ops in flight.

        The thread that waits for an op may run on before the op's end is written, so that is
        waited for a moment.
        """
        from rankcall.capture.hosts import watch

        if self.placement is not None:
            self.placement.finish()
        watch.remove(self._on_group)
        phases.publish_to(None)
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
        """Note in the ring that it is complete, and move it into the run unless a launcher will."""
        self._own_ring.close()

    def note_exit_status(self) -> None:
        """Have the status of this process noted in the run, if it ends with another one than 0."""
        note = self._own_ring.exit_note()
        if note is not None:
            self.capture.note_exit_status(*note)

    def leave(self) -> None:
        """Send the newest records to another node, because the process ends. The ring is closed."""
        if self.placement is not None:
            self.placement.leave(self._has_failed)

    def stay(self) -> None:
        """Send nothing to another node: recording was switched off, and the process goes on."""
        if self.placement is not None:
            self.placement.stay()

    def forget(self) -> None:
        """Touch the ring no more: this is a forked child, and the ring is its parent's."""
        self.capture.forget()
        if self._step_handle is not None:
            self._step_handle.remove()

    def _on_group(self, process_group: Any, group: Group) -> None:
        if group.description == "default_pg" or self.identity.rank < 0:
            self._learn_rank(process_group, group)
        number = self.capture.add_group(group, process_group.rank())
        self._devices.add_group(number, process_group, new=self._is_started)

    def _learn_rank(self, process_group: Any, group: Group) -> None:
        rank = group.ranks[process_group.rank()]
        if (rank, len(group.ranks)) == (self.identity.rank, self.identity.world_size):
            return
        if group.description == "default_pg":
            fresh = _identity(rank, len(group.ranks), self._first_attempt)
            self._own_ring.set_identity(fresh)

    def _beat(self) -> None:
        next_look = time.monotonic() + self._devices.poll_every_s
        while not self._stopped.is_set():
            put(self.ring, "python_heartbeat_ns", time.monotonic_ns())
            self._note_leaving()
            put(self.ring, "train_thread", self._training_thread.find())
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._devices.poll_every_s
                self._follow_devices(self._devices.poll)
            self._stopped.wait(_HEARTBEAT_SECONDS)

    def _follow_devices(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            name = type(error).__name__
            warn_once(f"cannot learn what has completed on devices: {name}: {error}")

    def _note_leaving(self) -> None:
        """Note in the ring how the program has ended: closing down can take for ever."""
        if self._left or threading.main_thread().is_alive():
            return
        self.note_end(getattr(sys, "last_value", None))

    def note_end(self, error: BaseException | None) -> None:
        """Note in the ring that the program has ended: without an error, or by this exception."""
        self._left, cause = True, cause_of(error)
        if cause is None:
            put(self.ring, "left_ns", time.monotonic_ns())
        else:
            self._has_failed = True
            put_text(self.ring, "failure", _one_line(cause))


def cause_of(error: BaseException | None) -> BaseException | None:
    """Return the exception that ended a program; None if it ended without an error.

    A launcher of children may turn their exceptions into an exit status, as torch's does.
    """
    if not isinstance(error, SystemExit):
        return error
    if error.code in (None, 0):
        return None
    return error.__context__ or error


def _one_line(error: object) -> str:
    """Return an exception's type and message as one line, without secrets."""
    try:  # its own code may fail to write it
        text = redact_text(" ".join(str(error).split()))
    except Exception:
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text.encode("utf-8", "replace").decode()


def restart_count() -> int:
    """Return how often torchrun has restarted this job."""
    return _number("TORCHELASTIC_RESTART_COUNT", default=0)


def _number(*names: str, default: int = -1) -> int:
    """Return the first of these environment variables that is a number."""
    for name in names:
        with contextlib.suppress(ValueError):
            return int(os.environ.get(name, ""))
    return default


def _identity(
    rank: int | None = None, world_size: int | None = None, first_attempt: int = 0
) -> Identity:
    """Return this process's identity. Launchers' variables only add where the rank runs."""
    import torch.distributed as dist

    if rank is None and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    return Identity(
        rank=_number("RANK") if rank is None else rank,
        world_size=_number("WORLD_SIZE") if world_size is None else world_size,
        local_rank=local_rank(),
        node=_number("GROUP_RANK", "SLURM_NODEID"),
        attempt=first_attempt + restart_count(),
        host=host_name(),
    )


def _count_steps(capture: Capture, training_thread: TrainingThread) -> Any:
    """Count optimizer steps; not those of compiled optimizers: a hook would break their graph."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # ZeRO's optimizer steps another one inside, which is counted already.
        if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
            capture.step()
            training_thread.note_step()

    return register_optimizer_step_post_hook(stepped)

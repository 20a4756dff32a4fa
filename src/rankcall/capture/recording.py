"""One recording, from start to end: its ring, its capture, and the threads that keep it up."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall import background
from rankcall.capture import phases
from rankcall.capture.failure import cause_of, one_line
from rankcall.capture.identity import own_identity, restart_count
from rankcall.capture.own_ring import OwnRing
from rankcall.capture.rpc_calls import RpcCalls
from rankcall.capture.sampler import Sampler
from rankcall.capture.settings import Settings
from rankcall.capture.source_lines import SourceLines
from rankcall.capture.training_thread import TrainingThread, count_steps
from rankcall.errors import CaptureUnavailableError, warn_once
from rankcall.handles import Handle
from rankcall.ring.layout import CAPTURES, Geometry
from rankcall.ring.tables import Group
from rankcall.ring.writer import Identity, PythonRing, put, put_text

if TYPE_CHECKING:
    from rankcall.capture.interface import Capture


# A reader takes a rank whose heartbeat is 2.5 s old for one that is kept from the GIL, so that a
# busy machine may delay a beat by the time of three (``moments.py`` has the pauses between them).
# The thread that waits for an op runs on before the op's end is written: microseconds, on a busy
# machine milliseconds. An op that is really in flight may take for ever, so nobody waits for that.
_DRAIN_SECONDS = 0.1
# Between looks at which ops have completed on devices.
_LOOK_SECONDS = 0.02
# For the heartbeat's thread. It may be inside the status of a back end that hangs.
_JOIN_SECONDS = 2.0


@dataclass(frozen=True)
class RecordingEnd:
    """How a recording ended.

    Attributes:
        process_ends: Whether the process ends. Otherwise recording was switched off.
        has_failed: Whether an exception has ended the program.
    """

    process_ends: bool
    has_failed: bool


class Recording(Handle):
    """The recording of one process. Also a context manager: ``with rankcall.enable(): ...``."""

    def __init__(self, settings: Settings, stop: Callable[[Recording], None]) -> None:
        # Imported here, because it imports torch, and ``rankcall run`` imports this module without.
        from rankcall.capture.device_status import DeviceStatus

        self._own_ring = OwnRing(settings, own_identity())
        try:
            self.capture: Capture = self._make_capture(settings)
        except BaseException:
            self._own_ring.discard()
            raise
        put(self.ring, "capture", CAPTURES.index(self.capture.name))
        self._stop = stop
        self._devices = DeviceStatus(self.capture)
        self._rpc_calls = RpcCalls(self.ring)
        self._stopped = threading.Event()
        self._left = self._has_failed = self._is_started = False
        self._heart = threading.Thread(target=self._beat, name="rankcall-heart", daemon=True)
        self._lines = SourceLines(self.ring, self.geometry, self.capture.add_line)
        self._training_thread = TrainingThread(self.ring, self.geometry)
        self._sampler = Sampler(self.ring, self.geometry, self.capture.look)
        self._step_handle: Any = None
        self.claims: set[str] = set()
        self._first_attempt = 0
        self._before_end: list[Callable[[], object]] = []
        self._on_end: list[Callable[[RecordingEnd], object]] = []
        self._ended: RecordingEnd | None = None  # once the callbacks have been called
        self._end_lock = threading.Lock()

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
    def has_local_run(self) -> bool:
        """Whether the run directory is known to be on a disk of this host."""
        return self._own_ring.has_local_run

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
            self._own_ring.set_identity(own_identity(rank, world_size, self._first_attempt))

    def before_end(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` when the recording is about to end: it can still be placed into a run.

        It runs on the thread that ends the recording, and must not raise.
        """
        self._before_end.append(callback)

    def on_end(self, callback: Callable[[RecordingEnd], object]) -> None:
        """Call ``callback`` when the recording has ended and its ring is closed.

        It runs on the thread that ended the recording. At the end of the process its waits must
        share the exit budget. If the recording has ended already, it is called at once: another
        thread may place the recording into its run at that very moment.
        """
        with self._end_lock:
            ended = self._ended
            if ended is None:
                self._on_end.append(callback)
        if ended is not None:
            _call(callback, ended)

    def stop(self) -> None:
        """Do the same as ``rankcall.disable()``, if this is the recording that is on."""
        self._stop(self)

    def _make_capture(self, settings: Settings) -> Capture:
        from rankcall.capture.fallback.capture import FallbackCapture

        if settings.capture != "python":
            try:
                from rankcall.capture.native import NativeCapture

                native = NativeCapture(self.ring, self.geometry, settings.call_sites)
                if not native.has_call_sites:
                    version = sys.version.split()[0]
                    warn_once(f"call sites are off: Python {version} is not known")
                return native
            except CaptureUnavailableError as error:
                if settings.capture == "native":
                    raise
                warn_once(f"the native recorder is not available, recording in Python: {error}")
        return FallbackCapture(PythonRing(self.ring, self.geometry), settings.call_sites)

    def start(self) -> None:
        """Record ops, and watch groups and optimizer steps."""
        from rankcall.capture.groups import watch

        self.capture.start()
        phases.publish_to(self.ring)
        watch.add(self._on_group)  # which reports the groups that exist
        self._is_started = True
        self._step_handle = count_steps(self.capture, self._training_thread)
        self._sampler.start()
        self._heart.start()
        self._lines.start()

    def end(self, *, process_ends: bool = False) -> bool:
        """Stop recording; return whether the ring is closed, or still awaits ends of ops in flight.

        If the process ends, and not by an exception, the back ends get the time to notice what has
        completed on devices: many programs never destroy their groups, which would wait for that.

        The order matters. The records get their run while the ring can still move. Then nothing new
        is recorded, the threads end, and ops in flight get a moment to record their ends.
        """
        from rankcall.capture.groups import watch

        for callback in self._before_end:
            _call(callback)
        watch.remove(self._on_group)
        phases.publish_to(None)
        self._step_handle.remove()
        self.capture.stop()
        self._note_leaving()
        self._stopped.set()
        background.join(self._heart, _JOIN_SECONDS)
        if not self._heart.is_alive():  # otherwise it may be inside the back end's status
            if process_ends and not self._has_failed:
                background.exit_budget.spend(
                    lambda most: self.await_devices(time.monotonic() + most), background.EXIT_S
                )
            self._follow_devices(self._devices.close)
            put(self.ring, "devices_known_ns", self._devices.known_ns)
            self._sampler.sample(self._training_thread.find())
            self._sampler.stop()
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

    def tell_end(self, *, process_ends: bool) -> None:
        """Call the callbacks of ``on_end``."""
        how = RecordingEnd(process_ends, self._has_failed)
        with self._end_lock:
            self._ended, callbacks = how, list(self._on_end)
        for callback in callbacks:
            _call(callback, how)

    def note_exit_status(self) -> None:
        """Have the status of this process noted in the run, if it ends with another one than 0."""
        note = self._own_ring.exit_note()
        if note is not None:
            self.capture.note_exit_status(*note)

    def forget(self) -> None:
        """Touch the ring no more: this is a forked child, and the ring is its parent's."""
        self.capture.forget()
        self._sampler.stop()
        if self._step_handle is not None:
            self._step_handle.remove()

    def await_devices(self, deadline: float) -> None:
        """Have the ends recorded that back ends know of ops on devices, or will know in a moment.

        Blocks until no op is in flight on a device, until the back ends know of all that were over
        at the call, or until ``deadline``, but looks once in any case: for a second at most. For
        any thread that issues no ops.
        """
        began = time.monotonic()
        while known_after_s := self._follow_devices(self._devices.poll):
            if time.monotonic() >= min(deadline, began + known_after_s):
                return
            time.sleep(_LOOK_SECONDS)

    def _on_group(self, process_group: Any, group: Group) -> None:
        from rankcall.capture.groups import back_ends_of, sides_of

        if group.description == "default_pg" or self.identity.rank < 0:
            self._learn_rank(process_group, group)
        group, on_host = sides_of(group, back_ends_of(process_group))
        if on_host is not None:  # first, because the first op of either looks for both
            self.capture.add_group(on_host, process_group.rank())
        number = self.capture.add_group(group, process_group.rank())
        self._devices.add_group(number, process_group, new=self._is_started)

    def _learn_rank(self, process_group: Any, group: Group) -> None:
        rank = group.ranks[process_group.rank()]
        if (rank, len(group.ranks)) == (self.identity.rank, self.identity.world_size):
            return
        if group.description == "default_pg":
            fresh = own_identity(rank, len(group.ranks), self._first_attempt)
            self._own_ring.set_identity(fresh)

    def _beat(self) -> None:
        next_look = time.monotonic() + self._devices.poll_every_s
        due_ns = time.monotonic_ns()
        while not self._stopped.is_set():
            put(self.ring, "python_heartbeat_ns", time.monotonic_ns())
            self._note_leaving()
            thread = self._training_thread.look()
            put(self.ring, "train_thread", thread)
            self._sampler.look(thread, due_ns)
            self._sampler.sample(thread)
            self._rpc_calls.look()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._devices.poll_every_s
                self._follow_devices(self._devices.poll)
            put(self.ring, "devices_known_ns", self._devices.known_ns)
            pause_s = self._sampler.pause_s()
            due_ns = time.monotonic_ns() + int(pause_s * 1e9)
            self._stopped.wait(pause_s)

    def _follow_devices(self, look: Callable[[], float | None]) -> float | None:
        try:
            return look()
        except Exception as error:
            name = type(error).__name__
            warn_once(f"cannot learn what has completed on devices: {name}: {error}")
            return None

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
            put_text(self.ring, "failure", one_line(cause))


def _call(callback: Callable[..., object], *arguments: object) -> None:
    """Call a callback. Its failure reaches neither the user's program nor the other callbacks."""
    try:
        callback(*arguments)
    except Exception as error:
        warn_once(f"at the end of the recording: {type(error).__name__}: {error}")

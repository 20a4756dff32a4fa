"""The recording of this process, from start to stop: its ring, capture, threads and claims.

One of these threads writes the text of each line that issues ops into the ring, from the process's
own source files (``SourceLines``). A reader of the run on another machine does not have the source,
and must not open files that a run names. A file on a network may take long to read, and neither
training nor the heartbeat may wait for it.
"""

from __future__ import annotations

import contextlib
import linecache
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rankcall import background
from rankcall.capture import own_ring
from rankcall.capture.own_ring import OwnRing
from rankcall.errors import CaptureUnavailable, TorchMissing, local_rank, warn_once
from rankcall.process import host_name
from rankcall.record import RECORD
from rankcall.registry import Scoped
from rankcall.ring import (
    CAPTURES,
    ENTRY_SITE,
    CallSite,
    Geometry,
    Group,
    decode_site,
    entries,
    offset_of,
)
from rankcall.ring.writer import Identity, PythonRing, put, put_text
from rankcall.run import redact_text

if TYPE_CHECKING:
    from rankcall.capture.interface import Capture


# Find the thread of this process that trains: its stack says where the rank stands.
#
# That is not always the main thread. A Ray Train worker, for example, trains in another one. The
# rank writes the thread's kernel id into its ring, for processes that ask for stacks.


_NEWEST = 64  # records: a thread that saves checkpoints issues fewer of them


class TrainingThread:
    """The thread that trains, as far as steps and records show it.

    It is the thread that stepped an optimizer last. Without one, it is the thread that issued most
    of the newest calls; before the first call, the thread that switched recording on. With
    autograd's threads for devices, the calls may come from a thread that runs no Python code, so
    only Python's threads count.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry) -> None:
        self._ring, self._geometry = ring, geometry
        self._first = threading.get_native_id()
        self._stepped = 0

    def note_step(self) -> None:
        """Note that this thread has stepped an optimizer."""
        self._stepped = threading.get_native_id()

    def find(self) -> int:
        """Return its kernel id; 0 if it is not known or has ended."""
        if self._stepped and os.path.exists(f"/proc/self/task/{self._stepped}"):
            return self._stepped
        threads = _python_threads()
        likeliest = (*self._issuing(), self._first)
        return next((thread for thread in likeliest if thread in threads), 0)

    def _issuing(self) -> list[int]:
        """Return the threads of the newest calls, the one with the most calls first."""
        at = offset_of("head")
        head = int.from_bytes(self._ring[at : at + 8], "little")
        newest = range(max(0, head - min(_NEWEST, self._geometry.capacity)), head)
        slots = np.fromiter(newest, np.int64) & (self._geometry.capacity - 1)
        begin, most = self._geometry.records_offset, self._geometry.capacity
        records = np.frombuffer(self._ring, RECORD, most, begin)
        threads, counts = np.unique(records["thread"][slots], return_counts=True)
        issuing: list[int] = threads[np.argsort(-counts, kind="stable")].tolist()
        return issuing


def _python_threads() -> set[int | None]:
    """Return the kernel ids of the threads that Python has started, and the main thread's."""
    return {
        thread.native_id
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread)  # one of autograd's may have become this
    }


_HEARTBEAT_SECONDS = 0.5
_DRAIN_SECONDS = 0.1


class Placement(Protocol):
    """Gives a recording its run once the job has chosen one (``rankcall.attach``)."""

    def name_in_time(self) -> None:
        """Give the run a name also if no group is created for a while."""

    def finish(self) -> None:
        """Place the records now: the recording ends."""

    def leave(self, failed: bool) -> None:
        """Send the newest records to another node, because the process ends."""

    def stay(self) -> None:
        """Send nothing: the recording has ended before the process."""


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

    def _end(self) -> None:
        self._leave(self)

    def _make_capture(self, wanted: str, call_sites: bool) -> Capture:
        from rankcall.capture.fallback import FallbackCapture

        if wanted != "python":
            try:
                from rankcall.capture.native import NativeCapture

                native = NativeCapture(self.ring, self.geometry, call_sites)
                if not native.has_call_sites:
                    version = sys.version.split()[0]
                    warn_once(f"call sites are off: Python {version} is not known")
                return native
            except CaptureUnavailable as error:
                if wanted == "native":
                    raise
                warn_once(f"the native recorder is not available, recording in Python: {error}")
        return FallbackCapture(PythonRing(self.ring, self.geometry), call_sites)

    def start(self) -> None:
        """Record ops, and watch groups and optimizer steps."""
        from rankcall.capture.groups import watch

        self.capture.start()
        own_ring.publish_to(self.ring)
        watch.add(self._on_group)  # which reports the groups that exist
        self._is_started = True
        self._step_handle = _count_steps(self.capture, self._training_thread)
        self._heart.start()
        self._lines.start()

    def stop(self) -> bool:
        """Stop recording; return whether the ring is closed, or still awaits ends of ops in flight.

        The thread that waits for an op may run on before the op's end is written, so that is
        waited for a moment.
        """
        from rankcall.capture.groups import watch

        if self.placement is not None:
            self.placement.finish()
        watch.remove(self._on_group)
        own_ring.publish_to(None)
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


_LOOK_SECONDS = 0.5
_MOST_CHARACTERS = 160
_BEGAN = time.time()


class SourceLines:
    """Adds the source lines of new call sites to a ring, through ``add(id, text)``.

    Once a quarter of the side tables is full, no
    more lines are added: the rest is for entries that records cannot do without.
    """

    def __init__(self, ring: mmap.mmap, geometry: Geometry, add: Callable[[int, str], None]):
        self._ring, self._geometry, self._add = ring, geometry, add
        self._offset, self._number = 0, 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankcall-lines", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout: float = 2.0) -> None:
        """Look once more, and end. Lines that a slow disk has not returned by then stay unknown."""
        self._stopping.set()
        background.join(self._thread, timeout)

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_SECONDS):
            self.look()
        self.look()

    def look(self) -> None:
        """Add the lines of the call sites that have come since the last look."""
        at = offset_of("tables_used")
        used = int.from_bytes(self._ring[at : at + 8], "little")
        if used == self._offset:
            return
        begin = self._geometry.tables_offset
        fresh = self._ring[begin + self._offset : begin + used]
        first = self._offset
        for entry in entries(fresh, self._number):
            self._offset, self._number = first + entry.end, entry.number
            if entry.kind == ENTRY_SITE and used < self._geometry.tables_bytes // 4:
                text = line_text(decode_site(entry.payload))
                if text:
                    self._add(entry.number, text)


def line_text(site: CallSite) -> str:
    """Return a call site's line of source, stripped and cut; empty if it is not known.

    That is the user's line, if the call site has two. A file that was changed after the process
    began may not be the source of the running code.
    """
    own = site.own
    with contextlib.suppress(OSError, ValueError):
        if os.stat(own.file).st_mtime > _BEGAN:
            return ""
    try:
        text = " ".join(linecache.getline(own.file, own.line).split())
    except Exception:  # a loader of the user's may raise anything
        return ""
    return text if len(text) <= _MOST_CHARACTERS else text[: _MOST_CHARACTERS - 1] + "…"


# The recording of this process: claims on it, and ``disable``.
#
# A process has at most one recording. The user, the watcher, hooks and traces each hold a claim on
# it, and it ends with the last claim. After it has ended it *drains*: ops in flight still write
# their ends into its ring. A forked child starts without a recording.


CAPTURE_CHOICES = ("auto", "native", "python")
OLDEST_TORCH = (2, 11)
_PLACE_SECONDS = 10.0
_LOCK_SECONDS = 600.0  # another thread may hold the lock while it builds the recorder


class _State:
    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.lock = threading.RLock()
        self.draining: list[Recording] = []
        self.registered = False


_state = _State()


def disable() -> None:
    """Stop recording and leave the ring in the run directory. Without a recording, do nothing.

    While hooks are registered or a trace is on, the recording goes on for them.
    """
    drop("user")


def current() -> Recording | None:
    """Return this process's recording, if there is one."""
    return _state.recording


def claim(
    owner: str,
    run_dir: Path | None,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Claim the recording for ``owner``; start one if recording is off."""
    check_torch()
    chosen = capture or os.environ.get("RANKCALL_CAPTURE") or "auto"
    if chosen not in CAPTURE_CHOICES:
        raise ValueError(f"capture must be one of {', '.join(CAPTURE_CHOICES)}; got {chosen!r}")
    with _state.lock:
        _register_once()
        _forget_drained()
        recording, claims = _state.recording, {owner}
        unnamed = recording is not None and recording.run_dir is None
        if recording and run_dir and unnamed and not recording.move_to(run_dir):
            claims |= recording.claims
            _stop(recording)
            recording = None
        if recording is None:
            recording = Recording(run_dir, chosen, _power_of_two(capacity), call_sites, _left)
            recording.start()
            _state.recording = recording
        recording.claims |= claims
        return recording


def drop(owner: str) -> None:
    """Give up a claim; the last one stops the recording."""
    with background.holding(_state.lock, _LOCK_SECONDS) as is_held:
        recording = _state.recording
        if recording is None or not is_held:
            return
        recording.claims.discard(owner)
        if not recording.claims:
            _stop(recording)


def _stop(recording: Recording, *, process_ends: bool = False) -> None:
    _state.recording = None
    if not recording.stop():
        _state.draining.append(recording)
    if not process_ends:
        recording.stay()


def _left(recording: Recording) -> None:
    """End the user's claim at the end of the recording's ``with`` block."""
    if _state.recording is recording:
        drop("user")


def place(recording: Recording, run_dir: Path, attempt: int) -> None:
    """Put a recording into a run, unless it is in one, and note its attempt.

    Raises ``OSError`` if the session is busy for too long.
    """
    with background.holding(_state.lock, _PLACE_SECONDS) as is_held:
        if not is_held:
            raise TimeoutError("another thread switches recording on or off")
        recording.place(run_dir, attempt)


def check_torch() -> None:
    """Raise ``TorchMissing`` if torch is absent, too old, or built without torch.distributed."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissing(
            "recording needs torch: pip install 'rankcall[torch]', or torch>=2.11 of your own"
        ) from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise TorchMissing(f"recording needs torch>=2.11; this is torch {torch.__version__}")
    if not torch.distributed.is_available():
        raise TorchMissing("this torch was built without torch.distributed")


def _power_of_two(capacity: int | None) -> int | None:
    if capacity is None:
        named = os.environ.get("RANKCALL_CAPACITY")
        if not named:
            return None
        capacity = int(named)
    if not 1 <= capacity <= 1 << 24:
        raise ValueError(f"capacity must be from 1 to {1 << 24:,} records; got {capacity}")
    return max(64, 1 << (capacity - 1).bit_length())


def _forget_drained() -> None:
    """Close the rings whose last op in flight has ended since recording stopped."""
    for old in [old for old in _state.draining if old.capture.drained()]:
        _state.draining.remove(old)
        old.close()


def _register_once() -> None:
    if not _state.registered:
        _state.registered = True
        os.register_at_fork(after_in_child=_in_forked_child)
        background.at_exit(end)


def _in_forked_child() -> None:
    """Start without a recording: the one that a forked child inherits belongs to its parent."""
    global _state
    old, _state = _state, _State()
    _state.registered = True
    _inherited.append(old)
    own_ring.forget()
    if old.recording is not None:
        old.recording.forget()


_inherited: list[_State] = []  # kept, so that a child runs no destructor of its parent's objects


def note_end(error: BaseException | None) -> None:
    """Note in the ring that the program has ended, by which exception if any."""
    recording = _state.recording
    if recording is not None:
        recording.note_end(error)


def end() -> None:
    """End the recording and leave its ring in the run, because the process ends."""
    recording = _state.recording
    with background.holding(_state.lock, _LOCK_SECONDS) as is_held:
        if not is_held:
            return
        if _state.recording is not None:
            _state.recording.note_exit_status()
            _stop(_state.recording, process_ends=True)
        for old in _state.draining:
            old.close()
    if recording is not None:
        recording.leave()

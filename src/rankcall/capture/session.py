"""Switch recording on and off for this process: ``enable``, ``disable``, and who else needs it.

There is one recording a process. The user, the launcher and registered hooks each hold a claim on
it; it ends with the last claim. A forked child starts without one.
"""

from __future__ import annotations

import atexit
import logging
import mmap
import os
import sys
import threading
import time
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from rankcall.errors import CaptureUnavailable, RankcallError, TorchMissing
from rankcall.ring.layout import CAPTURES as CAPTURE_NAMES
from rankcall.ring.layout import Geometry
from rankcall.ring.reader import Group
from rankcall.ring.writer import (
    Identity,
    PythonRing,
    boot_seconds,
    create,
    create_unnamed,
    encode_group,
    process_start,
    put,
    set_identity,
)
from rankcall.run import (
    create_run,
    default_run_dir,
    host_name,
    live_base,
    live_dir,
    ring_name,
    settle_ring,
)

logger = logging.getLogger("rankcall")
ARM = "RANKCALL_ARM"  # set by the launcher, which settles rings itself
CAPTURES = ("auto", "native", "python")
OLDEST_TORCH = (2, 11)
_HEARTBEAT_SECONDS = 0.5
_SMALLER = (1, 4, 16, 64)  # a ring that finds no room is tried at these fractions of its size


class Capture(Protocol):
    """What the native and the Python capture have in common."""

    name: str

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def drained(self) -> bool: ...
    def counts(self) -> tuple[int, int]: ...
    def sleep(self, fd: int, wanted: int) -> None: ...
    def add_group(self, name: str, payload: bytes) -> None: ...
    def step(self) -> None: ...


class Recording:
    """One process's recording. Also a context manager: ``with rankcall.enable(): ...``."""

    def __init__(
        self, run_dir: Path | None, capture: str, capacity: int | None, call_sites: bool
    ) -> None:
        self.run_dir: Path | None = None
        self.path: Path | None = None
        self.geometry = Geometry(capacity) if capacity else Geometry()
        self._identity = _identity()
        self._fd = -1
        self.ring = self._make_ring(run_dir)
        self.capture: Capture = self._make_capture(capture, call_sites)
        put(self.ring, "capture", CAPTURE_NAMES.index(self.capture.name))
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="rankcall-heart", daemon=True)
        self._step_handle: Any = None
        self.claims: set[str] = set()

    @property
    def host(self) -> str:
        """What this host is called in the run."""
        return self._identity.host

    def rank(self) -> int:
        """Return this process's rank, -1 while nobody knows it."""
        return self._identity.rank

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _state.recording is self:
            disable()

    # --- making the ring ---

    def _make_ring(self, run_dir: Path | None) -> mmap.mmap:
        if run_dir is None:
            ring, self._fd = create_unnamed(live_base(), self._identity, self.geometry)
            return ring
        self.run_dir = run_dir
        folder = self._prepare(run_dir)
        reason: str | None = None
        for fraction in _SMALLER:
            geometry = self._shrunk(fraction)
            try:
                ring = self._make_file(folder, geometry)
            except OSError as error:
                reason, self.path = error.strerror, None
                continue
            if fraction > 1:
                say(f"little room in {folder}: the ring holds {geometry.capacity:,} records")
            self.geometry = geometry
            return ring
        say(f"no ring can be kept in {folder} ({reason}): recording goes on in memory only")
        return create(None, self._identity, self.geometry)

    def _make_file(self, folder: Path, geometry: Geometry) -> mmap.mmap:
        try:
            return create(self._file_in(folder), self._identity, geometry)
        except FileNotFoundError:
            # Another launcher of this host has just settled its rings and removed the folder.
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            return create(self._file_in(folder), self._identity, geometry)

    def move_to(self, run_dir: Path) -> bool:
        """Give the unnamed ring of a hooks-only recording a place in a run; False if it has none."""
        if self._fd < 0:
            return False
        folder = self._prepare(run_dir)
        try:
            os.link(f"/proc/self/fd/{self._fd}", self._file_in(folder), follow_symlinks=True)
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

    def _prepare(self, run_dir: Path) -> Path:
        """Make the run directory and its live folder; say so where one cannot be written."""
        try:
            create_run(run_dir, _about())
        except OSError as error:
            say(f"the run directory {run_dir} cannot be written ({error.strerror}): "
                f"records stay in {live_dir(run_dir)}")  # fmt: skip
        folder = live_dir(run_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError:
            folder = run_dir / "rings"  # no tmpfs here: better a disk file than none
        return folder

    def _file_in(self, folder: Path) -> Path:
        self.path = folder / ring_name(
            self._identity.rank, self._identity.attempt, self._identity.host, os.getpid()
        )
        number = 1
        while self.path.exists():  # recording was switched off and on again
            number += 1
            self.path = self.path.with_name(f"{self.path.stem}-{number}.ring")
        return self.path

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
        """Install the kernels and watch groups and optimizer steps."""
        from rankcall.capture.groups import watch

        self.capture.start()
        watch.add(self._on_group)
        self._step_handle = _count_steps(self.capture)
        self._heart.start()

    def stop(self) -> None:
        """Stop recording, and move the ring to the run directory unless the launcher will."""
        from rankcall.capture.groups import watch

        watch.remove(self._on_group)
        self._step_handle.remove()
        self.capture.stop()
        self._stopped.set()
        self._heart.join(timeout=2)
        put(self.ring, "closed_ns", time.monotonic_ns())
        if self._fd >= 0:
            os.close(self._fd)
        if self.path is not None and self.run_dir is not None and not os.environ.get(ARM):
            settle_ring(self.path, self.run_dir)

    def _on_group(self, process_group: Any, group: Group) -> None:
        if group.description == "default_pg" or self._identity.rank < 0:
            self._learn_rank(process_group, group)
        self.capture.add_group(group.name, encode_group(group))

    def _learn_rank(self, process_group: Any, group: Group) -> None:
        rank = group.ranks[process_group.rank()]
        if (rank, len(group.ranks)) == (self._identity.rank, self._identity.world_size):
            return
        if group.description != "default_pg":
            return
        self._identity = _identity(rank, len(group.ranks))
        set_identity(self.ring, self._identity)
        if self.path is not None:
            old = self.path
            new = self._file_in(old.parent)
            try:
                os.rename(old, new)
            except OSError:
                self.path = old

    def _beat(self) -> None:
        while not self._stopped.is_set():
            put(self.ring, "python_heartbeat_ns", time.monotonic_ns())
            self._stopped.wait(_HEARTBEAT_SECONDS)


class _State:
    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.lock = threading.RLock()
        self.draining: list[Recording] = []
        self.said: set[str] = set()
        self.registered = False


_state = _State()


def enable(
    run_dir: str | os.PathLike[str] | None = None,
    *,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Recording:
    """Record every collective of this process, from now on, until ``disable()``.

    Call it before or after ``init_process_group``, on every rank at the same point of the program:
    sequence numbers count from here. ``run_dir`` is where the run is kept (default:
    ``RANKCALL_RUN_DIR``, or ``rankcall-runs/<UTC time>-<script>``, the same for all ranks that one
    process started). ``capture`` is ``auto``, ``native`` or ``python`` (default:
    ``RANKCALL_CAPTURE``, or ``auto``: native, and Python where that cannot be built). ``capacity``
    is the ring's size in records, rounded up to a power of two; older ones are overwritten.

    Returns the recording, a context manager. Enabling twice returns the one that is on. Raises
    ``TorchMissing``, ``ValueError`` for an unknown capture or a bad capacity, and
    ``CaptureUnavailable`` where ``native`` was asked for by name and cannot be built.
    """
    where = Path(run_dir or os.environ.get("RANKCALL_RUN_DIR") or _own_run_dir()).absolute()
    return claim("user", where, capture, capacity, call_sites)


def disable() -> None:
    """Stop recording and leave the ring in the run directory. Without a recording, do nothing.

    While hooks are registered the recording goes on for them.
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
    """Hold the recording open in the name of ``owner``, starting it if there is none."""
    check_torch()
    chosen = capture or os.environ.get("RANKCALL_CAPTURE") or "auto"
    if chosen not in CAPTURES:
        raise ValueError(f"capture must be one of {', '.join(CAPTURES)}; got {chosen!r}")
    with _state.lock:
        _register_once()
        _forget_drained()
        recording, claims = _state.recording, {owner}
        if recording is not None and run_dir is not None and recording.run_dir is None:
            if not recording.move_to(run_dir):
                claims |= recording.claims
                _stop(recording)
                recording = None
        if recording is None:
            recording = Recording(run_dir, chosen, _power_of_two(capacity), call_sites)
            recording.start()
            _state.recording = recording
        recording.claims |= claims
        return recording


def drop(owner: str) -> None:
    """Give up a claim; the last one stops the recording."""
    with _state.lock:
        recording = _state.recording
        if recording is None:
            return
        recording.claims.discard(owner)
        if not recording.claims:
            _stop(recording)


def _stop(recording: Recording) -> None:
    _state.recording = None
    recording.stop()
    if not recording.capture.drained():
        _state.draining.append(recording)


def arm() -> None:
    """Record as the launcher asked by environment. Never raises; says on stderr what went wrong."""
    try:
        enable()
    except (RankcallError, OSError, ValueError) as error:
        say(f"not recording: {error}")


def say(message: str) -> None:
    """Write one line to stderr, once, and on one rank a node only."""
    if message in _state.said:
        return
    _state.said.add(message)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"rankcall: {message}", file=sys.stderr, flush=True)


def check_torch() -> None:
    """Raise ``TorchMissing`` unless a torch that rankcall can record is there."""
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


def _own_run_dir() -> Path:
    """Name a run after the script and the process that started the ranks, so that they agree."""
    import multiprocessing

    started_by_other = "RANK" in os.environ or multiprocessing.parent_process() is not None
    ticks = process_start(os.getppid() if started_by_other else os.getpid()) or 0
    moment = boot_seconds() + ticks // os.sysconf("SC_CLK_TCK")
    return default_run_dir(
        sys.argv[0] if sys.argv and sys.argv[0] else "python",
        datetime.fromtimestamp(moment, timezone.utc),
    )


def _about() -> dict[str, Any]:
    import torch

    from rankcall import __version__

    return {
        "created_epoch_ns": time.time_ns(),
        "command": sys.argv,
        "cwd": str(Path.cwd()),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "rankcall": __version__,
    }


def _count_steps(capture: Capture) -> Any:
    """Count optimizer steps. Compiled optimizers are not counted: a hook would break their graph."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # ZeRO's optimizer steps another one inside: counted once.
        if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
            capture.step()

    return register_optimizer_step_post_hook(stepped)


def _forget_drained() -> None:
    _state.draining = [old for old in _state.draining if not old.capture.drained()]


def _register_once() -> None:
    if not _state.registered:
        _state.registered = True
        os.register_at_fork(after_in_child=_in_forked_child)
        atexit.register(_at_exit)


def _in_forked_child() -> None:
    """A data loader's worker records nothing: what it inherits belongs to its parent."""
    global _state
    old, _state = _state, _State()
    _state.registered = True
    _state.said = old.said
    _inherited.append(old)


_inherited: list[_State] = []  # kept so that nothing of the parent's is torn down in a child


def _at_exit() -> None:
    with _state.lock:
        if _state.recording is not None:
            _stop(_state.recording)

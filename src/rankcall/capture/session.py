"""The recording of this process: claims on it, and ``disable``.

A process has at most one recording. The user, the watcher, hooks and traces each hold a claim on
it, and it ends with the last claim. After it has ended it *drains*: ops in flight still write
their ends into its ring. A forked child starts without a recording.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rankcall import background
from rankcall.capture import phases
from rankcall.capture.recording import Recording
from rankcall.errors import TorchMissingError

if TYPE_CHECKING:
    pass


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
    if not recording.end():
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
    """Raise ``TorchMissingError`` if torch is absent, too old, or without torch.distributed."""
    try:
        import torch
    except ImportError as error:
        raise TorchMissingError(
            "recording needs torch: pip install 'rankcall[torch]', or torch>=2.11 of your own"
        ) from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise TorchMissingError(f"recording needs torch>=2.11; this is torch {torch.__version__}")
    if not torch.distributed.is_available():
        raise TorchMissingError("this torch was built without torch.distributed")


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
    phases.forget()
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

"""The recording of this process: who uses it, and when it begins and ends.

A process has at most one recording. The user, the watcher, hooks and traces each *claim* it, and it
ends when the last of them has dropped its claim. After it has ended it *drains*: ops in flight
still write their ends into its ring. A forked child starts without a recording.
"""

from __future__ import annotations

import os
import sysconfig
import threading
from pathlib import Path

from rankcall import background
from rankcall.capture import named_phases, phases
from rankcall.capture.recording import Recording
from rankcall.capture.settings import Settings, read_settings
from rankcall.errors import TorchMissingError

OLDEST_TORCH = (2, 11)  # the native source compiles against its headers
USER = "user"  # who claims the recording by ``rankcall.enable``

# A recording is placed while the user's thread creates a process group, which must not wait long.
# If another thread builds the recorder meanwhile, the records go into the run at the end only.
_PLACE_SECONDS = 10.0
_LOCK_SECONDS = 600.0  # another thread may hold the lock while it builds the recorder


class _State:
    def __init__(self) -> None:
        self.recording: Recording | None = None
        # Reentrant, because a recording that ends is placed into its run first, by the same thread.
        self.lock = threading.RLock()
        self.draining: list[Recording] = []
        self.registered = False


_state = _State()


def disable() -> None:
    """Stop recording and leave the ring in the run directory. Without a recording, do nothing.

    The counterpart of ``RANKCALL=1``, and of ``rankcall.enable()`` where its result is not at hand;
    otherwise the same as ``stop()`` of that. While hooks are registered, a trace is on or the
    watcher runs, the recording goes on for them.
    """
    drop(USER)


def current() -> Recording | None:
    """Return this process's recording, if there is one."""
    return _state.recording


def claim(owner: str, settings: Settings | None = None) -> Recording:
    """Claim the recording for ``owner``; start one if recording is off.

    Args:
        owner: The one that needs the recording until it calls ``drop`` with the same name.
        settings: Of the recording, if this call starts it. If it is on already, only ``run_dir``
            has an effect: a recording of no run moves there. By default the environment's, and no
            run.
    """
    check_torch()
    settings = settings or read_settings().without_run()
    replaced: Recording | None = None
    with _state.lock:
        _register_once()
        _forget_drained()
        recording, claims = _state.recording, {owner}
        if recording is not None and not _takes_run(recording, settings.run_dir):
            # It is in memory that cannot get a name. What follows is recorded where others see it.
            claims |= recording.claims
            _end(recording)
            replaced, recording = recording, None
        if recording is None:
            recording = Recording(settings, _stop_for_user)
            recording.start()
            _state.recording = recording
        recording.claims |= claims
    if replaced is not None:
        replaced.tell_end(process_ends=False)
    return recording


def _takes_run(recording: Recording, run_dir: Path | None) -> bool:
    """Return whether a recording is where it is wanted, or can move there."""
    return run_dir is None or recording.run_dir is not None or recording.move_to(run_dir)


def drop(owner: str) -> None:
    """Give up a claim; the last one ends the recording."""
    with background.holding(_state.lock, _LOCK_SECONDS) as is_held:
        recording = _state.recording
        if recording is None or not is_held:
            return
        recording.claims.discard(owner)
        if recording.claims:
            return
        _end(recording)
    recording.tell_end(process_ends=False)


def _end(recording: Recording, *, process_ends: bool = False) -> None:
    _state.recording = None
    if not recording.end(process_ends=process_ends):
        _state.draining.append(recording)


def _stop_for_user(recording: Recording) -> None:
    """Drop the user's claim, if this recording is the one that is on."""
    if _state.recording is recording:
        drop(USER)


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
        how = "pip install 'rankcall[torch]', or torch>=2.11 of your own"
        if "musl" in str(sysconfig.get_config_var("SOABI")):
            how = "PyTorch has no wheels for musl (Alpine): use an image with glibc, or build torch"
        raise TorchMissingError(f"recording needs torch: {how}") from error
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < OLDEST_TORCH:
        raise TorchMissingError(f"recording needs torch>=2.11; this is torch {torch.__version__}")
    if not torch.distributed.is_available():
        raise TorchMissingError("this torch was built without torch.distributed")


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
    """Start without a recording: the one that a forked child inherits belongs to its parent.

    The state is replaced, not emptied: another thread of the parent may have held the lock, and in
    the child nobody would ever release it.
    """
    global _state
    old, _state = _state, _State()
    _state.registered = True
    _inherited.append(old)
    phases.forget()
    named_phases.forget()
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
            _end(_state.recording, process_ends=True)
        for old in _state.draining:
            old.close()
    if recording is not None:
        recording.tell_end(process_ends=True)

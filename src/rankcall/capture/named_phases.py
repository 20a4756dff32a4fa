"""Phases that a program names: the time that each thread spends in them, for the sampler.

The time is that of the innermost phase, so a phase does not count those inside it. Entering and
leaving a phase changes some numbers of the thread's own, without a lock. The sampler reads them for
the thread that trains, also of a phase that is still open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rankcall.ring.layout import PHASE_COUNTERS

MOST_BYTES = 32  # of a name
_MOST_THREADS = 64  # threads that name phases; a program that names them in more is not measured
_NOT_COUNTED = -1  # the slot of a name for which there is no room

_lock = threading.Lock()  # only for a name or a thread that is new
_slots: dict[str, int] = {}
_threads: dict[int, _Thread] = {}  # by the kernel's id


@dataclass
class _Thread:
    """The phases of one thread."""

    open: list[int] = field(default_factory=list)  # slots, the innermost last
    since_ns: int = 0  # when the innermost was entered, or gone on with
    spent_ns: list[int] = field(default_factory=lambda: [0] * len(PHASE_COUNTERS))

    def charge(self, now_ns: int) -> None:
        """Add the time since the last change to the innermost phase."""
        if self.open and self.open[-1] != _NOT_COUNTED:
            self.spent_ns[self.open[-1]] += now_ns - self.since_ns
        self.since_ns = now_ns


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Name what this thread does in the block, so that a verdict can say why a rank is late.

    For example: ``with rankcall.phase("tokenize"): ...``. Use it as a context manager or as a
    decorator, on all ranks alike. Phases may nest; time counts for the innermost. Only the thread
    that trains is looked at, and the first four names of a process are measured. It costs some
    microseconds, and does nothing else.

    Args:
        name: A short name, at most 32 bytes; the rest is cut.

    Raises:
        TypeError: ``name`` is not a string.
        ValueError: ``name`` is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"a phase has a name, not {type(name).__name__}")
    if not name.strip():
        raise ValueError("phase() takes a name that says what is done in it")
    thread = _this_thread()
    slot = _slots.get(name)
    if slot is None:
        slot = _new_slot(name)
    thread.charge(time.monotonic_ns())
    thread.open.append(slot)
    try:
        yield
    finally:
        thread.charge(time.monotonic_ns())
        if thread.open:  # a forked child has forgotten its parent's
            thread.open.pop()


def spent_by(thread_id: int) -> dict[str, int]:
    """Return the time that a thread has spent in each phase so far, in ns, by counter."""
    thread = _threads.get(thread_id)
    if thread is None:
        return {}
    spent = list(thread.spent_ns)
    # The thread may go on meanwhile. A figure that is then too small is right the next time.
    open_, since_ns = thread.open[-1:], thread.since_ns
    if open_ and open_[0] != _NOT_COUNTED:
        spent[open_[0]] += max(0, time.monotonic_ns() - since_ns)
    return dict(zip(PHASE_COUNTERS[: len(_slots)], spent, strict=False))


def names() -> str:
    """Return the names of the phases that are measured, a line each."""
    return "\n".join(_cut(name) for name in list(_slots)[: len(PHASE_COUNTERS)])


def forget() -> None:
    """Measure nothing that the parent did: this is a forked child."""
    global _lock
    _lock = threading.Lock()
    _slots.clear()
    _threads.clear()


def _this_thread() -> _Thread:
    number = threading.get_native_id()
    thread = _threads.get(number)
    if thread is None:
        thread = _Thread()
        with _lock:
            if len(_threads) < _MOST_THREADS:
                _threads[number] = thread
    return thread


def _new_slot(name: str) -> int:
    with _lock:
        if len(_slots) >= len(PHASE_COUNTERS):
            return _NOT_COUNTED
        return _slots.setdefault(name, len(_slots))


def _cut(name: str) -> str:
    printable = "".join(char if char.isprintable() else "?" for char in name)
    return printable.encode("utf-8", "replace")[:MOST_BYTES].decode("utf-8", "ignore")

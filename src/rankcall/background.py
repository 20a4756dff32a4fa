"""Calls with a deadline on helper threads, and the time that rankcall may hold up an exit.

When the interpreter ends, several of rankcall's threads may be busy or blocked: in a user's hook,
in a sink, in a store whose host is stopped. All waits for them together may take ``EXIT_S``.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

# For all waits at the end of a process together. Who ends a job gives it 10 s (docker stop) to 30 s
# (Slurm, Kubernetes), and the user's own clean-up needs most of that.
EXIT_S = 2.0

logger = logging.getLogger("rankcall")
T = TypeVar("T")


def is_lack_of_threads(error: BaseException) -> bool:
    """Tell whether an error says that the system gives this process no further thread."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


class BackgroundCall(Generic[T]):
    """A call that runs on a daemon thread. If it never returns, the thread is left behind.

    An exception refers, by its traceback, to all that the call used, and to this object. So this
    object does not keep it once it has been raised, or is not wanted: the two would keep each
    other, and what the call used, until the garbage collector runs. Training jobs switch that off.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self._is_unwanted = False
        self._done = threading.Event()
        # Taken from here by the thread, and held nowhere else: once the caller hears that the call
        # has ended, no frame of the thread may keep what the call used, a user's store for example.
        self._to_make = [call]
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, or there are too many threads
            self._to_make.clear()
            self._raised.append(error)
            self._done.set()

    def _run(self) -> None:
        try:
            self._returned.append(self._to_make.pop()())
        except BaseException as error:
            self._raised.append(error)
        finally:
            if self._is_unwanted:
                self._forget()
            self._done.set()

    def _forget(self) -> None:
        self._returned.clear()
        self._raised.clear()

    def ended(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the call to end; return whether it has."""
        return self._done.wait(max(0.0, seconds))

    def outcome(self) -> T:
        """Return what the call returned or raise what it raised, once ``ended`` is true.

        The outcome is given once.
        """
        if not self._done.is_set():
            raise RuntimeError("the call has not ended: wait for it with ended() first")
        if self._is_unwanted:
            raise RuntimeError("the call was given up, for example because the interpreter ends")
        if self._raised:
            raise self._raised.pop()
        return self._returned.pop()

    def give_up(self) -> None:
        """Note that no caller will ask for the outcome."""
        self._is_unwanted = True
        self._forget()


class ExitBudget:
    """The time that is left for waits once the interpreter has begun to end.

    Before that, each wait gets the time that it asks for. Only the waits themselves are counted:
    an exit handler of the user's may run in between and take as long as it likes.
    """

    def __init__(
        self, seconds: float = EXIT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._spent = 0.0
        self._clock = clock
        self._is_exiting = False

    def begin(self) -> None:
        """Note that the interpreter has begun to end."""
        self._is_exiting = True

    @property
    def spent(self) -> float:
        """The seconds that waits have taken since the interpreter began to end."""
        return self._spent

    def spend(self, wait: Callable[[float], T], seconds: float) -> T:
        """Return ``wait(seconds)``; at exit, with what is left of the budget if that is less."""
        if not self._is_exiting:
            return wait(seconds)
        began = self._clock()
        try:
            return wait(min(seconds, max(0.0, self._seconds - self._spent)))
        finally:
            self._spent += self._clock() - began


exit_budget = ExitBudget()


def join(thread: threading.Thread, seconds: float) -> bool:
    """Wait up to ``seconds`` for a thread to end, within the exit budget; return whether it has.

    A thread that could not be started has ended.
    """
    if thread.ident is None:
        return True
    exit_budget.spend(thread.join, seconds)
    return not thread.is_alive()


@contextmanager
def holding(lock: Any, seconds: float) -> Iterator[bool]:
    """Hold a lock for a block if it is free in time, within the exit budget; yield whether it is.

    At exit another thread may hold it for minutes, for example while it builds the recorder.
    """
    is_held = exit_budget.spend(lambda most: bool(lock.acquire(timeout=most)), seconds)
    try:
        yield is_held
    finally:
        if is_held:
            lock.release()


def at_exit(close: Callable[[], object]) -> Callable[[], None]:
    """Call ``close`` when the interpreter ends; return what ``atexit.unregister`` takes.

    Its waits share the exit budget. An exception is logged: the job's exit status stays its own.
    """

    def close_within_budget() -> None:
        exit_budget.begin()
        try:
            close()
        except Exception as error:
            logger.warning("closing down failed; the job's exit goes on", exc_info=error)

    atexit.register(close_within_budget)
    return close_within_budget

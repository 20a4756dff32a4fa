"""Bring a finished ring into its run directory, without waiting for a disk that does not answer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from rankcall.background import exit_budget
from rankcall.capture.notices import say
from rankcall.files import is_local, reason

_SECONDS = 10.0


class Keeper:
    """Does the last file work of a recording: at once, or on a thread with a deadline.

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

    def keep(self, work: Callable[[], object]) -> None:
        """Do the work; say so if it fails, or takes longer than ten seconds (at exit, two)."""
        if self._thread is None:
            self._do(work)
            return
        self._work = work
        self._wanted.set()
        if not exit_budget.spend(self._done.wait, _SECONDS):
            say(
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
                say(f"the records of this rank cannot be kept: {reason(error)}")

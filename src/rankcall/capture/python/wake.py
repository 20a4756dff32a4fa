"""Wakes the hook dispatcher, which sleeps on an eventfd: the twin of native/wake.h."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """What the dispatcher ``wanted`` to be woken for: 0 nothing, 1 ends, 2 starts and ends."""

    def __init__(self) -> None:
        self.wanted = 0
        self._fd = -1

    def arm(self, fd: int, wanted: int) -> None:
        """Have the eventfd written at the next event that is wanted, once."""
        self._fd, self.wanted = fd, wanted

    def wake(self, least: int) -> None:
        """Wake the dispatcher if it wants ``least`` or more."""
        if self.wanted >= least:
            self.wanted = 0
            with contextlib.suppress(OSError):
                os.eventfd_write(self._fd, 1)

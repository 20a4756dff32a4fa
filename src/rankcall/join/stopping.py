"""Where all ranks of a block stop, once one of them is asked to.

The ranks pass the same points in the same order: the beginning of each step, and the end of each
iteration over batches. Nothing is sent until a rank is asked to stop. Then

1. that rank requests the stop at its next point, through the block's log;
2. the listening thread of each rank *freezes* it, so that its training thread passes no more
   points, and reports how many it has passed;
3. all ranks go on to the largest number, and stop there.

A rank that waits for the last report has passed a point that the others still come to, so it has
taken part in all that they wait for. Therefore no rank waits for one that is frozen.
"""

from __future__ import annotations

from collections.abc import Callable


class Stopping:
    """One rank's part. All methods but ``ask`` and ``freeze`` run on the training thread.

    Args:
        request: Requests a stop of all ranks.
        agree: Waits until all ranks have reported; returns the last point that ranks pass.
    """

    def __init__(self, request: Callable[[], None], agree: Callable[[], int]) -> None:
        self.is_stopped = False
        self._request = request
        self._agree = agree
        self._is_asked = False
        self._has_requested = False
        self._is_frozen = False
        self._passed = 0
        self._last: int | None = None

    def ask(self) -> None:
        """Ask this rank to stop. It only sets a flag, so a signal handler may call it."""
        self._is_asked = True

    def freeze(self) -> int:
        """Let no more points pass; return how many have passed. On the listening thread."""
        # This order and that of pass_point belong together: a point that is counted after the
        # look at the count here is passed only if the ranks agree on it.
        self._is_frozen = True
        return self._passed

    def pass_point(self) -> bool:
        """Pass the next point; return False if all ranks stop before it."""
        if not self._is_asked:
            self._passed += 1
            if not self._is_frozen:
                return True
            self._passed -= 1  # whether the report counts it or not: the ranks agree on it below
        if self._last is None:
            self._request_once()
            self._last = self._agree()
        self.is_stopped = self._passed >= self._last
        self._passed += not self.is_stopped
        return not self.is_stopped

    def follow(self) -> None:
        """Pass a point after another rank, whose step this one shadows."""
        self._passed += 1
        if self._is_asked:
            self._request_once()

    def _request_once(self) -> None:
        if not self._has_requested and not self._is_frozen:
            self._has_requested = True
            self._request()

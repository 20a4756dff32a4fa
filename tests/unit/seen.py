"""A hook that keeps its statuses, for hooks in one process and on real ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankcall.hooks import CollectiveStatus

WAIT_S = 120.0  # far more than anything takes


class Seen:
    """A hook that keeps its statuses, and lets a test wait for them."""

    def __init__(self) -> None:
        self.statuses: list[CollectiveStatus] = []
        self._changed = threading.Condition()

    def __call__(self, status: CollectiveStatus) -> None:
        with self._changed:
            self.statuses.append(status)
            self._changed.notify_all()

    def wait(
        self, enough: int | Callable[[list[CollectiveStatus]], bool]
    ) -> list[CollectiveStatus]:
        """Return everything, once there is enough of it."""

        def there() -> bool:
            if callable(enough):
                return enough(self.statuses)
            return len(self.statuses) >= enough

        with self._changed:
            came = self._changed.wait_for(there, WAIT_S)
            assert came, f"only {len(self.statuses)}, the last: {self.statuses[-3:]}"
            return list(self.statuses)

"""Make a call that may never end: on a thread of its own, which is left behind then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """A call that is under way on a daemon thread, from now on."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._returned: list[T] = []
        self._raised: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._returned.append(self._call())
        except BaseException as error:
            self._raised.append(error)

    def ended(self, seconds: float) -> bool:
        """Wait for its end, ``seconds`` at most, and tell whether it has come."""
        self._thread.join(max(0.0, seconds))
        return bool(self._returned or self._raised)

    def result(self) -> T:
        """Return what the call returned, or raise what it raised; waits for its end."""
        self._thread.join()
        if self._raised:
            raise self._raised[0]
        return self._returned[0]

"""Handles: every call that switches something on returns one, and its ``stop()`` switches it off.

The calls are ``rankcall.enable``, ``watch.start``, ``trace.enable``, ``store.install``, the
``hooks.register_...`` functions and ``FaultPlan.arm``. A handle is also a context manager, so that
what a block switched on ends with the block, whichever way the block is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

H = TypeVar("H", bound="Handle")


class Handle(ABC):
    """Something that is switched on, until ``stop()`` or the end of a ``with`` block."""

    @abstractmethod
    def stop(self) -> object:
        """Switch it off. A second call does nothing."""

    def __enter__(self: H) -> H:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class Registration(Handle):
    """A handle whose ``stop()`` calls one function, once."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end: Callable[[], object] | None = end

    def stop(self) -> None:
        """End the registration. A second call does nothing."""
        # Taken out before it is called: what was registered again since must not be ended too.
        end, self._end = self._end, None
        if end is not None:
            end()

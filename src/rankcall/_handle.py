"""Handles: ``remove()`` ends a registration, and so does leaving it as a context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound="Scoped")


class Scoped(ABC):
    """An object that ends at the end of its ``with`` block."""

    @abstractmethod
    def _end(self) -> object:
        """End the object."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()


class Removable(Scoped):
    """An object that ``remove()`` ends. A second call does nothing."""

    @abstractmethod
    def remove(self) -> object:
        """End the object."""

    def _end(self) -> None:
        self.remove()


class Registered(Removable):
    """A registration that a function ends."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """End the registration. A second call does nothing."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

"""What a registration returns: ``remove()`` ends it, and so does leaving it as a context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T", bound="Scoped")


class Scoped(ABC):
    """Something that leaving it as a context manager ends."""

    @abstractmethod
    def _end(self) -> object:
        """End it."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()


class Removable(Scoped):
    """Something that ``remove()`` undoes, once; a second time does nothing."""

    @abstractmethod
    def remove(self) -> object:
        """Undo it."""

    def _end(self) -> None:
        self.remove()


class Registered(Removable):
    """Something that a function undoes."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    def remove(self) -> None:
        """Undo it, once."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()

"""What a registration returns: ``remove()`` ends it, and so does leaving it as a context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import TypeVar

T = TypeVar("T", bound="Removable")


class Removable(ABC):
    """Something that ``remove()`` undoes, once; a second time does nothing."""

    @abstractmethod
    def remove(self) -> object:
        """Undo it."""

    def __enter__(self: T) -> T:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

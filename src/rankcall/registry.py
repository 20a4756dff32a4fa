"""Tables from names to registered values, such as the back ends of RPC and the sinks of a trace."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from rankcall.errors import BackendNotFoundError, DuplicateBackendError
from rankcall.handles import Registration

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of values of one kind, by name. Its methods may be called from any thread.

    Args:
        kind: The word for such a value in messages.
        group: The entry-point group in which other packages announce their values.
        check: Gets a name and the object that was loaded or registered. It returns the value, or
            raises ``TypeError`` if the object is not a valid one.
        builtin: The modules of the built-in names; each is imported at its first use.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        check: Callable[[str, Any], T],
        builtin: Mapping[str, str] | None = None,
    ) -> None:
        self._kind, self._group, self._check = kind, group, check
        self._builtin = dict(builtin or {})
        self._values: dict[str, T] = {}
        # Not held while a value is loaded: that reads files and runs code of other packages.
        self._lock = threading.Lock()

    def register(self, name: str, value: Any) -> Registration:
        """Add a value under a new name, until the handle's ``stop()``.

        A value that a caller has already got stays usable after that. Raises
        ``DuplicateBackendError`` if the name is taken, and any error of ``check``.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of an {self._kind} is a non-empty string; got {name!r}")
        checked, is_known = self._check(name, value), name in self
        with self._lock:
            if is_known or name in self._values:
                raise DuplicateBackendError(f"{self._kind} {name}: already registered")
            self._values[name] = checked
        return Registration(lambda: self._forget(name, checked))

    def get(self, name: str) -> T:
        """Return the value of a name, loading it at the first use.

        Raises ``BackendNotFoundError``.
        """
        with self._lock:
            if name in self._values:
                return self._values[name]
        loaded = self._check(name, self._load(name))
        with self._lock:
            return self._values.setdefault(name, loaded)  # another thread may have been faster

    def __contains__(self, name: object) -> bool:
        return any(name == known for known in self)

    def __iter__(self) -> Iterator[str]:
        announced = [point.name for point in self._announced()]
        with self._lock:
            return iter(list(dict.fromkeys([*self._builtin, *self._values, *announced])))

    def _announced(self) -> list[EntryPoint]:
        return sorted(entry_points(group=self._group), key=lambda point: point.name)

    def _load(self, name: str) -> Any:
        if name in self._builtin:
            return importlib.import_module(self._builtin[name])
        for point in self._announced():
            if point.name == name:
                return point.load()
        known = ", ".join(self) or "none"
        raise BackendNotFoundError(f"there is no {self._kind} {name!r}; known: {known}")

    def _forget(self, name: str, value: T) -> None:
        with self._lock:
            if self._values.get(name) is value:
                del self._values[name]

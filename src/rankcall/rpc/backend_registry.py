"""The RPC back ends by name: a drop-in for ``torch.distributed.rpc.backend_registry``.

torch makes a new enum at each registration, and from then on refuses members of the one before.
Here ``BackendType`` is one object that never changes: a member stays valid after other
registrations, and ``torch.distributed.rpc.init_rpc`` accepts it too. Other packages announce back
ends by the entry point ``rankcall.rpc_backends``: a ``BackendValue``, or a module that has
functions with the names of its fields.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.distributed.rpc import RpcAgent, RpcBackendOptions
from torch.distributed.rpc import backend_registry as _torch_registry
from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

from rankcall.durations import Duration, seconds
from rankcall.errors import BackendNotFoundError, DuplicateBackendError

__all__ = [
    "Backend",
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
    "unregister_backend",
]

_BUILTIN = {"TENSORPIPE": "rankcall.rpc.backends.tensorpipe", "ZMQ": "rankcall.rpc.backends.zmq"}
_ENTRY_POINTS = "rankcall.rpc_backends"


class BackendValue(NamedTuple):
    """The two functions that make a back end.

    ``construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)`` returns options;
    ``init_backend_handler(store, name, rank, world_size, rpc_backend_options)`` returns the agent.
    """

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., RpcAgent]


class Backend:
    """One back end: a member of ``BackendType``. There is one object for each name."""

    __slots__ = ("_load", "_value", "name")
    name: str
    _load: Callable[[], Any]
    _value: BackendValue | None

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        for attribute, content in (("name", name), ("_load", load), ("_value", None)):
            object.__setattr__(self, attribute, content)

    # torch checks isinstance() against its own enum, which it replaces at each registration. This
    # property returns the current one.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _torch_registry.BackendType

    @property
    def value(self) -> BackendValue:
        """The back end's two functions; its module is imported when they are first asked for."""
        # Without a lock: loading may run code of another package, and must not hold up threads
        # that look for other back ends. If two threads load at once, they get equal values.
        if self._value is None:
            object.__setattr__(self, "_value", _checked(self.name, self._load()))
            assert self._value is not None
        return self._value

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a BackendType does not change")

    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        return BackendType.__getitem__, (self.name,)

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


class _BackendTypes:
    """All back ends. It is used as torch's enum is, but members can be added to it.

    ``BackendType.ZMQ`` and ``BackendType["ZMQ"]`` are the member of that name. For any other name
    they raise errors that list the back ends there are: ``AttributeError`` and
    ``BackendNotFoundError``.
    """

    def __init__(self) -> None:
        # Threads share it without a lock: they add members by setdefault and remove them by pop,
        # which CPython does in one step.
        self._members = {
            name: Backend(name, partial(importlib.import_module, module))
            for name, module in _BUILTIN.items()
        }

    @property
    def __members__(self) -> MappingProxyType[str, Backend]:
        # Read anew each time: a package may have been installed or put on sys.path meanwhile.
        for point in sorted(entry_points(group=_ENTRY_POINTS), key=lambda point: point.name):
            self._members.setdefault(point.name, Backend(point.name, point.load))
        return MappingProxyType(dict(self._members))

    def __getitem__(self, name: str) -> Backend:
        member = self._members.get(name) or self.__members__.get(name)
        if member is None:
            known = ", ".join(self._members)
            raise BackendNotFoundError(f"there is no RPC backend {name!r}; known: {known}")
        return member

    def __getattr__(self, name: str) -> Backend:
        if name.startswith("__"):  # Python asks for special methods, which are no back ends
            raise AttributeError(name)
        try:
            return self[name]
        except BackendNotFoundError as error:
            raise AttributeError(*error.args) from None

    def __iter__(self) -> Iterator[Backend]:
        return iter(self.__members__.values())

    def __len__(self) -> int:
        return len(self.__members__)

    def __contains__(self, member: object) -> bool:
        return type(member) is Backend

    # isinstance(member, BackendType) is true, as with an enum.
    __instancecheck__ = __contains__

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.__members__])

    def __reduce__(self) -> str:
        return "BackendType"

    def __repr__(self) -> str:
        return f"<BackendType: {', '.join(self.__members__)}>"

    def _add(self, member: Backend) -> None:
        if (
            member.name in self.__members__
            or self._members.setdefault(member.name, member) is not member
        ):
            raise DuplicateBackendError(f"RPC backend {member.name}: already registered")


BackendType = _BackendTypes()
_registered: set[str] = set()


def _checked(name: str, backend: Any) -> BackendValue:
    handlers: list[Any] = [getattr(backend, field, None) for field in BackendValue._fields]
    for field, handler in zip(BackendValue._fields, handlers, strict=True):
        if not callable(handler):
            raise TypeError(f"RPC backend {name}: {field} must be callable; got {handler!r}")
    return BackendValue(*handlers)


def backend_registered(backend_name: str) -> bool:
    """Return whether there is a back end of this name: registered, built in or announced."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., RpcAgent],
) -> Backend:
    """Register a back end and return its member of ``BackendType``.

    Args:
        backend_name: The name of the new member.
        construct_rpc_backend_options_handler: Returns options; see ``BackendValue``.
        init_backend_handler: Returns the agent; see ``BackendValue``.

    Raises:
        DuplicateBackendError: The name is taken. It is a ``RuntimeError``, as torch's is.
        TypeError: The name is no string, or empty, or a handler cannot be called.
    """
    if not isinstance(backend_name, str) or not backend_name:
        raise TypeError(f"the name of an RPC backend is a non-empty string; got {backend_name!r}")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    member = Backend(backend_name, lambda: value)
    _ = member.value  # raises TypeError if a handler is wrong
    BackendType._add(member)
    _registered.add(backend_name)
    return member


def unregister_backend(backend_name: str) -> None:
    """Take back a ``register_backend``. A member that somebody holds stays usable.

    Raises ``BackendNotFoundError`` if there is no such back end, and ``ValueError`` if it was not
    registered by ``register_backend``.
    """
    if backend_name not in _registered:
        _ = BackendType[backend_name]
        raise ValueError(f"RPC backend {backend_name} was not registered by register_backend")
    _registered.discard(backend_name)
    BackendType._members.pop(backend_name, None)


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: Duration = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return a back end's options.

    Args:
        backend: A member of ``BackendType``.
        rpc_timeout: How long a call may take, in seconds or as a ``timedelta``; 0 for ever.
        init_method: Where the group's store is.
        **kwargs: Options of the back end's own.
    """
    construct = backend.value.construct_rpc_backend_options_handler
    timeout_s = seconds(rpc_timeout, "rpc_timeout", zero=True)
    options: RpcBackendOptions = construct(timeout_s, init_method, **kwargs)
    return options


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> RpcAgent:
    """Start a back end and return its agent; the arguments go to its ``init_backend_handler``."""
    agent: RpcAgent = backend.value.init_backend_handler(*args, **kwargs)
    return agent

"""The RPC back ends by name: a drop-in for ``torch.distributed.rpc.backend_registry``.

torch makes a new enum at each registration, and refuses members of the one before. Here
``BackendType`` is one class that never changes: a member stays valid after other registrations, and
``torch.distributed.rpc.init_rpc`` accepts it too. Other packages announce back ends by the entry
point ``rankcall.rpc_backends``: a ``BackendValue``, or a module with its fields' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

from torch.distributed.rpc import RpcAgent, RpcBackendOptions
from torch.distributed.rpc import backend_registry as _torch_registry
from torch.distributed.rpc.constants import DEFAULT_INIT_METHOD, DEFAULT_RPC_TIMEOUT_SEC

from rankcall.handles import Registration
from rankcall.registry import Registry

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
    "unregister_backend",
]


class BackendValue(NamedTuple):
    """The two functions that make a back end.

    ``construct_rpc_backend_options_handler(rpc_timeout, init_method, **kwargs)`` returns options;
    ``init_backend_handler(store, name, rank, world_size, rpc_backend_options)`` returns the agent.
    """

    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions]
    init_backend_handler: Callable[..., RpcAgent]


def _checked(name: str, backend: Any) -> BackendValue:
    handlers: list[Any] = [getattr(backend, field, None) for field in BackendValue._fields]
    for field, handler in zip(BackendValue._fields, handlers, strict=True):
        if not callable(handler):
            raise TypeError(f"RPC backend {name}: {field} must be callable; got {handler!r}")
    return BackendValue(*handlers)


_backends = Registry(
    "RPC backend",
    "rankcall.rpc_backends",
    _checked,
    {
        "TENSORPIPE": "rankcall.rpc.backends.tensorpipe",
        "ZMQ": "rankcall.rpc.backends.zmq",
    },
)
_registrations: dict[str, Registration] = {}


class _Members(type):
    """Lets ``BackendType`` be used as an enum is."""

    def __getattr__(cls, name: str) -> BackendType:
        if name.startswith("__") or name not in _backends:
            known = ", ".join(_backends)
            raise AttributeError(f"there is no RPC backend {name!r}; known: {known}")
        return BackendType(name)

    def __getitem__(cls, name: str) -> BackendType:
        return BackendType(name)

    def __iter__(cls) -> Iterator[BackendType]:
        return (BackendType(name) for name in _backends)

    def __len__(cls) -> int:
        return sum(1 for _ in _backends)

    def __contains__(cls, member: object) -> bool:
        return type(member) is BackendType

    def __dir__(cls) -> list[str]:
        return sorted([*super().__dir__(), *_backends])

    @property
    def __members__(cls) -> MappingProxyType[str, BackendType]:
        return MappingProxyType({member.name: member for member in cls})


class BackendType(metaclass=_Members):
    """A back end by its name: ``BackendType.ZMQ``, ``BackendType["ZMQ"]``.

    Raises ``BackendNotFoundError``, which lists the back ends there are, for any other name.
    """

    __slots__ = ("name",)
    name: str

    def __init__(self, name: str) -> None:
        if name not in _backends:
            _backends.get(name)
        object.__setattr__(self, "name", name)

    # torch checks isinstance() against its own enum, which it replaces at each registration. This
    # property returns the current one.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return _torch_registry.BackendType

    @property
    def value(self) -> BackendValue:
        """The back end's two functions; its module is imported when they are first asked for."""
        return _backends.get(self.name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a BackendType does not change")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.name,)

    def __repr__(self) -> str:
        return f"BackendType.{self.name}"


def backend_registered(backend_name: str) -> bool:
    """Whether there is a back end of this name, registered, built in or announced."""
    return backend_name in _backends


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., RpcBackendOptions],
    init_backend_handler: Callable[..., RpcAgent],
) -> BackendType:
    """Register a back end and return its member; see ``BackendValue`` for the two functions.

    Raises ``DuplicateBackendError`` (a ``RuntimeError``) if the name is taken, and ``TypeError``
    if a handler cannot be called.
    """
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    _registrations[backend_name] = _backends.register(backend_name, value)
    return BackendType(backend_name)


def unregister_backend(backend_name: str) -> None:
    """Take back a ``register_backend``. Raises ``BackendNotFoundError`` if there is none."""
    registration = _registrations.pop(backend_name, None)
    if registration is None:
        _backends.get(backend_name)
        raise ValueError(f"RPC backend {backend_name} was not registered by register_backend")
    registration.stop()


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> RpcBackendOptions:
    """Return a back end's options. ``rpc_timeout`` in seconds; further keywords are its own."""
    construct = backend.value.construct_rpc_backend_options_handler
    options: RpcBackendOptions = construct(rpc_timeout, init_method, **kwargs)
    return options


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> RpcAgent:
    """Start a back end and return its agent; the arguments go to its ``init_backend_handler``."""
    agent: RpcAgent = backend.value.init_backend_handler(*args, **kwargs)
    return agent

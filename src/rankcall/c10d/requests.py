"""The requests that a protocol over a c10d store makes, as values.

A protocol is a generator. It yields requests, receives their answers and returns its result. So
the same code runs against a real store (``rankcall.store``) and against a simulated one, whose
scheduler tries every order of requests (``rankcall.testing.simulated_store``).

No request except ``Arrive``, ``Wait`` and ``Until`` waits for anything, and these three end at the
deadline of the call. A request reads a key that is absent as ``None``.

If the store has ended, the next request raises ``StoreGoneError`` in the protocol. A protocol that
has its result already may catch it; if it does not, its caller raises ``StoreLostError``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A protocol: it yields requests, is sent their answers, and returns ``T``."""


class StoreGoneError(Exception):
    """Raised in a protocol whose store has ended: no key is left, and no request has an effect."""


class Add(NamedTuple):
    """Add to a counter, which starts at 0. The answer is the new value."""

    key: str
    amount: int


class Check(NamedTuple):
    """The answer is whether all of these keys exist."""

    keys: Sequence[str]


class Read(NamedTuple):
    """The answer is the value of a key, or None if the key does not exist."""

    key: str


class ReadMany(NamedTuple):
    """The answer is the list of the values, as for ``Read``, but not as of one moment."""

    keys: Sequence[str]


class Set(NamedTuple):
    """Set a key."""

    key: str
    value: bytes


class CompareSet(NamedTuple):
    """Set a key if it holds ``expected``; an absent key counts as empty.

    The answer is the value of the key afterwards, or None if it does not exist.
    """

    key: str
    expected: bytes
    value: bytes


class Append(NamedTuple):
    """Append to a key; only stores with ``appends`` can."""

    key: str
    value: bytes


class Delete(NamedTuple):
    """Remove a key if it exists. The answer means nothing."""

    key: str


class ListKeys(NamedTuple):
    """The answer is the list of all keys of the store."""


class Wait(NamedTuple):
    """Wait until all of these keys exist. The answer is False after the deadline."""

    keys: Sequence[str]


class Arrive(NamedTuple):
    """Append to some keys, count this process in at ``key``, and wait until ``size`` are in.

    The answer is True, or None if not all came in the time that the request may take. A client that
    must not block there does not count the process in, appends ``instead``, and answers False at
    once: its process asks the store again and again, and so makes requests after all have come. In
    both cases, what was appended tells which processes have come.

    Any other request that names ``key``, also one that reads it, lets all processes pass that wait.
    """

    appends: Sequence[tuple[str, bytes]]
    key: str
    size: int
    instead: Sequence[tuple[str, bytes]]


class Until(NamedTuple):
    """Repeat a request until its answer is enough. The answer is None after the deadline.

    A request whose answer is not enough must not have changed anything. ``seconds`` is how long to
    repeat it, if that is over before the deadline.
    """

    request: Any
    is_enough: Callable[[Any], bool]
    seconds: float = float("inf")


class Now(NamedTuple):
    """The answer is the time of this process's monotonic clock, in seconds."""


class Sleep(NamedTuple):
    """Do nothing for a time."""

    seconds: float


METHODS: dict[type, str] = {
    Add: "add",
    Append: "append",
    Check: "check",
    CompareSet: "compare_set",
    Delete: "delete",
    ListKeys: "list_keys",
    Now: "now",
    Read: "read",
    ReadMany: "read_many",
    Set: "set",
    Sleep: "sleep",
}
"""The names of the requests that do not wait, as methods of a connection."""

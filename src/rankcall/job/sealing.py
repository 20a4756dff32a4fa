"""Values in the job's store that only ranks of the job can have written: ``sealed``.

Whoever reaches a job's store can write to it, because a TCPStore asks for no password. If the
ranks have a secret in common, each value that they write for each other carries a message
authentication code (HMAC) of its key and the secret, and a value without the right one is refused.
The secret comes from the environment of the launcher, is the same on all nodes, and is never in the
store.

Without a secret, values are taken as they are, within the bounds of their readers. A job then rests
on its network, as torch's own use of the store does.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from typing import Any, TypeVar

from rankcall.c10d.requests import CompareSet, Read, ReadMany, Set, Steps, StoreGoneError, Until
from rankcall.secret import find_secret
from rankcall.whole_numbers import whole_number

SECRET = "RANKCALL_SECRET"
ADVICE = f"give all nodes the same {SECRET}_FILE or {SECRET}"
_MARK = b"rankcall-hmac\n"
_DIGEST_BYTES = 32

T = TypeVar("T")


class ForgedError(ValueError):
    """Raised for a value in the store that no rank of this job can have written."""


def job_secret() -> bytes | None:
    """Return the secret of this job; None without one. Raises ``AuthenticationError``."""
    return find_secret(SECRET)


def sealed(steps: Steps[T], secret_of_job: Callable[[], bytes | None] = job_secret) -> Steps[T]:
    """Run a protocol so that what it writes is sealed, and what it reads is checked.

    Counters are not sealed, because the store itself adds to them: their readers have bounds.

    Args:
        steps: The protocol. Its values are not empty.
        secret_of_job: Returns the secret; without one, values are written and read as they are. It
            is called on the thread that makes the requests, because a file can take long to read.

    Raises:
        AuthenticationError: The secret cannot be used.
        ForgedError: A value that was read is not sealed by this secret, or, without a secret, by
            any. The protocol is not told.
    """
    secret = secret_of_job()
    resume: Any = steps.send
    argument: Any = None
    while True:
        try:
            request = resume(argument)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            answer = yield _closed(request, secret)
            resume, argument = steps.send, _opened(request, answer, secret)
        except StoreGoneError as error:
            resume, argument = steps.throw, error


def _closed(request: Any, secret: bytes | None) -> Any:
    """Return a request as it is made, with its values sealed."""
    if isinstance(request, Set):
        return Set(request.key, _seal(request.key, request.value, secret))
    if isinstance(request, CompareSet):
        key, expected, value = request
        return CompareSet(key, _seal(key, expected, secret), _seal(key, value, secret))
    return request


def _opened(request: Any, answer: Any, secret: bytes | None) -> Any:
    """Return an answer as the protocol gets it, with its values checked."""
    if isinstance(request, Until):
        return _opened(request.request, answer, secret)
    if isinstance(request, (Read, CompareSet)):
        return _open(request.key, answer, secret)
    if isinstance(request, ReadMany):
        return [_open(key, value, secret) for key, value in zip(request.keys, answer, strict=True)]
    return answer


def _seal(key: str, value: bytes, secret: bytes | None) -> bytes:
    # A number is not sealed, so that it can be told from one to which the store adds.
    if secret is None or not value or whole_number(value) is not None:
        return value
    return _MARK + _digest(key, value, secret) + value


def _open(key: str, value: bytes | None, secret: bytes | None) -> bytes | None:
    if not value or whole_number(value) is not None:
        return value
    is_sealed = value.startswith(_MARK)
    if secret is None:
        if is_sealed:
            raise ForgedError(f"{key} is sealed by a secret, and this node has none ({ADVICE})")
        return value
    at = len(_MARK) + _DIGEST_BYTES
    digest, rest = value[len(_MARK) : at], value[at:]
    if not is_sealed or not hmac.compare_digest(digest, _digest(key, rest, secret)):
        by_another = "by another secret" if is_sealed else "by no secret"
        raise ForgedError(f"{key} is sealed {by_another} than this node's ({ADVICE})")
    return rest


def _digest(key: str, value: bytes, secret: bytes) -> bytes:
    # With the key, so that a value cannot be moved to another round, node or restart.
    return hmac.digest(secret, key.encode() + b"\0" + value, "sha256")

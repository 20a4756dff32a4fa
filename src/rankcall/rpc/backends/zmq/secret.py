"""The secret that the workers of several hosts have in common, and the CURVE keys made of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from rankcall.errors import AuthenticationError, BackendUnavailableError

# 16 bytes of base64 have 96 bits. BLAKE2b is fast, so a shorter secret could be guessed from one
# handshake that somebody has listened to.
_SHORTEST_SECRET = 16


class CurveKeys(NamedTuple):
    """CURVE keys, 32 bytes each. All workers of a job have the same two pairs."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def find_secret(secret_file: str | os.PathLike[str] | None) -> bytes | None:
    """Return the job's secret, from the file or from the environment.

    ``RANKCALL_RPC_SECRET_FILE`` names a file, ``RANKCALL_RPC_SECRET`` is the secret itself; None if
    neither is set. Raises ``AuthenticationError`` if the file is missing or others can read it,
    and if the secret is too short.
    """
    file = secret_file or os.environ.get("RANKCALL_RPC_SECRET_FILE")
    if file:
        return _check_length(_read(Path(file)), str(file))
    secret = os.environ.get("RANKCALL_RPC_SECRET")
    return _check_length(secret.encode(), "RANKCALL_RPC_SECRET") if secret else None


def derive_keys(secret: bytes) -> CurveKeys:
    """Return the keys that follow from a secret (BLAKE2b; one key for each role).

    All workers derive the same keys, so none has to be sent, through the store or otherwise.
    """
    import zmq
    from zmq.utils import z85

    if not zmq.has("curve"):
        raise BackendUnavailableError(
            "this pyzmq was built without CURVE, which the workers of several hosts need to trust "
            "each other: pip install --force-reinstall pyzmq"
        )
    pairs: list[bytes] = []
    for role in (b"server", b"client"):
        private = hashlib.blake2b(secret, digest_size=32, person=b"rankcall " + role).digest()
        pairs += [z85.decode(zmq.curve_public(z85.encode(private))), private]
    return CurveKeys(*pairs)


def _read(file: Path) -> bytes:
    try:
        mode = file.stat().st_mode & 0o077
        text = file.read_bytes().strip()
    except OSError as error:
        raise AuthenticationError(f"the secret {file} cannot be read: {error}") from error
    if mode:
        raise AuthenticationError(f"others may read the secret {file}: chmod 600 {file}")
    return text


def _check_length(secret: bytes, source: str) -> bytes:
    if len(secret) < _SHORTEST_SECRET:
        raise AuthenticationError(
            f"the secret in {source} has {len(secret)} bytes; it must have at least "
            f"{_SHORTEST_SECRET}. Make one with: head -c 32 /dev/urandom | base64"
        )
    return secret

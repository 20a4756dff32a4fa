"""The secret that the workers of one job share, and the CURVE keys that follow from it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from rankcall.errors import AuthenticationFailed

_SHORTEST = 16


class Keys(NamedTuple):
    """CURVE keys, 32 bytes each. Every worker of a job has the same two pairs, and nobody else."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def find_secret(secret_file: str | os.PathLike[str] | None) -> bytes | None:
    """Return the job's secret, from the file or from the environment.

    ``RANKCALL_RPC_SECRET_FILE`` names a file, ``RANKCALL_RPC_SECRET`` is the secret itself; None
    where neither is given. Raises ``AuthenticationFailed`` for a file that others can read, or that
    is not there, and for a secret that is too short.
    """
    file = secret_file or os.environ.get("RANKCALL_RPC_SECRET_FILE")
    if file:
        return _long_enough(_read(Path(file)), str(file))
    told = os.environ.get("RANKCALL_RPC_SECRET")
    return _long_enough(told.encode(), "RANKCALL_RPC_SECRET") if told else None


def derive_keys(secret: bytes) -> Keys:
    """Return the keys that follow from a secret (BLAKE2b; one key a role)."""
    import zmq
    from zmq.utils import z85

    pairs: list[bytes] = []
    for role in (b"server", b"client"):
        private = hashlib.blake2b(secret, digest_size=32, person=b"rankcall " + role).digest()
        pairs += [z85.decode(zmq.curve_public(z85.encode(private))), private]
    return Keys(*pairs)


def _read(file: Path) -> bytes:
    try:
        mode = file.stat().st_mode & 0o077
        text = file.read_bytes().strip()
    except OSError as error:
        raise AuthenticationFailed(f"the secret {file} cannot be read: {error}") from error
    if mode:
        raise AuthenticationFailed(f"others may read the secret {file}: chmod 600 {file}")
    return text


def _long_enough(secret: bytes, where: str) -> bytes:
    if len(secret) < _SHORTEST:
        raise AuthenticationFailed(
            f"the secret in {where} has {len(secret)} bytes; it takes {_SHORTEST} or more, "
            "such as those of: head -c 32 /dev/urandom | base64"
        )
    return secret

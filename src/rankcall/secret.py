"""A secret that the ranks of a job have in common: from a file, or from the environment."""

from __future__ import annotations

import os
from pathlib import Path

from rankcall.errors import AuthenticationError

# 16 bytes of base64 have 96 bits. The hashes that are made with a secret are fast, so a shorter one
# could be guessed from one message that somebody has read.
_SHORTEST = 16


def find_secret(variable: str, file: str | os.PathLike[str] | None = None) -> bytes | None:
    """Return a secret; None if neither the file nor the environment has one.

    Args:
        variable: The environment variable that holds the secret itself. The variable of that name
            with ``_FILE`` behind it names a file with the secret, and comes first.
        file: The file, if the caller knows it.

    Raises:
        AuthenticationError: The file is missing, others can read it, or the secret is too short.
    """
    path = file or os.environ.get(f"{variable}_FILE")
    if path:
        return _check_length(_read(Path(path)), str(path))
    secret = os.environ.get(variable)
    return _check_length(os.fsencode(secret), variable) if secret else None


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
    if len(secret) < _SHORTEST:
        raise AuthenticationError(
            f"the secret in {source} has {len(secret)} bytes; it must have at least "
            f"{_SHORTEST}. Make one with: head -c 32 /dev/urandom | base64"
        )
    return secret

"""The CURVE keys of a job, made of the secret that its workers on several hosts have in common."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from rankcall.errors import BackendUnavailableError


class CurveKeys(NamedTuple):
    """CURVE keys, 32 bytes each. All workers of a job have the same two pairs."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


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

"""The arguments of this package's functions: checked before any request is made."""

from __future__ import annotations


def check_prefix(key_prefix: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` if this is not a prefix of keys."""
    if not isinstance(key_prefix, str):
        raise TypeError(f"key_prefix must be a str; got {type(key_prefix).__name__}")
    if key_prefix.isascii():
        return
    try:
        key_prefix.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"key_prefix {key_prefix!r} cannot be written as UTF-8") from error


def check_world(world_size: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` if this is not a positive integer."""
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size must be an int; got {world_size!r}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1; got {world_size}")


def check_rank(rank: int, world_size: int, name: str = "rank") -> None:
    """Raise ``TypeError`` or ``ValueError`` if the rank is outside the world."""
    if rank.__class__ is world_size.__class__ is int and 0 <= rank < world_size:
        return  # the usual case: sixteen ranks on a core check this while all wait for the last
    check_world(world_size)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{name} must be an int; got {rank!r}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{name} {rank} is outside a world of {world_size} (0 to {world_size - 1})"
        )

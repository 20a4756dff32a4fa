"""Checks of the arguments, before any request is made."""

from __future__ import annotations

import math

from torch.distributed import Store

__all__ = ["check_prefix", "check_rank", "check_seconds", "check_store", "check_world"]


def check_store(store: Store) -> None:
    """Raise ``TypeError`` if this is not a store."""
    if not isinstance(store, Store):
        raise TypeError(f"store must be a torch.distributed.Store; got {type(store).__name__}")


def check_prefix(key_prefix: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` if this is not a prefix of keys."""
    if not isinstance(key_prefix, str):
        raise TypeError(f"key_prefix must be a str; got {type(key_prefix).__name__}")
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
    check_world(world_size)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise TypeError(f"{name} must be an int; got {rank!r}")
    if not 0 <= rank < world_size:
        raise ValueError(
            f"{name} {rank} is outside a world of {world_size} (0 to {world_size - 1})"
        )


def check_seconds(seconds: float, name: str, least: float = 0.0, positive: bool = True) -> float:
    """Return seconds as a float; raise ``TypeError`` or ``ValueError`` if this is not a time."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{name} is in seconds; got {seconds!r}")
    if math.isnan(seconds) or seconds < least or (positive and seconds <= 0):
        wanted = "positive" if positive else f"at least {least:g}"
        raise ValueError(f"{name} must be {wanted} seconds; got {seconds}")
    return float(seconds)

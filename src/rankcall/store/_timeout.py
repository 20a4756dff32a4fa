"""``store_timeout``: a store's timeout for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from rankcall.store._checks import check_seconds, check_store

__all__ = ["store_timeout"]


@contextmanager
def store_timeout(store: Store, timeout: float) -> Iterator[None]:
    """Set the store's timeout to ``timeout`` seconds; put the old one back on every way out.

    The timeout is the store object's: all threads that use it see it, and those who use the same
    store through a ``PrefixStore``. The functions of this module do not need it. Raises
    ``ValueError`` for a timeout that is not positive.
    """
    check_store(store, "")
    seconds = check_seconds(timeout, "timeout")
    known: Any = store  # torch's types leave ``timeout`` out
    before: timedelta = known.timeout
    known.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        known.set_timeout(before)

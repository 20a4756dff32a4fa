"""``store_timeout``: change a store's own timeout for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from rankcall.c10d.errors import check_store
from rankcall.durations import Duration, seconds


@contextmanager
def store_timeout(store: Store, timeout: Duration) -> Iterator[None]:
    """Set the store's timeout to ``timeout``; put the old one back on every way out.

    The timeout is the store object's: all threads that use it see it, and those that use the same
    store through a ``PrefixStore``. The functions of this module do not need it. Raises
    ``ValueError`` for a timeout that is not positive.
    """
    check_store(store)
    timeout_s = seconds(timeout, "timeout")
    known: Any = store  # torch's types leave ``timeout`` out
    before: timedelta = known.timeout
    known.set_timeout(timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        known.set_timeout(before)

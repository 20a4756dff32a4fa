"""The errors of a store itself: it is not one, it is gone, or it does not answer."""

from __future__ import annotations

from torch.distributed import DistNetworkError, Store

from rankcall import errors


class StoreLostError(errors.StoreLostError, DistNetworkError):
    """Raised if the store's host has died, or does not answer because it is stopped.

    ``rankcall.errors.StoreLostError``, which says what ``host`` and ``is_silent`` hold, and torch's
    own error, so that an ``except`` clause for either catches it.
    """


def check_store(store: Store) -> None:
    """Raise ``TypeError`` if this is not a store."""
    if not isinstance(store, Store):
        raise TypeError(f"store must be a torch.distributed.Store; got {type(store).__name__}")


def lost(place: str, reason: str) -> StoreLostError:
    """Return the error that says that the store's host is gone."""
    is_silent = "Timeout" in reason or "no answer" in reason
    state = "does not answer (its host is stopped, or cut off)" if is_silent else "is gone"
    return StoreLostError(
        f"the store {place} {state}: {reason.splitlines()[0]}. Look at the process that hosts it; "
        "with rankcall.store.failover() a job goes on without it",
        host=place.removeprefix("at "),
        is_silent=is_silent,
    )

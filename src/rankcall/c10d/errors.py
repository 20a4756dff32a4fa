"""The errors of a store itself: the argument is not a store, or the store is gone or silent."""

from __future__ import annotations

from torch.distributed import DistNetworkError, Store

from rankcall import errors


class StoreLostError(errors.StoreLostError, DistNetworkError):
    """Raised if the store's host has died, or does not answer because it is stopped.

    ``rankcall.errors.StoreLostError``, which says what ``host`` and ``is_silent`` hold, and torch's
    own error, so that an ``except`` clause for either catches it.

    ``answered_lately`` says that the store had answered a moment before the caller's time was over.
    Then it is there, and it or this machine is only too busy.
    """

    answered_lately = False


def check_store(store: Store) -> None:
    """Raise ``TypeError`` if this is not a store."""
    if not isinstance(store, Store):
        raise TypeError(f"store must be a torch.distributed.Store; got {type(store).__name__}")


def lost(
    place: str,
    reason: str,
    *,
    is_silent: bool = False,
    answered_lately: bool = False,
    name: str = "",
) -> StoreLostError:
    """Return the error that says that the store is gone, or does not answer.

    Args:
        place: The place of the store, as ``rankcall.c10d.location.where`` names it.
        reason: What happened; its first line stands in the message.
        is_silent: Whether the store gave no answer in time, but did not close the connection. The
            code that raises knows it; the text of torch's errors is not searched.
        answered_lately: Whether the store had answered a moment before.
        name: The call for which the store is lost, for example ``barrier 'epoch'``.
    """
    state = "does not answer (its host is stopped, or cut off)" if is_silent else "is gone"
    said = next(iter(reason.strip().splitlines()), "no reason was given").rstrip(".")
    end = "" if said.endswith(("?", "!")) else "."  # torch asks: did the remote server crash?
    error = StoreLostError(
        f"{name + ': ' if name else ''}the store {place} {state}: {said}{end} Look at the "
        "process that hosts it; with rankcall.store.failover() a job goes on without it",
        host=place.removeprefix("at "),
        is_silent=is_silent,
    )
    error.answered_lately = answered_lately
    return error

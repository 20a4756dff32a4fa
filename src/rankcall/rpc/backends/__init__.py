"""The back ends of ``rankcall.rpc``, ``tensorpipe`` and ``zmq``; a check that both begin with."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def check_arguments(store: dist.Store, options: Any, wanted: type) -> None:
    """Raise ``TypeError`` if a back end got something else than a store and its own options.

    The texts are those of torch's back ends: its tests, and users', look for them.
    """
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store; got {type(store).__name__} {store!r}")
    if not isinstance(options, wanted):
        raise TypeError(
            f"`rpc_backend_options` must be a `{wanted.__name__}`; "
            f"got {type(options).__name__} {options!r}"
        )

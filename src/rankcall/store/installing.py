"""``install``: make torch's own elastic code use this package's functions."""

from __future__ import annotations

import threading
from typing import Any

from rankcall.errors import warn_renamed
from rankcall.handles import Handle
from rankcall.store.barriers import barrier
from rankcall.store.exchanges import get_all, synchronize
from rankcall.store.timeouts import store_timeout

_lock = threading.Lock()
_installed: list[Installed] = []


class Installed(Handle):
    """The handle that ``install`` returns; ``stop()`` puts torch's functions back."""

    def __init__(self, before: list[tuple[Any, str, Any]]) -> None:
        self._before = before

    def stop(self) -> None:
        """Put torch's functions back. A second call does nothing."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
                for module, name, function in self._before:
                    setattr(module, name, function)

    def remove(self) -> None:
        """Call ``stop()``, by its name of version 0.1."""
        warn_renamed("store.install().remove()", "stop()")
        self.stop()


def install() -> Installed:
    """Put ``barrier``, ``synchronize``, ``get_all`` and ``store_timeout`` in place of torch's.

    In this process, for all callers by way of ``torch.distributed.elastic.utils``: the exit barrier
    of torchelastic's agents, ``create_c10d_store``, the checkpoint barriers. All processes that
    meet have to install it, because torch's functions and these do not see each other's arrivals.
    The handle undoes it.

    Raises ``RuntimeError`` if it is installed already.
    """
    import torch.distributed.elastic.utils.distributed as distributed
    import torch.distributed.elastic.utils.store as elastic

    ours = {
        (elastic, "barrier"): barrier,
        (elastic, "get_all"): get_all,
        (elastic, "store_timeout"): store_timeout,
        (elastic, "synchronize"): synchronize,
        (distributed, "barrier"): barrier,
    }
    with _lock:
        if _installed:
            raise RuntimeError(
                "rankcall.store is installed already: stop() the handle that install() returned"
            )
        handle = Installed([(module, name, getattr(module, name)) for module, name in ours])
        for (module, name), function in ours.items():
            setattr(module, name, function)
        _installed.append(handle)
    return handle

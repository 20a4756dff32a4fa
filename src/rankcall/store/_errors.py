"""The errors a store raises, which torch's own ``except`` clauses catch as well.

``rankcall.errors`` defines them without torch; what is raised here derives from torch's too.
"""

from __future__ import annotations

from torch.distributed import DistNetworkError, DistStoreError

from rankcall import errors

__all__ = ["BarrierTimeout", "StoreLost"]


class BarrierTimeout(errors.BarrierTimeout, DistStoreError):
    __doc__ = errors.BarrierTimeout.__doc__


class StoreLost(errors.StoreLost, DistNetworkError):
    __doc__ = errors.StoreLost.__doc__

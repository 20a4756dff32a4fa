"""Agree through a c10d Store: barriers and exchanges that name everyone who is missing.

The functions of ``torch.distributed.elastic.utils.store``, with its names and positional
arguments, on any ``torch.distributed.Store``.
"""

from __future__ import annotations

from rankcall.errors import WorldMismatch
from rankcall.store._barrier import barrier
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._exchange import get_all, synchronize
from rankcall.store._timeout import store_timeout

__all__ = [
    "BarrierTimeout",
    "StoreLost",
    "WorldMismatch",
    "barrier",
    "get_all",
    "store_timeout",
    "synchronize",
]

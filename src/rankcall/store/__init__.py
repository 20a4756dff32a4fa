"""Agree through a c10d Store: barriers and exchanges that name everyone who is missing.

The functions of ``torch.distributed.elastic.utils.store``, with its names and positional
arguments, on any ``torch.distributed.Store``.
"""

from __future__ import annotations

from rankcall.errors import WorldMismatch
from rankcall.store._barrier import barrier
from rankcall.store._cleanup import clean_up
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._exchange import get_all, synchronize
from rankcall.store._failover import Failover, failover
from rankcall.store._install import Installed, install
from rankcall.store._rollcall import Answer, Rollcall, rollcall
from rankcall.store._timeout import store_timeout

__all__ = [
    "Answer",
    "BarrierTimeout",
    "Failover",
    "Installed",
    "Rollcall",
    "StoreLost",
    "WorldMismatch",
    "barrier",
    "clean_up",
    "failover",
    "get_all",
    "install",
    "rollcall",
    "store_timeout",
    "synchronize",
]

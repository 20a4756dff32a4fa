"""Agree through a c10d Store: barriers and exchanges that name every missing rank.

The functions of ``torch.distributed.elastic.utils.store``, with its names and positional
arguments, on any ``torch.distributed.Store``. docs/design/store.md describes the protocol.
"""

from __future__ import annotations

from rankcall.errors import WorldMismatch
from rankcall.store._calls import barrier, clean_up, get_all, store_timeout, synchronize
from rankcall.store._errors import BarrierTimeout, StoreLost
from rankcall.store._failover import Failover, failover
from rankcall.store._install import Installed, install
from rankcall.store._rollcall import Answer, Rollcall, rollcall

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

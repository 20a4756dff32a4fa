"""Agree through a c10d Store: barriers and exchanges that name every missing rank.

The functions of ``torch.distributed.elastic.utils.store``, with its names and positional
arguments, on any ``torch.distributed.Store``; and a roll call, a clean-up and a store that outlives
its host. docs/design/store.md describes the protocol.
"""

from rankcall.c10d.errors import StoreLostError
from rankcall.errors import WorldMismatchError
from rankcall.store.barriers import barrier
from rankcall.store.cleaning import clean_up
from rankcall.store.errors import BarrierTimeout
from rankcall.store.exchanges import any_failed, get_all, synchronize
from rankcall.store.failing_over import Failover, failover
from rankcall.store.installing import Installed, install
from rankcall.store.rollcalls import Answer, Rollcall, rollcall
from rankcall.store.timeouts import store_timeout

__all__ = [
    "Answer",
    "BarrierTimeout",
    "Failover",
    "Installed",
    "Rollcall",
    "StoreLostError",
    "WorldMismatchError",
    "any_failed",
    "barrier",
    "clean_up",
    "failover",
    "get_all",
    "install",
    "rollcall",
    "store_timeout",
    "synchronize",
]

"""Uneven inputs with any parallelism: no hang, exact gradients, no cost while inputs are even.

``Join``, ``Joinable`` and ``JoinHook`` follow the protocol of
``torch.distributed.algorithms.join``. torch's joinables work with this ``Join``, and joinables
written for this package work with torch's.
"""

from __future__ import annotations

from rankcall._joins import JoinSummary, RankSummary
from rankcall.join.context import Join
from rankcall.join.protocol import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "JoinSummary", "Joinable", "RankSummary"]

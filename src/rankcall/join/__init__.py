"""Uneven inputs with any parallelism: no hang, exact gradients, and no tax on even steps.

``Join``, ``Joinable`` and ``JoinHook`` have the protocol of ``torch.distributed.algorithms.join``
and work with its objects both ways.
"""

from __future__ import annotations

from rankcall._joins import JoinSummary, RankSummary
from rankcall.join.context import Join
from rankcall.join.protocol import Joinable, JoinHook

__all__ = ["Join", "JoinHook", "JoinSummary", "Joinable", "RankSummary"]

"""Uneven inputs with any parallelism: no hang, exact gradients, no cost while inputs are even.

``Join`` follows the protocol of ``torch.distributed.algorithms.join``, and ``Joinable`` and
``JoinHook`` are torch's own classes. So torch's joinables work with this ``Join``, and joinables
written for this package work with torch's.
"""

from __future__ import annotations

from torch.distributed.algorithms.join import Joinable, JoinHook

from rankcall.join.context import Join
from rankcall.run.joins import JoinSummary, RankSummary

__all__ = ["Join", "JoinHook", "JoinSummary", "Joinable", "RankSummary"]

"""Tools that test rankcall, and that its users can test with: real ranks, faults, made-up runs."""

from rankcall.testing.faults import FaultPlan
from rankcall.testing.injection import Fault, InjectedFault
from rankcall.testing.model import Op, Pace
from rankcall.testing.spawn import RankResult, Ranks, RanksFailed, spawn_ranks, start_ranks
from rankcall.testing.synthetic import Synthetic, synthetic_run

__all__ = [
    "Fault",
    "FaultPlan",
    "InjectedFault",
    "Op",
    "Pace",
    "RankResult",
    "Ranks",
    "RanksFailed",
    "Synthetic",
    "spawn_ranks",
    "start_ranks",
    "synthetic_run",
]

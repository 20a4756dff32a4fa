"""Tools that test rankcall, and that its users can test with: real ranks, faults, made-up runs."""

from rankcall.testing._spawn import RankResult, Ranks, RanksFailed, spawn_ranks, start_ranks
from rankcall.testing.faults import Fault, FaultPlan, InjectedFault
from rankcall.testing.synthetic import Op, Pace, Synthetic, synthetic_run

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

"""What the ranks of a job wait for by RPC: the states of their agents, and the waits that are long.

A rank's state is a text in its ring's header (``ring/rpc_state.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankcall.analysis.snapshot import RankState, Snapshot
from rankcall.ring.rpc_state import RpcState, RpcWait, decode

_S = 1e9


@dataclass(frozen=True)
class RankWait:
    """A wait of one rank, and the rank of the worker whose answer it waits for, if it is known."""

    rank: int
    to_rank: int | None
    wait: RpcWait

    @property
    def age_s(self) -> float:
        """For how long it has been seen to wait."""
        return self.wait.since_ns / _S


def with_ages(text: str, moment: int) -> str:
    """Return a state of a ring's header with the ages that its times have at some moment."""
    state = decode(text)
    if state is None:
        return ""
    return state.with_times(lambda since_ns: max(0, moment - since_ns)).encode()


@lru_cache(maxsize=4096)
def _state(text: str) -> RpcState | None:
    return decode(text)


def rpc_states(snapshot: Snapshot) -> dict[int, RpcState]:
    """Return the state of each rank whose RPC agent is on, with ages as times."""
    states = {rank.rank: _state(rank.rpc) for rank in snapshot.ranks if rank.rpc}
    return {rank: state for rank, state in states.items() if state is not None}


def rpc_quiet_s(rank: RankState) -> float:
    """Return for how long a rank was seen to do nothing new by RPC; infinity without an agent."""
    state = _state(rank.rpc)
    return float("inf") if state is None else state.active_ns / _S


def long_waits(snapshot: Snapshot, hang_after: float) -> Sequence[RankWait]:
    """Return the waits for answers that have lasted for ``hang_after`` s, the longest first."""
    states = rpc_states(snapshot)
    ranks: dict[str, int] = {}
    for rank, state in states.items():
        ranks.setdefault(state.worker, rank)
        # A call that names its worker by id: in a static group, that is the rank.
        ranks.setdefault(f"#{rank}", rank)
    waits = [
        RankWait(rank, ranks.get(wait.to), wait)
        for rank, state in states.items()
        for wait in state.waits
        if wait.since_ns / _S >= hang_after
    ]
    return sorted(waits, key=lambda wait: (-wait.age_s, wait.rank))

"""Who is who: one line for each process that claimed a rank, appended to one key.

``+rank/world nonce pid host``; ``-`` instead of ``+`` takes a claim back, ``!`` too: that process
was turned away, because another one is that rank.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from rankcall.run import host_name

__all__ = ["Claim", "conflicts", "hosts_of", "new_claim", "parse"]


class Claim(NamedTuple):
    """One process's word that it is a rank of a world. ``nonce`` is unique."""

    rank: int
    world_size: int
    nonce: str
    pid: int
    host: str

    def line(self, sign: str = "+") -> bytes:
        """Write it as the log has it."""
        text = f"{sign}{self.rank}/{self.world_size} {self.nonce} {self.pid} {self.host}\n"
        return text.encode()

    @property
    def who(self) -> str:
        """Name the process as a person would look for it."""
        return f"pid {self.pid} on {self.host}"

    @property
    def plain(self) -> tuple[int, int, str, int]:
        """Return it as ``WorldMismatch.claims`` has it."""
        return self.rank, self.world_size, self.host, self.pid


def new_claim(rank: int, world_size: int) -> Claim:
    """Make this process's claim."""
    host = re.sub(r"\s+", "_", host_name()) or "unknown"
    return Claim(rank, world_size, os.urandom(6).hex(), os.getpid(), host)


_LINE = re.compile(rb"([+!-])(-?\d+)/(\d+) ([0-9a-f]+) (\d+) ([^\s]+)")


@lru_cache(maxsize=8)
def parse(log: bytes) -> tuple[list[Claim], list[Claim]]:
    """Return the claims that stand and those that were turned away, oldest first.

    Lines that are not ours are passed over. Not to be changed by the caller: all who read the same
    log share the answer.
    """
    standing: dict[str, Claim] = {}
    refused: list[Claim] = []
    for sign, rank, world, nonce, pid, host in _LINE.findall(log):
        one = Claim(int(rank), int(world), nonce.decode(), int(pid), host.decode(errors="replace"))
        if sign == b"+":
            standing[one.nonce] = one
        else:
            standing.pop(one.nonce, None)
            refused += [one] * (sign == b"!")
    here = {(one.pid, one.host) for one in standing.values()}
    return list(standing.values()), [one for one in refused if (one.pid, one.host) not in here]


def conflicts(claims: Sequence[Claim], world_size: int) -> list[list[Claim]]:
    """Return the groups of claims on one and the same rank of a world of this size."""
    by_rank: dict[int, list[Claim]] = defaultdict(list)
    for one in claims:
        if one.world_size == world_size:
            by_rank[one.rank].append(one)
    return [group for _, group in sorted(by_rank.items()) if len(group) > 1]


def hosts_of(claims: Sequence[Claim], world_size: int) -> dict[int, str]:
    """Return the host of each rank that has a process, or had one in an earlier round."""
    known = {one.rank: one.host for one in claims if one.world_size == world_size}
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0)
    if local < 1 or os.environ.get("WORLD_SIZE") != str(world_size):
        return known
    # torchrun numbers the ranks host by host: a rank's host is that of its neighbours.
    by_host = {rank // local: host for rank, host in known.items()}
    return {
        rank: known.get(rank) or by_host[rank // local]
        for rank in range(world_size)
        if rank in known or rank // local in by_host
    }

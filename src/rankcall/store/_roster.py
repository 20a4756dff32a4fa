"""Who is who: one line for each process that claimed a rank, appended to one key.

``+rank/world nonce pid host``; ``-`` instead of ``+`` takes a claim back, ``!`` too: that process
was turned away, because another one is that rank.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rankcall.rundir import host_name

__all__ = ["Claim", "Roster", "new_claim", "parse", "read"]


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


@dataclass(frozen=True)
class Roster:
    """What a log says of a world of one size.

    ``twice``: the groups of claims on one and the same rank. ``hosts``: the host of each rank that
    has a process, or had one in an earlier round. Shared by all who read the same log.
    """

    claims: Sequence[Claim]
    refused: Sequence[Claim]
    twice: Sequence[list[Claim]]
    hosts: Mapping[int, str]


def read(log: bytes, world_size: int) -> Roster:
    """Return what a log says; once for all threads that read the same."""
    return _read(log, world_size, _ranks_on_a_host(world_size))


@lru_cache(maxsize=8)
def _read(log: bytes, world_size: int, on_a_host: int) -> Roster:
    claims, refused = parse(log)
    by_rank: dict[int, list[Claim]] = defaultdict(list)
    for one in claims:
        if one.world_size == world_size:
            by_rank[one.rank].append(one)
    twice = [group for _, group in sorted(by_rank.items()) if len(group) > 1]
    hosts = {rank: group[-1].host for rank, group in by_rank.items()}
    return Roster(claims, refused, twice, _with_neighbours(hosts, world_size, on_a_host))


def _ranks_on_a_host(world_size: int) -> int:
    """Return how many ranks torchrun started on each host; 0 where it is not known."""
    if os.environ.get("WORLD_SIZE") != str(world_size):
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 0)


def _with_neighbours(known: Mapping[int, str], world_size: int, on_a_host: int) -> dict[int, str]:
    """Add the ranks beside those known: torchrun numbers ranks host by host."""
    if on_a_host < 1:
        return dict(known)
    by_host = {rank // on_a_host: host for rank, host in known.items()}
    return {
        rank: known.get(rank) or by_host[rank // on_a_host]
        for rank in range(world_size)
        if rank in known or rank // on_a_host in by_host
    }

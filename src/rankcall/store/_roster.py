"""Who is who: one line for each process that claimed a rank, appended to a log.

``+rank/world nonce pid.start.place host``; ``-`` instead of ``+`` takes a claim back. In the log of
those who did not belong, ``!`` is a process whose rank another one is, ``?`` one that came with
another world size.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from rankcall.ring.writer import boot_id, process_start
from rankcall.rundir import host_name

__all__ = ["Claim", "Roster", "new_claim", "read", "signed"]


class Claim(NamedTuple):
    """One process's word that it is a rank of a world. ``nonce`` is unique.

    ``start`` (clock ticks since boot) and ``place`` (the machine's boot and pid namespace) tell
    whether the process is there still, for whoever is in the same place; 0 where not known.
    """

    rank: int
    world_size: int
    nonce: str
    pid: int
    host: str
    start: int = 0
    place: str = "0"

    def line(self, sign: str = "+") -> bytes:
        """Write it as the log has it."""
        process = f"{self.pid}.{self.start}.{self.place}"
        return f"{sign}{self.rank}/{self.world_size} {self.nonce} {process} {self.host}\n".encode()

    @property
    def who(self) -> str:
        """Name the process as a person would look for it."""
        return f"pid {self.pid} on {self.host}"

    @property
    def process(self) -> tuple[int, int, str, str]:
        """Tell the process apart from all others."""
        return self.pid, self.start, self.place, self.host

    @property
    def gone(self) -> bool:
        """Whether the process has ended, beyond doubt; never where it ran in another place."""
        known = self.start > 0 and self.place == _place() != "0"
        return known and process_start(self.pid) != self.start

    @property
    def plain(self) -> tuple[int, int, str, int]:
        """Return it as ``WorldMismatch.claims`` has it."""
        return self.rank, self.world_size, self.host, self.pid


@lru_cache(maxsize=1)
def _place() -> str:
    """Name the only place where this process's pid is its own."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return "0"
    boot = boot_id()
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8] if boot else "0"


def new_claim(rank: int, world_size: int) -> Claim:
    """Make this process's claim."""
    host = re.sub(r"\s+", "_", host_name()) or "unknown"
    pid = os.getpid()
    start = process_start(pid) or 0
    return Claim(rank, world_size, os.urandom(6).hex(), pid, host, start, _place())


_LINE = re.compile(rb"([+!?-])(-?\d+)/(\d+) ([0-9a-f]+) (\d+)\.(\d+)\.([0-9a-f]+) ([^\s]+)")


@lru_cache(maxsize=8)
def signed(log: bytes) -> list[tuple[str, Claim]]:
    """Return the lines of a log with their signs, oldest first.

    Lines that are not ours are passed over. Not to be changed by the caller: all who read the same
    log share the answer.
    """
    return [
        (sign.decode(), Claim(int(rank), int(world), nonce.decode(), int(pid),
                              host.decode(errors="replace"), int(start), place.decode()))
        for sign, rank, world, nonce, pid, start, place, host in _LINE.findall(log)
    ]  # fmt: skip


@dataclass(frozen=True)
class Roster:
    """What a log says of a world.

    ``twice``: the groups of claims on one and the same rank. ``hosts``: the host of each rank that
    has a process, or had one in an earlier round. Shared by all who read the same log.
    """

    claims: Sequence[Claim]
    twice: Sequence[list[Claim]]
    hosts: Mapping[int, str]


def read(log: bytes, world_size: int) -> Roster:
    """Return what a log says; once for all threads that read the same."""
    return _read(log, world_size, _ranks_on_a_host(world_size))


@lru_cache(maxsize=8)
def _read(log: bytes, world_size: int, on_a_host: int) -> Roster:
    standing: dict[str, Claim] = {}
    for sign, one in signed(log):
        if sign == "+":
            standing[one.nonce] = one
        else:
            standing.pop(one.nonce, None)
    by_rank: dict[int, list[Claim]] = defaultdict(list)
    for one in standing.values():
        by_rank[one.rank].append(one)
    ranks = {rank: group for rank, group in by_rank.items() if rank >= 0}
    twice = [group for _, group in sorted(ranks.items()) if len(group) > 1]
    hosts = {rank: group[-1].host for rank, group in ranks.items()}
    return Roster([*standing.values()], twice, _with_neighbours(hosts, world_size, on_a_host))


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

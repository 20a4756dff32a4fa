"""When a node's leader looks for calls that no time can end.

Such a look reads the rings of all ranks, so a healthy job must not cause many. The watcher of each
rank writes into its ring's header which call it is in, as a number. Ranks that wait for a late one
are all in the same call, and cause no look. Different calls, or a process that is gone, cause one.
"""

from __future__ import annotations

import time
import zlib
from typing import Any

from rankcall.job.judge import Judge
from rankcall.record import KINDS, OPS, SIZE_TO_AGREE_ON
from rankcall.ring.follower import LiveTables
from rankcall.ring.layout import Header
from rankcall.ring.tables import Group

_IN_CALL_S = 0.2  # a rank that has been in a call for less may be on its way
# Between two looks that must agree. The second only has to begin after the first has ended: a proof
# names calls, and their ages are looked at in each.
_CONFIRM_S = 0.05
_LEAST_PAUSE_S = 0.25
_SHARE = 0.01  # of a core, for looks that find nothing
_P2P = KINDS.index("p2p")


class CallNumbers:
    """Numbers for calls: equal on all ranks that issue one collective with equal arguments."""

    def __init__(self, tables: LiveTables) -> None:
        self._tables = tables
        self._groups: dict[Group, int] = {}  # by group: a number that is equal on all members

    def number_of(self, record: Any) -> int:
        """Return the number of a record's call; 0 if its group is not known."""
        group = self._tables.now().groups.get(int(record["group"]))
        if group is None:
            return 0
        if group not in self._groups:
            text = f"{group.name} {group.epoch} {group.ranks}"
            self._groups[group] = zlib.crc32(text.encode())
        op = int(record["op"])
        size = SIZE_TO_AGREE_ON.get(OPS[op]) if op < len(OPS) else None
        facts = [self._groups[group], op, int(record["seq"]), int(record["root"])]
        facts.append(int(record[size]) if size is not None else 0)
        if record["kind"] == _P2P:  # of which each end is a call of its own
            facts += [int(record["peer"]), int(record["tag"])]
        return zlib.crc32(repr(facts).encode()) or 1


class EndlessCalls:
    """Decides when to look; on the watcher's thread of the node's leader."""

    def __init__(self) -> None:
        self._seen: set[int] = set()  # the ranks that have had a ring
        self._next = self._confirms = 0.0

    def pause_s(self, now: float, longest_s: float) -> float:
        """Return how long to sleep: less than usual if the last look must be confirmed."""
        return min(longest_s, self._confirms - now) if now < self._confirms else longest_s

    def is_due(self, headers: dict[int, Header], now: float) -> bool:
        """Return whether to look, by the headers of the node's ranks."""
        self._seen.update(headers)
        world = max((header.world_size for header in headers.values()), default=0)
        if now < self._next or len(self._seen) < world:
            return False  # other nodes are not asked, so they must have no ranks
        now_ns = time.monotonic_ns()
        waiting = [
            header
            for header in headers.values()
            if header.in_call_ns and now_ns - header.in_call_ns >= _IN_CALL_S * 1e9
        ]
        if not waiting:
            return False
        return (
            len({header.in_call for header in waiting}) > 1
            or len(self._seen) > len(headers)
            or any(head.failure or head.process_state() == "gone" for head in headers.values())
        )

    def look(self, judge: Judge, headers: dict[int, Header]) -> bool:
        """Look, and decide when to look again; return whether there is a new verdict."""
        first_ns = min(header.in_call_ns for header in headers.values() if header.in_call_ns)
        began_cpu = time.thread_time()  # on a busy machine, a look takes long and costs no more
        is_new = judge.look_for_endless(headers, first_ns)
        cost, ended = time.thread_time() - began_cpu, time.monotonic()
        if judge.suspects_endless:
            self._next = self._confirms = ended + _CONFIRM_S
        else:
            self._next = ended + max(_LEAST_PAUSE_S, cost / _SHARE)
        return is_new

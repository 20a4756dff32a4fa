"""The log that the ranks of one ``Join`` share, as keys of the job's store.

This module alone knows the keys. Each request waits for the store's answer, so it is made on a
helper thread with a deadline, or on the listening thread. Below one prefix for each ``Join``:

    n, log/<i>      the number of entries, and the entries
    wake/<rank>     wakes that rank, which then removes the key
    answer/<rank>   that rank's answer to the first failure: the local ends of its connections
    process/<rank>  the process of that rank
    left/<k>        the step and the rank of the first to leave its loop for the kth time
    gone/<k>        how many ranks left their loop at that step
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rankcall.process import Process

Entry = dict[str, Any]
_DAY = timedelta(days=1)


class SharedLog:
    """The log of one ``Join`` and the facts about each rank, through one client of the store."""

    def __init__(self, name: str, store: Any) -> None:
        self._store: Any = dist.PrefixStore(name, store)

    def append(self, entry: Entry, wake_ranks: Sequence[int]) -> None:
        """Append an entry and wake the ranks that are to read it."""
        index = self._store.add("n", 1) - 1
        self._store.set(f"log/{index}", json.dumps(entry))
        wake_keys = [f"wake/{rank}" for rank in wake_ranks]
        self._store.multi_set(wake_keys, ["1"] * len(wake_keys))

    def length(self) -> int:
        """Return the number of entries."""
        count: int = self._store.add("n", 0)
        return count

    def entry(self, index: int) -> Entry | None:
        """Return an entry, or None if it has not been written yet."""
        found: Entry | None = self._read(f"log/{index}")
        return found

    def wake(self, rank: int) -> None:
        """Wake the listening thread of a rank."""
        self._store.set(f"wake/{rank}", "1")

    def wait_to_be_woken(self, rank: int) -> None:
        """Wait until somebody wakes this rank. Raises ``DistStoreError`` after a day."""
        self._store.wait([f"wake/{rank}"], _DAY)
        self._store.delete_key(f"wake/{rank}")

    def answer(self, rank: int, ends: Sequence[str]) -> None:
        """Answer the first failure with the local ends of this rank's connections."""
        self._store.set(f"answer/{rank}", json.dumps(ends))

    def answer_if_missing(self, rank: int) -> None:
        """Answer without connections, unless this rank has answered already."""
        self._store.compare_set(f"answer/{rank}", "", "[]")

    def has_answered(self, rank: int) -> bool:
        """Return whether a rank has answered."""
        return bool(self._store.check([f"answer/{rank}"]))

    def answer_of(self, rank: int) -> list[str] | None:
        """Return the answer of a rank, or None if it has not answered."""
        ends: list[str] | None = self._read(f"answer/{rank}")
        return ends

    def set_process(self, rank: int, process: Process) -> None:
        """Publish the process of this rank."""
        self._store.set(f"process/{rank}", json.dumps(asdict(process)))

    def process_of(self, rank: int) -> Process | None:
        """Return the process of a rank, or None if that rank never entered the block."""
        fields = self._read(f"process/{rank}")
        return None if fields is None else Process(**fields)

    def leave(self, rank: int, step: int, leave_number: int) -> tuple[int, int]:
        """Note that a rank leaves its loop; return the step and the rank of the first to leave."""
        first = self._store.compare_set(f"left/{leave_number}", "", f"{step} {rank}").decode()
        first_step, first_rank = map(int, first.split())
        return first_step, first_rank

    def count_leaver(self, leave_number: int) -> int:
        """Count a rank that left at the same step as the first; return how many have."""
        count: int = self._store.add(f"gone/{leave_number}", 1)
        return count

    def remove_keys_of(self, rank: int) -> None:
        """Remove the keys that only this rank writes. Call it if no rank reads them any more."""
        for kind in ("process", "answer", "wake"):
            self._store.delete_key(f"{kind}/{rank}")

    def _read(self, key: str) -> Any:
        """Return a value, or None without one. No rank removes a key that another one reads."""
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

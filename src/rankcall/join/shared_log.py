"""The log that the ranks of one ``Join`` share, as keys of the job's store.

This module alone knows the keys. Its methods are protocols: ``rankcall.c10d.client.perform``
makes their requests. Below one prefix for each ``Join``:

   log/<i>         the entries (``rankcall.c10d.parts.Log``)
   wake/<rank>     wakes that rank, which then removes the key
   answer/<rank>   that rank's answer to the first failure: the local ends of its connections
   process/<rank>  the process of that rank
   left/<k>        the step and the rank of the first to leave its loop for the kth time
   gone/<k>        how many ranks left their loop at that step
   passed/<rank>   how many points that rank had passed when it was frozen (``stopping``)
   reports/0       how many ranks have reported that; a repeated report may count twice
   stop/0          the last point that ranks pass
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rankcall.c10d.parts import Log, publish_once
from rankcall.c10d.requests import Add, CompareSet, Delete, Read, ReadMany, Set, Steps, Until, Wait
from rankcall.process import Process

Entry = dict[str, Any]


class SharedLog:
    """The log of one ``Join`` and the facts about each rank."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._log = Log(name)

    def append(self, entry: Entry, wake_ranks: Sequence[int]) -> Steps[None]:
        """Append an entry and wake the ranks that are to read it."""
        yield from self._log.append(json.dumps(entry).encode())
        for rank in wake_ranks:
            yield from self.wake(rank)

    def length(self) -> Steps[int]:
        """Return the number of entries."""
        return self._log.length()

    def read(self) -> Steps[list[Entry]]:
        """Return the entries since the last call. Call it on one thread only."""
        return [json.loads(entry) for entry in (yield from self._log.read())]

    def wake(self, rank: int) -> Steps[None]:
        """Wake the listening thread of a rank."""
        yield Set(self._key("wake", rank), b"1")

    def wait_to_be_woken(self, rank: int) -> Steps[None]:
        """Return when another rank has woken this one, or at the deadline."""
        if (yield Wait((self._key("wake", rank),))):
            yield Delete(self._key("wake", rank))

    def answer(self, rank: int, ends: Sequence[str]) -> Steps[None]:
        """Answer the first failure with the local ends of this rank's connections."""
        yield Set(self._key("answer", rank), json.dumps(ends).encode())

    def answer_if_missing(self, rank: int) -> Steps[None]:
        """Answer without connections, unless this rank has answered already."""
        yield CompareSet(self._key("answer", rank), b"", b"[]")

    def answers(self, ranks: Sequence[int]) -> Steps[dict[int, list[str]]]:
        """Return the answers of those ranks that have answered."""
        texts = yield ReadMany([self._key("answer", rank) for rank in ranks])
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True) if text}

    def set_process(self, rank: int, process: Process) -> Steps[None]:
        """Publish the process of this rank."""
        yield Set(self._key("process", rank), json.dumps(asdict(process)).encode())

    def process_of(self, rank: int) -> Steps[Process | None]:
        """Return the process of a rank, or None if that rank never entered the block."""
        fields = yield Read(self._key("process", rank))
        return Process(**json.loads(fields)) if fields else None

    def leave(self, rank: int, step: int, leave_number: int) -> Steps[tuple[int, int]]:
        """Note that a rank leaves its loop; return the step and the rank of the first to leave."""
        key = self._key("left", leave_number)
        first = yield from publish_once(key, b"%d %d" % (step, rank))
        first_step, first_rank = map(int, first.split())
        return first_step, first_rank

    def count_leaver(self, leave_number: int) -> Steps[int]:
        """Count a rank that left at the same step as the first; return how many have."""
        return int((yield Add(self._key("gone", leave_number), 1)))

    def report_passed(self, rank: int, passed: int, ranks: Sequence[int]) -> Steps[None]:
        """Report how many points a rank has passed. The last rank to report decides."""
        yield Set(self._key("passed", rank), b"%d" % passed)
        if (yield Add(self._key("reports", 0), 1)) >= len(ranks):
            yield from self.decide_stop(ranks)

    def decide_stop(self, ranks: Sequence[int]) -> Steps[list[int]]:
        """Decide where the ranks stop, if all have reported; return those that have not."""
        reports = yield ReadMany([self._key("passed", rank) for rank in ranks])
        missing = [rank for rank, report in zip(ranks, reports, strict=True) if report is None]
        if not missing:
            yield from publish_once(self._key("stop", 0), b"%d" % max(map(int, reports)))
        return missing

    def wait_for_stop(self, seconds: float) -> Steps[int | None]:
        """Return the last point that ranks pass; None if that is not decided in ``seconds``."""
        # Not a Wait: a TCPStore without libuv does not wake one for a key made by compare_set.
        last = yield Until(Read(self._key("stop", 0)), bool, seconds)
        return int(last) if last else None

    def remove_keys_of(self, rank: int) -> Steps[None]:
        """Remove the keys that only this rank writes. Call it if no rank reads them any more."""
        for kind in ("process", "answer", "wake", "passed"):
            yield Delete(self._key(kind, rank))

    def _key(self, kind: str, number: int) -> str:
        return f"{self._name}/{kind}/{number}"

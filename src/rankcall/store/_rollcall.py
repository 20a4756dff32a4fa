"""``rollcall``: who is here, and what is each doing, without waiting for all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from rankcall.rundir import host_name
from rankcall.store import _messages
from rankcall.store._bounded import within
from rankcall.store._checks import check_rank, check_seconds, check_store
from rankcall.store._keys import attempt_of, keys_of
from rankcall.store._link import Link
from rankcall.store._member import Call

__all__ = ["Answer", "Rollcall", "rollcall"]

_POLL_S = 0.005
_OLD_S = 60.0  # an answer that a rank gave longer ago was to an earlier call


@dataclass(frozen=True)
class Answer:
    """One rank's answer. ``doing`` is its newest unfinished record in words, None if there is none.

    ``age_s``: how long ago it was given.
    """

    rank: int
    host: str
    pid: int
    doing: str | None
    age_s: float = 0.0


@dataclass(frozen=True)
class Rollcall:
    """Who answered, by rank, and who did not."""

    answers: Sequence[Answer]
    missing_ranks: Sequence[int]
    world_size: int

    def __str__(self) -> str:
        lines = [
            f"rank {one.rank} ({one.host}, pid {one.pid}): "
            f"{one.doing or 'in no collective'}, {one.age_s:.1f} s ago"
            for one in self.answers
        ]
        if self.missing_ranks:
            missing = _messages.places(self.missing_ranks, {})
            lines.append(f"no answer from {len(self.missing_ranks):,} ranks: {missing}")
        return "\n".join(lines)


def rollcall(
    store: Store,
    rank: int,
    world_size: int,
    key_prefix: str = "rollcall",
    timeout: float = 1.0,
    *,
    doing: str | None = None,
    attempt: int | None = None,
) -> Rollcall:
    """Say who this rank is and what it does, and return who else has said so.

    Waits ``timeout`` seconds at most, and for nobody once all have answered. Answers stay for those
    who come later (a minute), so a rank that calls in from a watcher thread, now and then, is seen
    by all. ``doing`` is said of this rank; by default its newest collective that has not ended, if
    it is being recorded.

    Never raises for ranks that are missing; raises ``StoreLost``, ``ValueError`` and ``TypeError``.
    May be called from any thread.
    """
    check_store(store, key_prefix)
    check_rank(rank, world_size)
    seconds = check_seconds(timeout, "timeout")
    keys = keys_of(key_prefix, "r", attempt_of(attempt), world_size)
    names = [f"{keys.base}{world_size}/{one}" for one in range(world_size)]
    mine = Answer(rank, host_name(), os.getpid(), newest() if doing is None else doing)
    told: dict[int, Answer] = {}

    def step(link: Link, call: Call, until: float) -> Rollcall | None:
        link.set(names[rank], json.dumps({**asdict(mine), "at": time.time()}).encode())
        while True:
            told.update(_read(link, names))
            if len(told) == world_size:
                return _result(told, world_size)
            if time.monotonic() >= until:
                return None
            time.sleep(min(_POLL_S, max(0.0, until - time.monotonic())))

    def last(link: Link, call: Call, until: float) -> Rollcall:
        return _result(told, world_size)

    return within(store, seconds, step, last)


def _read(link: Link, names: Sequence[str]) -> dict[int, Answer]:
    there = link.present(names)
    now = time.time()
    found = {}
    for at, value in zip(there, link.multi_get([names[at] for at in there]), strict=True):
        told: dict[str, Any] = json.loads(value)
        age = max(0.0, now - told.pop("at"))
        if age <= _OLD_S:
            found[at] = Answer(**{**told, "age_s": age})
    return found


def _result(told: dict[int, Answer], world_size: int) -> Rollcall:
    missing = [rank for rank in range(world_size) if rank not in told]
    return Rollcall([told[rank] for rank in sorted(told)], missing, world_size)


def newest() -> str | None:
    """Describe this process's newest unfinished collective; None where nothing is recorded."""
    from rankcall.capture import session

    recording = session.current()
    if recording is None:
        return None
    from rankcall.capture.events import StatusMaker
    from rankcall.capture.tail import RingTail

    rows = RingTail(recording.ring, recording.geometry).open()
    unfinished = list(StatusMaker(recording).unfinished(rows))
    if not unfinished:
        return None
    group, _, sequence, operation, *_ = unfinished[-1]
    return f"in {operation} #{sequence} on group {group}"

"""``rollcall``: which ranks are here, and what each is doing, without waiting for all."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from rankcall.c10d import client
from rankcall.c10d.calls import Call
from rankcall.c10d.connection import clock
from rankcall.c10d.requests import ReadMany, Set, Steps, Until
from rankcall.durations import Duration, seconds
from rankcall.process import host_name
from rankcall.store.arguments import check_prefix, check_rank
from rankcall.store.errors import name_of, ranks_with_hosts
from rankcall.store.local import local_store

_OLD_S = 60.0  # a rank whose answer this process has known for so long does not answer any more


@dataclass(frozen=True)
class Answer:
    """One rank's answer. ``doing`` is its newest unfinished record in words, or None.

    ``age_s``: for how many seconds this process has known the answer.
    """

    rank: int
    host: str
    pid: int
    doing: str | None
    age_s: float = 0.0


@dataclass(frozen=True)
class Rollcall:
    """The answers by rank, and the ranks that did not answer."""

    answers: Sequence[Answer]
    missing_ranks: Sequence[int]
    world_size: int

    def __str__(self) -> str:
        lines = [
            f"rank {answer.rank} ({answer.host}, pid {answer.pid}): "
            f"{answer.doing or 'in no collective'}"
            + (f", known for {answer.age_s:.1f} s" if answer.age_s >= 0.05 else "")
            for answer in self.answers
        ]
        if self.missing_ranks:
            missing = ranks_with_hosts(self.missing_ranks, {})
            count = len(self.missing_ranks)
            lines.append(f"no answer from {count:,} rank{'s' * (count > 1)}: {missing}")
        return "\n".join(lines)


def rollcall(
    store: Store,
    rank: int,
    world_size: int,
    key_prefix: str = "rollcall",
    timeout: Duration = 1.0,
    *,
    doing: str | None = None,
    attempt: int | None = None,
) -> Rollcall:
    """Answer for this rank, and return the answers of all ranks.

    It waits no longer than ``timeout`` seconds, and not at all once all ranks have answered.
    Answers stay for ranks that call later. A rank whose answer has not changed for a minute, as
    this process's own clock counts, is missing: so a watcher thread that calls now and then is seen
    by all, and the hosts' wall clocks do not matter.

    Args:
        store: Any ``torch.distributed.Store``.
        rank: This rank.
        world_size: How many ranks there are.
        key_prefix: Names the roll call.
        timeout: In seconds.
        doing: The activity of this rank; by default its newest collective that has not ended, if it
            is being recorded.
        attempt: Keeps the keys of a restarted job apart; by default torchrun's restart count.

    Raises:
        StoreLostError: The store's host is gone, or does not answer.
        ValueError: An argument is out of its range.
        TypeError: An argument is of the wrong type.
    """
    local = local_store(store)
    check_prefix(key_prefix)
    check_rank(rank, world_size)
    timeout_s = seconds(timeout, "timeout")
    keys = local.world(key_prefix, attempt, world_size).keys
    names = [keys.answer(member) for member in range(world_size)]
    own = asdict(Answer(rank, host_name(), os.getpid(), newest() if doing is None else doing))
    # The nonce makes each answer of a rank another one, also if it says the same.
    own_line = json.dumps({**own, "nonce": os.urandom(6).hex()}).encode()

    def ages(lines: Sequence[bytes | None]) -> list[float | None]:
        """Return for how long this process has known each answer; None if that is too long."""
        now = clock.monotonic()
        known_ages: list[float | None] = []
        for name, line in zip(names, lines, strict=True):
            if line is not None and local.seen.get(name, (b"", 0.0))[0] != line:
                local.seen[name] = line, now
            age = now - local.seen[name][1] if line is not None else _OLD_S
            known_ages.append(age if age < _OLD_S else None)
        return known_ages

    def steps() -> Steps[list[bytes | None]]:
        yield Set(names[rank], own_line)
        lines = yield Until(ReadMany(names), lambda lines: None not in ages(lines))
        if lines is None:
            lines = yield ReadMany(names)
        return list(lines)

    call = Call(name_of("rollcall", key_prefix, None))
    lines = client.perform(store, timeout_s, steps(), call=call)
    answers = []
    for line, age in zip(lines, ages(lines), strict=True):
        if line is not None and age is not None:
            fields: dict[str, Any] = json.loads(line)
            del fields["nonce"]
            answers.append(Answer(**{**fields, "age_s": age}))
    answered = {answer.rank for answer in answers}
    return Rollcall(
        answers, [member for member in range(world_size) if member not in answered], world_size
    )


def newest() -> str | None:
    """Describe this process's newest unfinished collective; None if nothing is recorded."""
    from rankcall.capture import session

    recording = session.current()
    if recording is None:
        return None
    from rankcall.events.statuses import unfinished

    in_flight = unfinished(recording)
    if not in_flight:
        return None
    group, _, sequence, operation, *_ = in_flight[-1]
    return f"in {operation} #{sequence} on group {group}"

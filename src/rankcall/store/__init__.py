"""Agree through a c10d Store: barriers and exchanges that name every missing rank.

The functions of ``torch.distributed.elastic.utils.store``, with its names and positional
arguments, on any ``torch.distributed.Store``. docs/design/store.md describes the protocol.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import Store

from rankcall.c10d.calls import Call
from rankcall.c10d.client import run
from rankcall.c10d.connection import clock
from rankcall.c10d.errors import StoreLostError
from rankcall.c10d.requests import ReadMany, Set, Steps, Until
from rankcall.durations import Duration, seconds
from rankcall.errors import WorldMismatchError, warn_renamed
from rankcall.handles import Handle
from rankcall.process import host_name
from rankcall.store import _errors
from rankcall.store._calls import barrier, clean_up, get_all, store_timeout, synchronize
from rankcall.store._errors import (
    BarrierTimeout,
    check_prefix,
    check_rank,
)
from rankcall.store._failover import Failover, failover
from rankcall.store.local import local_store

# ``install``: make torch's own elastic code use these functions.


_lock = threading.Lock()
_installed: list[Installed] = []


class Installed(Handle):
    """The handle that ``install`` returns; ``stop()`` puts torch's functions back."""

    def __init__(self, before: list[tuple[Any, str, Any]]) -> None:
        self._before = before

    def stop(self) -> None:
        """Put torch's functions back. A second call does nothing."""
        with _lock:
            if self in _installed:
                _installed.remove(self)
                for module, name, function in self._before:
                    setattr(module, name, function)

    def remove(self) -> None:
        """Call ``stop()``, by its name of version 0.1."""
        warn_renamed("store.install().remove()", "stop()")
        self.stop()


def install() -> Installed:
    """Put ``barrier``, ``synchronize``, ``get_all`` and ``store_timeout`` in place of torch's.

    In this process, for all callers by way of ``torch.distributed.elastic.utils``: the exit barrier
    of torchelastic's agents, ``create_c10d_store``, the checkpoint barriers. All processes that
    meet have to install it, because torch's functions and these do not see each other's arrivals.
    The handle undoes it.

    Raises ``RuntimeError`` if it is installed already.
    """
    import torch.distributed.elastic.utils.distributed as distributed
    import torch.distributed.elastic.utils.store as elastic

    ours = {
        (elastic, "barrier"): barrier,
        (elastic, "get_all"): get_all,
        (elastic, "store_timeout"): store_timeout,
        (elastic, "synchronize"): synchronize,
        (distributed, "barrier"): barrier,
    }
    with _lock:
        if _installed:
            raise RuntimeError(
                "rankcall.store is installed already: stop() the handle that install() returned"
            )
        handle = Installed([(module, name, getattr(module, name)) for module, name in ours])
        for (module, name), function in ours.items():
            setattr(module, name, function)
        _installed.append(handle)
    return handle


# ``rollcall``: which ranks are here, and what each is doing, without waiting for all.


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
            missing = _errors.ranks_with_hosts(self.missing_ranks, {})
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
    state = local_store(store)
    check_prefix(key_prefix)
    check_rank(rank, world_size)
    timeout_s = seconds(timeout, "timeout")
    keys = state.keys(key_prefix, attempt, world_size)
    names = [keys.answer(member) for member in range(world_size)]
    own = asdict(Answer(rank, host_name(), os.getpid(), newest() if doing is None else doing))
    # The nonce makes each answer of a rank another one, also if it says the same.
    own_line = json.dumps({**own, "nonce": os.urandom(6).hex()}).encode()

    def ages(lines: Sequence[bytes | None]) -> list[float | None]:
        """Return for how long this process has known each answer; None if that is too long."""
        now = clock.monotonic()
        known_ages: list[float | None] = []
        for name, line in zip(names, lines, strict=True):
            if line is not None and state.seen.get(name, (b"", 0.0))[0] != line:
                state.seen[name] = line, now
            age = now - state.seen[name][1] if line is not None else _OLD_S
            known_ages.append(age if age < _OLD_S else None)
        return known_ages

    def steps() -> Steps[list[bytes | None]]:
        yield Set(names[rank], own_line)
        lines = yield Until(ReadMany(names), lambda lines: None not in ages(lines))
        if lines is None:
            lines = yield ReadMany(names)
        return list(lines)

    lines = run(store, timeout_s, steps(), Call())
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


__all__ = [
    "Answer",
    "BarrierTimeout",
    "Failover",
    "Installed",
    "Rollcall",
    "StoreLostError",
    "WorldMismatchError",
    "barrier",
    "clean_up",
    "failover",
    "get_all",
    "install",
    "rollcall",
    "store_timeout",
    "synchronize",
]

"""What a process's RPC agent waits for and runs, as the text in its ring's header.

The process's own threads look twice a second (``capture/rpc_calls.py``); nothing is written when a
call is made. A reader takes the text as hostile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rankcall.whole_numbers import LARGEST

# Of waits, and of runs. The header has 768 bytes for the text, which three or four of usual lengths
# fill; ``encode`` leaves out more if they are longer.
MOST = 4
_MOST_NAME, _MOST_LINE = 60, 100  # characters


@dataclass(frozen=True)
class RpcWait:
    """A call of ``function`` that has no answer of the worker ``to``, from ``line``.

    ``during`` is the function that the waiting thread runs for another worker; empty if it runs
    none. ``since_ns`` is when the wait was first seen.
    """

    to: str
    function: str
    line: str
    during: str
    since_ns: int


@dataclass(frozen=True)
class RpcRun:
    """A function that a thread runs for another worker, and its line there.

    ``waits``: the thread waits for an answer itself.
    """

    function: str
    line: str
    waits: bool
    since_ns: int


@dataclass(frozen=True)
class RpcState:
    """One worker. ``open_calls`` have no answer; ``idle`` threads could run a request.

    ``active_ns``: when it was last seen to do anything else than before.
    """

    worker: str
    open_calls: int
    idle: int
    active_ns: int
    waits: tuple[RpcWait, ...] = ()
    runs: tuple[RpcRun, ...] = ()

    def with_times(self, change: Callable[[int], int]) -> RpcState:
        """Return the same with other times, for example with ages in their place."""
        return replace(
            self,
            active_ns=change(self.active_ns),
            waits=tuple(replace(wait, since_ns=change(wait.since_ns)) for wait in self.waits),
            runs=tuple(replace(run, since_ns=change(run.since_ns)) for run in self.runs),
        )

    def encode(self, room: int = LARGEST) -> str:
        """Return the text, in at most ``room`` bytes: without the newest waits and runs if need be.

        Long names lose their beginnings.
        """
        waits, runs = list(self.waits[:MOST]), list(self.runs[:MOST])
        while True:
            text = self._encoded(waits, runs)
            if len(text) <= room or not (waits or runs):
                return text if len(text) <= room else ""
            (waits if len(waits) > len(runs) else runs).pop()

    def _encoded(self, waits: list[RpcWait], runs: list[RpcRun]) -> str:
        fields = [
            _end(self.worker, _MOST_NAME),
            self.open_calls,
            self.idle,
            self.active_ns,
            [
                [
                    _end(wait.to, _MOST_NAME),
                    _end(wait.function, _MOST_NAME),
                    _end(wait.line, _MOST_LINE),
                    _end(wait.during, _MOST_NAME),
                    wait.since_ns,
                ]
                for wait in waits
            ],
            [
                [
                    _end(run.function, _MOST_NAME),
                    _end(run.line, _MOST_LINE),
                    int(run.waits),
                    run.since_ns,
                ]
                for run in runs
            ],
        ]
        return json.dumps(fields, separators=(",", ":"))


def decode(text: str) -> RpcState | None:
    """Return the state that a text says; None if it says none, or is damaged."""
    if not text:
        return None
    try:
        worker, open_calls, idle, active_ns, waits, runs = json.loads(text)
        return RpcState(
            _text(worker),
            _number(open_calls),
            _number(idle),
            _number(active_ns),
            tuple(map(_wait, waits[:MOST])),
            tuple(map(_run, runs[:MOST])),
        )
    except (ValueError, TypeError, RecursionError):
        return None


def _wait(fields: Any) -> RpcWait:
    to, function, line, during, since_ns = fields
    return RpcWait(_text(to), _text(function), _text(line), _text(during), _number(since_ns))


def _run(fields: Any) -> RpcRun:
    function, line, waits, since_ns = fields
    return RpcRun(_text(function), _text(line), bool(_number(waits)), _number(since_ns))


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"…{text[1 - most :]}"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise ValueError("not a number")
    return value

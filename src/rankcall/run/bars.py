"""The nodes that are barred from a job: ``bars.jsonl`` of the run, and values of the same form.

A line says that a node is barred, or no longer is. The newest line about a node counts::

    {"node": "node-b", "barred": true, "reason": "...", "at_ns": 17..., "until_ns": 17...}

Agents write it when they leave the job, and people by ``rankcall bar`` and ``rankcall unbar``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankcall.files import append_line, open_file

BARS = "bars.jsonl"
BAR_S = 3600.0  # by default; a node that was repaired needs no human to get back
# Read at the end of the file: an agent that is started again and again adds a line each time that
# its node is not well, and the newest lines count.
_MOST_BYTES = 1 << 20
_MOST_LINE = 4096
_MOST_NAME, _MOST_REASON = 255, 1024  # characters
_LIMIT = 1 << 62  # a larger number is damage


@dataclass(frozen=True)
class Bar:
    """That a node is barred, or that it no longer is. Times are in ns since the epoch."""

    node: str
    barred: bool
    reason: str
    at_ns: int
    until_ns: int

    def holds(self, now_ns: int) -> bool:
        """Return whether the node may not take part now."""
        return self.barred and now_ns < self.until_ns

    @property
    def shown_end(self) -> str:
        """The time of its end for people, in UTC."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.until_ns / 1e9))


def bar_of(node: str, reason: str, seconds: float, *, barred: bool = True) -> Bar:
    """Return a line that holds from now on."""
    now_ns = time.time_ns()
    reason = reason[:_MOST_REASON]
    return Bar(node[:_MOST_NAME], barred, reason, now_ns, now_ns + int(seconds * 1e9))


def encode_bar(bar: Bar) -> bytes:
    """Return a line without its end."""
    return json.dumps(asdict(bar)).encode()


def decode_bar(line: bytes) -> Bar:
    """Return what a line says. Raises ``ValueError`` if it is damaged."""
    try:
        fields: Any = json.loads(line[:_MOST_LINE])
        node, reason = fields["node"], fields["reason"]
        at_ns, until_ns = fields["at_ns"], fields["until_ns"]
        barred = fields["barred"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError("this is no bar of a node") from error
    texts = (node, _MOST_NAME), (reason, _MOST_REASON)
    numbers = at_ns, until_ns
    if (
        not all(isinstance(text, str) and len(text) <= most for text, most in texts)
        or not all(type(number) is int and 0 <= number < _LIMIT for number in numbers)
        or type(barred) is not bool
    ):
        raise ValueError("this is no bar of a node")
    return Bar(node, barred, reason, at_ns, until_ns)


def note_bar(run_dir: Path, bar: Bar) -> None:
    """Add a line to the run. Raises ``OSError``."""
    append_line(run_dir / BARS, encode_bar(bar) + b"\n")


def read_bars(run_dir: Path) -> list[Bar]:
    """Return the lines of a run; damaged ones are left out."""
    try:
        with open_file(run_dir / BARS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _MOST_BYTES))
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return []
    bars = []
    for line in lines:
        try:
            bars.append(decode_bar(line))
        except ValueError:
            continue
    return bars


def newest(bars: Iterable[Bar]) -> dict[str, Bar]:
    """Return by node the line that counts."""
    return {bar.node: bar for bar in sorted(bars, key=lambda bar: bar.at_ns)}

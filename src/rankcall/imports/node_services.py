"""What the services of this node wrote about failed processes: kubelet, raylet, and containers.

They are asked on request, beside the kernel (``node``). What they wrote is hostile: any user may
have made the folder of Ray's logs, and a container may have any name.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from rankcall.files import open_regular
from rankcall.imports.logs.sources.frameworks import SOURCES as FRAMEWORKS
from rankcall.imports.logs.sources.nodes import SOURCES as NODES

__all__ = ["ServiceLine", "lines_of_services"]

_RAYLET = Path("/tmp/ray/session_latest/logs")
_TAIL_BYTES = 1 << 20  # of a log of the raylet
_MOST_EVENTS = 10_000
_YEAR_9999 = 253_370_764_800.0  # in seconds since 1970: later times cannot be written as a date
_NAME = 80  # characters of a container's name
_JOURNAL = re.compile(r"(\d{1,12}\.\d{1,9}) \S{1,253} kubelet\S{0,20}: (.*)")
_RAY_TIME = re.compile(
    r"(?:\(raylet\) )?\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]{0,40}\] (?:\(raylet\) )?"
)

ServiceLine = tuple[float, str]  # the time in seconds since 1970, and the service with its words
Output = Callable[..., list[str]]  # the lines that a program prints, for its name and options


def lines_of_services(since: float, output: Output, *, containers: bool) -> list[ServiceLine]:
    """Return what the services of this node report since a time, oldest first.

    A service that is not there, or that this user may not ask, has nothing to say.

    Args:
        since: Seconds since 1970.
        output: Runs a program of the system, with a time limit.
        containers: Ask docker, too, which tells of all containers of the node.
    """
    lines: list[ServiceLine] = []
    for ask in (_kubelet, _raylet, *((_docker,) if containers else ())):
        try:
            lines += [line for line in ask(since, output) if since <= line[0] < _YEAR_9999]
        except (OSError, subprocess.SubprocessError):
            continue
    return sorted(lines)


def _patterns(sources: Iterable[Any]) -> list[re.Pattern[str]]:
    messages = [message for source in sources for message in source.messages]
    return [message.pattern for message in messages if message.pattern is not None]


_OF_NODES, _OF_RAY = _patterns(NODES), _patterns(FRAMEWORKS)


def _kubelet(since: float, output: Output) -> Iterator[ServiceLine]:
    options = ("-u", "kubelet", "-o", "short-unix", "--no-pager", "-n", "10000", "-q")
    for line in output("journalctl", *options):
        match = _JOURNAL.match(line)
        if match and any(pattern.search(match[2]) for pattern in _OF_NODES):
            yield float(match[1]), f"kubelet: {match[2]}"


def _raylet(since: float, output: Output) -> Iterator[ServiceLine]:
    for name in ("raylet.out", "raylet.err"):
        for line in _tail(_RAYLET / name):
            match = _RAY_TIME.match(line)
            if match and any(pattern.search(line) for pattern in _OF_RAY):
                try:  # in the time zone of this node
                    moment = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S"))
                except (ValueError, OverflowError):  # there is no such day
                    continue
                yield moment, f"raylet: {line[match.end() :]}"


def _tail(path: Path) -> list[str]:
    """Return the last lines of a log that this user or root has written; nothing of another's."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()):
                return []
            file.seek(max(0, status.st_size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return []


def _docker(since: float, output: Output) -> Iterator[ServiceLine]:
    filters = [f"--filter={words}" for words in ("type=container", "event=die", "event=oom")]
    times = f"--since={int(since)}", f"--until={int(time.time()) + 1}"
    yield from _ends(output("docker", "events", *times, *filters, "--format={{json .}}"))


def _ends(lines: list[str]) -> Iterator[ServiceLine]:
    """Yield how containers ended badly, of the events that docker prints as JSON lines."""
    out_of_memory: set[str] = set()
    for line in lines[-_MOST_EVENTS:]:
        try:
            event = json.loads(line)
            moment, attributes = float(event["time"]), event["Actor"]["Attributes"]
            name, code = str(attributes["name"])[:_NAME], str(attributes.get("exitCode", ""))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if event.get("Action") == "oom":
            out_of_memory.add(name)
        elif re.fullmatch(r"[1-9]\d{0,2}", code):
            why = ", because its memory ran out" if name in out_of_memory else ""
            out_of_memory.discard(name)
            yield moment, f"docker: container {name} ended with code {code}{why}"

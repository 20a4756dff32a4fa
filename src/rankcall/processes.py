"""What is known of a run's processes: their state on this host, and how they ended.

The launcher (or whoever started the ranks) notes each end in the run directory::

    exits/<host>.<launcher's pid>.jsonl    one object a line: rank, attempt, host, pid, code, ...

so that a dead run tells an out-of-memory kill from an exception. Where a job is collected while
it runs, what its processes were doing is kept beside it::

    states/<host>.<boot>.json              the moment, and each process's state at it
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankcall.files import append_line, run_folder
from rankcall.process import ALIVE, DEAD, boot_id
from rankcall.ring.header import Header

EXITS, STATES = "exits", "states"
LAUNCHER = -1  # as a rank: the launcher itself was told to stop, by the signal in ``code``
_MOST_BYTES = 1 << 24  # of one file; what is beyond is no list of exits
_MOST_LINE = 4096


@dataclass(frozen=True)
class Exit:
    """How one worker ended. ``code`` is negative for a signal, as ``subprocess`` has it.

    ``by_launcher``: the launcher ended it, because another had failed or it was told to stop.
    """

    rank: int
    attempt: int
    host: str
    pid: int
    code: int
    epoch_ns: int
    by_launcher: bool = False


def note_exit(run_dir: Path, ended: Exit) -> None:
    """Append an end to the run's list of them. Raises ``OSError`` if it cannot be written."""
    folder = run_folder(run_dir, EXITS)
    name = f"{re.sub(r'[^A-Za-z0-9_-]+', '_', ended.host)}.{os.getpid()}.jsonl"
    append_line(folder / name, json.dumps(asdict(ended)).encode() + b"\n")


def read_exits(run_dir: Path) -> list[Exit]:
    """Return the ends that were noted; lines that are none are left out."""
    folder = run_dir / EXITS
    if not folder.is_dir():
        return []
    return [ended for path in sorted(folder.glob("*.jsonl")) for ended in _exits_in(path)]


def _exits_in(path: Path) -> Iterator[Exit]:
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield _exit(json.loads(line[:_MOST_LINE]))
        except (ValueError, TypeError, KeyError, RecursionError):
            continue


def _exit(fields: Any) -> Exit:
    numbers = {key: int(fields[key]) for key in ("rank", "attempt", "pid", "code", "epoch_ns")}
    return Exit(host=str(fields["host"]), by_launcher=bool(fields.get("by_launcher")), **numbers)


def process_state(header: Header) -> str:
    """Return what a ring's process is doing: ``alive``, ``stopped``, ``gone`` or ``unknown``.

    Unknown: it ran on another host or in another pid namespace.
    """
    process = header.process
    if process.is_stopped():
        return "stopped"
    return {ALIVE: "alive", DEAD: "gone"}.get(process.liveness(), "unknown")


@dataclass(frozen=True)
class Noted:
    """What a process was doing when its run was collected, and when that was (its host's ns)."""

    state: str
    mono_ns: int


Process = tuple[str, int, int]  # boot id, pid, start: one process of the world


def describe_states(headers: Iterable[Header]) -> bytes:
    """Return, as a file of ``states``, what the processes of this host are doing now."""
    found = [(header, process_state(header)) for header in headers]
    processes = [
        {"pid": header.pid, "start": header.process_start, "state": state}
        for header, state in found
        if state != "unknown"
    ]
    about = {"boot_id": boot_id(), "mono_ns": time.monotonic_ns(), "processes": processes}
    return json.dumps(about).encode()


def read_states(run_dir: Path) -> dict[Process, Noted]:
    """Return what was noted of processes when the run was collected; damaged files say nothing."""
    found: dict[Process, Noted] = {}
    folder = run_dir / STATES
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            with path.open("rb") as file:
                about = json.loads(file.read(_MOST_BYTES))
            moment = int(about["mono_ns"])
            for each in about["processes"]:
                key = str(about["boot_id"]), int(each["pid"]), int(each["start"])
                if each["state"] in ("alive", "stopped", "gone"):
                    found[key] = Noted(each["state"], moment)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
    return found

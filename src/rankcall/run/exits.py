"""How a run's processes ended, and what they were doing when the run was collected.

The process that starts the ranks, for example the launcher, notes each exit in the run directory.
A rank that is recorded natively notes its own exit status, if that is not 0::

   exits/<host>.<pid>.jsonl               one object a line: rank, attempt, host, pid, code, ...

With these notes a diagnosis tells an out-of-memory kill from an exception. If ``rankcall
collect`` packs the run of a living job, it also notes what each process of its host was doing::

   states/<host>.<boot>.json              the time, and the state of each process
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rankcall.files import append_line, open_file
from rankcall.folders import run_folder
from rankcall.process import boot_id, host_name
from rankcall.ring.layout import Header
from rankcall.run.paths import (
    files_in,
)

EXITS, STATES = "exits", "states"
LAUNCHER = -1  # instead of a rank: the launcher got a signal to stop, which is in ``code``
_MOST_BYTES = 1 << 24  # of one file; the rest is not read
_MOST_LINE = 4096  # characters; a line has a host's name and some numbers
_LIMIT = 1 << 62  # a larger number is damage


@dataclass(frozen=True)
class Exit:
    """How one worker ended.

    ``code`` is the exit status, or the negative number of a signal. It is ``None`` if the worker's
    status could not be read. ``by_launcher`` says that the launcher ended the worker,
    because another one had failed or because the launcher got a signal to stop, or that rankcall
    ended it, because the job hung.
    """

    rank: int
    attempt: int
    host: str
    pid: int
    code: int | None
    epoch_ns: int
    by_launcher: bool = False


def note_exit(run_dir: Path, ended: Exit) -> None:
    """Append an exit to the run's list. Raises ``OSError`` if it cannot be written."""
    name = exits_name(ended.host)
    append_line(run_folder(run_dir, EXITS) / name, json.dumps(asdict(ended)).encode() + b"\n")


def exits_name(host: str) -> str:
    """Return the name of the file in ``exits`` to which this process appends."""
    return f"{re.sub(r'[^A-Za-z0-9_-]+', '_', host)}.{os.getpid()}.jsonl"


def read_exits(run_dir: Path) -> list[Exit]:
    """Return the exits that were noted, one for each process; damaged lines are left out.

    If a process was noted twice, a known code replaces an unknown one. A note that it was ended on
    purpose stays: the process that ends it notes that, and the launcher then notes a mere signal.
    But a process may have begun to end with an error, and was ended only while it closed down.
    """
    exits: dict[tuple[int, int, str, int], Exit] = {}
    own: dict[tuple[int, int, str, int], Exit] = {}
    first_failure_ns: dict[tuple[int, str], int] = {}  # by attempt and host: noted by the launcher
    for path in files_in(run_dir / EXITS, ".jsonl"):
        for ended in _exits_in(path):
            key = ended.rank, ended.attempt, ended.host, ended.pid
            known = exits.get(key)
            if known is None or ended.code is not None:
                on_purpose = ended.by_launcher or (known is not None and known.by_launcher)
                exits[key] = replace(ended, by_launcher=on_purpose)
            elif ended.by_launcher:
                exits[key] = replace(known, by_launcher=True)
            if path.name.endswith(f".{ended.pid}.jsonl") and ended.rank != LAUNCHER:
                own[key] = ended
            elif ended.code != 0 and not ended.by_launcher:
                place = ended.attempt, ended.host
                noted_ns = first_failure_ns.get(place, ended.epoch_ns)
                first_failure_ns[place] = min(noted_ns, ended.epoch_ns)
    for key, ended in own.items():
        # Then the launcher ended it because of another rank, which failed later.
        if ended.code and ended.epoch_ns < first_failure_ns.get((ended.attempt, ended.host), 0):
            exits[key] = ended
    return list(exits.values())


def _exits_in(path: Path) -> Iterator[Exit]:
    try:
        with open_file(path) as file:
            lines = file.read(_MOST_BYTES).splitlines()
    except OSError:
        return
    for line in lines:
        try:
            yield _exit(json.loads(line[:_MOST_LINE]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue


def _exit(fields: Any) -> Exit:
    rank, attempt, pid, epoch_ns = (
        int(fields[name]) for name in ("rank", "attempt", "pid", "epoch_ns")
    )
    code = None if fields["code"] is None else int(fields["code"])
    if epoch_ns < 0 or any(
        abs(number) >= _LIMIT for number in (rank, attempt, pid, epoch_ns, code or 0)
    ):
        raise ValueError("impossible numbers")
    by_launcher = bool(fields.get("by_launcher"))
    return Exit(rank, attempt, str(fields["host"]), pid, code, epoch_ns, by_launcher)


@dataclass(frozen=True)
class Noted:
    """The state of a process when its run was collected, and the time on its host's clock."""

    state: str
    mono_ns: int


Process = tuple[str, int, int]  # boot id, pid, start: one process of the world


def states_name() -> str:
    """Return the name of this host's file in ``states``."""
    names = (re.sub(r"[^A-Za-z0-9]", "_", part) for part in (host_name(), boot_id()))
    return f"{'.'.join(names)}.json"


def describe_states(headers: Iterable[Header]) -> bytes:
    """Return the content of a file in ``states``: the states of this host's processes now."""
    states = [(header, header.process_state()) for header in headers]
    processes = [
        {"pid": header.pid, "start": header.process_start, "state": state}
        for header, state in states
        if state != "unknown"
    ]
    content = {"boot_id": boot_id(), "mono_ns": time.monotonic_ns(), "processes": processes}
    return json.dumps(content).encode()


def read_states(run_dir: Path) -> dict[Process, Noted]:
    """Return what the processes did when the run was collected; damaged files are left out."""
    noted: dict[Process, Noted] = {}
    for path in files_in(run_dir / STATES, ".json"):
        try:
            with open_file(path) as file:
                content = json.loads(file.read(_MOST_BYTES))
            moment = int(content["mono_ns"])
            if not 0 <= moment < _LIMIT:
                raise ValueError("an impossible time")
            for process in content["processes"]:
                key = str(content["boot_id"]), int(process["pid"]), int(process["start"])
                if process["state"] in ("alive", "stopped", "gone"):
                    noted[key] = Noted(process["state"], moment)
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            continue
    return noted

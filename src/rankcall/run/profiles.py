"""Profiles of ranks, taken by py-spy while they run, for a reader who asks for them.

::

    <run>/profiles/0001/rank-00005.speedscope.json

Nothing is added to the ranks: py-spy reads their memory from outside, and pauses each of them for
some milliseconds at each sample.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankcall.errors import RankcallError
from rankcall.files import open_file
from rankcall.folders import run_folder
from rankcall.printable import clean
from rankcall.ring.layout import Header
from rankcall.run.frames import Frame
from rankcall.run.hangs import next_free
from rankcall.run.load import Run
from rankcall.run.own_stacks import training_thread_of
from rankcall.run.stacks import py_spy

FOLDER = "profiles"
MOST_RANKS = 8  # at once; py-spy takes some CPU time for each
_START_S = 60.0  # until py-spy has found the interpreter, on a machine that is busy
_MOST_BYTES = 1 << 26  # of one profile; 60 s of deep stacks are some MiB
_RANKS = re.compile(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*")
_NOT_ALIVE = {
    "gone": "has ended",
    "stopped": "is stopped, and does nothing: see rankcall diagnose --stacks",
    "unknown": "does not run on this host, or is not in this run",
}
_THREAD = re.compile(r"Thread (\d{1,10})\b")


@dataclass(frozen=True)
class Profile:
    """The profile of one rank.

    Attributes:
        header: The ring header of its process.
        path: The file; None if there is none.
        lines: The lines at which its training thread was seen most often, each with its share.
        problem: Why there is no file, or why its lines are not known; empty if all went well.
    """

    header: Header
    path: Path | None
    lines: Sequence[tuple[float, str]] = ()
    problem: str = ""

    def as_object(self) -> dict[str, Any]:
        """Return it as JSON of ``rankcall profile --json`` has it."""
        return {
            "rank": self.header.rank,
            "host": self.header.host,
            "pid": self.header.pid,
            "file": None if self.path is None else str(self.path),
            "lines": [{"share": round(share, 3), "line": line} for share, line in self.lines],
            "problem": self.problem or None,
        }


def parse_ranks(text: str) -> list[int]:
    """Return the ranks that somebody wrote, as in ``5,6`` or ``0-3``, in ascending order.

    Raises ``ValueError`` for anything else, and for more than ``MOST_RANKS``.
    """
    chosen: list[int] = []
    for part in text.split(","):
        match = _RANKS.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= MOST_RANKS:
            raise ValueError(f"ranks, as in 5,6 or 0-3; got {clean(text)!r}")
        chosen += range(first, last + 1)
    chosen = sorted(set(chosen))
    if len(chosen) > MOST_RANKS:
        raise ValueError(f"{MOST_RANKS} ranks at most; got {len(chosen)}")
    return chosen


def alive(run: Run, ranks: Sequence[int]) -> list[Header]:
    """Return the headers of these ranks' processes.

    Raises ``RankcallError`` for the first of them that does not run on this host, and says why.
    """
    by_rank = {head.header.rank: head.header for head in run.heads}
    states = {
        rank: by_rank[rank].process_state() if rank in by_rank else "unknown" for rank in ranks
    }
    absent = [rank for rank in ranks if states[rank] != "alive"]
    if absent:
        why = _NOT_ALIVE.get(states[absent[0]], "cannot be profiled")
        raise RankcallError(f"rank {absent[0]} {why}")
    return [by_rank[rank] for rank in ranks]


def take_profiles(
    run_dir: Path, headers: Sequence[Header], seconds: int, rate: int
) -> list[Profile]:
    """Profile processes of this host at the same time, and keep the profiles in their run.

    Args:
        run_dir: The run.
        headers: The ring headers of the processes, ``MOST_RANKS`` at most.
        seconds: For how long.
        rate: Samples per second.

    Raises:
        RankcallError: py-spy is not installed.
        OSError: The run directory cannot be written.
    """
    spy = py_spy()
    if spy is None:
        raise RankcallError("profiles are taken by py-spy: pip install 'rankcall[stacks]'")
    folder = _new_folder(run_folder(run_dir, FOLDER))
    with ThreadPoolExecutor(len(headers)) as pool:
        return list(pool.map(lambda head: _profile(spy, folder, head, seconds, rate), headers))


def _new_folder(parent: Path) -> Path:
    while True:
        folder = next_free(parent)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # somebody else profiles the same run
            continue
        return folder


def _profile(spy: str, folder: Path, header: Header, seconds: int, rate: int) -> Profile:
    path = folder / f"rank-{header.rank:05d}.speedscope.json"
    command = [spy, "record", "--pid", str(header.pid), "--duration", str(seconds)]
    # Idle threads are those that wait, which is what a rank that others wait for may do.
    command += ["--rate", str(rate), "--idle", "--format", "speedscope", "--output", str(path)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + _START_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Profile(header, None, problem="py-spy did not end in time")
    if not path.exists():
        words = [line for line in done.stderr.splitlines() if line.strip()]
        said = clean(words[-1].strip()) if words else f"exit status {done.returncode}"
        return Profile(header, None, problem=f"py-spy: {said}")
    try:
        return Profile(header, path, busiest_lines(_read(path), header))
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        return Profile(header, path, problem=f"the profile cannot be read: {error}")


def _read(path: Path) -> Any:
    with open_file(path) as file:
        return json.loads(file.read(_MOST_BYTES))


def busiest_lines(profile: Any, header: Header, most: int = 3) -> list[tuple[float, str]]:
    """Return the lines at which the training thread was seen most often, with their shares.

    Of each sample that is the innermost line of the user's own code, and if there is none, the
    innermost line.

    Args:
        profile: A profile in speedscope's format, as py-spy writes it.
        header: The ring header of its process.
        most: The number of lines.

    Raises ``ValueError``, ``KeyError``, ``TypeError`` or ``IndexError`` for another format.
    """
    thread = training_thread_of(header) or header.pid
    of_thread = [part for part in profile["profiles"] if _thread_in(part["name"]) == thread]
    if not of_thread:
        raise ValueError("the training thread is not in it")
    frames = [
        Frame(str(frame["file"] or ""), int(frame["line"] or 0), str(frame["name"]))
        for frame in profile["shared"]["frames"]
    ]
    seen: Counter[str] = Counter()
    for stack in of_thread[0]["samples"]:
        inner_first = [frames[number] for number in reversed(stack)]
        if inner_first:
            users = (frame for frame in inner_first if frame.is_users)
            seen[_line(next(users, inner_first[0]))] += 1
    total = sum(seen.values())
    return [(count / total, line) for line, count in seen.most_common(most)]


def _thread_in(name: object) -> int:
    match = _THREAD.search(str(name))
    return int(match[1]) if match else 0


def _line(frame: Frame) -> str:
    return clean(f"{Path(frame.file).name}:{frame.line} in {frame.name}")

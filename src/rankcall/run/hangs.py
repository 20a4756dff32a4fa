"""The verdicts that a job's own watcher kept in its run, each with the stacks of its ranks.

::

    <run>/hangs/0001/verdict.json         as ``rankcall diagnose --json``, with an id and its origin
    <run>/hangs/0001/verdict.txt          the text that was printed
    <run>/hangs/0001/stacks/rank-00003.txt
    <run>/hangs/0001/over.json            after how many seconds the hang passed, if it did

If the run directory cannot be written, for example because the disk is full, they are kept beside
the live rings until ``settle`` can move them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankcall.files import open_file, scratch_beside
from rankcall.folders import run_folder
from rankcall.printable import clean_lines
from rankcall.ranks import MAX_RANKS
from rankcall.ring.tables import both_lines
from rankcall.run.paths import HANGS, files_in, trusted_live_dirs
from rankcall.whole_numbers import whole_number

STACKS = "stacks"
_VERDICT, _TEXT, _OVER = "verdict.json", "verdict.txt", "over.json"
_LATEST_NS = 1 << 62  # a later time is damage; with it, int64 arithmetic would overflow
_NUMBER = re.compile("[0-9]{1,9}")  # the name of a verdict's folder
_LONGEST_S = 1e9  # a longer hang is damage
_MOST_HANG_BYTES = 1 << 26  # of one file; the largest verdicts, of 100,000 ranks, are smaller
_MOST_STACK_BYTES = 1 << 16
Object = dict[str, Any]


def decode(raw: bytes) -> Object:
    """Decode a verdict, which any user may have written. Raises ``ValueError`` if it is damaged."""
    try:
        verdict = json.loads(raw)
        sound = all(isinstance(finding, dict) for finding in verdict["findings"])
        when = verdict["hang"]["epoch_ns"] = int(verdict["hang"]["epoch_ns"])
        sound &= 0 <= when < _LATEST_NS
        mono_ns = verdict["hang"]["mono_ns"] = int(verdict["hang"].get("mono_ns", 0))
        sound &= 0 <= mono_ns < _LATEST_NS
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a verdict: {type(error).__name__}: {error}") from error
    if not sound:
        raise ValueError("not a verdict: a finding is not an object, or the time is impossible")
    return dict(verdict)


def origin(mono_ns: int, epoch_ns: int, boot_id: str, pid: int) -> Object:
    """Return a verdict's id, which is unique in a run, and the time and process that it comes from.

    A wall clock can step back, so ``epoch_ns`` is only for people to read. ``mono_ns`` counts from
    the boot ``boot_id``.
    """
    return {
        "id": f"{boot_id}.{pid}.{mono_ns}",
        "boot_id": boot_id,
        "mono_ns": mono_ns,
        "epoch_ns": epoch_ns,
        "by_pid": pid,
    }


def id_of(verdict: Object) -> str:
    """Return a verdict's id; for a verdict of rankcall 0.1, its time and process."""
    hang = verdict["hang"]
    return str(hang.get("id") or f"{hang.get('by_pid', 0)}@{hang['epoch_ns']}")


def kept_hangs(path: Path) -> list[Object]:
    """Return the verdicts that a job's watcher kept, in the order in which they were kept.

    A verdict that cannot be read is left out. ``over_s`` is after how many seconds its hang
    passed, or None.
    """
    verdicts: list[Object] = []
    if not os.path.isdir(path):  # unlike Path.is_dir, false if a parent cannot be read
        return verdicts
    for place in (path, *trusted_live_dirs(path)):
        for folder in numbered(place / HANGS):
            with contextlib.suppress(OSError, ValueError):
                verdict = decode(_read(folder / _VERDICT))
                verdicts.append({**verdict, "place": str(folder), "over_s": _over_s(folder)})
    return verdicts


def note_over(place: Path, seconds: float) -> None:
    """Note that a hang passed after so many seconds. Raises ``OSError``."""
    (place / _OVER).write_text(json.dumps({"seconds": round(seconds, 1)}))


def _over_s(folder: Path) -> float | None:
    try:
        seconds = float(json.loads(_read(folder / _OVER))["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return seconds if 0 <= seconds < _LONGEST_S else None


def waits_that_ended(verdicts: Iterable[Object]) -> dict[str, float]:
    """Return by line the longest hang there that passed, in s."""
    longest: dict[str, float] = {}
    for verdict in verdicts:
        for finding in verdict["findings"]:
            line = finding.get("call_site")
            if isinstance(line, str) and line and verdict.get("over_s"):
                line = both_lines(line, str(finding.get("user_line") or ""))
                longest[line] = max(longest.get(line, 0.0), verdict["over_s"])
    return longest


def text_of(verdict: Object) -> str:
    """Return the printed text of a verdict from ``kept_hangs``, safe for a terminal."""
    try:
        text = _read(Path(verdict["place"]) / _TEXT).decode("utf-8", "replace")
    except OSError:
        text = f"verdict: {verdict.get('verdict')}"
    return clean_lines(text)


def _read(path: Path, most: int = _MOST_HANG_BYTES) -> bytes:
    with open_file(path) as file:
        return file.read(most)


def fill(folder: Path, verdict: Object) -> None:
    """Write a verdict into a new folder. Raises ``OSError``."""
    folder.mkdir(mode=0o700)
    (folder / _TEXT).write_text(str(verdict.get("text", "")))
    rest = {key: value for key, value in verdict.items() if key not in ("text", "place", "over_s")}
    (folder / _VERDICT).write_text(json.dumps(rest, indent=1))


def stacks_in(folder: Path) -> list[Path]:
    """Return the files of stacks beside a verdict."""
    return files_in(folder / STACKS, ".txt")


def kept_stacks(verdict: Object, most: int) -> dict[int, str]:
    """Return the stacks beside a verdict from ``kept_hangs``, by rank; of ``most`` ranks."""
    stacks = {}
    for path in stacks_in(Path(verdict["place"]))[:most]:
        rank = whole_number(path.stem.removeprefix("rank-"), most=MAX_RANKS - 1)
        if rank is not None:
            stacks[rank] = kept_stack(verdict, rank)
    return {rank: text for rank, text in stacks.items() if text}


def kept_stack(verdict: Object, rank: int) -> str:
    """Return a rank's stack beside a verdict from ``kept_hangs``; empty without one."""
    try:
        text = _read(Path(verdict["place"]) / STACKS / stack_name(rank), _MOST_STACK_BYTES)
    except OSError:
        return ""
    return text.decode("utf-8", "replace")


def stack_name(rank: int) -> str:
    """Return the name of the file that has a rank's stack."""
    return f"rank-{rank:05d}.txt"


def numbered(folder: Path) -> list[Path]:
    """Return the folders of verdicts below ``hangs``, in order."""
    try:
        return sorted(path for path in folder.iterdir() if _NUMBER.fullmatch(path.name))
    except OSError:  # none yet, or this process may not read them, for example after setuid
        return []


def next_free(folder: Path) -> Path:
    """Return the folder for the next verdict."""
    return folder / f"{1 + max((int(path.name) for path in numbered(folder)), default=0):04d}"


def claim(scratch: Path, place: Path) -> bool:
    """Rename a complete folder to its final name; return False if the name is taken."""
    try:
        scratch.rename(place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def settle_hangs(source: Path, run_dir: Path) -> None:
    """Move the verdicts beside the live rings into the run, except those that cannot be moved."""
    for folder in numbered(source / HANGS):
        taken = folder.with_name(f".{folder.name}.{os.getpid()}")
        try:
            folder.rename(taken)  # only one process gets it
        except OSError:
            continue
        try:
            _move(taken, run_dir)
        except OSError:
            taken.rename(folder)
    with contextlib.suppress(OSError):
        (source / HANGS).rmdir()


def _move(folder: Path, run_dir: Path) -> None:
    target = run_folder(run_dir, HANGS)
    scratch = scratch_beside(target)
    try:
        shutil.copytree(folder, scratch, symlinks=True)
        # Each failure means that another process has kept a verdict, so this ends.
        while not claim(scratch, next_free(target)):
            pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    shutil.rmtree(folder)

"""The files of the verdicts that a job's own watcher kept in its run, with its ranks' stacks.

::

    <run>/hangs/0001/verdict.json         as ``rankcall diagnose --json``, with an id and its origin
    <run>/hangs/0001/verdict.txt          the text that was printed
    <run>/hangs/0001/stacks/rank-00003.txt
    <run>/hangs/0001/lines.json           the source text of the lines at which these ranks stood
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
from collections.abc import Mapping
from pathlib import Path

from rankcall.files import open_file, scratch_beside, write_private
from rankcall.folders import run_folder
from rankcall.ranks import MAX_RANKS
from rankcall.run.paths import HANGS, files_in, trusted_live_dirs
from rankcall.whole_numbers import whole_number

STACKS = "stacks"
_VERDICT, _TEXT, _OVER, LINES = "verdict.json", "verdict.txt", "over.json", "lines.json"
_NUMBER = re.compile("[0-9]{1,9}")  # the name of a verdict's folder
_LONGEST_S = 1e9  # a longer hang is damage
_MOST_HANG_BYTES = 1 << 26  # of one file; the largest verdicts, of 100,000 ranks, are smaller
# What a verdict takes at most, beside its ranks and for each of them. As JSON, a byte of a hostile
# one can become twenty in memory.
_FIRST_BYTES, _BYTES_OF_RANK = 1 << 23, 1 << 10
_MOST_VERDICTS = 256  # that are read of a run, the newest ones
_MOST_STACK_BYTES = 1 << 16  # of one rank: about 800 lines
_MOST_LINES_BYTES = 1 << 16  # of source text: each line is cut to some 160 characters


def hang_folders(path: Path) -> list[Path]:
    """Return the folders of a run's newest verdicts, in the order in which they were kept."""
    if not os.path.isdir(path):  # unlike Path.is_dir, false if a parent cannot be read
        return []
    places = path, *trusted_live_dirs(path)
    folders = [folder for place in places for folder in numbered(place / HANGS)]
    return folders[-_MOST_VERDICTS:]


def read_verdict(folder: Path, ranks: int | None = None) -> bytes:
    """Return an encoded verdict. Raises ``OSError``.

    Args:
        folder: Its folder.
        ranks: The number of ranks of the job, if it is known. A verdict that has more bytes than
            one about so many ranks is cut, and so damaged.
    """
    most = _MOST_HANG_BYTES
    if ranks is not None:
        most = min(most, _FIRST_BYTES + ranks * _BYTES_OF_RANK)
    return _read(folder / _VERDICT, most)


def note_over(place: Path, seconds: float) -> None:
    """Note that a hang passed after so many seconds. Raises ``OSError``."""
    write_private(place / _OVER, json.dumps({"seconds": round(seconds, 1)}).encode())


def read_over(folder: Path) -> float | None:
    """Return after how many seconds a hang passed, or None."""
    try:
        seconds = float(json.loads(_read(folder / _OVER))["seconds"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return seconds if 0 <= seconds < _LONGEST_S else None


def kept_at_ns(folder: Path) -> int:
    """Return when this node kept a verdict, in ns since the epoch. Raises ``OSError``."""
    return (folder / _VERDICT).stat().st_mtime_ns


def _read(path: Path, most: int = _MOST_HANG_BYTES) -> bytes:
    with open_file(path) as file:
        return file.read(most)


def fill(folder: Path, verdict: bytes, text: str) -> None:
    """Write an encoded verdict and its text into a new folder. Raises ``OSError``."""
    folder.mkdir(mode=0o700)
    write_private(folder / _TEXT, text.encode())
    write_private(folder / _VERDICT, verdict)


def stacks_in(folder: Path) -> list[Path]:
    """Return the files of stacks beside a verdict."""
    return files_in(folder / STACKS, ".txt")


def kept_stacks(folder: Path, most: int) -> dict[int, str]:
    """Return the stacks beside a verdict, by rank; of ``most`` ranks."""
    stacks = {}
    for path in stacks_in(folder)[:most]:
        rank = whole_number(path.stem.removeprefix("rank-"), most=MAX_RANKS - 1)
        if rank is not None:
            stacks[rank] = kept_stack(folder, rank)
    return {rank: text for rank, text in stacks.items() if text}


def kept_stack(folder: Path, rank: int) -> str:
    """Return a rank's stack beside a verdict; empty without one."""
    try:
        text = _read(folder / STACKS / stack_name(rank), _MOST_STACK_BYTES)
    except OSError:
        return ""
    return text.decode("utf-8", "replace")


def add_stacks(folder: Path, stacks: Mapping[int, str]) -> None:
    """Write stacks, by rank, beside a verdict. Raises ``OSError``."""
    if stacks:
        (folder / STACKS).mkdir(mode=0o700, exist_ok=True)
    for rank, text in stacks.items():
        write_private(folder / STACKS / stack_name(rank), f"{text}\n".encode())


def add_lines(folder: Path, texts: Mapping[str, str]) -> None:
    """Write source text, by ``file:line``, beside a verdict. Raises ``OSError``."""
    if texts:
        write_private(folder / LINES, json.dumps({**kept_lines(folder), **texts}).encode())


def kept_lines(folder: Path) -> dict[str, str]:
    """Return the source text beside a verdict, by ``file:line``; empty if it cannot be read."""
    try:
        texts = json.loads(_read(folder / LINES, _MOST_LINES_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    pairs = texts.items() if isinstance(texts, dict) else ()
    return {line: text for line, text in pairs if isinstance(text, str)}


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
    keep_copy(folder, run_dir)
    shutil.rmtree(folder)


def keep_copy(folder: Path, run_dir: Path) -> None:
    """Copy a verdict's folder into a run, which may be on another file system.

    Raises ``OSError``.
    """
    target = run_folder(run_dir, HANGS)
    scratch = scratch_beside(target)
    try:
        shutil.copytree(folder, scratch, symlinks=True)
        # Each failure means that another process has kept a verdict, so this ends.
        while not claim(scratch, next_free(target)):
            pass
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""Where each file of a run is: the run directory, and the live rings in shared memory.

``load`` reads a run as tables. Each of the other modules of this package owns some kinds of files.

::

    rankcall-runs/latest -> 20261121T034130-train_digits
    rankcall-runs/20261121T034130-train_digits/
        run.json                                    the command that was started, where and when
        rings/rank-00003.attempt-0.node-a.4711.ring one file per rank and attempt
        rings/rank-00003....4711.tail.ring          its newest records: see ``tails``
        exits/                                      how the workers ended: see ``exits``
        hangs/0001/                                 a verdict of the watcher: see ``hangs``
        stderr/                                     the end of each rank's: see ``stderr_tails``
        recoveries/                                 restarts, and what was decided: ``recoveries``
        bars.jsonl                                  the nodes that are kept out: see ``bars``
        outcome.json                                how the job ended: see ``outcome``
        joins.jsonl                                 the sums of each ``Join``: see ``joins``
    /dev/shm/rankcall-<uid>/<run>-<hash>/           the rings of processes that still run

A live ring is on tmpfs, because a page of a disk file can block its writer. ``settle`` moves a
ring into the run directory after its process has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rankcall._version import __version__
from rankcall.errors import RunNotFoundError
from rankcall.files import open_regular, read_at_most, replacing, scratch_beside
from rankcall.folders import (
    UnsafeFolderError,
    check_file,
    check_folder,
    make_folder,
    make_parents,
    reason,
    run_folder,
)
from rankcall.problems import Problem, ProblemKind
from rankcall.process import host_name
from rankcall.run.redaction import redact_command

RUNS = "rankcall-runs"
ATTEMPTS = "attempts"
RUN_SCHEMA = 1
_MOST_ABOUT = 1 << 22  # bytes of ``run.json``; Linux limits a command line to 2 MiB
_DEEPEST = 100  # levels of lists and dicts in ``run.json``
HANGS = "hangs"
VIEWS = "views"  # below the live rings: see ``views``
TAIL = ".tail.ring"  # a ring's newest records, written while its process lives


def default_run_dir(script: str, started: datetime | None = None) -> Path:
    """Return ``rankcall-runs/<UTC time>-<script>`` below the working directory."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(script).stem).strip("._") or "python"
    moment = (started or datetime.now(timezone.utc)).strftime("%Y%m%dT%H%M%S")
    return Path(RUNS) / f"{moment}-{stem}"


def new_run_dir(path: Path) -> Path:
    """Make ``path``, or ``<path>-2``, ``-3``... if other runs have taken it, and return its path.

    If no directory can be made, only the path is returned: ``create_run`` reports the error.
    """
    number, candidate = 1, path
    while True:
        try:
            make_parents(candidate.parent)
            candidate.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        except OSError:
            return candidate
        else:
            return candidate


def create_run(path: Path, about: dict[str, Any]) -> Path:
    """Make a run directory of mode 0700 with a ``run.json``, and point ``latest`` at it.

    An existing directory keeps its mode, because other users may use it, too. An existing
    ``run.json`` is kept: every rank calls this, and the launcher may have been first.
    """
    if not path.is_dir():
        # Another rank may have been first; "rings" is checked below.
        with contextlib.suppress(UnsafeFolderError):
            make_folder(path, private=False)
    run_folder(path, "rings")
    meta = path / "run.json"
    if not meta.exists():
        text = json.dumps({"schema": RUN_SCHEMA, "name": path.name, **about}, indent=1)
        with replacing(meta) as file:
            file.write(text.encode() + b"\n")
    if path.parent.name == RUNS:
        link = path.parent / "latest"
        scratch = scratch_beside(link)
        scratch.symlink_to(path.name)
        scratch.replace(link)
    return path


def about_job(command: Sequence[str], torch: str, **more: Any) -> dict[str, Any]:
    """Return the content of ``run.json`` for a job that this process starts or is part of.

    Secrets in the command line are replaced, because people copy and send run directories.
    """
    return {
        "created_epoch_ns": time.time_ns(),
        "command": redact_command(command),
        "cwd": str(Path.cwd()),
        "host": host_name(),
        **more,
        "torch": torch,
        "python": sys.version.split()[0],
        "rankcall": __version__,
    }


def job_folder(about: Mapping[str, Any]) -> str:
    """Return the directory in which a job was started, as ``run.json`` has it; else empty."""
    folder = about.get("cwd")
    return folder if isinstance(folder, str) and folder.startswith("/") else ""


def read_about(path: Path, problems: list[Problem]) -> dict[str, Any]:
    """Return the content of ``run.json``; empty if there is none.

    If the file cannot be read, the result is empty, and ``problems`` gets one that says why.
    """
    try:
        if not path.is_dir():
            return {}
        with open_regular(path / "run.json") as file:
            about = json.loads(read_at_most(file, _MOST_ABOUT))
        if _is_deep(about):
            raise ValueError("it is nested too deeply")
        return about if isinstance(about, dict) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        text = f"{path / 'run.json'}: cannot be read: {error}"
        problems.append(Problem(ProblemKind.UNREADABLE, text))
        return {}


def _is_deep(value: Any) -> bool:
    """Tell whether a JSON value is nested so deeply that functions that call themselves fail."""
    values = [value] if isinstance(value, (dict, list)) else []
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for outer in values:
            inner += outer.values() if isinstance(outer, dict) else outer
        values = [container for container in inner if isinstance(container, (dict, list))]
        if not values:
            return False
    return True


def find_run(path: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of a run; without ``path``, of the latest one here.

    That is the latest run below the working directory, or else below the nearest of its parents.

    If the run directory could not be made, this is the folder of the run's live rings.

    Raises ``RunNotFoundError``, which names the path that does not exist.
    """
    if path is None:
        latest = Path(RUNS) / "latest"
        for folder in (Path.cwd(), *Path.cwd().parents):
            if (folder / latest).exists():
                return (folder / latest).resolve()
        raise RunNotFoundError(
            f"no run given and no {latest} here ({Path.cwd()}): "
            "start one with 'rankcall run script.py', or name a run directory"
        )
    run = Path(path)
    if not run.exists():
        for rings in trusted_live_dirs(run):
            return rings
        raise RunNotFoundError(f"no such run: {run}")
    return run


def live_base() -> Path:
    """Return the tmpfs that live rings are kept on: ``RANKCALL_SHM``, or /dev/shm."""
    return Path(os.environ.get("RANKCALL_SHM") or "/dev/shm")


def live_dir(path: Path) -> Path:
    """Return the folder in which this user's processes keep the live rings of a run."""
    return _live_dir_of(path, os.geteuid())


def make_live_dir(path: Path) -> Path:
    """Make or check the folder of a run's live rings, and return it. Raises ``OSError``."""
    folder = live_dir(path)
    make_folder(folder.parent)
    make_folder(folder)
    return folder


def _live_dir_of(path: Path, owner: int) -> Path:
    real = Path(os.path.realpath(path))  # unlike resolve, it never raises
    digest = hashlib.sha1(str(real).encode(), usedforsecurity=False).hexdigest()[:8]
    return live_base() / f"rankcall-{owner}" / f"{real.name}-{digest}"


def _owners(path: Path) -> set[int]:
    """Return the users whose live rings and verdicts are trusted: this one and the run's owner."""
    try:
        return {os.geteuid(), path.stat().st_uid}
    except OSError:
        return {os.geteuid()}


def trusted_live_dirs(path: Path, problems: list[Problem] | None = None) -> list[Path]:
    """Return the folders of a run's live rings that no other user could have written to.

    ``problems`` gets one for each folder that is left out.
    """
    owners, folders = _owners(path), []
    for owner in sorted(owners):
        folder = _live_dir_of(path, owner)
        try:
            for directory in (folder.parent, folder):
                check_folder(directory, owners)
        except FileNotFoundError:
            continue
        except OSError as error:
            if problems is not None:
                text = f"{reason(error)}: live rings and verdicts in it are ignored"
                problems.append(Problem(ProblemKind.UNTRUSTED, text))
            continue
        folders.append(folder)
    return folders


def ring_name(rank: int, attempt: int, host: str, pid: int) -> str:
    """Return the name of a ring file. It is for people: programs read the header instead."""
    rank_label = f"rank-{rank:05d}" if rank >= 0 else "rank-unknown"
    return f"{rank_label}.attempt-{attempt}.{re.sub(r'[^A-Za-z0-9_-]+', '_', host)}.{pid}.ring"


def unused_ring(name: str, *folders: Path) -> str:
    """Return a ring's name, with a number added if one of the folders has a ring of that name.

    A process that records, stops and records again leaves several rings in one run.
    """
    stem, number, candidate = name.removesuffix(".ring"), 1, name
    while any((folder / candidate).exists() for folder in folders):
        number += 1
        candidate = f"{stem}-{number}.ring"
    return candidate


def ring_paths(path: Path, problems: list[Problem] | None = None) -> list[Path]:
    """Return the ring files of a run, both moved and live ones; if ``path`` is a file, that file.

    The tail of a ring counts only if the whole ring is in neither place. A live ring that another
    user could have put there is left out, and ``problems`` says so.
    """
    if path.is_file():
        return [path]
    rings: dict[str, Path] = {}
    for place in (path / "rings", path):
        for ring in files_in(place, ".ring"):
            rings.setdefault(ring.name, ring)
    owners = _owners(path)
    for place in trusted_live_dirs(path, problems):
        for ring in files_in(place, ".ring"):
            try:
                check_file(ring, owners)
            except FileNotFoundError:
                continue  # it was moved meanwhile
            except OSError as error:
                if problems is not None:
                    text = f"{reason(error)}: it is ignored"
                    problems.append(Problem(ProblemKind.UNTRUSTED, text))
            else:
                rings.setdefault(ring.name, ring)
    return [
        ring
        for name, ring in rings.items()
        if whole_name(name) == name or whole_name(name) not in rings
    ]


def files_in(folder: Path, suffix: str) -> list[Path]:
    """Return the files in a folder by name; none if it is not there or may not be read.

    Another process may remove the folder at any time. ``Path.glob`` raises if that happens between
    its two looks at it.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    return [folder / name for name in sorted(names) if name.endswith(suffix)]


def tail_name(name: str) -> str:
    """Return the name of the file with the tail of a ring."""
    return f"{whole_name(name).removesuffix('.ring')}{TAIL}"


def is_tail(ring: Path) -> bool:
    """Return whether a ring file has only the tail of a ring, by its name."""
    return ring.name.endswith(TAIL)


def whole_name(name: str) -> str:
    """Return the name of the ring that a file holds, whole or only its tail."""
    return f"{name.removesuffix(TAIL)}.ring" if name.endswith(TAIL) else name

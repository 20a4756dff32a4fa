"""The live jobs of this user on this host, under any launcher, and the run that a command means.

A live ring names its run, so the jobs are found without a run directory: by the folders of live
rings in shared memory. A rank whose ring is elsewhere, because shared memory is not safe or is
full, is not found so.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from rankcall.errors import RunNotFoundError
from rankcall.folders import check_folder
from rankcall.printable import clean
from rankcall.ring.layout import Header, read_header
from rankcall.run import worker_dirs
from rankcall.run.paths import files_in, find_run, live_base, live_dir

_MOST_RINGS = 4096  # of one job on this host; each costs one small read
_ALIVE, _STOPPED = "alive", "stopped"  # of ``Header.process_state``
_NAMED = 5  # jobs in an error message


@dataclass(frozen=True)
class LiveJob:
    """A job with a live rank here. ``ranks`` are the headers of those of this host, by rank."""

    place: Path  # the run directory, or the folder of the live rings if there is none
    ranks: tuple[Header, ...]
    stopped: int

    @property
    def state(self) -> str:
        """What the ranks here do, in a few words."""
        parts = [f"{self.stopped} stopped"] if self.stopped else []
        overdue = [header.overdue_ns for header in self.ranks if header.overdue_ns > 0]
        if overdue:
            seconds = max(0.0, time.monotonic() - min(overdue) / 1e9)
            parts.append(f"a call overdue for {seconds:.0f} s")
        return ", ".join(parts) or "running"


def live_jobs() -> list[LiveJob]:
    """Return the jobs that run on this host, the newest first. Raises nothing."""
    base = live_base() / f"rankcall-{os.geteuid()}"
    try:
        check_folder(base)
        folders = [folder for folder in base.iterdir() if folder.name != worker_dirs.NAME]
    except OSError:
        return []
    jobs = list(filter(None, map(_job_in, folders)))
    return sorted(jobs, key=lambda job: -max(header.anchor_epoch_ns for header in job.ranks))


def chosen_run(path: str | os.PathLike[str] | None) -> Path:
    """Return the run that a command means: the named one, the only live job, or the latest run.

    Raises ``RunNotFoundError``; if several jobs are live, its text names them.
    """
    jobs = live_jobs() if path is None else []
    if len(jobs) == 1:
        return jobs[0].place
    try:
        return find_run(path)
    except RunNotFoundError:
        if not jobs:
            raise
        names = ", ".join(clean(str(job.place)) for job in jobs[:_NAMED])
        more = f" and {len(jobs) - _NAMED:,} more" if len(jobs) > _NAMED else ""
        raise RunNotFoundError(
            f"{len(jobs)} jobs are live on this host: name one of {names}{more} (rankcall ps)"
        ) from None


def _job_in(folder: Path) -> LiveJob | None:
    try:
        check_folder(folder)
        rings = files_in(folder, ".ring")[:_MOST_RINGS]
    except OSError:
        return None
    headers = [header for header in map(read_header, rings) if header and not header.closed_ns]
    states = [(header, header.process_state()) for header in headers]
    living = [header for header, state in states if state in (_ALIVE, _STOPPED)]
    if not living:
        return None
    newest = max(header.attempt for header in living)
    ranks = sorted((h for h in living if h.attempt == newest), key=lambda header: header.rank)
    stopped = sum(state == _STOPPED and header in ranks for header, state in states)
    return LiveJob(_place(folder, ranks), tuple(ranks), stopped)


def _place(folder: Path, ranks: list[Header]) -> Path:
    """Return the run directory that a ring names, if its live rings are in this folder."""
    for header in ranks:
        path = Path(header.run_dir)
        if header.run_dir and path.is_absolute() and path.is_dir() and live_dir(path) == folder:
            return path
    return folder

"""Open a run as every command does: find it, settle it, load it, choose an attempt.

The live page and the watcher only ``load``: they look at a run again and again, and change nothing
in it.
"""

from __future__ import annotations

import os

from rankcall.run.live_jobs import chosen_run
from rankcall.run.load import Progress, Run, load
from rankcall.run.settle import settle


def open_run(
    path: str | os.PathLike[str] | None = None,
    attempt: int | None = None,
    progress: Progress | None = None,
    *,
    exits_only: bool = False,
) -> Run:
    """Move the rings of this host's ended processes into a run, then load the run.

    A run is settled first, so that the first command after a crash frees the memory that the rings
    take, and so that a copy of the run directory is complete.

    Args:
        path: See ``load``. Without it: see ``chosen_run``.
        attempt: Keep only the rings of this attempt.
        progress: Called with the number of rings that are done, and of all rings.
        exits_only: See ``load``.

    Raises:
        RunNotFoundError: The path, or the attempt, does not exist.
        CorruptRunError: No ring, and no dump, can be read.
    """
    where = chosen_run(path)
    if where.is_dir():
        settle(where)
    run = load(where, progress, exits_only=exits_only)
    return run if attempt is None else run.only(attempt)

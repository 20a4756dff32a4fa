"""Proposals for the run of a job: a new directory, or the next attempt in one that exists.

Several ranks may propose at once, and one proposal is taken (``choice.agree``). So each proposal is
made on the disk before it is published, and can be withdrawn.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

from rankcall.files import create_file
from rankcall.folders import run_folder
from rankcall.job.choice import MOST_ATTEMPTS, Choice
from rankcall.process import boot_seconds, process_start
from rankcall.run.paths import ATTEMPTS, about_job, default_run_dir, new_run_dir
from rankcall.whole_numbers import whole_number

# Other jobs may reserve attempts of the same directory meanwhile. After so many that are taken,
# something else is wrong with the folder, and the attempt is used without a reservation.
_MOST_TRIES = 1_000
_NAME = re.compile(r"\.attempt-(\d{1,9})\.")


def propose_in(run_dir: Path) -> Choice:
    """Reserve the next attempt of a run directory that the user has named."""
    import torch

    number = _next_attempt(run_dir)
    with contextlib.suppress(OSError):  # for example, it cannot be written
        folder = run_folder(run_dir, ATTEMPTS)
        text = json.dumps(about_job(sys.argv, torch.__version__), indent=1)
        for candidate in range(number, number + _MOST_TRIES):
            with contextlib.suppress(FileExistsError):
                with open(create_file(folder / f"{candidate:05d}.json"), "w") as file:
                    file.write(text)
                return Choice(run_dir, candidate)
    return Choice(run_dir, number)


def propose_new(base: Path | None = None) -> Choice:
    """Make a new run directory for this job, beside ``base`` if that is given."""
    return Choice(new_run_dir(base or own_run_dir().absolute()))


def withdraw(choice: Choice) -> None:
    """Remove the directory or the reservation of a proposal that was not taken."""
    with contextlib.suppress(OSError):
        (choice.run_dir / ATTEMPTS / f"{choice.first_attempt:05d}.json").unlink(missing_ok=True)
        choice.run_dir.rmdir()  # fails if it is in use


def own_run_dir(unique: bool = False) -> Path:
    """Name a run after the script and the start of the job, as far as this process knows that.

    If ``unique``, the process that started the job is in the name, so that no other job has it.
    """
    import multiprocessing

    started_by_other = "RANK" in os.environ or multiprocessing.parent_process() is not None
    starter = os.getppid() if started_by_other else os.getpid()
    ticks = process_start(starter) or 0
    moment = boot_seconds() + ticks // os.sysconf("SC_CLK_TCK")
    script = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c") else "python"
    if script == "-m":
        script = "python"
    path = default_run_dir(script, datetime.fromtimestamp(moment, timezone.utc))
    return path.with_name(f"{path.name}-{starter}") if unique else path


def _next_attempt(run_dir: Path) -> int:
    """Return the number after the last attempt that a run directory has seen."""
    numbers = [-1]
    with contextlib.suppress(OSError):
        reserved = (run_dir / ATTEMPTS).iterdir()
        named = (whole_number(path.stem) for path in reserved)
        numbers += [number for number in named if number is not None]
    with contextlib.suppress(OSError):  # of a run that an older rankcall recorded
        matches = (_NAME.search(path.name) for path in (run_dir / "rings").iterdir())
        numbers += [int(match[1]) for match in matches if match]
    return min(max(numbers) + 1, MOST_ATTEMPTS - 1)

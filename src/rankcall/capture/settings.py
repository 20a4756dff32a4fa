"""The settings of a recording, read once from the arguments of ``enable`` and the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from rankcall.ring.layout import AHEAD, MAX_CAPACITY, Geometry
from rankcall.whole_numbers import whole_number

CAPTURES = ("auto", "native", "python")
# The pid of the recorded rank that set it: a process below that rank belongs to another job.
WORKER = "RANKCALL_WORKER"


@dataclass(frozen=True)
class Settings:
    """What one recording is to be. They are handed down as they are; no layer below reads more.

    Attributes:
        run_dir: The run directory that the user or a launcher names, absolute. None: the ranks
            choose one, or the recording is only for hooks and traces and belongs to no run.
        is_inherited: Whether ``run_dir`` comes from the environment, not from an argument.
        outer_run: The run of the recorded rank that started this process, whose job is another.
        capture: One of ``CAPTURES``.
        capacity: The number of records in the ring, a power of two.
        call_sites: Whether to record the line that issued each op.
        settled_run: The run directory into which a launcher on this host moves the rings itself.
        places: A file of ``rankcall exec``, to which each rank adds the path of its run.
        collect_to: The URL to which the newest records are written at the end.
    """

    run_dir: Path | None
    is_inherited: bool
    outer_run: Path | None
    capture: str
    capacity: int
    call_sites: bool
    settled_run: str
    places: str
    collect_to: str

    def without_run(self) -> Settings:
        """Return the settings of a recording that no run is named for."""
        return replace(self, run_dir=None, is_inherited=False, outer_run=None)


def read_settings(
    run_dir: str | os.PathLike[str] | None = None,
    capture: str | None = None,
    capacity: int | None = None,
    call_sites: bool = True,
) -> Settings:
    """Return the settings that these arguments of ``enable`` and the environment ask for.

    An argument wins over its environment variable. Raises ``ValueError`` if a value is not allowed.
    """
    named = run_dir or os.environ.get("RANKCALL_RUN_DIR") or None
    path = Path(named).absolute() if named else None
    is_inherited = path is not None and not run_dir
    is_outer = is_inherited and _is_below_a_rank()
    return Settings(
        run_dir=None if is_outer else path,
        is_inherited=is_inherited,
        outer_run=path if is_outer else None,
        capture=_capture(capture or os.environ.get("RANKCALL_CAPTURE") or "auto"),
        capacity=_capacity(capacity),
        call_sites=call_sites,
        settled_run=os.environ.get("RANKCALL_SETTLES", ""),
        places=os.environ.get("RANKCALL_PLACES", ""),
        collect_to=os.environ.get("RANKCALL_COLLECT_TO", ""),
    )


def _is_below_a_rank() -> bool:
    """Return whether a recorded rank started this process, which then belongs to another job."""
    return os.environ.get(WORKER, str(os.getpid())) != str(os.getpid())


def _capture(name: str) -> str:
    if name not in CAPTURES:
        raise ValueError(f"capture must be one of {', '.join(CAPTURES)}; got {name!r}")
    return name


def _capacity(records: int | None) -> int:
    """Return the next power of two, because a record's slot is its number without the upper bits.

    A ring holds at least as many records as writers may be ahead of its ``head``, or a reader would
    take a slot twice for two records.
    """
    if records is None:
        text = os.environ.get("RANKCALL_CAPACITY") or str(Geometry().capacity)
        records = whole_number(text.strip())
        if records is None:
            raise ValueError(f"RANKCALL_CAPACITY must be a number of records; got {text!r}")
    if not 1 <= records <= MAX_CAPACITY:
        raise ValueError(f"capacity must be from 1 to {MAX_CAPACITY:,} records; got {records}")
    return max(AHEAD, 1 << (records - 1).bit_length())

"""``rankcall clean``: free the memory that the records of killed jobs take on this host."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rankcall.cli._engine import say
from rankcall.rundir import clean_up

__all__ = ["command"]


def command(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also what was recorded less than a day ago."),
    ] = False,
) -> None:
    """Free the memory that the records of this user's killed jobs take on this host.

    A job that is killed together with its launcher leaves its records in shared memory. They are
    moved to the job's run directory, or removed if that is gone. Records of processes that may
    still run are never touched. Other commands do this for records that are older than a day.
    """
    lines = clean_up(everything, most=sys.maxsize)
    for line in lines:
        say(line)
    if not lines:
        say("there is nothing to clean up")

"""``rankcall clean``: free the memory that killed jobs left on this host."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rankcall.cli.common import say
from rankcall.run.clean_up import clean_up

__all__ = ["command"]


def command(
    everything: Annotated[
        bool,
        typer.Option("--all", help="Also free records that are less than a day old."),
    ] = False,
) -> None:
    """Free the memory that this user's killed jobs take on this host.

    A job that is killed together with its launcher leaves its records in shared memory. This moves
    them to the job's run directory, or removes them if that is gone, and removes the blocks that
    killed RPC workers left. It never touches those of processes that may still run. Other
    commands do this for records that are older than a day.
    """
    lines = clean_up(everything, most=sys.maxsize)
    for line in lines:
        say(line)
    if not lines:
        say("there is nothing to clean up")

"""``rankcall ps``: list the jobs that run on this host."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from rankcall.cli.common import console_for_result, say
from rankcall.printable import clean
from rankcall.ranks import format_ranks
from rankcall.run.live_jobs import LiveJob, live_jobs

__all__ = ["command"]


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of JSON objects.")] = False,
) -> None:
    """List this user's jobs that run on this host, whatever started them, the newest first.

    Each has its run, which other commands take, the ranks that run here, the number of optimizer
    steps, and the state. A job is found by its records in shared memory.
    """
    jobs = live_jobs()
    if as_json:
        typer.echo(json.dumps([_object(job) for job in jobs], indent=1))
    elif jobs:
        _print(jobs)
    else:
        say("no job of this user is recorded on this host now")


def _object(job: LiveJob) -> dict[str, object]:
    return {
        "run": str(job.place),
        "ranks": [header.rank for header in job.ranks],
        "pids": [header.pid for header in job.ranks],
        "world_size": max(header.world_size for header in job.ranks),
        "attempt": job.ranks[0].attempt,
        "step": max(header.step for header in job.ranks),
        "state": job.state,
    }


def _print(jobs: list[LiveJob]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("ranks here", "of", "step", "state", "run"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        world = max(header.world_size for header in job.ranks)
        step = max(header.step for header in job.ranks)
        ranks = format_ranks([header.rank for header in job.ranks])
        table.add_row(ranks, f"{world:,}", f"{step:,}", job.state, clean(str(job.place)))
    console_for_result(wraps=False).print(table, markup=False)

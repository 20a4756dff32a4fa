"""``rankcall bar``: keep a node out of a job that carries on."""

from __future__ import annotations

from typing import Annotated

import typer

from rankcall.cli.common import RunPath, say
from rankcall.run.bars import BAR_S, Bar, bar_of, newest, note_bar, read_bars
from rankcall.run.live_jobs import chosen_run

__all__ = ["command", "note"]

Node = Annotated[
    str,
    typer.Argument(metavar="NODE", help="The node's name, as rankcall's reports have it."),
]


def command(
    node: Node,
    run: RunPath = None,
    seconds: Annotated[
        float,
        typer.Option("--for", min=0.0, metavar="SECONDS", help="For how long."),
    ] = BAR_S,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the run.")] = (
        "a person barred it"
    ),
) -> None:
    """Keep a node out of a job that runs with --on-hang recover and --nnodes MIN:MAX.

    It takes effect when the job next restarts its workers, or when the node comes back to it. The
    node's launcher must see this run directory. The job keeps a node that it cannot go on without.
    """
    note(bar_of(node, reason, seconds), run)


def note(bar: Bar, run: RunPath) -> None:
    """Write a bar into a run, and say what holds now."""
    where = chosen_run(run)
    if not where.is_dir():
        say(f"{where} is no run directory")
        raise typer.Exit(2)
    note_bar(where, bar)
    for known in newest(read_bars(where)).values():
        if known.holds(bar.at_ns):
            say(f"{known.node} is barred until {known.shown_end}: {known.reason}")
    if not bar.barred:
        say(f"{bar.node} may take part")

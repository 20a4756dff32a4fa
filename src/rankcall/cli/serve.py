"""``rankcall serve``: a page that shows every rank of a job, live or after its end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rankcall.cli.common import HangAfter, say
from rankcall.run.paths import find_run
from rankcall.serve import DEFAULT_HOST, DEFAULT_PORT, PageServer

__all__ = ["command"]


def command(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run directory or an archive. Without it: the latest run here."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="The address to listen on; if it is not loopback, a token is made.")
    ] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")
    ] = DEFAULT_PORT,
    allow_name: Annotated[
        list[str] | None,
        typer.Option(help="A further host name by which browsers reach the page."),
    ] = None,
    hang_after: HangAfter = None,
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Show a job in a browser, to all who have the link, until Ctrl-C.

    The page reads the ranks' records as top does, and only while somebody looks. An address that
    other hosts can reach needs the token in the printed link.
    """
    if run is not None:
        run = find_run(run).absolute()
    parent = os.getppid() if end_with_parent else None
    server = PageServer(run, host, port, allow_name or (), hang_after, parent)
    typer.echo(f"{'rankcall: the live page: ' if end_with_parent else ''}{server.access.link()}")
    if not end_with_parent:
        say("Ctrl-C ends the page; the job goes on")
    server.serve()

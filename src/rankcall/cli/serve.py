"""``rankcall serve``: a page that shows every rank of a job, live or after its end."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rankcall.cli.common import Attempt, HangAfter, RunPath, say
from rankcall.run.paths import find_run
from rankcall.serve import DEFAULT_HOST, DEFAULT_PORT, PageServer

__all__ = ["command"]


def command(
    run: RunPath = None,
    attempt: Attempt = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="The address to listen on; 0.0.0.0: all of this host.",
        ),
    ] = DEFAULT_HOST,
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0: a free one.")
    ] = DEFAULT_PORT,
    allow_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further host name by which browsers reach the page."),
    ] = None,
    hang_after: HangAfter = None,
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Serve a live page of a job. Everyone who has the link can read it. Ends with Ctrl-C.

    The page reads the ranks' records as top does, and only while somebody looks. The printed link
    has a token, without which nobody can read it, not even other users of this host.
    """
    if run is not None:
        run = find_run(run).absolute()
    parent = os.getppid() if end_with_parent else None
    server = PageServer(run, host, port, allow_name or (), hang_after, parent, attempt)
    typer.echo(f"{'rankcall: the live page: ' if end_with_parent else ''}{server.access.link()}")
    if not end_with_parent:
        say("Ctrl-C ends the page; the job goes on")
    server.serve()

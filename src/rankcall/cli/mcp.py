"""``rankcall mcp``: let a program that assists a person read runs, over the MCP protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankcall.errors import ExtraMissingError

__all__ = ["command"]


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="The runs below this folder, or in its rankcall-runs, can be read.",
            exists=True,
            file_okay=False,
        ),
    ] = Path(),
) -> None:
    """Serve the runs below a folder to an assistant, over MCP on stdin and stdout. Read-only.

    It has four tools: list_runs, verdict, report and stacks. Add it to the assistant's
    configuration as the command "rankcall mcp FOLDER".
    """
    from rankcall.serve.assistant import server

    try:
        made = server(folder)
    except ImportError as error:
        raise ExtraMissingError("mcp needs the package mcp: pip install 'rankcall[mcp]'") from error
    made.run()

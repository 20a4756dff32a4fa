"""``rankcall build``: build the native recorder ahead of time, for images and shared caches."""

from __future__ import annotations

import typer

from rankcall.capture.session import check_torch
from rankcall.cli._engine import say
from rankcall.errors import CaptureUnavailable


def command() -> None:
    """Build the native recorder for this Python and torch, and say where it is.

    Jobs that find it there start at once. Exits with 1 and the reason where it cannot be built;
    jobs then record with the slower Python capture.
    """
    check_torch()
    from rankcall.capture.native.build import prebuild

    try:
        path = prebuild()
    except CaptureUnavailable as error:
        say(str(error))
        raise typer.Exit(1) from error
    typer.echo(f"native recorder: {path}")

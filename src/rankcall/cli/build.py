"""``rankcall build``: build the native parts ahead of time, for images and shared caches."""

from __future__ import annotations

import importlib.util

import typer

from rankcall.capture.session import check_torch
from rankcall.cli.common import COMPILING, say, working
from rankcall.errors import BackendUnavailableError, CaptureUnavailableError


def command() -> None:
    """Build the native recorder and RPC agent for this Python and torch, and print their paths.

    Jobs that find them start without a delay. Exits with 1 and the reason if one cannot be built;
    jobs then record with the slower Python capture, and have no ZMQ back end. The agent is left out
    if pyzmq is not installed.
    """
    check_torch()
    from rankcall.capture.native import RECORDER

    try:
        with working(COMPILING):
            recorder = RECORDER.prebuild()
        typer.echo(f"native recorder: {recorder}")
        if importlib.util.find_spec("zmq") is not None:
            from rankcall.rpc.backends.zmq.agent_module import AGENT

            with working("compiling the native RPC agent, which takes about 20 s"):
                agent = AGENT.prebuild()
            typer.echo(f"native RPC agent: {agent}")
    except (CaptureUnavailableError, BackendUnavailableError) as error:
        say(str(error))
        raise typer.Exit(1) from error

"""``rankcall serve``: one page that shows all ranks of a job, live, to all who have the link.

``live_run`` reads the rings as ``rankcall top`` does and keeps the figures of the last minutes.
``view`` turns both into the page's sections, and gives all viewers the result of one look. ``app``
answers the requests that the rules of ``access`` let through, and ``connections`` says who may stay
connected. This module listens on a socket until it gets a signal. Nothing is read while the page
has no viewer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rankcall.errors import ExtraMissingError, RankcallError, warn_once
from rankcall.serve.live_run import LiveRun

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8088
_BACKLOG = 512  # hundreds of viewers may connect again at once
_POLL_S = 0.1  # uvicorn has no event for the end of a server


class PageServer:
    """A page that listens. ``access.link()`` is its address.

    Args:
        run: The run to show; None: the latest one below the working directory.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        names: Further names under which browsers may reach the page.
        hang_after: See ``judge``.
        parent: End when the process with this id is not this process's parent any more.
        attempt: Show this attempt only; None: the last one.

    Raises:
        ExtraMissingError: starlette, uvicorn or jinja2 is not installed.
        RankcallError: The address cannot be listened on.
    """

    def __init__(
        self,
        run: Path | None = None,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        names: Iterable[str] = (),
        hang_after: float | None = None,
        parent: int | None = None,
        attempt: int | None = None,
    ) -> None:
        check_extra()
        from rankcall.serve.access import Access

        self._socket = _listen(host, port)
        self.access = Access(host, self._socket.getsockname()[1], tuple(names))
        self._run = LiveRun(run, hang_after, attempt)
        self._parent = parent

    def serve(self) -> None:
        """Answer requests until Ctrl-C or SIGTERM."""
        try:
            asyncio.run(self._serve())
        except KeyboardInterrupt:  # uvicorn raises it again once it has ended
            pass
        finally:
            self._socket.close()

    async def _serve(self) -> None:
        import uvicorn

        from rankcall.serve.app import make_app
        from rankcall.serve.connections import AT_ONCE, Connections

        app, page = make_app(self._run, self.access)
        asyncio.get_running_loop().set_exception_handler(_say)
        gc.freeze()  # what the imports made stays: collections need not go through it again
        config = uvicorn.Config(
            app,
            log_level="error",  # an access log would say who reads what
            access_log=False,
            lifespan="off",  # it would write a traceback if the server cannot start
            server_header=False,
            date_header=False,
            proxy_headers=False,
            backlog=AT_ONCE,
            h11_max_incomplete_event_size=1 << 15,
            http=Connections().protocol(),
            ws="none",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        closing = asyncio.create_task(_close_when(server, page.closing, self._parent))
        try:
            await server.serve(sockets=[self._socket])
        finally:
            closing.cancel()
            page.downloads.close()


def _say(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say in one line what the system does not let the page do; it goes on.

    asyncio writes a traceback, and while there are no free descriptors, one for each connection.
    """
    error = context.get("exception")
    if isinstance(error, OSError):
        warn_once(f"the live page: {error}")
    else:
        loop.default_exception_handler(context)


async def _close_when(server: Any, closing: asyncio.Event, parent: int | None) -> None:
    """End the streams when the server ends, which waits for them, or when its parent is gone."""
    while not server.should_exit:
        await asyncio.sleep(_POLL_S)
        if parent is not None and os.getppid() != parent:
            server.should_exit = True
    closing.set()


def check_extra() -> None:
    """Raise ``ExtraMissingError`` if a package that the page needs is not installed."""
    try:
        import jinja2
        import starlette
        import uvicorn
    except ImportError as error:
        raise ExtraMissingError(
            f"the live page needs {error.name}: pip install 'rankcall[serve]'"
        ) from error
    del jinja2, starlette, uvicorn


class _Listener(socket.socket):
    """A socket with a long queue, of which asyncio takes few at once.

    asyncio has one number, ``backlog``, for both, and calls ``listen`` with it. By then, this one
    listens already.
    """

    def listen(self, backlog: int = 0, /) -> None:
        """Change nothing."""


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = _Listener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        socket.socket.listen(listener, _BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        raise RankcallError(f"cannot listen on {host} port {port}: {error}") from error
    listener.set_inheritable(False)
    return listener

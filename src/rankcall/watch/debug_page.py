"""A page for the debug server of torch: the verdict, and where every rank stands.

``torch.distributed.debug.start_debug_server`` starts an HTTP server. In torch 2.13 and 2.15, it
takes pages of others (``handlers``), and calls their methods by name. The base class of its own
pages is in a private module, so ``DebugPage`` does not derive from it.

The server runs in a process of its own on rank 0. If that process was forked from rank 0, then no
library with threads can be trusted in it. So the page is the output of ``rankcall diagnose``, which
runs as a command.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rankcall.capture.session import current
from rankcall.errors import RunNotFound

_PATH = "/rankcall"
_TEMPLATE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}rankcall{% endblock %}</h1>{% endblock %}
{% block content %}<pre>{{ text | e }}</pre>{% endblock %}
"""
_SECONDS = 60.0  # for the command; the server's own ``fetch_timeout`` replaces it
_FRESH_S = 2.0  # all who ask within this time get the same text
_WIDTH = "120"


class _Route(NamedTuple):
    path: str
    handler: Callable[[Any], bytes]


class _Link(NamedTuple):
    path: str
    label: str


class DebugPage:
    """A page ``/rankcall`` of torch's debug server. It shows what ``rankcall diagnose`` says.

    Create it on rank 0 once the job's default process group exists, and start the server with it.
    The other ranks start the server without pages::

        from torch.distributed.debug._debug_handlers import default_handlers

        pages = [*default_handlers(), DebugPage()]
        start_debug_server(handlers=pages, enabled_dumps={"stacks", "rankcall"})

    With ``dump_dir``, the server also writes the text to a file at intervals, if ``enabled_dumps``
    contains ``"rankcall"``. While the job runs, the page has only the ranks of rank 0's host, and
    says so.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None) -> None:
        """Show a run.

        Args:
            run: The run directory. The default is the one that this process records into.

        Raises:
            RunNotFound: No run is given, and this process does not record.
        """
        recording = current()
        if run is None and recording is not None:
            run = recording.run_dir
        if run is None:
            raise RunNotFound(
                "this process does not record into a run: create the page after "
                "init_process_group, in a job that 'rankcall run' started, or give it a run"
            )
        self.run = Path(run).absolute()
        self.fetch_timeout = _SECONDS  # the server sets it
        self._start()

    def _start(self) -> None:
        self._asking = threading.Lock()
        self._text, self._until = "", 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"run": self.run, "fetch_timeout": self.fetch_timeout}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def routes(self) -> list[_Route]:
        """Return the address of the page, and what makes it."""
        return [_Route(_PATH, self._answer)]

    def nav_links(self) -> list[_Link]:
        """Return the link that the server shows on all pages."""
        return [_Link(_PATH, "rankcall")]

    def templates(self) -> dict[str, str]:
        """Return the page's template, which extends the server's own."""
        return {"rankcall.html": _TEMPLATE}

    def dump(self) -> str | None:
        """Return the text that the server writes to a file."""
        return self.text()

    def dump_filename(self) -> str:
        """Return the first part of that file's name."""
        return "rankcall"

    def _answer(self, request: Any) -> bytes:
        page: bytes = request.frontend.render_template("rankcall.html", text=self.text())
        return page

    def text(self) -> str:
        """Return what ``rankcall diagnose`` says now. Many who ask at once get one answer."""
        if not self._asking.acquire(timeout=self.fetch_timeout):
            return f"rankcall diagnose was not done after {self.fetch_timeout:.0f} s"
        try:
            if time.monotonic() >= self._until:
                self._text = _diagnosis(self.run, self.fetch_timeout)
                self._until = time.monotonic() + _FRESH_S
            return self._text
        finally:
            self._asking.release()


def _diagnosis(run: Path, seconds: float) -> str:
    command = [sys.executable, "-m", "rankcall", "diagnose", str(run)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "COLUMNS": _WIDTH},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"rankcall diagnose was not done after {seconds:.0f} s"
    except OSError as error:
        return f"rankcall diagnose cannot be started: {error.strerror}"
    output = done.stdout if done.returncode in (0, 1) else done.stdout + done.stderr
    return output.decode("utf-8", "replace").strip()

"""A page that ``rankcall serve`` shows in a process of its own, and plain HTTP requests to it."""

from __future__ import annotations

import http.client
import json
import re
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

DEADLINE_S = 200.0
RANKCALL = Path(sys.executable).with_name("rankcall")


@dataclass(frozen=True)
class Answer:
    """A response: its status, its headers in small letters, and its text."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        """The text as JSON."""
        return json.loads(self.text)


class Served:
    """``rankcall serve`` on a free port, for the length of a block.

    ``descriptors``: the most that the process may have; 0: as many as this one.
    """

    def __init__(self, *args: str | Path, cwd: Path | None = None, descriptors: int = 0) -> None:
        limit = ["bash", "-c", f'ulimit -n {descriptors} && exec "$@"', "-"] if descriptors else []
        self.process = subprocess.Popen(
            [*limit, str(RANKCALL), "serve", "--port", "0", *map(str, args)],
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out = self.err = ""
        self.link = self._line()
        match = re.fullmatch(r"http://(.+):(\d+)/#token=(\S+)", self.link)
        assert match, self.link
        self.port, self.token = int(match[2]), match[3]
        self.url = f"http://127.0.0.1:{self.port}/"

    @property
    def authorization(self) -> dict[str, str]:
        """The header that a program sends."""
        return {"Authorization": f"Bearer {self.token}"}

    def stream_request(self, path: str = "/events") -> bytes:
        """Return a request with the token as it is sent over a socket."""
        lines = [f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.authorization.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def _line(self) -> str:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            assert selector.select(DEADLINE_S), "the page did not say its address"
        return self.process.stdout.readline().strip()

    def ask(
        self,
        path: str = "/",
        method: str = "GET",
        body: str | None = None,
        **headers: str | None,
    ) -> Answer:
        """Send one request with the token; a header's name is written with _ for -.

        A header that is None is left out: ``Authorization=None`` is a request without the token.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        sent = {**self.authorization, **headers}
        named = {name.replace("_", "-"): value for name, value in sent.items() if value is not None}
        try:
            connection.request(method, path, body, named)
            got = connection.getresponse()
            text = got.read().decode()
            return Answer(got.status, {k.lower(): v for k, v in got.getheaders()}, text)
        finally:
            connection.close()

    def end(self) -> int:
        """Send Ctrl-C, and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            out, err = self.process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate(timeout=DEADLINE_S)
            raise
        self.out, self.err = self.out + out, self.err + err
        return self.process.returncode

    def __enter__(self) -> Served:
        """Return the page."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the page, if the block has not done so."""
        if self.process.poll() is None:
            self.end()

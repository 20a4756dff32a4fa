"""The page's application, asked for all that it has: in this process, or over its socket."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2  # noqa: F401
import uvicorn  # noqa: F401

from rankcall.serve import downloads
from rankcall.serve.access import Access
from rankcall.serve.app import Page, make_app
from rankcall.serve.live_run import LiveRun

REQUESTS = (
    *(("GET", "/"), ("GET", "/api/diagnosis"), ("GET", "/api/figures"), ("GET", "/api/stacks")),
    *(("POST", "/api/stacks"), ("POST", "/stacks"), ("GET", "/report")),
    *(("GET", "/api/profiles"), ("POST", "/api/profiles")),
)
TURNS = 2


class _Connection:
    def has_shown_token(self) -> None:
        pass


_ANSWER_S = 20.0  # to wait for one answer, which a connection that has failed never gets


def view(out: Path, ended: int) -> str:
    """Ask the page whose command writes its link to a file; return the answers.

    A request whose connection fails is sent again. ``ended``: a pipe that is closed if the command
    has ended.
    """
    link = None
    while link is None:
        if select.select([ended], [], [], 0.05)[0]:
            return "has ended"
        link = re.search(r"http://127.0.0.1:(\d+)/#token=(\S+)\n", out.read_text())
    return " ".join(_answer(int(link[1]), link[2], ended, *request) for request in VIEWED)


VIEWED = (("GET", "/"), ("GET", "/api/diagnosis"), ("POST", "/api/stacks"))


def _answer(port: int, token: str, ended: int, method: str, path: str) -> str:
    headers = {"Authorization": f"Bearer {token}", "Origin": f"http://127.0.0.1:{port}"}
    # A page that could not look at the run looks again after a second.
    while not select.select([ended], [], [], 0.2)[0]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
        try:
            connection.request(method, path, headers=headers)
            got = connection.getresponse()
            got.read()
        except (OSError, http.client.HTTPException):
            continue
        finally:
            connection.close()
        if got.status < 500:
            return f"{path} {got.status}"
    return f"{path}: has ended"


def ask_for_all(run: Path, at_last: Callable[[], None]) -> None:
    """Ask for everything twice, and print the answers of the second time.

    ``at_last`` is called in between.
    """
    # What the commands do under failing calls is another phase's subject.
    made: Any = lambda *arguments: ["sh", "-c", 'echo made > "$0"', arguments[-1]]  # noqa: E731
    downloads.run_command = made
    asyncio.run(_ask_for_all(run, at_last))


async def _ask_for_all(run: Path, at_last: Callable[[], None]) -> None:
    access = Access("127.0.0.1", 1)
    app, page = make_app(LiveRun(run), access)
    try:
        for turn in range(TURNS):
            if turn == TURNS - 1:
                at_last()
            answers = [await ask(app, page, access, *request) for request in REQUESTS]
        for status, text in answers:
            print(status, text, flush=True)
    finally:
        page.downloads.close()


async def ask(app: Any, page: Page, access: Access, method: str, path: str) -> tuple[int, str]:
    """Send one request; return the status, and what of the body is the same each time."""
    sent: list[dict[str, Any]] = []
    host = "127.0.0.1:1"
    headers = {"host": host, "origin": f"http://{host}", "authorization": f"Bearer {access.token}"}
    scope = {
        **{"type": "http", "method": method, "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1"},
        "headers": [(name.encode(), text.encode()) for name, text in headers.items()],
        "state": {"connection": _Connection()},
        "asgi": {"spec_version": "2.4"},
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    page.shared.forget()
    page._stacks._at = float("-inf")
    page.downloads._made.clear()
    await app(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in sent).decode()
    status = sent[0]["status"]
    if path == "/api/diagnosis" and status == 200:
        look = json.loads(body)
        return status, f"{look['state']} {[finding['kind'] for finding in look['findings']]}"
    if status >= 400:
        print(method, path, status, body, file=sys.stderr)
    return status, path

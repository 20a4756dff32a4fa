"""The page's application, asked in this process for all that it has, without a socket."""

from __future__ import annotations

import asyncio
import json
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

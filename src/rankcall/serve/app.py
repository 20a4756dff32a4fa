"""The page's addresses, its downloads, and the checks that each request passes first."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from rankcall.errors import RankcallError
from rankcall.process import clean
from rankcall.report.json import diagnosis_object, stack_objects
from rankcall.serve.live_run import LiveRun, Look
from rankcall.serve.view import SharedLook, login_page, page, policy

# The rules for readers of the page: addresses, tokens, and the Host and Origin headers.
#
# A page on a loopback address needs no token: only processes of this host can connect to it. Any
# other address needs the token that is made at start. A browser sends the cookies of a site to
# whatever address the site's name leads to at that moment (DNS rebinding), so the Host header is
# checked as well.


_LOCAL_NAMES = ("localhost",)
_MOST_CHARS = 512  # of a token or header; the rest is ignored


def is_loopback(address: str) -> bool:
    """Return whether only processes of this host can connect to an address."""
    if address in _LOCAL_NAMES:
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Access:
    """The rules of one server.

    ``names`` are further names under which browsers may reach it. ``token`` is empty on a loopback
    address.
    """

    host: str
    port: int
    names: tuple[str, ...] = ()
    token: str = field(default="", repr=False)

    @classmethod
    def of(cls, host: str, port: int, names: Iterable[str] = ()) -> Access:
        """Return the rules for an address, with a new token if it needs one."""
        token = "" if is_loopback(host) else secrets.token_urlsafe(32)
        return cls(host, port, tuple(name.lower() for name in names), token)

    @property
    def cookie(self) -> str:
        """The cookie's name. Cookies do not know ports, so the name has it."""
        return f"rankcall-{self.port}"

    @property
    def cookie_value(self) -> str:
        """The cookie's value: not the token itself, but a value that follows from it alone."""
        return hmac.new(self.token.encode(), b"rankcall cookie", hashlib.sha256).hexdigest()

    def link(self) -> str:
        """Return the page's address. The part after # is never sent, so no log has the token."""
        host = self.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"#token={self.token}" if self.token else "")

    def is_token(self, given: str) -> bool:
        """Compare a token in constant time."""
        return bool(self.token) and _equal(given, self.token)

    def is_known_host(self, header: str) -> bool:
        """Return whether the Host header names this server."""
        name = _host_name(header)
        if name is None:
            return False
        if not self.token:
            return is_loopback(name) or name in self.names
        if name in (*_LOCAL_NAMES, self.host.lower(), *self.names, *_own_names()):
            return True
        try:
            ipaddress.ip_address(name)  # an address has no name that could lead elsewhere
        except ValueError:
            return False
        return True

    def may_read(self, authorization: str, cookies: str) -> bool:
        """Return whether a request's headers carry the token, or the cookie that was set for it."""
        if not self.token:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        jar = SimpleCookie()
        try:
            jar.load(cookies[: 16 * _MOST_CHARS])
        except CookieError:
            return False
        return self.cookie in jar and _equal(jar[self.cookie].value, self.cookie_value)

    def is_same_origin(self, origin: str, host: str) -> bool:
        """Return whether a POST comes from the page itself: Origin and Host name one server."""
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower() != ""


def _equal(given: str, wanted: str) -> bool:
    short = given[:_MOST_CHARS].encode("utf-8", "replace")
    return hmac.compare_digest(short, wanted.encode())


def _host_name(header: str) -> str | None:
    """Return the name in a Host header, without the port; None if the header is damaged."""
    if not header or len(header) > _MOST_CHARS or any(char in header for char in "@/\\ ?#"):
        return None
    try:
        parts = urlsplit(f"//{header}")
        _ = parts.port
    except ValueError:
        return None
    return parts.hostname


def _own_names() -> tuple[str, ...]:
    name = socket.gethostname().lower()
    return name, name.partition(".")[0]


# The report, the timeline and the archive of a run, made by rankcall's own commands when asked.
#
# Each is made by a process of its own with a low priority, so a large run neither blocks the page
# nor takes the cores that the job needs. One file is made at a time; viewers that want the same one
# meanwhile get the same file.


LIMIT_S = 600.0
_KEPT_S = 15.0  # a file is offered again without being made anew
_LEFT_OUT = 1  # the exit status of a command that has done its work but met problems


@dataclass(frozen=True)
class Kind:
    """A file that viewers can ask for. ``arguments``: of rankcall; RUN and FILE are replaced."""

    name: str
    media_type: str
    arguments: tuple[str, ...]
    shown: bool = False  # in the browser, not saved


KINDS = {
    "report": Kind("report.html", "text/html", ("report", "RUN", "--html", "FILE"), shown=True),
    "timeline": Kind(
        "timeline.pftrace",
        "application/octet-stream",
        ("export", "RUN", "--to", "perfetto", "-o", "FILE"),
    ),
    "archive": Kind("run.tar.zst", "application/zstd", ("collect", "RUN", "--to", "FILE")),
    "summary": Kind("report.json", "application/json", ("report", "RUN", "--json")),
}


class Downloads:
    """Makes files of one run in a temporary folder, which ``close`` removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rankcall-serve-"))
        self._turn = asyncio.Lock()
        self._made: dict[tuple[str, Path], tuple[float, Path]] = {}

    async def make(self, kind: Kind, run: Path) -> Path:
        """Return the file. Raises ``RankcallError`` if it cannot be made in ``LIMIT_S`` seconds."""
        try:
            await asyncio.wait_for(self._turn.acquire(), LIMIT_S)
        except asyncio.TimeoutError:
            raise RankcallError("another file is being made: ask again later") from None
        try:
            made = self._made.get((kind.name, run))
            if made is None or time.monotonic() - made[0] > _KEPT_S or not made[1].exists():
                path = await asyncio.to_thread(self._run, kind, run)
                self._made[kind.name, run] = time.monotonic(), path
            return self._made[kind.name, run][1]
        finally:
            self._turn.release()

    def _run(self, kind: Kind, run: Path) -> Path:
        target = Path(tempfile.mkdtemp(dir=self._folder)) / kind.name
        filled = {"RUN": str(run), "FILE": str(target)}
        command = [sys.executable, "-m", "rankcall", *(filled.get(a, a) for a in kind.arguments)]
        with contextlib.ExitStack() as stack:
            out = None
            if "FILE" not in kind.arguments:
                out = stack.enter_context(target.open("wb"))
            try:
                done = subprocess.run(
                    ["nice", "-n", "10", *command] if shutil.which("nice") else command,
                    stdin=subprocess.DEVNULL,
                    stdout=out or subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    timeout=LIMIT_S,
                    check=False,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise RankcallError(f"{kind.name} cannot be made: {error}") from error
        if done.returncode > _LEFT_OUT or not target.exists():
            lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
            why = clean(lines[-1]) if lines else f"exit status {done.returncode}"
            raise RankcallError(f"{kind.name} cannot be made: {why}")
        for key, (_, older) in list(self._made.items()):
            if key[0] == kind.name:  # a viewer that still receives it has it open
                shutil.rmtree(older.parent, ignore_errors=True)
                del self._made[key]
        return target

    def close(self) -> None:
        """Remove all files."""
        shutil.rmtree(self._folder, ignore_errors=True)


MOST_VIEWERS = 512  # event streams at once
_SEND_S = 30.0  # a viewer that takes no byte for so long is gone
_MOST_BODY = 4096
_STACKS_EVERY_S = 2.0  # requests within that time get the same stacks
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_OPEN = ("/login",)  # addresses that need no token
Handler = Callable[[Request], Awaitable[Response]]


class _EventStream(StreamingResponse):
    """A stream that ends if its viewer takes nothing for ``_SEND_S`` seconds."""

    def __init__(self, changes: AsyncGenerator[bytes, None]) -> None:
        super().__init__(changes, media_type="text/event-stream")
        self._changes = changes

    async def stream_response(self, send: Any) -> None:
        async def send_in_time(message: Any) -> None:
            await asyncio.wait_for(send(message), _SEND_S)

        async with contextlib.aclosing(self._changes):
            with contextlib.suppress(asyncio.TimeoutError):
                await super().stream_response(send_in_time)


class Page:
    """Answers the requests for one run. ``closing`` is set when the server ends."""

    def __init__(self, run: LiveRun, access: Access) -> None:
        self.shared = SharedLook(run)
        self.downloads = Downloads()
        self.closing = asyncio.Event()
        self._access = access
        self._viewers = 0
        self._stacks_turn = asyncio.Lock()
        self._stacks_at = float("-inf")

    def routes(self) -> list[Route]:
        """Return the addresses."""
        made = [(f"/{name}", name) for name in ("report", "timeline", "archive")]
        return [
            Route("/", self._checked(self.index)),
            Route("/login", self._checked(self.login), methods=["POST"]),
            Route("/events", self._checked(self.events)),
            Route("/stacks", self._checked(self.stacks_form), methods=["POST"]),
            Route("/api/diagnosis", self._checked(self.diagnosis)),
            Route("/api/figures", self._checked(self.figures)),
            Route("/api/stacks", self._checked(self.stacks), methods=["GET", "POST"]),
            *(Route(path, self._checked(self._download(name))) for path, name in made),
            Route("/api/report", self._checked(self._download("summary"))),
        ]

    # --- checks ---

    def _checked(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            response = self._refusal(request)
            if response is None:
                try:
                    response = await handler(request)
                except RankcallError as error:
                    response = PlainTextResponse(f"{error}\n", 503)
            response.headers.update(_HEADERS)
            response.headers.setdefault("Content-Security-Policy", policy())
            return response

        return answer

    def _refusal(self, request: Request) -> Response | None:
        """Return why a request gets no answer, or None."""
        headers = request.headers
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._access.is_known_host(host):
            return PlainTextResponse(
                "this is not a name of the server: see rankcall serve --allow-name\n", 421
            )
        origin = headers.get("origin", "")
        if request.method == "POST" and not self._access.is_same_origin(origin, host):
            return PlainTextResponse("this request must come from the page itself\n", 403)
        if request.url.path in _OPEN:
            return None
        if not self._access.may_read(headers.get("authorization", ""), headers.get("cookie", "")):
            if request.url.path == "/":
                return HTMLResponse(login_page(), 401)
            return PlainTextResponse(
                "the token is missing or wrong\n", 401, {"WWW-Authenticate": "Bearer"}
            )
        return None

    async def login(self, request: Request) -> Response:
        """Set the cookie for a token from a form."""
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY:
                return PlainTextResponse("too long\n", 413)
        token = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0]
        if not self._access.is_token(token.strip()):
            return HTMLResponse(login_page("That is not the token of this server."), 401)
        response = RedirectResponse("./", 303)
        response.set_cookie(
            self._access.cookie, self._access.cookie_value, httponly=True, samesite="strict"
        )
        return response

    # --- the page ---

    async def index(self, request: Request) -> Response:
        """Return the whole page."""
        update = await self.shared.newest()
        return HTMLResponse(page(update.look, dict(update.sections)))

    async def events(self, request: Request) -> Response:
        """Return the stream of changes; the browser asks again if it is cut off."""
        if self._viewers >= MOST_VIEWERS:
            return PlainTextResponse("too many viewers\n", 503, {"Retry-After": "10"})
        return _EventStream(self._changes())

    async def _changes(self) -> AsyncGenerator[bytes, None]:
        self._viewers += 1
        try:
            known: dict[str, str] = {}
            yield b"retry: 3000\n\n"
            while not self.closing.is_set():
                update = await self.shared.newest()
                # A comment shows the viewer, and us, that the connection still works.
                yield update.event(known) if dict(update.digests) != known else b": no change\n\n"
                known = dict(update.digests)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.closing.wait(), self.shared.pause)
        finally:
            self._viewers -= 1

    # --- JSON ---

    async def diagnosis(self, request: Request) -> Response:
        """Return the object that ``rankcall diagnose --json`` prints."""
        look = (await self.shared.newest()).look
        if look.diagnosis is None:
            return JSONResponse({"state": look.state, "problem": look.problem}, 503)
        stacks = look.stacks.by_rank if look.stacks else {}
        content = diagnosis_object(look.diagnosis, stacks)
        return JSONResponse({**content, "state": look.state, "epoch_s": look.epoch_s})

    async def figures(self, request: Request) -> Response:
        """Return waiting and bandwidth over the last minutes."""
        await self.shared.newest()
        rows = [
            {
                "epoch_s": sample.epoch_s,
                "waiting": sample.waiting,
                "busbw": [
                    {"op": op, "group": group, "size_bucket_bytes": size, "busbw_gbps": rate}
                    for (op, group, size), rate in sample.busbw.items()
                ],
            }
            for sample in list(self.shared.history.samples)
        ]
        return JSONResponse({"samples": rows})

    async def stacks(self, request: Request) -> Response:
        """Return the stacks that the page shows; a POST takes new ones first."""
        if request.method == "POST":
            await self._take_stacks()
        look = (await self.shared.newest()).look
        return JSONResponse(_stacks_object(look))

    async def stacks_form(self, request: Request) -> Response:
        """Take stacks for a browser without scripts."""
        await self._take_stacks()
        return RedirectResponse("./#stacks", 303)

    async def _take_stacks(self) -> None:
        """Have the ranks dump their stacks, once for all who ask at the same time."""
        loop = asyncio.get_running_loop()
        async with self._stacks_turn:
            if loop.time() - self._stacks_at < _STACKS_EVERY_S:
                return
            await asyncio.to_thread(self.shared.run.take_stacks)
            self._stacks_at = loop.time()
            self.shared.forget()

    # --- files ---

    def _download(self, name: str) -> Handler:
        kind = KINDS[name]

        async def send(request: Request) -> Response:
            run: Path = await asyncio.to_thread(self.shared.run.place)
            path = await self.downloads.make(kind, run)
            if kind.shown:
                # The report has a policy of its own, and may load nothing either.
                response = FileResponse(path, media_type=kind.media_type)
                response.headers["Content-Security-Policy"] = (
                    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
                    "script-src 'unsafe-inline'; frame-ancestors 'none'"
                )
                return response
            if kind.media_type == "application/json":
                return FileResponse(path, media_type=kind.media_type)
            stem = run.resolve().name.partition(".tar")[0]
            plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
            return FileResponse(path, media_type=kind.media_type, filename=f"{plain}.{kind.name}")

        return send


def _stacks_object(look: Look) -> dict[str, Any]:
    stacks = look.stacks
    return {
        "epoch_s": stacks.epoch_s if stacks else None,
        "by_watcher": bool(stacks and stacks.by_watcher),
        "stack_classes": stack_objects(stacks.by_rank) if stacks else [],
    }


def make_app(run: LiveRun, access: Access) -> tuple[Starlette, Page]:
    """Return the application, and the page whose ``closing`` ends its streams."""
    served = Page(run, access)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            served.downloads.close()

    return Starlette(routes=served.routes(), lifespan=lifespan), served

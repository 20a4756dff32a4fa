"""The page's addresses, its downloads, and the checks that each request passes first."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
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

from rankcall.analysis.verdicts.encoding import stack_objects, verdict_object
from rankcall.background import is_lack_of_threads
from rankcall.errors import RankcallError
from rankcall.run.profiles import parse_ranks
from rankcall.serve.access import Access
from rankcall.serve.downloads import Download, Downloads
from rankcall.serve.live_run import LiveRun, Look
from rankcall.serve.shared_look import SharedLook
from rankcall.serve.view import login_page, page, policy

KINDS = {
    "report": Download("report.html", "text/html", ("report", "RUN", "-o", "FILE"), shown=True),
    "timeline": Download(
        "timeline.pftrace",
        "application/octet-stream",
        ("export", "RUN", "--to", "perfetto", "-o", "FILE"),
    ),
    "archive": Download(
        "run.tar.zst", "application/zstd", ("collect", "RUN", "-o", "FILE"), takes_attempt=False
    ),
    "summary": Download("report.json", "application/json", ("report", "RUN", "--json")),
}

_SEND_S = 30.0  # a viewer that takes no byte for so long is gone
_MOST_BODY = 4096  # bytes of a request: a form has one token, or a list of ranks
_LONGEST_FOLD = 200  # characters: the name of a parallel dimension, with what its rows are
_ASKED_EVERY_S = 2.0  # requests within that time get the same stacks, or the same profiles
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


class _File(FileResponse):
    """A file that may be unreadable when it is sent: that is an answer, not a traceback."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_begun = False

        async def note_and_send(message: Any) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await super().__call__(scope, receive, note_and_send)
        except (OSError, RuntimeError) as error:
            # Of a response that has begun, the server closes the connection: it is incomplete.
            if not has_begun:
                await PlainTextResponse(f"{error}\n", 503, dict(_HEADERS))(scope, receive, send)


class _Asked:
    """Asks the ranks for something, once for all viewers who ask for the same at the same time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._asked: tuple[object, ...] | None = None
        self._at = float("-inf")

    async def ask(self, take: Callable[..., object], *arguments: object) -> bool:
        """Call ``take`` on a thread, unless that was just done; return whether it was called."""
        loop = asyncio.get_running_loop()
        async with self._turn:
            if self._asked == arguments and loop.time() - self._at < _ASKED_EVERY_S:
                return False
            await asyncio.to_thread(take, *arguments)
            self._asked, self._at = arguments, loop.time()
            return True


class Page:
    """Answers the requests for one run. ``closing`` is set when the server ends."""

    def __init__(self, run: LiveRun, access: Access) -> None:
        self.shared = SharedLook(run)
        self.downloads = Downloads()
        self.closing = asyncio.Event()
        self._access = access
        self._stacks, self._profiles = _Asked(), _Asked()

    def routes(self) -> list[Route]:
        """Return the addresses."""
        made = [(f"/{name}", name) for name in ("report", "timeline", "archive")]
        return [
            Route("/", self._checked(self.index)),
            Route("/login", self._checked(self.login), methods=["POST"]),
            Route("/events", self._checked(self.events)),
            Route("/stacks", self._checked(self.stacks_form), methods=["POST"]),
            Route("/profiles", self._checked(self.profiles_form), methods=["POST"]),
            Route("/profiles/{rank}", self._checked(self.profile)),
            Route("/api/diagnosis", self._checked(self.diagnosis)),
            Route("/api/figures", self._checked(self.figures)),
            Route("/api/stacks", self._checked(self.stacks), methods=["GET", "POST"]),
            Route("/api/profiles", self._checked(self.profiles), methods=["GET", "POST"]),
            *(Route(path, self._checked(self._download(name))) for path, name in made),
            Route("/api/report", self._checked(self._download("summary"))),
        ]

    def _checked(self, handler: Handler) -> Handler:
        async def answer(request: Request) -> Response:
            response = self._refusal(request)
            if response is None:
                try:
                    response = await handler(request)
                except (RankcallError, OSError) as error:  # such as too many open files
                    response = PlainTextResponse(f"{error}\n", 503)
                except RuntimeError as error:
                    if not is_lack_of_threads(error):
                        raise
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
        request.state.connection.has_shown_token()
        return None

    async def login(self, request: Request) -> Response:
        """Set the cookie for a token from a form."""
        fields = await _form(request)
        if isinstance(fields, Response):
            return fields
        if not self._access.is_token(fields.get("token", "").strip()):
            return HTMLResponse(login_page("That is not the token of this server."), 401)
        response = RedirectResponse("./", 303)
        response.set_cookie(
            self._access.cookie, self._access.cookie_value, httponly=True, samesite="strict"
        )
        return response

    async def index(self, request: Request) -> Response:
        """Return the whole page."""
        update = await self.shared.folded(_chosen_rows(request))
        return HTMLResponse(page(update.look, dict(update.sections)))

    async def events(self, request: Request) -> Response:
        """Return the stream of changes; the browser asks again if it is cut off."""
        return _EventStream(self._changes(_chosen_rows(request)))

    async def _changes(self, by: str = "") -> AsyncGenerator[bytes, None]:
        known: dict[str, str] = {}
        yield b"retry: 3000\n\n"
        while not self.closing.is_set():
            update = await self.shared.folded(by)
            # A comment shows the viewer, and us, that the connection still works.
            yield update.event(known) if dict(update.digests) != known else b": no change\n\n"
            known = dict(update.digests)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.closing.wait(), self.shared.pause)

    async def diagnosis(self, request: Request) -> Response:
        """Return the object that ``rankcall diagnose --json`` prints."""
        look = (await self.shared.newest()).look
        if look.diagnosis is None:
            return JSONResponse({"state": look.state, "problem": look.problem}, 503)
        stacks = look.stacks.by_rank if look.stacks else {}
        content = verdict_object(look.diagnosis, stacks)
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
        """Have the ranks dump their stacks."""
        if await self._stacks.ask(self.shared.run.take_stacks):
            self.shared.forget()

    async def profiles(self, request: Request) -> Response:
        """Return the profiles that the page shows; a POST takes new ones first."""
        if request.method == "POST":
            refused = await self._take_profiles(request)
            if refused is not None:
                return refused
        look = (await self.shared.newest()).look
        return JSONResponse(_profiles_object(look))

    async def profiles_form(self, request: Request) -> Response:
        """Profile ranks for a browser without scripts."""
        return await self._take_profiles(request) or RedirectResponse("./#profiles", 303)

    async def _take_profiles(self, request: Request) -> Response | None:
        """Profile the ranks that a form names; return why that is refused, or None."""
        fields = await _form(request)
        if isinstance(fields, Response):
            return fields
        text = fields.get("ranks", "").strip()
        try:
            ranks = parse_ranks(text) if text else []
        except ValueError as error:
            return PlainTextResponse(f"the page takes {error}\n", 400)
        if await self._profiles.ask(self.shared.run.take_profiles, ranks):
            self.shared.forget()
        return None

    async def profile(self, request: Request) -> Response:
        """Return the newest profile of a rank, for a viewer of such files."""
        look = (await self.shared.newest()).look
        taken = look.profiles.taken if look.profiles else ()
        rank = request.path_params["rank"]  # text: a number may have thousands of digits
        for profile in taken:
            if str(profile.header.rank) == rank and profile.path is not None:
                return _File(
                    profile.path, media_type="application/json", filename=profile.path.name
                )
        return PlainTextResponse("that rank has no profile here\n", 404)

    def _download(self, name: str) -> Handler:
        kind, attempt = KINDS[name], self.shared.run.attempt
        if attempt is not None and kind.takes_attempt:
            kind = replace(kind, arguments=(*kind.arguments, "--attempt", str(attempt)))

        async def send(request: Request) -> Response:
            run: Path = await asyncio.to_thread(self.shared.run.place)
            path = await self.downloads.make(kind, run)
            if kind.shown:
                # The report has a policy of its own, and may load nothing either.
                response = _File(path, media_type=kind.media_type)
                response.headers["Content-Security-Policy"] = (
                    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
                    "script-src 'unsafe-inline'; frame-ancestors 'none'"
                )
                return response
            if kind.media_type == "application/json":
                return _File(path, media_type=kind.media_type)
            stem = run.resolve().name.partition(".tar")[0]
            plain = "".join(c if c.isalnum() or c in "-_." else "_" for c in stem)
            return _File(path, media_type=kind.media_type, filename=f"{plain}.{kind.name}")

        return send


def _chosen_rows(request: Request) -> str:
    """Return the fold in whose rows a viewer wants to see the ranks; empty: by host."""
    return request.query_params.get("by", "")[:_LONGEST_FOLD]


async def _form(request: Request) -> dict[str, str] | Response:
    """Return the fields of a form, or an answer if it cannot be read."""
    body = b""
    try:
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BODY:
                return PlainTextResponse("too long\n", 413)
    except ClientDisconnect:  # a traceback for each of many strangers would fill stderr
        return PlainTextResponse("incomplete\n", 400)
    return {name: values[0] for name, values in parse_qs(body.decode("utf-8", "replace")).items()}


def _profiles_object(look: Look) -> dict[str, Any]:
    profiles = look.profiles
    return {
        "epoch_s": profiles.epoch_s if profiles else None,
        "profiles": [profile.as_object() for profile in profiles.taken] if profiles else [],
    }


def _stacks_object(look: Look) -> dict[str, Any]:
    stacks = look.stacks
    return {
        "epoch_s": stacks.epoch_s if stacks else None,
        "by_watcher": bool(stacks and stacks.by_watcher),
        "stack_classes": stack_objects(stacks.by_rank) if stacks else [],
    }


def make_app(run: LiveRun, access: Access) -> tuple[Starlette, Page]:
    """Return the application, and the page: ``closing`` ends its streams.

    Its downloads are closed by whoever has served it.
    """
    served = Page(run, access)
    return Starlette(routes=served.routes()), served

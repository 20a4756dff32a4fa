"""The readers of the page of ``rankcall serve``: loopback, tokens, and forged headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from serving import Served

from rankcall.serve.access import Access, is_loopback
from rankcall.testing.synthetic import synthetic_run

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small run."""
    folder = tmp_path_factory.mktemp("served") / "run"
    synthetic_run(folder, 2, 20)
    return folder


@pytest.fixture(scope="module")
def local(run: Path) -> Iterator[Served]:
    """Return a page on loopback."""
    with Served(run) as served:
        yield served


@pytest.fixture(scope="module")
def public(run: Path) -> Iterator[Served]:
    """Return a page that other hosts could reach."""
    with Served(run, "--host", "0.0.0.0") as served:
        yield served


def test_loopback_needs_no_token(local: Served) -> None:
    """The link has none, and every address answers."""
    assert local.token == ""
    assert local.ask().status == 200
    assert local.ask("/api/diagnosis").status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
        "10.0.0.7",
        "127.0.0.1.evil.example",
        "a@127.0.0.1",
        "",
        "[::1",
    ],
)
def test_a_name_that_leads_here_is_refused(local: Served, host: str) -> None:
    """DNS rebinding: a page of another site that reaches us by its own name gets nothing."""
    for path in ("/", "/api/diagnosis", "/events", "/login"):
        answer = local.ask(path, Host=host)
        assert answer.status in (400, 405, 421)
        assert "rank" not in answer.text.replace("rankcall serve --allow-name", "")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.8.8.8", "[::1]"])
def test_loopback_by_its_own_names(local: Served, host: str) -> None:
    """Each name of this host's loopback is accepted, on any port: it may be forwarded by ssh."""
    assert local.ask(Host=host).status == 200


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "http://127.0.0.1:1", "file://", "http://["]
)
def test_only_the_page_itself_takes_stacks(local: Served, origin: str | None) -> None:
    """A POST from elsewhere, or from nowhere, does nothing."""
    headers = {} if origin is None else {"Origin": origin}
    for path in ("/stacks", "/api/stacks"):
        assert local.ask(path, "POST", "", **headers).status == 403


def test_the_page_itself_may_take_stacks(local: Served) -> None:
    """The answer is JSON, or without a script the page again. Ended ranks have no stacks."""
    own = f"http://127.0.0.1:{local.port}"
    answer = local.ask("/api/stacks", "POST", "", Origin=own)
    assert (answer.status, answer.json["stack_classes"]) == (200, [])
    assert local.ask("/stacks", "POST", "", Origin=own).status == 303


def test_without_the_token_nothing_is_shown(public: Served) -> None:
    """The page asks for the token; everything else is refused, with nothing of the run."""
    assert len(public.token) >= 40
    first = public.ask()
    assert first.status == 401
    assert "This page needs the token" in first.text
    assert "train.py" not in first.text
    for path in ("/events", "/api/diagnosis", "/api/figures", "/api/report", "/report", "/archive"):
        assert public.ask(path).status == 401


def test_the_token_in_a_header(public: Served) -> None:
    """A program sends it as a bearer token; in the address it does not count."""
    assert public.ask("/api/diagnosis", Authorization=f"Bearer {public.token}").status == 200
    assert public.ask(f"/?token={quote(public.token)}").status == 401


@pytest.mark.parametrize("wrong", ["", "x", "ä", "x" * 100_00, "Bearer"])
def test_wrong_tokens(public: Served, wrong: str) -> None:
    """Any other token is refused, however long or odd it is."""
    sent = f"Bearer {wrong}".encode().decode("latin-1")
    assert public.ask("/api/diagnosis", Authorization=sent).status == 401
    assert public.ask("/api/diagnosis", Authorization=public.token).status == 401
    cookie = f"rankcall-{public.port}={sent}"
    assert public.ask("/api/diagnosis", Cookie=cookie).status == 401


def test_a_token_of_another_server_is_refused(public: Served, run: Path) -> None:
    """Each start makes a new token: an old link, and an old cookie, open nothing."""
    with Served(run, "--host", "0.0.0.0") as other:
        assert other.token != public.token
        old = Access("0.0.0.0", other.port, token=public.token)
        assert other.ask(Authorization=f"Bearer {public.token}").status == 401
        assert other.ask(Cookie=f"{old.cookie}={old.cookie_value}").status == 401


def test_login_sets_a_cookie_that_scripts_cannot_read(public: Served) -> None:
    """The form answers with a cookie that opens the page; the cookie is not the token."""
    own = f"http://127.0.0.1:{public.port}"
    form = {"Content_Type": "application/x-www-form-urlencoded", "Origin": own}
    done = public.ask("/login", "POST", f"token={quote(public.token)}", **form)
    assert done.status == 303
    cookie = done.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert public.token not in cookie
    assert public.ask(Cookie=cookie.partition(";")[0]).status == 200
    assert public.ask("/login", "POST", "token=wrong", **form).status == 401
    assert public.ask("/login", "POST", "token=" + "x" * 9000, **form).status == 413
    elsewhere = {**form, "Origin": "http://evil.example"}
    assert public.ask("/login", "POST", f"token={public.token}", **elsewhere).status == 403


def test_the_token_is_printed_once(run: Path) -> None:
    """It is in the link alone, and in no line of the log, after any request."""
    with Served(run, "--host", "0.0.0.0") as served:
        served.ask(Authorization=f"Bearer {served.token}")
        served.ask(f"/?token={served.token}")
        assert served.end() == 0
    assert served.token in served.link
    assert served.token not in served.out + served.err


def test_names_of_a_public_page() -> None:
    """Addresses, the host's own name and allowed names are accepted; other names are not."""
    access = Access.of("0.0.0.0", 80, ["Monitor.Example"])
    for good in ("10.1.2.3:80", "[fe80::1]:80", "localhost", "monitor.example:443"):
        assert access.is_known_host(good)
    for bad in ("evil.example", "", "x" * 600, "10.1.2.3/x", "a:b:c", "10.1.2.3:port"):
        assert not access.is_known_host(bad)


def test_loopback_addresses() -> None:
    """Only addresses that no other host can reach need no token."""
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", "", "128.0.0.1"]))

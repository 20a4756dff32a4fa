"""The readers of the page of ``rankcall serve``: tokens, other users, and forged headers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from serving import DEADLINE_S, Served

from rankcall.serve.access import Access
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


def test_the_link_has_a_token_on_loopback_too(local: Served) -> None:
    """With it every address answers, and without it none does."""
    assert len(local.token) >= 40
    for path in ("/", "/api/diagnosis"):
        assert local.ask(path).status == 200
        assert local.ask(path, Authorization=None).status == 401


# Gives up root's rights, then asks for every address of a page, with what a stranger could guess.
OTHER_USER = """
import http.client, json, os, sys
port, paths = int(sys.argv[1]), sys.argv[2:]
cookies = [f"rankcall-{port}=", f"rankcall-{port}=x", "rankcall-=; rankcall=1"]
"é".encode("idna")  # what asking imports must be imported while this is root
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
answers = []
for path in paths:
    for method in ("GET", "HEAD", "POST"):
        for more in ({}, *({"Cookie": each} for each in cookies), {"Authorization": "Bearer "}):
            asking = http.client.HTTPConnection("127.0.0.1", port, timeout=200)
            origin = {"Origin": f"http://127.0.0.1:{port}"}
            asking.request(method, path, "token=" if method == "POST" else None, {**origin, **more})
            answer = asking.getresponse()
            answers.append([answer.status, dict(answer.getheaders()), answer.read().decode()])
            asking.close()
print(json.dumps([os.getuid(), answers]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_this_host_reads_nothing(local: Served) -> None:
    """A page on loopback shows nothing of the run to a process of another user."""
    made = ["/report", "/timeline", "/archive", "/api/report"]
    paths = ["/", "/login", "/events", "/stacks", "/api/diagnosis", "/api/figures", "/api/stacks"]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_USER, str(local.port), *paths, *made],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    uid, answers = json.loads(done.stdout)
    assert uid == 65534
    assert len(answers) == 11 * 3 * 5
    assert {status for status, _, _ in answers} <= {401, 405}
    for _, headers, text in answers:
        assert "Set-Cookie" not in headers
        assert not any(word in text for word in ("train.py", "all_reduce", "ranks go on"))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:80",
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


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:99", "127.8.8.8", "[::1]", "10.0.0.7"])
def test_names_that_cannot_lead_elsewhere(local: Served, host: str) -> None:
    """Addresses and localhost are accepted, on any port: it may be forwarded by ssh."""
    assert local.ask(Host=host).status == 200


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "http://127.0.0.1:1", "file://", "http://["]
)
def test_only_the_page_itself_asks_the_ranks(local: Served, origin: str | None) -> None:
    """A POST from elsewhere, or from nowhere, does nothing."""
    headers = {} if origin is None else {"Origin": origin}
    for path in ("/stacks", "/api/stacks", "/profiles", "/api/profiles"):
        assert local.ask(path, "POST", "", **headers).status == 403


def test_the_page_itself_may_take_stacks(local: Served) -> None:
    """The answer is JSON, or without a script the page again. Ended ranks have no stacks."""
    own = f"http://127.0.0.1:{local.port}"
    answer = local.ask("/api/stacks", "POST", "", Origin=own)
    assert (answer.status, answer.json["stack_classes"]) == (200, [])
    assert local.ask("/stacks", "POST", "", Origin=own).status == 303


def test_ranks_that_cannot_be_profiled(local: Served) -> None:
    """The answer says why, and nothing of the run directory is served for a rank without one."""
    own = f"http://127.0.0.1:{local.port}"
    for ranks, status, why in (
        ("ranks=0", 503, "rank 0 does not run on this host"),
        ("ranks=0-99", 400, "the page takes ranks, as in 5,6 or 0-3"),
        ("ranks=%3Cb%3E%1b", 400, "the page takes ranks, as in 5,6 or 0-3"),
    ):
        answer = local.ask("/api/profiles", "POST", ranks, Origin=own)
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (
            status,
            "text/plain",
        )
        assert why in answer.text
        assert answer.text.strip().isprintable()
    assert local.ask("/api/profiles", "POST", "ranks=" + "1," * 9000, Origin=own).status == 413
    assert local.ask("/api/profiles").json == {"epoch_s": None, "profiles": []}
    for rank in ("0", "9" * 20, "9" * 5000, "-1", "0x0", "%C2%B2"):
        assert local.ask(f"/profiles/{rank}").status == 404


def test_without_the_token_nothing_is_shown(public: Served) -> None:
    """The page asks for the token; everything else is refused, with nothing of the run."""
    assert len(public.token) >= 40
    first = public.ask(Authorization=None)
    assert first.status == 401
    assert "This page needs the token" in first.text
    assert "train.py" not in first.text
    for path in ("/events", "/api/diagnosis", "/api/figures", "/api/report", "/report", "/archive"):
        assert public.ask(path, Authorization=None).status == 401


def test_the_token_in_a_header(public: Served) -> None:
    """A program sends it as a bearer token; in the address it does not count."""
    assert public.ask("/api/diagnosis", Authorization=f"Bearer {public.token}").status == 200
    assert public.ask(f"/?token={quote(public.token)}", Authorization=None).status == 401


@pytest.mark.parametrize("wrong", ["", "x", "ä", "x" * 100_00, "Bearer"])
def test_wrong_tokens(public: Served, wrong: str) -> None:
    """Any other token is refused, however long or odd it is."""
    sent = f"Bearer {wrong}".encode().decode("latin-1")
    assert public.ask("/api/diagnosis", Authorization=sent).status == 401
    assert public.ask("/api/diagnosis", Authorization=public.token).status == 401
    cookie = f"rankcall-{public.port}={sent}"
    assert public.ask("/api/diagnosis", Authorization=None, Cookie=cookie).status == 401


def test_a_token_of_another_server_is_refused(public: Served, run: Path) -> None:
    """Each start makes a new token: an old link, and an old cookie, open nothing."""
    with Served(run, "--host", "0.0.0.0") as other:
        assert other.token != public.token
        old = Access("0.0.0.0", other.port, token=public.token)
        assert other.ask(Authorization=f"Bearer {public.token}").status == 401
        cookie = f"{old.cookie}={old.cookie_value}"
        assert other.ask(Authorization=None, Cookie=cookie).status == 401


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
    assert public.ask(Authorization=None, Cookie=cookie.partition(";")[0]).status == 200
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
    access = Access("0.0.0.0", 80, ("Monitor.Example",))
    for good in ("10.1.2.3:80", "[fe80::1]:80", "localhost", "monitor.example:443"):
        assert access.is_known_host(good)
    for bad in ("evil.example", "", "x" * 600, "10.1.2.3/x", "a:b:c", "10.1.2.3:port"):
        assert not access.is_known_host(bad)

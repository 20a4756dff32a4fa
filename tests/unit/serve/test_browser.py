"""The page of ``rankcall serve`` in real Chromium: with and without scripts, by mouse and keys."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from liveruns import give_to, live_run
from serving import DEADLINE_S, Served

from rankcall.run.stacks import py_spy
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

pytest.importorskip("starlette", reason="needs rankcall[serve]")
pytest.importorskip("uvicorn", reason="needs rankcall[serve]")

HOSTILE = '"><img src=x onerror="window.hurt=1">', "</script><script>window.hurt=1</script>\x1b[2J"
WAIT_MS = DEADLINE_S * 1000


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Start one browser for the module's tests."""
    with chromium() as chrome:
        yield chrome


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(DEADLINE_S)


def opened(browser: Any, served: Served, **options: Any) -> tuple[Any, list[str]]:
    """Open the page; return it with a list that collects errors and foreign requests."""
    page = browser.new_context(extra_http_headers=served.authorization, **options).new_page()
    page.set_default_timeout(WAIT_MS)
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
    page.on("request", lambda r: None if r.url.startswith(served.url) else wrong.append(r.url))
    page.goto(served.url)
    return page, wrong


def test_a_thousand_ranks(browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """Each rank has a square, all fit on one screen, and that of the culprit names its place."""
    run = live_run(tmp_path, 1024, someone.pid)
    with Served(run) as served:
        page, wrong = opened(browser, served, viewport={"width": 1280, "height": 900})
        assert page.locator("h1").inner_text() == "Rank 341 did not come"
        assert page.locator("#grid .cell").count() == 1024
        assert page.evaluate("document.getElementById('grid').offsetHeight") <= 900
        culprit = page.locator("#grid .cell.culprit")
        assert culprit.get_attribute("data-r") == "341"
        culprit.hover()
        page.wait_for_selector("#tip:not([hidden])")
        tip = page.locator("#tip").inner_text()
        assert tip.startswith("rank 341 (node-0)")
        assert "all_reduce #41" in tip
        page.context.close()
        assert wrong == []


def test_keys_reach_every_rank(
    browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes]
) -> None:
    """Arrow keys, Home and End move between ranks once the squares have the focus."""
    run = live_run(tmp_path, 8, someone.pid)
    with Served(run) as served:
        page, wrong = opened(browser, served)
        page.locator("#grid").focus()
        for key, rank in (("ArrowRight", "0"), ("ArrowRight", "1"), ("End", "7"), ("Home", "0")):
            page.keyboard.press(key)
            assert page.locator("#grid .at").get_attribute("data-r") == rank
            assert page.locator("#tip").inner_text().startswith(f"rank {rank} (")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        page.context.close()
        assert wrong == []


@pytest.mark.parametrize("has_scripts", [True, False])
def test_rows_of_a_parallel_dimension(
    browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes], has_scripts: bool
) -> None:
    """A viewer chooses hosts, places or groups as rows, and keeps them over updates."""
    groups = {"mesh_tp": [list(range(at, at + 4)) for at in range(0, 16, 4)]}
    run = live_run(tmp_path, 16, someone.pid, hosts=2, groups=groups)
    with Served(run) as served:
        page, wrong = opened(browser, served, java_script_enabled=has_scripts)
        names = page.locator("#grid .host b")
        assert names.all_inner_texts() == ["node-0", "node-1"]
        page.locator(".ways a", has_text="tp: places in the groups").click()
        page.wait_for_selector(".ways b >> text=tp: places in the groups")
        assert names.all_inner_texts() == ["tp 0", "tp 1", "tp 2", "tp 3"]
        third = page.locator("#grid .host", has=page.locator("b", has_text="tp 1"))
        assert third.locator(".cell").all_inner_texts() == ["1", "5", "9", "13"]
        assert third.locator(".cell.culprit").get_attribute("data-r") == "5"
        page.locator(".ways a", has_text="tp: groups").click()
        page.wait_for_selector(".ways b >> text=tp: groups")
        assert names.all_inner_texts() == ["ranks 0-3", "ranks 4-7", "ranks 8-11", "ranks 12-15"]
        if has_scripts:
            someone.kill()
            someone.wait(DEADLINE_S)
            page.wait_for_selector(".state >> text=ended")
        else:
            page.reload()
        assert names.all_inner_texts()[-1] == "ranks 12-15"
        page.locator(".ways a", has_text="hosts").click()
        page.wait_for_selector(".ways b >> text=hosts")
        assert names.all_inner_texts() == ["node-0", "node-1"]
        page.context.close()
        assert wrong == []


def test_a_change_during_a_press_loses_no_click(
    browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes]
) -> None:
    """What comes between the press and the release of a button waits, and then it is shown."""
    groups = {"mesh_tp": [list(range(at, at + 4)) for at in range(0, 16, 4)]}
    run = live_run(tmp_path, 16, someone.pid, hosts=2, groups=groups)
    with Served(run) as served:
        page, _ = opened(browser, served)
        page.add_init_script(
            "window.EventSource = class { constructor() { window.events = this; } }"
        )
        page.reload()
        # In one task of the page, so that no time passes between the events.
        is_there = page.evaluate(
            """() => {
                const link = document.querySelector(".ways a");
                const press = (name) => link.dispatchEvent(new PointerEvent(name, {bubbles: true}));
                press("pointerdown");
                events.onmessage({data: JSON.stringify({ranks: "<p>newer</p>"})});
                const isThere = link.isConnected;
                press("pointerup");
                return isThere;
            }"""
        )
        assert is_there
        page.wait_for_selector("#ranks p >> text=newer")
        page.context.close()


def test_changes_come_by_themselves(
    browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes]
) -> None:
    """The page shows the end of a job without being loaded again; opened parts stay open."""
    run = live_run(tmp_path, 8, someone.pid)
    with Served(run) as served:
        page, wrong = opened(browser, served)
        page.wait_for_selector(".state.alarm >> text=hangs")
        page.locator("#verdict details[data-keep=why] summary").click()
        page.evaluate("window.same = true")
        someone.kill()
        someone.wait(DEADLINE_S)
        page.wait_for_selector(".state >> text=ended")
        assert page.evaluate("window.same")
        assert page.locator("#verdict details[data-keep=why]").get_attribute("open") is not None
        page.context.close()
        assert wrong == []


def test_without_scripts(browser: Any, tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """The verdict, the squares, the table and the button are there; the page reloads itself."""
    run = live_run(tmp_path, 8, someone.pid)
    with Served(run) as served:
        page, _ = opened(browser, served, java_script_enabled=False)
        assert page.locator("h1").inner_text() == "Rank 2 did not come"
        assert page.locator("#grid .cell").count() == 8
        rows = page.locator("table.places tbody tr").all_inner_texts()
        assert any(row.split()[:2] == ["1", "2"] for row in rows)
        page.locator("#take button").click()
        page.wait_for_selector("text=No rank of this host has answered")
        page.context.close()


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    """Return another process that is there until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait(DEADLINE_S)


@pytest.mark.parametrize("has_scripts", [True, False])
def test_profiles(
    browser: Any,
    tmp_path: Path,
    someone: subprocess.Popen[bytes],
    peer: subprocess.Popen[bytes],
    has_scripts: bool,
) -> None:
    """The button shows where the rank of the verdict, and another one, spend some seconds."""
    skip_without_py_spy(peer.pid)
    run = live_run(tmp_path, 8, peer.pid)
    give_to(run, someone.pid, rank=2)
    with Served(run) as served:
        page, wrong = opened(browser, served, java_script_enabled=has_scripts)
        page.locator("#profile button").click()
        lines = page.locator("#profiles table td.code")
        lines.first.wait_for()
        assert lines.all_inner_texts() == ["<string>:1 in <module>"] * 2
        assert page.locator("#profiles b").all_inner_texts() == ["rank 2", "rank 0"]
        with page.expect_download() as download:
            page.locator("#profiles a").first.click()
        assert download.value.suggested_filename == "rank-00002.speedscope.json"
        assert "profiles" in json.loads(Path(download.value.path()).read_text())
        if has_scripts:
            page.fill("#profiled", "77")
            page.locator("#profile button").click()
            page.wait_for_selector("text=rank 77 does not run on this host")
            wrong = [line for line in wrong if "503" not in line]
        assert wrong == []
        page.context.close()


def skip_without_py_spy(pid: int) -> None:
    """Skip the test if py-spy is not installed, or may not read a process here."""
    spy = py_spy()
    if spy is None:
        pytest.skip("needs rankcall[stacks]")
    done = subprocess.run(
        [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    if done.returncode:
        pytest.skip(f"py-spy may not read processes here: {done.stderr[-200:]}")


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    """Markup and escape codes in names of hosts are shown as they are, and do nothing."""
    synthetic_run(tmp_path / "run", 4, 60, hosts=list(HOSTILE), planted=Planted("dead", (1,), 30))
    with Served(tmp_path / "run") as served:
        page, wrong = opened(browser, served)
        page.wait_for_selector("#grid")
        assert page.locator("img").count() == 0
        assert page.evaluate("window.hurt") is None
        assert "<img src=x" in page.locator("#grid").inner_text()
        assert "\x1b" not in page.content()
        page.context.close()
        assert wrong == []


def test_the_link_with_the_token_opens_the_page(browser: Any, tmp_path: Path) -> None:
    """The link logs in, and the token leaves the address; without it a form asks."""
    synthetic_run(tmp_path / "run", 4, 60)
    with Served(tmp_path / "run", "--host", "0.0.0.0") as served:
        page = browser.new_context().new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(served.url)
        assert page.locator("h1").inner_text() == "This page needs the token"
        page.goto("about:blank")
        page.goto(served.link.replace(served.link.partition("/#")[0], served.url.rstrip("/")))
        page.wait_for_selector("#grid")
        assert served.token not in page.url
        page.context.close()
        form = browser.new_context(java_script_enabled=False).new_page()
        form.goto(served.url)
        form.fill("#token", served.token)
        form.click("#login button")
        form.wait_for_selector("#grid", timeout=WAIT_MS)
        form.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(browser: Any, tmp_path: Path, scheme: str) -> None:
    """The page is no wider than a phone, in light and dark."""
    synthetic_run(tmp_path / "run", 64, 60, hosts=8, planted=Planted("dead", (9,), 30))
    with Served(tmp_path / "run") as served:
        size = {"width": 390, "height": 844}
        page, wrong = opened(browser, served, viewport=size, color_scheme=scheme)
        page.wait_for_selector("#grid")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.context.close()
        assert wrong == []

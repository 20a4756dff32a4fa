"""The HTML report: its words, its behaviour in a browser, and what hostile names can do to it."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import chromium
from torchless import without_torch
from worlds import MS, PAIR, Call, group_of, together, write_world

import golden
from rankcall._version import __version__
from rankcall.analysis.details import Details, detail
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.cli import main
from rankcall.errors import ExtraMissingError
from rankcall.report.html import environment, render
from rankcall.report.html.charts import ABSENT, late_maps, levels, picture
from rankcall.ring.tables import CallSite, Group
from rankcall.run.load import load
from rankcall.run.paths import create_run
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

SHOTS = Path(__file__).parents[3] / "build" / "report"
PROGRAM = (
    Op(message_bytes=25 << 20, line=41, code="loss.backward()"),
    Op(message_bytes=1 << 20, line=42, function="sync_stats", code="dist.all_reduce(stats)"),
    Op("all_gather", 4 << 20, family="tp", line=57, function="forward"),
    Op("all_gather", 64 << 10, family="tp", line=58, function="forward"),
    Op("exchange", 1 << 16, family="pp", line=90, function="send_forward"),
    Op("broadcast", 4096, line=12, function="sync_seed"),
)
GROUPS = {
    "tp": [list(range(at, at + 4)) for at in range(0, 16, 4)],
    "pp": [list(range(at, 16, 4)) for at in range(4)],
}


def run_of(folder: Path) -> Details:
    """Return 16 ranks on 4 hosts; rank 5 is slow."""
    synthetic_run(
        folder,
        16,
        600,
        hosts=4,
        straggler=5,
        straggler_ms=6.0,
        program=PROGRAM,
        groups=GROUPS,
        clock_offsets_ns=[0, 10**9, -(10**9), 5 * 10**8],
        per_step=6,
    )
    return detail(load(folder))


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page of a run with a straggler."""
    return render(run_of(tmp_path_factory.mktemp("html") / "20261121T034130-train_gpt"))


class Words(HTMLParser):
    """The text of a page, a line for each block, with the axes of charts."""

    BLOCKS = frozenset(
        (
            "h1",
            "h2",
            "p",
            "li",
            "tr",
            "dl",
            "dt",
            "dd",
            "div",
            "section",
            "svg",
            "title",
            "header",
            "footer",
            "summary",
            "option",
            "table",
        )
    )

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.silent = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.silent += tag in ("script", "style")
        self.parts.append("\n" if tag in self.BLOCKS else " ")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("script", "style")
        self.parts.append("\n" if tag in self.BLOCKS else " ")

    def handle_data(self, text: str) -> None:
        if not self.silent:
            self.parts.append(text)


def words(page: str) -> str:
    """Return the page's text as a reader without a browser would have it."""
    parser = Words()
    parser.feed(page)
    lines = (" ".join(line.split()) for line in "".join(parser.parts).splitlines())
    return "\n".join(line for line in lines if line) + "\n"


def test_golden(html: str) -> None:
    """The page's words and figures are as they were last looked at."""
    golden.check(
        "report-html.txt", words(html).replace(f"rankcall {__version__}", "rankcall VERSION")
    )


def test_the_page_fetches_nothing(html: str) -> None:
    """There is no address in it, and its policy allows its own script only."""
    assert "http://" not in html
    assert "https://" not in html
    assert "default-src 'none'" in html
    assert len(re.findall(r"<script", html)) == 2


def test_the_first_screen_names_rank_line_and_cost(html: str) -> None:
    """Who, where and how much stand before anything else."""
    first, _, rest = words(html).partition("What to look at")
    assert "Rank 5 on node-1 makes the others wait" in first
    assert re.search(r"train[.]py:41\n+loss[.]backward[(][)]", first)
    assert rest.partition("Where a rank's time goes")[0].count("loss.backward()") >= 1
    assert "dist.all_reduce(stats)" in rest.partition("Slowest call sites")[2]
    assert "lost by each other rank" in first


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless browser."""
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, html: str, tmp_path: Path) -> Iterator[Any]:
    """Return the page opened from a file; any error in its console fails the test."""
    yield from opened(browser, html, tmp_path)


def opened(browser: Any, html: str, folder: Path) -> Iterator[Any]:
    """Open a page; fail on what it complains of, and on whatever it asks the network for."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    complaints: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: complaints.append(dialog.message))
    tab.on("request", lambda request: complaints.append(request.url) if _foreign(request) else None)
    tab.goto((folder / "report.html").as_uri())
    yield tab
    context.close()
    assert complaints == []


def _foreign(request: Any) -> bool:
    return not request.url.startswith(("file:", "data:"))


def tip(page: Any) -> str:
    """Return the text of the tooltip, or an empty text without one."""
    return str(page.locator("#tip").inner_text()) if page.locator("#tip").is_visible() else ""


def point(page: Any, at: str, x: float, y: float) -> dict[str, float]:
    """Move the mouse to a place in an element, in shares of its size; return its box."""
    page.locator(at).scroll_into_view_if_needed()
    box: dict[str, float] = page.locator(at).bounding_box()
    page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
    return box


def test_hover_over_a_rank(page: Any) -> None:
    """Pointing at a column names the rank, its host and its three parts."""
    point(page, "#columns svg", (64 + 5.5 * 888 / 16) / 960, 0.5)
    assert tip(page).startswith("rank 5 (node-1), per step\ncompute ")
    assert "waiting 0" in tip(page) or "µs" in tip(page)
    page.mouse.move(5, 5)
    assert tip(page) == ""


def test_the_map_hovers_zooms_and_filters(page: Any) -> None:
    """The slow rank's row is late, a drag magnifies, a group's map is another picture."""
    pane = page.locator("#map .window")
    box = point(page, "#map .window", 0.5, 5.5 / 16)
    row = box["y"] + box["height"] * 5.5 / 16
    assert tip(page).startswith("rank 5 (node-1)\n")
    assert float(re.findall(r"\n([\d.]+) ms late", tip(page))[0]) > 5
    point(page, "#map .window", 0.5, 0.01)
    assert "rank 0 (node-0)\n" in tip(page)
    before = page.locator("#map .times").inner_text()
    page.mouse.move(box["x"] + 200, row)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, row, steps=4)
    page.mouse.up()
    assert page.locator("#map .times").inner_text() != before
    assert float(pane.locator("img").first.evaluate("image => parseFloat(image.style.width)")) > 300
    page.locator("#map-reset").click()
    assert page.locator("#map .times").inner_text().split()[0] == "0"
    page.locator("#map-group").select_option(label="tp (4 ranks)")
    assert pane.locator("img:not([hidden])").get_attribute("alt") == (
        "Lateness by rank and time, tp (4 ranks)"
    )


def test_the_map_folds_by_host_and_dimension(page: Any) -> None:
    """Rows that are hosts, or places in a dimension, have their own names, and show the mean."""
    names = page.locator("#map .hosts:not([hidden])")
    page.locator("#map-group").select_option(label="hosts")
    assert names.inner_text().split() == ["node-0", "node-1", "node-2", "node-3"]
    point(page, "#map .window", 0.5, 1.5 / 4)
    assert tip(page).startswith("node-1, the mean\n")
    page.locator("#map-group").select_option(label="tp: places in the groups")
    assert names.inner_text().split("\n") == ["tp 0", "tp 1", "tp 2", "tp 3"]
    page.locator("#map-group").select_option(label="all groups")
    assert names.inner_text().split("\n")[:2] == ["rank 0", "rank 1"]
    point(page, "#map .window", 0.5, 5.5 / 16)
    assert tip(page).startswith("rank 5 (node-1)\n")


def test_the_picture_of_all_moments(page: Any) -> None:
    """Pointing at a moment names the rank and the time."""
    point(page, "#timeline .window", 0.5, 5.5 / 16)
    assert re.match(r"rank 5 \(node-1\)\n[\d.]+ m?s to [\d.]+ m?s$", tip(page)), tip(page)
    page.mouse.move(5, 5)
    assert tip(page) == ""


def test_call_sites_as_a_tree(page: Any) -> None:
    """Folded until it is asked for; then the slowest file and function are open."""
    tree = page.locator("#site-tree")
    assert not tree.locator(".branch").first.is_visible()
    tree.locator("summary").first.click()
    assert tree.locator(".branch > summary .code").first.inner_text() == "train.py"
    assert tree.locator("li:visible").count() == 2  # the send and the receive of send_forward
    tree.locator("summary", has_text="train_step").click()
    assert "loss.backward()" in tree.inner_text()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_curves_choose_and_hover(page: Any) -> None:
    """Choosing a group shows its points and its peers' median beside them."""
    page.locator("#curve").select_option(label="all_gather, group tp:8")
    assert page.locator("#peers-are").inner_text() == "peers: all_gather in other groups"
    assert page.locator("#bandwidth .printed").text_content() == "all_gather, group tp:8"
    dots = page.locator(".curve.on .own circle")
    assert dots.count() == 2
    assert page.locator(".curve.on .peers circle").first.is_visible()
    dots.last.hover()
    assert re.match(
        r"all_gather, group tp:8, 4 MiB: [\d.]+ GB/s from 100 times; peers [\d.]+ GB/s$", tip(page)
    )


def test_tables_sort_filter_and_unfold(page: Any) -> None:
    """A head sorts, words and groups filter, a long table unfolds."""
    sites = page.locator("#site-table tbody tr")
    page.locator("#site-filter").fill("forward")
    assert page.locator("#site-table tbody tr:visible").count() == 4
    page.locator("#site-filter").fill("")
    assert page.locator("#site-table tbody tr:visible").count() == sites.count()
    page.locator("#site-table th", has_text="calls").locator("button").click()
    calls = [
        int(text.replace(",", "")) for text in sites.locator("td:nth-child(4)").all_inner_texts()
    ]
    assert calls == sorted(calls, reverse=True)
    page.locator("#op-filter").select_option("tp:4")
    shown = page.locator("#op-table tbody tr:visible td:nth-child(2)").all_inner_texts()
    assert set(shown) == {"tp:4"}


def test_everything_by_keyboard(page: Any) -> None:
    """Charts take the focus in turn, and arrow keys read them out."""
    page.locator("#columns").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert tip(page).startswith("rank 2 (node-0)")
    page.locator("#map").focus()
    for key in ("ArrowDown", "ArrowRight", "+", "+"):
        page.keyboard.press(key)
    assert "rank 1 (node-0)" in tip(page)
    assert page.locator("#map-reset").is_enabled()
    page.keyboard.press("Escape")
    assert page.locator("#map-reset").is_disabled()
    page.locator("#curves").focus()
    page.keyboard.press("ArrowRight")
    assert "all_reduce, group 0" in tip(page)
    assert page.locator("#tip").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("look", ["light", "dark", "narrow", "print"])
def test_pictures_to_look_at(page: Any, look: str) -> None:
    """Light, dark, narrow and printed: kept in build/report; nothing is wider than the page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.emulate_media(
        color_scheme="dark" if look == "dark" else "light",
        media="print" if look == "print" else "screen",
    )
    page.set_viewport_size({"width": 390 if look == "narrow" else 1200, "height": 900})
    (SHOTS / f"{look}.png").write_bytes(page.screenshot(full_page=True))
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 26)" if look == "dark" else "rgb(255, 255, 255)")
    on_paper = page.locator("#bandwidth .printed")
    assert page.locator("#curve").is_visible() == (look != "print") == on_paper.is_hidden()
    assert on_paper.text_content() == "all_reduce, group 0"


NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"&\u202e\x00\x1b[2J{{7*7}}"


def hostile_run(folder: Path) -> Details:
    """Return a run whose every name is made to break a page."""
    group = Group(NASTY, 0, NASTY, NASTY, (0, 1))
    calls = [replace(call, code=NASTY) for seq in range(1, 9) for call in late(seq, group)]
    run = write_world(folder, calls, hosts={0: NASTY, 1: NASTY[:20] + "b"})
    create_run(run, {"torch": NASTY, "script": NASTY})
    loaded = load(run)
    for head in loaded.heads:
        assert NASTY in {known.name for known in head.tables.groups.values()}
    return detail(loaded)


def late(seq: int, group: Group) -> list[Call]:
    """Return a collective that rank 1 is late to."""
    start = 10 * MS * seq
    return together(seq, [start, start + 3 * MS], start + 4 * MS, group)


def test_hostile_names(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shown as they are spelt, run nothing, and put nothing unreadable into the page."""
    site = CallSite(NASTY, 3, NASTY, NASTY)
    monkeypatch.setattr("worlds.CallSite", lambda *args: site)
    page = render(hostile_run(tmp_path / ("run" + NASTY.replace("/", "_").replace("\0", ""))))
    assert {char for char in page if not char.isprintable()} == {"\n"}
    assert "<script>alert" not in page
    assert "<img src=x" not in page
    assert "49" not in words(page).partition("NASTY")[0].split()
    for tab in opened(browser, page, tmp_path):
        assert "<img src=x onerror=alert(2)>" in tab.locator("body").inner_text()
        assert "<img src=x" in tab.locator("#sites .source").first.inner_text()
        point(tab, "#columns svg", 100 / 960, 0.5)
        assert "</script>" in tip(tab)
        for button in tab.locator("th button").all()[:4]:
            button.dispatch_event("click")


def test_absent_is_not_zero(tmp_path: Path) -> None:
    """An op that has not ended has a dash for its times; a time without collectives is grey."""
    calls = [*late(1, PAIR), Call(0, 2, 40 * MS, None, line=9), Call(1, 3, 41 * MS, None, line=8)]
    details = detail(load(write_world(tmp_path / "run", calls)))
    row = next(
        line for line in words(render(details)).splitlines() if line.startswith("train.py:9")
    )
    assert row.endswith("- -")
    page = words(render(details))
    assert "2 ops never finished on any rank" in page
    assert "to the last end of a call" in page
    maps = levels(np.array([[np.nan, 0.0, 2.0]]), 2.0)
    assert maps.tolist() == [[ABSENT, 0, 254]]
    assert picture(maps).startswith("data:image/png;base64,iVBORw0KGgo")


@pytest.mark.parametrize(("lag_ms", "is_quiet"), [(1, True), (20, False)])
def test_noise_is_not_drawn_as_lateness(tmp_path: Path, lag_ms: int, is_quiet: bool) -> None:
    """The scale of the picture begins at 5 % of a step (here 100 ms), and the page says so."""
    steps, lag = range(1, 11), lag_ms * MS
    calls = [
        call
        for step in steps
        for call in together(
            step,
            [100 * step * MS, 100 * step * MS + lag],
            100 * step * MS + 2 * lag,
            PAIR,
            step=step,
        )
    ]
    details = detail(load(write_world(tmp_path / "run", calls)))
    page = late_maps(details)
    assert page is not None
    assert page["highest_ms"] == pytest.approx(5.0 if is_quiet else lag_ms, rel=0.1)
    assert ("No rank stands out" in words(render(details))) == is_quiet


def test_findings_come_first(tmp_path: Path) -> None:
    """The cause of a hang is on the first screen, with its evidence, before all figures."""
    calls = [call for seq in range(1, 121) for call in late(seq, PAIR)]
    details = detail(load(write_world(tmp_path / "run", calls)))
    missing = Finding(
        "missing",
        (3,),
        (0, 1, 2),
        ("node-c",),
        "0",
        17,
        "all_reduce",
        "/job/train.py:41",
        65.0,
        "likely",
        "rank 3 (node-c) never issued it",
        ("it was last in step 4",),
        "get its stack",
        predicate=Predicate("did not come", "did not come"),
    )
    first, _, after = words(render(details, [missing])).partition("What to look at")
    assert "Rank 3 did not come" in first
    assert "train.py:41\nall_reduce #17 of group 0\n" in first
    assert "65.0 s\n3 ranks held up\n" in first
    line = "rank 3 (node-c) never issued it (likely) /job/train.py:41\nit was last in step 4."
    assert after.index(line) < after.index("Rank 1 (node-a) is late")
    slow = Finding("straggler", (1,), stops=False, summary="rank 1 is slow since step 3")
    first, _, after = words(render(details, [slow])).partition("What to look at")
    assert "Rank 1 on node-a makes the others wait" in first
    assert after.startswith("\nrank 1 is slow since step 3\n")


def test_no_line_ends_inside_an_option_or_before_a_unit(browser: Any) -> None:
    """At any width; and what a name has of markup stays text."""
    template = environment().from_string(
        "<style>.whole { white-space: nowrap; }</style><p>{{ text | prose }}</p>"
    )
    advice = "See <b>--what</b> it did for 1,127 s: rankcall diagnose --no-color --hang-after 5"
    opened = browser.new_page()
    opened.set_content(template.render(text=advice))
    assert opened.text_content("p") == advice
    assert opened.query_selector("b") is None
    for width in range(120, 420, 20):
        opened.set_viewport_size({"width": width, "height": 400})
        boxes = opened.eval_on_selector_all(
            ".whole", "all => all.map(one => [one.textContent, one.getClientRects().length])"
        )
        whole = ("--what", "1,127 s", "--no-color", "--hang-after")
        assert boxes == [[text, 1] for text in whole]
    opened.close()


@pytest.mark.parametrize("calls", [[], [Call(0, 1, 0, MS, group=group_of(1))]], ids=["none", "one"])
def test_little_to_show(browser: Any, tmp_path: Path, calls: list[Call]) -> None:
    """A run without collectives, or of one rank, is a page that says so."""
    page = render(detail(load(write_world(tmp_path / "run", calls, ranks=[0]))))
    for tab in opened(browser, page, tmp_path):
        title = tab.locator("h1").inner_text()
        assert title.startswith(("No collectives were recorded", "A world of one rank"))


def test_many_hosts_and_ranks(browser: Any, tmp_path: Path) -> None:
    """Many ranks are a picture instead of figures; more ranks than pixels share a row."""
    synthetic_run(tmp_path / "run", 520, 6, hosts=40, straggler=350, program=(Op(),))
    page = render(detail(load(tmp_path / "run")))
    assert len(page) < 1 << 20
    for tab in opened(browser, page, tmp_path):
        point(tab, "#traffic img", 3.5 / 40, 2.5 / 40)
        assert tip(tab).startswith("node-2 → node-3\nabout ")
        point(tab, "#traffic img", 9.5 / 40, 2.5 / 40)
        assert tip(tab) == "node-2 → node-9\nnothing"
        point(tab, "#map .window", 0.5, 175.5 / 260)
        assert re.match(r"ranks 350–351, the latest\n(19|20)[.]\d ms late", tip(tab))
        tab.mouse.move(0, 0)  # scrolling would move what is under it
        tab.locator("#columns").focus()
        tab.keyboard.press("End")
        assert tip(tab).startswith("rank 519 (node-39)")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names its output, and reports a full disk, a bad ring and wrong options."""
    run = write_world(tmp_path / "run", late(1, PAIR))
    target = tmp_path / "r.html"
    assert main(["report", str(run), "-o", str(target)]) == 0
    assert capsys.readouterr().out.startswith(f"{target}: ")
    assert target.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["report", str(run), "--to", "html", "-o", "/dev/full"]) == 2
    assert "/dev/full: cannot be written: No space left" in capsys.readouterr().err
    assert main(["report", str(run), "--json", "--to", "html"]) == 2
    assert "html and json: one form" in capsys.readouterr().err
    (run / "rings" / "bad.ring").write_bytes(b"nothing")
    assert main(["report", str(run), "-o", str(target)]) == 1
    assert "bad.ring" in capsys.readouterr().err
    assert "bad.ring: not a rankcall ring file" in target.read_text(encoding="utf-8")


def test_without_jinja2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named."""
    details = detail(load(write_world(tmp_path / "run", late(1, PAIR))))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'rankcall\[report\]'"):
        render(details)


def test_without_torch(tmp_path: Path) -> None:
    """The page is made where torch is not."""
    run = write_world(tmp_path / "run", late(1, PAIR))
    done = without_torch("report", run, "-o", tmp_path / "r.html")
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").endswith("</html>")


def test_a_narrow_page_can_be_read(page: Any) -> None:
    """On a telephone, the text of charts is at least 9 pixels high, and what scrolls shows that."""
    measure = """() => [...document.querySelectorAll('.chart svg text')].map(text =>
        parseFloat(getComputedStyle(text).fontSize) *
        text.ownerSVGElement.getBoundingClientRect().width / 960)"""
    for width in (400, 1200):
        page.set_viewport_size({"width": width, "height": 900})
        heights = page.evaluate(measure)
        assert heights
        assert min(heights) >= 9.0
    for part in page.locator(".scroll, .chart").all():
        assert "local" in part.evaluate("each => getComputedStyle(each).backgroundAttachment")

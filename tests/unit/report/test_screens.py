"""Every kind of verdict as a reader sees it: the report and the live page, by their structure.

A screen is one kind of job, at one size of the job, one width, light or dark. Each is looked at by
a program: the title and the first card name the ranks at which the fault was planted, nothing is
wider than the screen, and all text stands out from what is behind it. The pictures are kept in
build/screens, for people to look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import chromium
from serving import Served

from rankcall.cli import main
from rankcall.testing.model import Planted
from rankcall.testing.synthetic import synthetic_run

SHOTS = Path(__file__).parents[3] / "build" / "screens"
WAIT_MS = 600_000  # a page of 16,384 ranks on a busy machine
WIDTHS = (400, 1440)
SCHEMES = ("light", "dark")
# A kind of job: the ranks at which its fault is planted, and what the report's title says of them.
# "healthy" and "straggler" are jobs that have ended well; the others hang.
KINDS: dict[str, tuple[tuple[int, ...], str]] = {
    "healthy": ((), r"No rank stands out|wait"),
    "straggler": ((2,), r"Rank 2 (.*makes the others wait|comes late)"),
    "dead": ((2,), r"Rank 2 (died|was killed|failed|ended)"),
    "stopped": ((2,), r"Rank 2 does not run"),
    "missing": ((2,), r"Rank 2 (did not|has not) come"),
    "exhausted": ((2,), r"Rank 2 (left|had left|has left|ran out)"),
    "desync": ((2,), r"Rank 2 .*call"),
    "mismatch": ((2,), r"Rank 2 differs"),
    "deadlock": ((0, 1, 2), r"Ranks 0-2 wait for each other"),
}
# The size of a job changes charts and tables, which all kinds of verdict share.
LARGER = [
    ("dead", 512),
    *(pytest.param(kind, 512, marks=pytest.mark.slow) for kind in ("healthy", "straggler")),
    *(pytest.param(kind, 16384, marks=pytest.mark.slow) for kind in ("healthy", "dead")),
]
# WCAG's contrast between each text and what is behind it, for text that can be seen. Returns the
# texts with less than the 4.5 that WCAG asks for, or 3 for large text.
FAINT = """() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parse = text => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return n.length > 3 ? n : [...n.slice(0, 3), 1];
  };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3]));
  const papers = new Map([[null, [255, 255, 255]]]);
  const behind = element => {
    if (!papers.has(element))
      papers.set(element,
        over(parse(getComputedStyle(element).backgroundColor), behind(element.parentElement)));
    return papers.get(element);
  };
  const faint = [];
  for (const element of document.querySelectorAll('body *')) {
    const words = [...element.childNodes].filter(n => n.nodeType === 3 && n.data.trim());
    const style = getComputedStyle(element), box = element.getBoundingClientRect();
    if (!words.length || element.closest('svg') || !box.width || style.visibility === 'hidden')
      continue;
    const paper = behind(element), ink = over(parse(style.color), paper);
    const [a, b] = [light(ink), light(paper)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    if ((a + 0.05) / (b + 0.05) < least && !element.closest(':disabled'))
      faint.push(`${words[0].data.trim().slice(0, 40)}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return faint;
}"""

# Names beside a chart that are cut off at its left edge, and names of rows that touch.
CUT = """() => {
  const cut = [], box = element => element.getBoundingClientRect();
  for (const text of document.querySelectorAll('.chart svg text'))
    if (box(text).left < box(text.closest('.chart')).left) cut.push(text.textContent);
  for (const names of document.querySelectorAll('.hosts')) {
    let below = -1e9;
    for (const name of names.querySelectorAll('b')) {
      if (box(name).top < below - 4) cut.push(name.textContent);  // lines are higher than letters
      below = box(name).bottom;
    }
  }
  return cut;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless browser."""
    with chromium() as started:
        yield started


def write(folder: Path, kind: str, ranks: int) -> Path:
    """Write a run of a kind of job, and return its directory."""
    culprits, _ = KINDS[kind]
    run, hosts = folder / "20261126T101112-train", max(1, ranks // 8)
    calls = 60 if ranks < 1000 else 24
    if kind == "healthy":
        synthetic_run(run, ranks, calls, hosts=hosts)
    elif kind == "straggler":
        synthetic_run(run, ranks, calls, hosts=hosts, straggler=2)
    else:
        synthetic_run(run, ranks, calls, hosts=hosts, planted=Planted(kind, culprits, calls // 2))
    return run


def look(page: Any, place: str, kind: str, name: str) -> None:
    """Look at one screen."""
    title = page.locator("h1").first.inner_text()
    expected = KINDS[kind][1]
    if place == "page" and kind == "healthy":
        expected = "The job has ended"  # the page is about now
    elif KINDS[kind][0]:
        first_lines = page.locator("body").inner_text()[:800]
        numbers = "0-2" if kind == "deadlock" else "2"
        assert re.search(rf"\branks? {numbers}\b", first_lines), first_lines
        if (
            kind == "deadlock"
        ):  # the line is that of the ranks that are named; others wait elsewhere
            assert "Where\ntrain.py:10\nrecv #1" in first_lines
            assert "Others wait in" not in first_lines
    assert re.search(expected, " ".join(title.split())), title
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / f"{place}-{kind}-{name}.png").write_bytes(page.screenshot())
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 4) for kind in KINDS), *LARGER])
def test_the_report(browser: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    """The report of each kind of job, light and dark, narrow and wide."""
    file = tmp_path / "report.html"
    assert main(["report", str(write(tmp_path, kind, ranks)), "-o", str(file)]) in (0, None)
    for scheme in SCHEMES:
        page = browser.new_page(color_scheme=scheme)
        wrong: list[str] = []
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        page.goto(file.as_uri())
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            look(page, "report", kind, f"{ranks}-{scheme}-{width}")
            assert page.evaluate(CUT) == []
        assert page.evaluate(FAINT) == []
        page.close()
        assert wrong == []


@pytest.mark.parametrize(("kind", "ranks"), [*((kind, 4) for kind in KINDS), *LARGER])
def test_the_live_page(browser: Any, tmp_path: Path, kind: str, ranks: int) -> None:
    """The live page of each kind of job, light and dark, narrow and wide."""
    with Served(write(tmp_path, kind, ranks)) as served:
        for scheme in SCHEMES:
            page = browser.new_page(color_scheme=scheme)
            page.goto(served.link)
            page.wait_for_selector("#grid", timeout=WAIT_MS)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                look(page, "page", kind, f"{ranks}-{scheme}-{width}")
            assert page.evaluate(FAINT) == []
            page.close()

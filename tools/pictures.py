#!/usr/bin/env python3
"""Make the pictures of README's tour from two jobs, and the text of its demo from the demo.

python tools/pictures.py            writes docs/images/tour-*.png, in some minutes
python tools/pictures.py --demo     writes the beginning of the demo's report into README.md

It needs what `make setup` and `make browser` install. They show what rankcall says of jobs on this
machine, so hosts, times and figures differ each time; the ranks and the lines do not. On a machine
with other work, the other ranks are late as well, so the demo's figures are not typical there.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
README = ROOT / "README.md"
DEMO = ("--slow-ms", "20")  # as `make demo` has it
_TEXT = re.compile(
    r"(?<=^The demo's report begins like this:\n\n```text\n).*?(?=^```$)", re.M | re.S
)
RANK = "2"  # the one that is at fault in both jobs
_JOB = ("--nproc-per-node", "4", "train_digits.py", "--slow-rank", RANK)
_NEVER = ("--slow-ms", "3600000", "--slow-from", "2")  # its second epoch does not get its data
_SECONDS = 400  # for a job: on a busy machine, importing torch takes most of it
_WIDTH, _HEIGHT = 1100, 900
_NEWEST = 12  # calls of each rank in the timeline: the last steps before the hang
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_TERMINAL = """<meta charset="utf-8"><body style="margin:0;background:#14161a"><pre style="margin:0;
padding:20px 24px;color:#e6e8eb;font:14px/1.45 'DejaVu Sans Mono',monospace">{}</pre>"""


def main() -> int:
    """Run the jobs, and take the pictures or write the text."""
    # The folder stands in the pictures, so its name does not depend on who takes them.
    folder = Path(tempfile.gettempdir()) / "digits"
    folder.mkdir()
    try:
        if sys.argv[1:] == ["--demo"]:
            _demo(folder)
        else:
            _take(folder)
    finally:
        shutil.rmtree(folder)
    return 0


def _take(folder: Path) -> None:
    shutil.copy(ROOT / "examples" / "train_digits.py", folder)
    _hang(folder)
    late = ("--epochs", "6", "--slow-ms", "150")
    _rankcall(folder, "run", "--run-dir", "slow", *_JOB, *late)
    _rankcall(folder, "report", "slow", "-o", "slow.html")
    _photograph(folder, {"tour-slow": "slow"})


def _demo(folder: Path) -> None:
    """Run what `make demo` runs, and write the first words of its report into README."""
    shutil.copy(ROOT / "examples" / "train_digits.py", folder)
    _rankcall(folder, "run", "--run-dir", "demo", *_JOB, *DEMO)
    report = _rankcall(folder, "report", "demo")
    README.write_text(with_text(README.read_text(), report))


def with_text(readme: str, report: str) -> str:
    """Return README with the first words of another report of the demo.

    Raises ``SystemExit`` if the report does not say that the demo's slow rank makes others wait, or
    if README has no place for it.
    """
    words = report.partition("\n\n")[0]
    if not words.startswith(f"Rank {RANK} "):
        raise SystemExit(f"the demo's report does not begin with rank {RANK}:\n{words}")
    if len(_TEXT.findall(readme)) != 1:
        raise SystemExit("README has no text of the demo's report")
    return _TEXT.sub(lambda _: f"{words}\n", readme)


def _hang(folder: Path) -> None:
    """Take the pictures of the job that hangs: what its terminal says, the page, the timeline."""
    watched = ("run", "--run-dir", "hang", "--hang-after", "5", "--on-hang", "abort")
    said = _rankcall(folder, *watched, *_JOB, *_NEVER, ends_well=False)
    # After the verdict, the ranks write their tracebacks, with paths of this machine.
    verdict = re.search(r"^missing\b.*?(?=^kept with all stacks)", said, re.DOTALL | re.MULTILINE)
    if verdict is None:
        raise SystemExit(f"the job's watcher did not say that rank {RANK} is missing:\n{said}")
    (folder / "verdict.html").write_text(_TERMINAL.format(html.escape(verdict[0].rstrip())))
    _rankcall(folder, "report", "hang", "-o", "hang.html")
    _timeline(folder / "hang")
    _photograph(folder, {"tour-verdict": "verdict", "tour-page": "hang"})


def _rankcall(folder: Path, *arguments: str, ends_well: bool = True) -> str:
    """Run a command of rankcall; return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "rankcall", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # the launcher writes the verdict there
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if ends_well != (done.returncode == 0):
        raise SystemExit(f"rankcall {' '.join(arguments)} ended with {done.returncode}")
    return done.stdout


def _timeline(run_dir: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib.figure import Figure

    from rankcall.run.load import load

    figure = load(run_dir).plot.timeline(newest=_NEWEST).figure
    assert isinstance(figure, Figure), "new axes are in a figure of their own"
    figure.savefig(IMAGES / "tour-timeline.png", dpi=110)


def _photograph(folder: Path, pages: dict[str, str]) -> None:
    """Take a picture of the first screen of each page."""
    from playwright.sync_api import sync_playwright

    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), None)
    with sync_playwright() as started:
        # Without a browser of the system's, playwright takes its own.
        browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        view = browser.new_page(viewport={"width": _WIDTH, "height": _HEIGHT})
        for name, page in pages.items():
            view.goto((folder / f"{page}.html").as_uri())
            if page == "verdict":
                height = view.evaluate("document.querySelector('pre').offsetHeight")
                view.set_viewport_size({"width": _WIDTH, "height": height})
            view.screenshot(path=IMAGES / f"{name}.png")
            view.set_viewport_size({"width": _WIDTH, "height": _HEIGHT})
        browser.close()


if __name__ == "__main__":
    sys.exit(main())

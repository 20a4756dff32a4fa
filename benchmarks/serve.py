"""What the live page costs: 1,024 live rings on this machine, and training with a viewer.

The rings are synthetic and one real process owns them all. A missing rank hangs the job, and each
update finds the records of ``--moving`` ranks changed. ``first_paint_seconds``: from the start of
the request until Chromium has painted (null without a browser). ``update_cpu_seconds``: CPU time of
one look with its sections, the median. ``page_kib``: of the whole page, with style and script.
``verdict_equals_diagnose``: the page's findings are those of ``rankcall diagnose``.
``training_ratio_with_viewer``: time of blocks of a training with a viewer, over blocks without one.
``server_cpu_share``: what the server used of one core meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from jobs import told_by_ranks

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("chromium", "chromium-browser", "google-chrome")
HUNG_S = 120
RANKCALL = Path(sys.executable).with_name("rankcall")


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=9)
    parser.add_argument("--moving", type=int, default=64, help="ranks that record between updates")
    parser.add_argument("--rounds", type=int, default=30, help="blocks with a viewer, or 0")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rankcall-bench-", dir="/dev/shm"))
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        figures = _page(folder, owner.pid, options)
        if options.rounds:
            figures.update(_training(options.rounds))
    finally:
        owner.kill()
        owner.wait(10)
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"ranks": options.ranks, "moving": options.moving, **figures}, indent=1))
    return 0


def _page(folder: Path, pid: int, options: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "tests/unit"))
    from liveruns import give_to  # type: ignore[import-not-found]

    from rankcall.serve.history import History
    from rankcall.serve.live_run import LiveRun
    from rankcall.serve.view import page, sections
    from rankcall.testing.model import Planted
    from rankcall.testing.synthetic import BOOT_NS, synthetic_run

    run = folder / "run"
    offset = time.monotonic_ns() - BOOT_NS - HUNG_S * 10**9
    hosts = max(1, options.ranks // 8)
    synthetic_run(
        run,
        options.ranks,
        60,
        hosts=hosts,
        planted=Planted("missing", (options.ranks // 3,), 41),
        hung_s=HUNG_S,
        clock_offsets_ns=[offset] * hosts,
    )
    give_to(run, pid)
    rings = sorted((run / "rings").iterdir())
    live, history = LiveRun(run), History()
    first = live.look()
    text = page(first, sections(first, history))
    spent = []
    for number in range(options.updates):
        for mover in range(options.moving):
            _touch(rings[(number * options.moving + mover) % len(rings)], number)
        began = time.process_time()
        look = live.look()
        sections(look, history)
        spent.append(time.process_time() - began)
    shown, diagnosed = _findings(look), _diagnosed(run)
    if shown != diagnosed:
        print(f"the page says {shown}\nand diagnose {diagnosed}", file=sys.stderr)
    return {
        "first_paint_seconds": _first_paint(run),
        "update_cpu_seconds": round(median(spent), 3),
        "page_kib": round(len(text.encode()) / 1024, 1),
        "verdict_equals_diagnose": shown == diagnosed,
    }


def _touch(ring: Path, number: int) -> None:
    """Change the time at which a ring's newest record of all was closed by a nanosecond."""
    from rankcall.record import RECORD
    from rankcall.ring.layout import read_header

    header = read_header(ring)
    assert header is not None
    index = (header.head - 2) % header.geometry.capacity
    fields = RECORD.fields
    assert fields is not None
    offset = header.geometry.records_offset + index * RECORD.itemsize + fields["completed_ns"][1]
    with ring.open("r+b") as file:
        file.seek(offset)
        value = int.from_bytes(file.read(8), "little") + 1 + number % 2
        file.seek(offset)
        file.write(value.to_bytes(8, "little"))


def _findings(look: Any) -> list[Any]:
    return [
        (finding.kind, list(finding.ranks), finding.op, finding.seq)
        for finding in look.diagnosis.findings
    ]


def _diagnosed(run: Path) -> list[Any]:
    done = subprocess.run(
        [str(RANKCALL), "diagnose", "--json", str(run)],
        stdout=subprocess.PIPE,
        timeout=120,
        check=False,
    )
    findings = json.loads(done.stdout)["findings"]
    return [
        (finding["kind"], finding["ranks"], finding["op"], finding["seq"]) for finding in findings
    ]


class _Served:
    """``rankcall serve`` for the length of a block."""

    def __init__(self, *arguments: str, cwd: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [str(RANKCALL), "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
        )
        assert self._process.stdout is not None
        self.link = self._process.stdout.readline().strip()
        self.url, _, self.token = self.link.partition("#token=")

    def cpu_s(self) -> float:
        """Return the CPU time that the server has used."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(20)


def _first_paint(run: Path) -> float | None:
    """Return the median time until the first paint of a server that runs, s."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if path is None:
        return None
    times: list[float] = []
    with _Served(str(run)) as served, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        context = browser.new_context(
            extra_http_headers={"Authorization": f"Bearer {served.token}"}
        )
        for _ in range(5):
            page = context.new_page()
            page.goto(served.url)
            times.append(_painted_ms(page))
            page.close()
            time.sleep(2.5)  # so that each viewer needs a new look
        browser.close()
    return round(median(times) / 1e3, 3)


def _painted_ms(page: Any) -> float:
    """Return when a page was painted. Its policy forbids what ``wait_for_function`` does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        paints_ms = page.evaluate(
            "performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)"
        )
        if paints_ms:
            return float(paints_ms[0])
        time.sleep(0.02)
    raise TimeoutError("the page has not been painted")


def _training(rounds: int) -> dict[str, float]:
    """Train on two recorded ranks, with a viewer in every second block of some seconds."""
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as name:
        run = Path(name) / "run"
        run.mkdir()
        with _Served(str(run)) as served:
            arguments = ["--rank", "--viewed", served.link, "--rounds", str(rounds)]
            began, cpu = time.monotonic(), served.cpu_s()
            printed = told_by_ranks(
                str(ROOT / "benchmarks/training.py"),
                [*arguments, "--epochs", "24"],
                2,
                {"BENCH_RUN_DIR": str(run)},
            )
            share = (served.cpu_s() - cpu) / (time.monotonic() - began)
    ratios = printed[0]["ratios"]
    return {
        "training_ratio_with_viewer": round(median(ratios["viewed"]), 3),
        "training_ratio_plain": round(median(ratios["plain"]), 3),
        "server_cpu_share": round(share, 4),
    }


if __name__ == "__main__":
    sys.exit(main())

"""``rankcall top`` in a terminal, as a person uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from liveruns import live_run
from terminal import ALTERNATE, HIDDEN, NORMAL, SHOWN, Terminal, frames


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("leave", [b"q", b"\x03"])
def test_leaving(tmp_path: Path, someone: subprocess.Popen[bytes], leave: bytes) -> None:
    """q and Ctrl-C leave it; the last look stays, the terminal is as it was."""
    run = live_run(tmp_path, 8, someone.pid)
    with Terminal("top", run) as terminal:
        terminal.read_until(lambda text: "missing" in text)
        terminal.type(b"xyz" + leave)
        assert terminal.status() == 1
        assert terminal.settings == terminal.before
    drawn, _, left = terminal.text.rpartition(NORMAL)
    assert "q or Ctrl-C leaves" in drawn
    assert drawn.count(ALTERNATE) == 1
    assert "Rank 2 (" in left
    assert "q or Ctrl-C leaves" not in left
    assert terminal.text.rindex(SHOWN) > terminal.text.rindex(HIDDEN)
    assert "xyz" not in terminal.text
    assert "Traceback" not in terminal.text


def test_a_thousand_ranks_on_a_screen(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """1,024 ranks fit into 80 x 24; it is drawn again and again, and anew when it is resized."""
    run = live_run(tmp_path, 1024, someone.pid)
    with Terminal("top", run) as terminal:
        terminal.read_until(lambda text: len(frames(text)) >= 3)
        first = frames(terminal.text)[0]
        terminal.resize(40, 120)
        seen = len(frames(terminal.text))
        terminal.read_until(lambda text: len(frames(text)) >= seen + 3)
        last = frames(terminal.text)[-2]
        someone.kill()  # the job ends: so does the view
        someone.wait()
        terminal.status()
    assert "run · 1,024 ranks" in first
    assert "missing" in first
    assert "q or Ctrl-C leaves" in first
    for frame, rows, columns in ((first, 24, 80), (last, 40, 120)):
        assert len(frame.splitlines()) <= rows
        widest = max(len(line.rstrip()) for line in frame.splitlines())
        assert widest <= columns
    assert max(len(line.rstrip()) for line in last.splitlines()) > 80


def test_a_pipe_gets_one_snapshot(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """``rankcall top | cat`` prints the view once and ends, though the job goes on."""
    run = live_run(tmp_path, 4, someone.pid)
    done = subprocess.run(
        [sys.executable, "-m", "rankcall", "top", str(run)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.count("missing") == 1

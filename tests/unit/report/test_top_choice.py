"""Keys of ``rankcall top``: sort, filter, choose a rank, unfold, and show its stack."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from diagnosing import diagnose_calls, unfinished
from liveruns import live_run
from terminal import Terminal, frames
from worlds import MS, group_of, together

from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.cli.keys import names_of
from rankcall.report import top
from rankcall.report.formatting import as_text
from rankcall.report.top_choice import Choice

WORLD = group_of(6)


@pytest.fixture
def hang(tmp_path: Path) -> Diagnosis:
    """Return a job in which rank 2 is missing, 0, 1 and 3 wait at one line, 4 and 5 at another."""
    calls = [call for seq in (1, 2) for call in together(seq, [0] * 6, seq * MS, WORLD)]
    calls += unfinished(WORLD, 3, (0, 1, 3), 5 * MS, line=7)
    calls += unfinished(WORLD, 3, (4, 5), 9 * MS, line=9)
    return diagnose_calls(tmp_path, calls, states={})


def pressed(diagnosis: Diagnosis, *keys: str, choice: Choice | None = None) -> Choice:
    """Return what is chosen after some keys."""
    choice = choice or Choice()
    for key in keys:
        choice = choice.press(key, diagnosis)
    return choice


def rows(diagnosis: Diagnosis, choice: Choice) -> list[list[int]]:
    """Return the ranks of each row."""
    return [[place.rank for place in line.places] for line in choice.lines(diagnosis)]


def screen(diagnosis: Diagnosis, choice: Choice, *stack: str) -> str:
    """Return what is on the screen."""
    view = top.view(diagnosis, 80, choice=choice, stack=stack)
    return as_text(lambda console: console.print(view), 80)


def test_keys_have_names() -> None:
    """Arrows and function keys are one key each; what is unknown or a control code is none."""
    assert names_of("a>\x1b[A\x1bOB\x1b[17~\r\x7f\x1b") == [
        *("a", ">", "up", "down", "F6", "enter", "backspace", "escape")
    ]
    assert names_of("\x1b[1;5C\x00é") == ["é"]


def test_sorting(hang: Diagnosis) -> None:
    """The columns are tried one after the other, forwards and backwards, and marked."""
    assert rows(hang, Choice()) == [[2], [0, 1, 3], [4, 5]]
    by_rank = pressed(hang, ">")
    assert rows(hang, by_rank) == [[0, 1, 3], [2], [4, 5]]
    assert "ranks▼" in screen(hang, by_rank)
    backwards = pressed(hang, ">", "I")
    assert rows(hang, backwards) == [[4, 5], [2], [0, 1, 3]]
    assert "ranks▲" in screen(hang, backwards)
    assert pressed(hang, *[">"] * 6) == Choice()
    longest = pressed(hang, "<")
    assert longest.order == "for"
    ages = [line.longest for line in longest.lines(hang)]
    assert ages == sorted(ages, reverse=True)


def test_filtering(hang: Diagnosis) -> None:
    """Rows without the text are left out; enter keeps the filter, escape drops it."""
    typing = pressed(hang, "/", *"train.py:9")
    assert rows(hang, typing) == [[4, 5]]
    assert "only rows with: train.py:9_  (2 ranks; enter keeps it" in screen(hang, typing)
    kept = pressed(hang, "enter", choice=typing)
    assert (kept.typing, kept.only) == (False, "train.py:9")
    assert rows(hang, pressed(hang, "backspace", choice=typing)) == [[2], [0, 1, 3], [4, 5]]
    assert pressed(hang, "escape", choice=kept) == Choice()
    assert rows(hang, pressed(hang, "/", *"nowhere")) == []
    assert screen(hang, pressed(hang, "/", *"nowhere", "enter", "down", "s"))


def test_keys_are_text_while_a_filter_is_typed(hang: Diagnosis) -> None:
    """A q or an I belongs to the filter then."""
    assert pressed(hang, "F4", "q", "I", ">").only == "qI>"


def test_choosing_a_row_follows_the_rank(hang: Diagnosis) -> None:
    """The chosen row stays that of the rank when the order changes, or ranks unfold."""
    chosen = pressed(hang, "down", "down")
    assert (chosen.rank, chosen.at(chosen.lines(hang))) == (0, 1)
    sorted_rows = pressed(hang, ">", choice=chosen)
    assert sorted_rows.at(sorted_rows.lines(hang)) == 0
    unfolded = pressed(hang, "+", choice=chosen)
    assert rows(hang, unfolded) == [[2], [0], [1], [3], [4], [5]]
    assert pressed(hang, "end", choice=unfolded).rank == 5
    assert pressed(hang, "down", "page up", choice=unfolded).rank == 2
    assert pressed(hang, "up").rank == 4
    assert rows(hang, pressed(hang, "-", choice=unfolded)) == rows(hang, Choice())


def test_the_stack_and_the_help_take_the_place_of_rows(hang: Diagnosis) -> None:
    """The screen stays a screen: fewer rows are shown beside a stack or the help."""
    stacked = pressed(hang, "down", "s")
    assert (stacked.stack, stacked.rank) == (True, 2)
    assert "load_batch  data.py:12" in screen(hang, stacked, "    load_batch  data.py:12")
    assert not pressed(hang, "s", choice=stacked).stack
    unfolded = screen(hang, pressed(hang, "+", choice=stacked), "a stack")
    assert "and 2 more ranks at 2 other rows" in unfolded
    text = screen(hang, pressed(hang, "h", "+"))
    assert "sort by the column before or after" in text
    assert "train.py" not in text.partition("sort by")[2]
    for shown in (unfolded, text):
        assert len(shown.splitlines()) <= 24


@pytest.fixture
def someone() -> Iterator[subprocess.Popen[bytes]]:
    """Return a process that is there, until the test is over."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_in_a_terminal(tmp_path: Path, someone: subprocess.Popen[bytes]) -> None:
    """A person filters, unfolds, chooses a rank and asks for its stack, and leaves."""
    with Terminal("top", live_run(tmp_path, 8, someone.pid)) as terminal:
        terminal.read_until(lambda text: "missing" in text)
        terminal.type(b"h")
        terminal.read_until(lambda text: "show the stack of" in frames(text)[-1])
        terminal.type(b"h+")
        terminal.read_until(lambda text: "\n  7  " in frames(text)[-1])
        terminal.type(b"/rank 2\x7f\x7f\x7f\x7f\x7f\x7fmissing-line\r")
        terminal.read_until(lambda text: "only rows with: missing-line  (0 ranks" in text)
        terminal.type(b"\x1b")
        terminal.read_until(lambda text: "only rows with" not in frames(text)[-1])
        terminal.type(b"\x1b[B")
        terminal.type(b"s")
        # py-spy may not be there, or not be allowed to look.
        terminal.read_until(lambda text: "time_sleep" in text or "rank 2: no stack" in text)
        terminal.type(b"q")
        assert terminal.status() == 1
        assert terminal.settings == terminal.before
    assert "Traceback" not in terminal.text

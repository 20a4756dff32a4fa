"""Long work shows on a terminal that it goes on, and writes nothing elsewhere."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from rankcall.cli import main
from rankcall.cli.common import working
from rankcall.testing.synthetic import synthetic_run


class Screen(io.StringIO):
    """A stderr that says whether it is a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_reading_many_rings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """A bar shows how many rings ``diagnose`` has read, if there are many."""
    synthetic_run(tmp_path / "run", 40, 6)
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["diagnose", str(tmp_path / "run")]) == 0
    assert ("reading records" in screen.getvalue()) == is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_working(monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    """A terminal sees what is done and the time so far; an error ends it and is passed on."""
    screen = Screen(is_terminal=is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(ValueError, match="no"), working("reading \x1b[2J logs"):
        raise ValueError("no")
    shown = screen.getvalue()
    assert ("reading" in shown and "0:00:00" in shown) == is_terminal
    assert (shown == "") != is_terminal
    assert "\x1b[2J" not in shown

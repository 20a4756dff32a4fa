"""The last file work of a recording: at once on a local disk, with a deadline elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rankcall.capture import keeper
from rankcall.capture.keeper import Keeper


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that go to stderr."""
    lines: list[str] = []
    monkeypatch.setattr(keeper, "say", lines.append)
    return lines


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every file system for a server's."""
    monkeypatch.setattr(keeper, "is_local", lambda path: False)


def test_local(tmp_path: Path, said: list[str]) -> None:
    """The work is done by the caller's thread, and its failure is one line."""
    threads: list[threading.Thread] = []
    Keeper(tmp_path).keep(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]

    def fail() -> None:
        raise OSError(28, "No space left on device", "/run/x")

    Keeper(tmp_path).keep(fail)
    assert said == ["the records of this rank cannot be kept: /run/x: No space left on device"]


@pytest.mark.usefixtures("remote")
def test_remote(tmp_path: Path, said: list[str]) -> None:
    """The work is done when ``keep`` returns, by a thread that then ends."""
    done: list[int] = []
    Keeper(tmp_path).keep(lambda: done.append(1))
    assert (done, said) == ([1], [])


@pytest.mark.usefixtures("remote")
def test_a_server_that_does_not_answer(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on without it, and says so."""
    monkeypatch.setattr(keeper, "_SECONDS", 0.05)
    answers = threading.Event()
    Keeper(tmp_path).keep(lambda: answers.wait(60))
    assert len(said) == 1
    assert f"the run directory {tmp_path} does not answer" in said[0]
    answers.set()


@pytest.mark.usefixtures("remote")
def test_nothing_to_do(tmp_path: Path) -> None:
    """A recording that never began leaves no thread behind."""
    Keeper(tmp_path).discard()

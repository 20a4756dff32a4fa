"""The last file work of a recording: at once on a local disk, with a deadline elsewhere."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rankcall.capture import own_ring
from rankcall.capture.own_ring import Mover


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines that go to stderr."""
    lines: list[str] = []
    monkeypatch.setattr(own_ring, "warn_once", lines.append)
    return lines


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every file system for a server's."""
    monkeypatch.setattr(own_ring, "is_local", lambda path: False)


def test_local(tmp_path: Path, said: list[str]) -> None:
    """The work is done by the caller's thread, and its failure is one line."""
    threads: list[threading.Thread] = []
    Mover(tmp_path).move(lambda: threads.append(threading.current_thread()))
    assert threads == [threading.current_thread()]

    def fail() -> None:
        raise OSError(28, "No space left on device", "/run/x")

    Mover(tmp_path).move(fail)
    assert said == ["the records of this rank cannot be kept: /run/x: No space left on device"]


@pytest.mark.usefixtures("remote")
def test_remote(tmp_path: Path, said: list[str]) -> None:
    """The work is done when ``move`` returns, by a thread that then ends."""
    done: list[int] = []
    Mover(tmp_path).move(lambda: done.append(1))
    assert (done, said) == ([1], [])


@pytest.mark.usefixtures("remote")
def test_a_server_that_does_not_answer(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on without it, and says so."""
    monkeypatch.setattr(own_ring, "_MOVE_SECONDS", 0.05)
    answers = threading.Event()
    Mover(tmp_path).move(lambda: answers.wait(60))
    assert len(said) == 1
    assert f"the run directory {tmp_path} does not answer" in said[0]
    answers.set()


@pytest.mark.usefixtures("remote")
def test_nothing_to_do(tmp_path: Path) -> None:
    """A recording that never began leaves no thread behind."""
    Mover(tmp_path).discard()

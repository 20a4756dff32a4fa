"""The settings of a recording: what wins, what is refused, and whose run directory it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rankcall
from rankcall.capture.settings import WORKER, read_settings
from rankcall.ring.layout import Geometry


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RANKCALL")]:
        monkeypatch.delenv(name)


def test_defaults() -> None:
    """Without arguments and variables: any capture, and the ranks choose the run."""
    settings = read_settings()
    assert (settings.run_dir, settings.outer_run, settings.is_inherited) == (None, None, False)
    assert (settings.capture, settings.capacity, settings.call_sites) == (
        "auto",
        Geometry().capacity,
        True,
    )
    assert (settings.settled_run, settings.places, settings.collect_to) == ("", "", "")


def test_an_argument_wins_over_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Relative directories become absolute; a capacity becomes a power of two, 64 at least."""
    monkeypatch.setenv("RANKCALL_RUN_DIR", "theirs")
    monkeypatch.setenv("RANKCALL_CAPTURE", "native")
    monkeypatch.setenv("RANKCALL_CAPACITY", "100")
    monkeypatch.chdir(tmp_path)
    inherited, given = read_settings(), read_settings("mine", "python", 5, call_sites=False)
    assert (inherited.run_dir, inherited.is_inherited) == (tmp_path / "theirs", True)
    assert (inherited.capture, inherited.capacity) == ("native", 128)
    assert (given.run_dir, given.is_inherited) == (tmp_path / "mine", False)
    assert (given.capture, given.capacity, given.call_sites) == ("python", 64, False)
    unnamed = inherited.without_run()
    assert (unnamed.run_dir, unnamed.outer_run, unnamed.is_inherited) == (None, None, False)
    assert unnamed.capacity == 128


def test_a_process_below_a_rank_belongs_to_another_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The inherited directory is the outer job's; one that the program names is its own."""
    monkeypatch.setenv("RANKCALL_RUN_DIR", str(tmp_path))
    monkeypatch.setenv(WORKER, "1")
    assert (read_settings().run_dir, read_settings().outer_run) == (None, tmp_path)
    assert read_settings(tmp_path / "own").run_dir == tmp_path / "own"
    monkeypatch.setenv(WORKER, str(os.getpid()))
    assert (read_settings().run_dir, read_settings().outer_run) == (tmp_path, None)


@pytest.mark.parametrize("capacity", [0, -1, (1 << 24) + 1])
def test_a_capacity_out_of_range(capacity: int) -> None:
    """The error says the range."""
    with pytest.raises(ValueError, match="capacity must be from 1 to 16,777,216 records; got"):
        read_settings(capacity=capacity)


def test_variables_that_are_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what is allowed."""
    with pytest.raises(ValueError, match="capture must be one of auto, native, python; got 'rust'"):
        read_settings(capture="rust")
    monkeypatch.setenv("RANKCALL_CAPACITY", "many")
    with pytest.raises(ValueError, match="RANKCALL_CAPACITY must be a number of records; got"):
        read_settings()


def test_a_rank_stays_in_its_own_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second call of ``enable`` does not move a nested job into the run around it.

    By then this process has declared itself a rank, so that the inherited directory looks its own.
    """
    monkeypatch.setenv("RANKCALL_RUN_DIR", str(tmp_path / "outer"))
    monkeypatch.setenv(WORKER, "1")
    with rankcall.enable(capture="python") as recording:
        monkeypatch.setenv(WORKER, str(os.getpid()))
        assert rankcall.enable() is recording
        assert recording.run_dir is None
        assert rankcall.enable(tmp_path / "mine") is recording
        assert recording.run_dir == tmp_path / "mine"

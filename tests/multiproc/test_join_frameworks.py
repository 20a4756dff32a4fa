"""Uneven inputs under Lightning and Accelerate equal one process; skipped where they are absent."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from joinframeworks import with_accelerate, with_failing_lightning, with_lightning
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
TIMEOUT_S = 300
LOCAL = {"LOCAL_WORLD_SIZE": "2"}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where an optional package is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs pip install 'rankcall[{package}]'")


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    """Two epochs; the callback weighs the loss and leaves nothing behind."""
    for told in run_ranks(
        with_lightning, 2, str(tmp_path), init=False, timeout=TIMEOUT_S, env=LOCAL
    ):
        assert told["apart"] < 1e-12
        assert told["batches"] == [6, 10]
        assert told["replayed"] == [4, 0]
        assert told["restored"]


@needs("lightning")
@pytest.mark.parametrize("where", ["step", "loader"])
def test_lightning_that_fails(tmp_path: Path, where: str) -> None:
    """The rank that fails in fit keeps its error, the other one gets it as a PeerError."""
    other, failing = run_ranks(
        with_failing_lightning, 2, str(tmp_path), where, init=False, timeout=TIMEOUT_S, env=LOCAL
    )
    assert failing["error"] == "KeyError", failing
    assert (other["error"], other["rank"]) == ("PeerError", 1), other
    assert "no such sample" in other["text"]
    assert "joinframeworks.py" in other["text"], "the traceback came along"
    assert other["restored"]
    assert failing["restored"]


@needs("accelerate")
def test_accelerate() -> None:
    """Each sample once, instead of repeating some to be even; settings are as before."""
    for told in run_ranks(
        with_accelerate, 2, timeout=TIMEOUT_S, env={"ACCELERATE_USE_CPU": "true"}
    ):
        assert told["apart"] < 1e-12
        assert told["batches"] == [3, 2]
        assert told["shadowed"] == [0, 1]
        assert told["even"] is True
        assert told["sync"] is True

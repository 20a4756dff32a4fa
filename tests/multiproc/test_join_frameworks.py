"""Uneven inputs under Lightning and Accelerate equal one process. Needs both packages."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from join_programs.frameworks import with_accelerate, with_lightning
from once import once
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
TIMEOUT_S = 300
LOCAL = {"LOCAL_WORLD_SIZE": "2"}


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the test if an optional package is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs pip install 'rankcall[{package}]'")


@once
def fits(_: str, factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of all fits, one dictionary for each rank."""
    folder = str(factory.mktemp("lightning"))
    return run_ranks(with_lightning, 2, folder, init=False, timeout=TIMEOUT_S, env=LOCAL)


@needs("lightning")
def test_lightning(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two uneven epochs equal one process; the callback weights the loss and restores Lightning."""
    for results in fits("once", tmp_path_factory):
        assert results["good"]["apart"] < 1e-12
        assert results["good"]["batches"] == [6, 10]
        assert results["good"]["replayed"] == [4, 0]
        assert results["good"]["restored"]


@needs("lightning")
@pytest.mark.parametrize("where", ["step", "loader"])
def test_lightning_that_fails(tmp_path_factory: pytest.TempPathFactory, where: str) -> None:
    """The rank that fails in fit keeps its error; the other one gets it as a PeerError."""
    other, failing = (results[where] for results in fits("once", tmp_path_factory))
    assert failing["error"] == "KeyError", failing
    assert (other["error"], other["rank"]) == ("PeerError", 1), other
    assert "no such sample" in other["text"]
    assert "join_programs/frameworks.py" in other["text"], "the traceback came along"
    assert other["restored"]
    assert failing["restored"]


@needs("accelerate")
def test_accelerate() -> None:
    """Each sample counts once, and none is repeated; Accelerate's settings are restored."""
    for results in run_ranks(
        with_accelerate, 2, timeout=TIMEOUT_S, env={"ACCELERATE_USE_CPU": "true"}
    ):
        assert results["apart"] < 1e-12
        assert results["batches"] == [3, 2]
        assert results["shadowed"] == [0, 1]
        assert results["even"] is True
        assert results["sync"] is True

"""Callbacks of real frameworks, on two ranks: figures, declared phases, and the same training."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from integration_programs import with_accelerate, with_lightning, with_transformers
from ranks import run_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(400)]
TIMEOUT_S = 300
LOCAL = {"LOCAL_WORLD_SIZE": "2"}
FIGURES = ("rankcall/waiting_share", "rankcall/communication_share")


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the test if an optional package is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs pip install {package}")


def check(results: list[dict[str, Any]], phases: set[tuple[str, str]]) -> None:
    """Compare the two ranks with what every callback promises.

    The model is the same to the bit as without the callback. Only rank 0 logs. Each phase is
    declared on every rank while it lasts, and not a moment longer.
    """
    for result in results:
        assert result["same"]
        assert result["restored"]
        assert set(map(tuple, result["phases"])) == phases
    first, second = results
    assert second["figures"] == []
    assert first["figures"]
    for figures in first["figures"]:
        for name in FIGURES:
            assert 0 <= figures[name] <= 1, name


@needs("lightning")
def test_lightning(tmp_path: Path) -> None:
    """A fit with the callback; a step that fails keeps its own error."""
    results = run_ranks(with_lightning, 2, str(tmp_path), init=False, timeout=TIMEOUT_S, env=LOCAL)
    check(
        results,
        {("train", ""), ("validate", "evaluation"), ("save", "a checkpoint")},
    )
    for result in results:
        assert result["failing"]["error"] == "'no such sample'"
        assert result["failing"]["restored"]


@needs("accelerate")
def test_accelerate(tmp_path: Path) -> None:
    """The tracker adds its figures to the other tracker's."""
    environment = {**LOCAL, "ACCELERATE_USE_CPU": "true"}
    results = run_ranks(with_accelerate, 2, str(tmp_path), timeout=TIMEOUT_S, env=environment)
    check(
        results,
        {("train", ""), ("validate", "evaluation"), ("save", "a checkpoint")},
    )


@needs("transformers")
def test_transformers(tmp_path: Path) -> None:
    """The callback adds its figures to the trainer's history, and for the callbacks behind it."""
    results = run_ranks(with_transformers, 2, str(tmp_path), timeout=TIMEOUT_S, env=LOCAL)
    check(
        results,
        {("train", ""), ("validate", "evaluation"), ("save", "a checkpoint")},
    )
    assert results[0]["logged"]

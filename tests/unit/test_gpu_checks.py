"""``make gpu`` runs the list in docs/performance.md, and skips checks that need more GPUs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
HEADING = "## What to run first on a GPU"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """Import the script."""
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]


def test_the_page_lists_what_is_run(gpu: ModuleType) -> None:
    """The page and the script have the same checks, in the same order."""
    page = (ROOT / "docs" / "performance.md").read_text()
    section = page.split(HEADING)[1].split("\n## ")[0]
    listed = [line.split("**")[1] for line in section.splitlines() if line.startswith("1. **")]
    assert listed == [check.name for check in gpu.CHECKS]


def test_without_a_gpu_all_is_skipped_with_the_reason() -> None:
    """The exit status is 0, and the table has a line for each check."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    heading, _, first, *rest = done.stdout.splitlines()
    assert heading == "| check | result | figures, or the reason |"
    assert first.startswith("| versions and devices | ok | Python ")
    assert f"torch {torch.__version__}" in first
    assert rest
    assert all(line.endswith("| skipped | no GPU |") for line in rest)


def fake_check(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, code: str) -> Any:
    """Run a check whose process runs some code instead."""
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code], **options)

    with monkeypatch.context() as patched:
        patched.setattr(gpu.subprocess, "Popen", start)
        return gpu.run_check(gpu.Check("a check", 0, lambda: (True, "")))


def test_a_check_that_fails_says_why(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table distinguishes an exception, a bad result and a good one."""
    line = fake_check(gpu, monkeypatch, "raise ValueError('no such thing')")
    assert (line.result, line.detail) == ("failed", "exit status 1: ValueError: no such thing")
    line = fake_check(gpu, monkeypatch, f"print({json.dumps([False, 'too slow'])!r})")
    assert (line.result, line.detail) == ("failed", "too slow")
    line = fake_check(gpu, monkeypatch, f"print({json.dumps([True, '1 | 2'])!r})")
    assert (line.result, line.detail) == ("ok", "1 | 2")
    assert "1 \\| 2" in gpu.table([line])


def test_a_check_that_hangs_is_ended(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """After its time a check is killed and counts as failed."""
    monkeypatch.setattr(gpu, "CHECK_SECONDS", 0.1)
    line = fake_check(gpu, monkeypatch, "import threading; threading.Event().wait()")
    assert line.result == "failed"
    assert "took longer" in line.detail


def test_what_is_lacking(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with one GPU skips the check that needs two, and runs the rest."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    lacks = {check.name: gpu.what_lacks(check) for check in gpu.CHECKS}
    assert lacks.pop("hang verdict") == "needs 2 GPUs, 1 here"
    assert set(lacks.values()) == {""}

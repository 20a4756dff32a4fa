"""What callbacks of frameworks share: figures and verdicts, without waiting and without raising."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankcall.integrations import reporter as reporter_module
from rankcall.integrations.reporter import Reporter, look_at
from rankcall.testing.synthetic import synthetic_run


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in which rank 3 is late all along; this process seems to record it."""
    synthetic_run(tmp_path / "run", 8, 400, straggler=3)
    recording = SimpleNamespace(run_dir=tmp_path / "run")
    monkeypatch.setattr(reporter_module.session, "current", lambda: recording)
    monkeypatch.setattr(reporter_module, "LAST_LOOK_S", 120.0)
    monkeypatch.setattr("rankcall.errors._warnings", set())
    return tmp_path / "run"


def test_figures_and_the_verdict_of_a_straggler(recorded: Path) -> None:
    """Each look logs shares and the late rank; the reporter says the verdict once."""
    logged: list[dict[str, float]] = []
    verdicts: list[str] = []
    reporter = Reporter(logged.append, verdicts.append, every_s=0.0)
    for _ in range(3):
        reporter.close()
    assert len(logged) == 3
    for figures in logged:
        assert figures["rankcall/straggler_rank"] == 3.0
        assert figures["rankcall/straggler_share"] > 0.9
        assert 0 < figures["rankcall/waiting_share"] <= 1
        assert 0 < figures["rankcall/communication_share"] <= 1
    assert len(verdicts) == 1
    assert verdicts[0].startswith("rankcall: straggler: Rank 3")


def test_an_update_does_not_wait(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a look takes its time, updates return, and begin no second one."""
    free, looks = threading.Event(), []

    def slow(run_dir: Path) -> reporter_module.Look:
        looks.append(run_dir)
        free.wait(120)
        return reporter_module.Look({"rankcall/waiting_share": 0.5})

    monkeypatch.setattr(reporter_module, "look_at", slow)
    logged: list[dict[str, float]] = []
    reporter = Reporter(logged.append, print, every_s=0.0)
    try:
        for _ in range(5):
            reporter.update()
        assert logged == []
    finally:
        free.set()
    assert reporter._call is not None
    assert reporter._call.ended(120)
    assert looks == [recorded]
    reporter.update()
    assert logged == [{"rankcall/waiting_share": 0.5}]
    reporter.close()
    assert set(looks) == {recorded}


def test_looks_are_rare(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are ``every_s`` apart, however often a framework logs."""
    looks: list[Path] = []

    def look(run_dir: Path) -> reporter_module.Look:
        looks.append(run_dir)
        return reporter_module.Look()

    monkeypatch.setattr(reporter_module, "look_at", look)
    reporter = Reporter(print, print, every_s=3600.0)
    for _ in range(20):
        reporter.update()
    assert len(looks) == 1


def test_looks_at_a_large_job_are_rarer(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks take at most a hundredth of a core: after one of 3 s, the next is 300 s later."""
    now = [1000.0]
    looks: list[float] = []

    def look(run_dir: Path) -> reporter_module.Look:
        looks.append(now[0])
        return reporter_module.Look(cpu_s=3.0)

    monkeypatch.setattr(reporter_module, "look_at", look)
    monkeypatch.setattr(reporter_module.time, "monotonic", lambda: now[0])
    reporter = Reporter(print, print)
    for _ in range(100):
        reporter.update()
        call = reporter._call
        assert call is None or call.ended(60)
        now[0] += 10.0
    # A look ends unseen until the next update, ten seconds later.
    assert looks == [1000.0, 1310.0, 1620.0, 1930.0]


def raises(*_: Any) -> None:
    """Fail, as a logger does whose server is gone."""
    raise ConnectionError("the logger's server is gone")


@pytest.mark.parametrize("log", [raises, lambda figures: None])
def test_a_failing_logger_raises_nothing(
    recorded: Path, log: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """The job goes on, and one line on stderr says what failed."""
    Reporter(log, raises, every_s=0.0).close()
    assert "cannot report on the run: ConnectionError" in capsys.readouterr().err


def test_a_damaged_run_raises_nothing(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot be read is reported on stderr."""
    for ring in recorded.rglob("*.ring"):
        ring.write_bytes(b"x" * 100)
    Reporter(print, print, every_s=0.0).close()
    assert "cannot report on the run" in capsys.readouterr().err


def test_without_a_recording_there_is_no_look() -> None:
    """Nothing is read, logged or said, and no thread begins."""
    reporter = Reporter(raises, raises, every_s=0.0)
    reporter.update()
    reporter.close()
    assert reporter._call is None


def test_a_healthy_run_says_nothing(tmp_path: Path) -> None:
    """No finding, and no late rank."""
    synthetic_run(tmp_path / "run", 8, 400)
    look = look_at(tmp_path / "run")
    assert look.findings == ()
    assert "rankcall/straggler_rank" not in look.figures


def test_rankcall_imports_no_integration() -> None:
    """Neither the package nor recording loads a framework or a callback."""
    program = (
        "import sys, rankcall, rankcall.watch, rankcall.hooks; rankcall.enable; "
        "print([name for name in sys.modules if name.startswith('rankcall.integrations') "
        "or name in ('lightning', 'accelerate', 'transformers', 'ray')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_durations_are_checked_before_the_job() -> None:
    """A duration that ``expect`` would refuse in a checkpoint is refused at the beginning."""
    if find_spec("lightning") is None:
        pytest.skip("needs Lightning")
    # In a process of its own, because Lightning's import changes the environment.
    program = (
        "from rankcall.integrations.lightning import RankcallCallback\n"
        "RankcallCallback(evaluation_s=0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=240)
    assert b"ValueError: evaluation_s must be positive seconds; got 0" in done.stderr


def test_a_timedelta_is_a_duration() -> None:
    """Between two looks, for example."""
    reporter = Reporter(lambda figures: None, print, timedelta(minutes=2))
    assert reporter._every_s == 120.0

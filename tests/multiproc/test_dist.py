"""``make dist``: both files work in a fresh environment, and a fault is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import try_dist

pytestmark = pytest.mark.multiproc


@pytest.mark.slow
def test_both_files_are_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Wheel and sdist are built, installed and used; each step is a line."""
    status = try_dist.main(["-o", str(tmp_path)])
    out, err = capfd.readouterr()
    assert status == 0, out + err
    assert out.count("  rankcall run, two ranks") == 2
    assert "FAILED" not in out
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gz", ".whl"]


def test_a_step_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is marked, and the output of its command follows; the status is 1."""

    def broken(folder: Path) -> tuple[Path, Path]:
        try_dist.call(sys.executable, "-c", "import sys; sys.exit('no space')", cwd=tmp_path)
        raise AssertionError("the call should have failed")

    monkeypatch.setattr(try_dist, "build", broken)
    assert try_dist.main(["-o", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.split()[-1] == "FAILED"
    assert "exit status 1" in printed.err
    assert "no space" in printed.err


def test_a_step_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that does not end is ended at the deadline, and named."""
    monkeypatch.setattr(try_dist, "STEP_S", 0.2)
    with pytest.raises(try_dist.Failed, match="did not end in"):
        try_dist.call(sys.executable, "-c", "import time; time.sleep(600)", cwd=tmp_path)

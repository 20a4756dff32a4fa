"""Which verdicts the ranks of a node are called to react to."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.capture import session
from rankcall.capture.settings import read_settings
from rankcall.job.watcher import Watcher
from rankcall.ring.layout import read_header


def verdict(kind: str, confidence: str) -> Verdict:
    """Return a verdict with one finding."""
    return Verdict("run", [Finding(kind, (1,), confidence=confidence)])


@pytest.mark.parametrize(
    ("kind", "confidence", "on_hang", "counted"),
    [
        ("missing", "likely", "abort", 1),
        ("no_progress", "certain", "abort", 1),
        ("no_progress", "likely", "abort", 0),
        ("no_progress", "likely", "report", 1),
    ],
)
def test_only_verdicts_to_act_on_are_counted(
    kind: str,
    confidence: str,
    on_hang: str,
    counted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that sees a new count, and cannot read the verdict, ends itself on ``abort``."""
    recording = session.claim("watch", read_settings(tmp_path))
    try:
        watcher = Watcher(recording, 5.0, on_hang)
        judge = watcher._make_judge()
        assert judge is not None
        monkeypatch.setattr(judge, "verdicts", lambda: [verdict(kind, confidence)])
        watcher._call_for_reaction(judge)
        assert recording.path is not None
        header = read_header(recording.path)
        assert header is not None
        assert header.verdicts == counted
    finally:
        session.drop("watch")

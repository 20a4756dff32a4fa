"""Which verdicts the ranks of a node are called to react to."""

from __future__ import annotations

import time
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
        ("missing", "likely", "recover", 1),
        ("no_progress", "likely", "recover", 0),
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


@pytest.mark.parametrize("is_verified", [True, False])
@pytest.mark.parametrize("on_hang", ["abort", "recover", "report"])
def test_a_verdict_that_this_node_does_not_confirm(
    on_hang: str,
    is_verified: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With abort and recover, a verdict counts once a call of this node is overdue, or not at all.

    If the node is only silent, it counts if it is verified. A verdict that is never confirmed
    lapses with a line that says so, and does not count for what happens later.
    """
    recording = session.claim("watch", read_settings(tmp_path))
    try:
        watcher = Watcher(recording, 5.0, on_hang)
        judge = watcher._make_judge()
        assert judge is not None
        judge.is_verified = is_verified
        monkeypatch.setattr(judge, "verdicts", lambda: [verdict("missing", "certain")])

        def counted(now: float, overdue_ns: int, first_ns: int) -> int:
            monkeypatch.setattr(time, "monotonic", lambda: now)
            watcher._verdicts, watcher._react_until = 0, 10.0
            watcher._react(judge, {}, overdue_ns, first_ns)
            return watcher._verdicts

        acts = on_hang == "report"
        assert counted(1.0, 0, 0) == acts
        assert counted(1.0, 0, 7) == (acts or is_verified)
        assert counted(1.0, 7, 7) == 1
        assert capsys.readouterr().err == ""
        assert counted(10.0, 0, 0) == acts
        assert watcher._react_until < 0
        assert ("are not ended" in capsys.readouterr().err) == (not acts)
    finally:
        session.drop("watch")

"""``rankcall.checkpointed``: what a program says it has saved, as whoever restarts it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rankcall
from rankcall.recovery.failures import Attempt, cause_of
from rankcall.ring.layout import Header, read_header
from rankcall.ring.writer import put


def header_of(recording: Any) -> Header:
    """Return the header of a recording's ring."""
    header = read_header(recording.path)
    assert header is not None
    return header


@pytest.mark.parametrize("capture", ["python", pytest.param("native", marks=pytest.mark.slow)])
def test_the_newest_step_counts(capture: str, tmp_path: Path) -> None:
    """Steps after it are lost, and those before it are not."""
    with rankcall.enable(tmp_path, capture=capture) as recording:
        assert header_of(recording).saved == 0
        put(recording.ring, "step", 7)
        rankcall.checkpointed(0)
        assert (header_of(recording).saved, header_of(recording).saved_at) == (1, 7)
        rankcall.checkpointed(1007)
        put(recording.ring, "step", 12)
        assert (header_of(recording).saved, header_of(recording).saved_at) == (1008, 7)
        header = header_of(recording)
        attempt = Attempt({header.rank: header.pid}, 1)  # without a process group, the rank is -1
        cause = cause_of(tmp_path, attempt)
        assert (cause.steps, cause.saved, cause.since_saved) == (12, 1007, 5)


def test_without_a_recording() -> None:
    """It does nothing, so a script need not ask."""
    rankcall.checkpointed(5)


@pytest.mark.parametrize(
    ("step", "error"),
    [(-1, ValueError), (1 << 70, ValueError), ("5", TypeError), (True, TypeError)],
)
def test_what_is_no_step(step: Any, error: type[Exception]) -> None:
    """A mistake is said where it is made, recording or not."""
    with pytest.raises(error, match="checkpointed"):
        rankcall.checkpointed(step)

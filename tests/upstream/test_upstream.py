"""PyTorch's own Gloo tests end the same with recording on as without it."""

from __future__ import annotations

import pytest

from upstream import compare


@pytest.mark.multiproc
def test_same_outcomes_with_recording_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Each test has the same outcome with and without recording."""
    summary, differences = compare()
    with capsys.disabled():
        print(f"\n{summary}")
    assert not differences

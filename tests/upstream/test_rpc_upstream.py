"""All of PyTorch's own RPC tests on both back ends; TENSORPIPE beside torch's own bring-up."""

from __future__ import annotations

import pytest
from rpcupstream import count, failed, run_twice

pytestmark = pytest.mark.multiproc


def test_zmq_passes_torchs_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """Every test that does not name TensorPipe passes on ZMQ."""
    outcomes = run_twice("ZMQ")
    with capsys.disabled():
        print(f"\nZMQ: {count(outcomes)}: {failed(outcomes)}")
    ran = [name for name, outcome in outcomes.items() if not outcome.startswith("skipped")]
    assert len(ran) > 300
    assert not failed(outcomes)


def test_tensorpipe_passes_what_torchs_own_passes(capsys: pytest.CaptureFixture[str]) -> None:
    """A test that fails on our bring-up also fails on torch's."""
    ours, theirs = run_twice("TENSORPIPE"), run_twice("torch")
    with capsys.disabled():
        print(f"\nTENSORPIPE: {count(ours)}\ntorch: {count(theirs)}: {failed(theirs)}")
    assert ours.keys() == theirs.keys()
    assert len(ours) > 400
    assert not set(failed(ours)) - set(failed(theirs))

"""Handles: every call that switches something on returns one, with ``stop()`` and as a context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rankcall
from rankcall import hooks, store, trace, watch
from rankcall.capture import session
from rankcall.handles import Handle, Registration
from rankcall.testing import FaultPlan


def test_a_registration_ends_once() -> None:
    """The function is called at the first stop, in whatever way, and never again."""
    ends: list[int] = []
    with Registration(lambda: ends.append(1)) as registration:
        assert not ends
    registration.stop()
    assert ends == [1]


def test_a_block_that_raises_ends_its_handle() -> None:
    """The exception comes out as it is."""
    ends: list[int] = []
    with pytest.raises(KeyError), Registration(lambda: ends.append(1)):
        raise KeyError("mine")
    assert ends == [1]


@pytest.mark.parametrize(
    "switch_on",
    [
        lambda folder: rankcall.enable(folder / "run"),
        lambda folder: watch.start(60, run_dir=folder / "run"),
        lambda folder: trace.enable("ALL", sinks=[trace.MemorySink()]),
        lambda folder: hooks.register_collective_start_hook(print),
        lambda folder: hooks.register_collective_end_hook(print),
        lambda folder: hooks.register_process_group_hook(print),
        lambda folder: FaultPlan().arm(),
        lambda folder: store.install(),
    ],
    ids=["enable", "watch", "trace", "start_hook", "end_hook", "group_hook", "faults", "store"],
)
def test_every_switch_has_a_handle(switch_on: Any, tmp_path: Path) -> None:
    """It is a context manager; ``stop()`` switches off, and may be called twice."""
    with switch_on(tmp_path) as in_a_block:
        assert isinstance(in_a_block, Handle)
    handle = switch_on(tmp_path)
    handle.stop()
    handle.stop()
    assert session.current() is None


def test_the_recording_goes_on_for_others_after_stop(tmp_path: Path) -> None:
    """``stop()`` of the recording ends what ``enable`` began, not what a hook needs."""
    recording = rankcall.enable(tmp_path / "run")
    with hooks.register_collective_end_hook(print):
        recording.stop()
        assert session.current() is recording
    assert session.current() is None
    with rankcall.enable(tmp_path / "run"):
        recording.stop()  # another one is on now
        assert session.current() is not None

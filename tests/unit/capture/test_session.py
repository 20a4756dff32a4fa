"""The recording of this process: its claims, and the callbacks at its end."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from unittest.mock import patch

import pytest

import rankcall
from rankcall.capture import session
from rankcall.capture.recording import RecordingEnd
from rankcall.errors import TorchMissingError
from rankcall.ring.layout import read_header


@pytest.mark.parametrize("process_ends", [False, True])
def test_callbacks_of_the_end(process_ends: bool, tmp_path: Path) -> None:
    """First while the ring can still move, then once it is closed; each of them once."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    seen: list[object] = []

    def is_closed() -> bool:
        (path,) = tmp_path.glob("run/rings/*.ring") if recording.path is None else [recording.path]
        header = read_header(path)
        if header is None:  # it has moved into the run
            (moved,) = tmp_path.glob("run/rings/*.ring")
            header = read_header(moved)
        assert header is not None
        return header.closed_ns > 0

    recording.before_end(lambda: seen.append(("before", is_closed())))
    recording.on_end(lambda how: seen.append((how, is_closed())))
    if process_ends:
        recording.note_end(KeyError("mine"))
        session.end()
    else:
        rankcall.disable()
    rankcall.disable()
    session.end()
    assert seen == [
        ("before", False),
        (RecordingEnd(process_ends=process_ends, has_failed=process_ends), True),
    ]


@pytest.mark.parametrize(
    ("how", "looks"),
    [("process ends", 3), ("process fails", 0), ("switched off", 0)],
)
def test_an_end_gives_back_ends_time_to_notice_what_is_over(
    how: str, looks: int, tmp_path: Path
) -> None:
    """A process that ends well looks until nothing is in flight on a device. Others do not wait."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    recording._stopped.set()
    recording._heart.join(60)  # which looks each second, too
    in_flight_for, done = [60.0, 60.0, 0.0], []
    with patch.object(recording, "_devices", wraps=recording._devices) as devices:
        devices.known_ns = 0
        devices.poll.side_effect = lambda: (done.append("look"), in_flight_for.pop(0))[1]
        devices.close.side_effect = lambda: done.append("last look")
        if how == "switched off":
            rankcall.disable()
        else:
            recording.note_end(KeyError("mine") if how == "process fails" else None)
            session.end()
    assert done == ["look"] * looks + ["last look"]


def test_the_last_claim_ends_the_recording(tmp_path: Path) -> None:
    """A claim that is dropped twice, or was never made, does not count."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    assert session.claim("other") is recording
    for owner in ("nobody", session.USER, session.USER):
        session.drop(owner)
        assert session.current() is recording
    session.drop("other")
    assert session.current() is None


def test_a_callback_that_comes_late_is_called_at_once(tmp_path: Path) -> None:
    """Another thread may place the recording while it ends: its thread must be ended, too."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    rankcall.disable()
    seen: list[RecordingEnd] = []
    recording.on_end(seen.append)
    assert seen == [RecordingEnd(process_ends=False, has_failed=False)]


def test_a_callback_that_raises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recording ends all the same, the others are called, and ``disable`` raises nothing."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    seen: list[object] = []

    def fail(*_: object) -> None:
        raise ValueError("mine")

    recording.before_end(fail)
    recording.on_end(fail)
    recording.on_end(seen.append)
    rankcall.disable()
    assert len(seen) == 1
    assert session.current() is None
    assert "at the end of the recording: ValueError: mine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("soabi", "advice"),
    [
        (
            "cpython-312-x86_64-linux-gnu",
            "pip install 'rankcall[torch]', or torch>=2.11 of your own",
        ),
        (
            "cpython-312-x86_64-linux-musl",
            "PyTorch has no wheels for musl (Alpine): use an image with glibc, or build torch",
        ),
    ],
)
def test_without_torch(monkeypatch: pytest.MonkeyPatch, soabi: str, advice: str) -> None:
    """The error says how to get torch; pip finds none for musl."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": soabi}.get)
    with pytest.raises(TorchMissingError) as caught:
        session.check_torch()
    assert str(caught.value) == f"recording needs torch: {advice}"

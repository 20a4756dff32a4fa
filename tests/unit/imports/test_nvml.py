"""What NVML says of devices in trouble; on simulated devices, see ``tests/nccl/test_stuck.py``."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import pytest

from rankcall.imports import nvml
from rankcall.imports.node import NodeReport

LOST = 15


class Library:
    """NVML of a node with some devices, of which one is lost and one had errors."""

    def __init__(self, count: int, lost: int, errors: dict[int, int], init: int = 0) -> None:
        self._count, self._lost, self._errors, self._init = count, lost, errors, init
        self.nvmlErrorString = lambda status: b"GPU is lost \x1b[31m" if status == LOST else None

    def nvmlInit_v2(self) -> int:
        """Return whether NVML can be used at all."""
        return self._init

    def nvmlDeviceGetCount_v2(self, out: Any) -> int:
        """Tell the number of devices."""
        out._obj.value = self._count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, out: Any) -> int:
        """Make a handle of a device."""
        out._obj.value = number + 1
        return LOST if number == self._lost else 0

    def nvmlDeviceGetTotalEccErrors(
        self, device: ctypes.c_void_p, kind: int, since: int, out: Any
    ) -> int:
        """Tell how many errors could not be corrected; a device without a count does not know."""
        assert (kind, since) == (1, 0)
        number = (device.value or 0) - 1
        out._obj.value = self._errors.get(number, 0)
        return 0 if number in self._errors else 3


def test_devices_in_trouble() -> None:
    """A device that is lost, or that had errors of its memory, is told; others are not."""
    assert nvml._trouble(Library(4, 1, {0: 0, 2: 1, 3: 2})) == [
        "device 1: GPU is lost \x1b[31m (NVML error 15)",
        "device 2: 1 uncorrectable error of its memory since the driver was loaded",
        "device 3: 2 uncorrectable errors of its memory since the driver was loaded",
    ]


def test_nvml_that_cannot_be_used() -> None:
    """A driver in trouble is told. A node with the library and without a driver has no devices."""
    assert nvml._trouble(Library(4, 1, {}, init=999)) == [
        "no device can be asked: ? (NVML error 999)"
    ]
    assert nvml._trouble(Library(4, 1, {}, init=9)) == []


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the process that asks NVML run this code instead."""
    monkeypatch.setattr(nvml, "_load", object)
    monkeypatch.setattr(nvml, "run_function", lambda *_: [sys.executable, "-I", "-c", code])


def test_what_it_prints_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words reach terminals."""
    child(monkeypatch, 'print("""["device 1: lost \\\\u001b[31m"]""")')
    (line,), unknown = nvml.ask_devices()
    assert line.startswith("device 1: lost")
    assert "\x1b" not in line
    assert unknown == ""


def test_a_driver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is ended at a deadline, and the report says so: nothing is called well."""
    child(monkeypatch, "import time; time.sleep(1000)")
    monkeypatch.setattr(nvml, "_ANSWER_S", 0.5)
    lines, unknown = nvml.ask_devices()
    assert lines == []
    assert "has not answered for 0.5 s" in unknown
    report = NodeReport("node-a", problems=[unknown])
    assert "nothing" not in report.text()
    assert not report.is_news


def test_a_driver_that_kills_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was about to say is not known."""
    child(monkeypatch, "import os; os.abort()")
    lines, unknown = nvml.ask_devices()
    assert lines == []
    assert "ended with -6" in unknown


def test_a_node_without_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to say, and nothing is unknown."""
    monkeypatch.setattr(nvml, "_LIBRARY", "libno-such-library.so.1")
    assert nvml.ask_devices() == ([], "")

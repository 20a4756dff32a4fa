"""Device start, end and duration in host time, against a made-up device whose times are known.

In a process of its own: the made-up device must not be there for other tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent

CHECKS = """
import sys, time
import torch
sys.path.insert(0, sys.argv[1])
import device_probe as probe

ENQUEUED, STARTED, COMPLETED = range(3)
SLACK_NS = 2_000_000  # the reference event's host time is read after it, by a busy machine

def settle():
    deadline = time.monotonic() + 10
    while probe.poll():
        assert time.monotonic() < deadline

def op(before_ms, own_ms):
    began = probe.work(before_ms)
    assert probe.begin()
    ended = probe.work(own_ms)
    assert probe.end()
    return began, ended

# An op behind 30 ms of other work: enqueued, then started, then completed, at the device's times.
probe.reset()
began, ended = op(30.0, 20.0)
assert probe.poll()
assert probe.last()[:3] == (ENQUEUED, 0, 0)
while probe.poll() and probe.last()[0] == ENQUEUED:
    pass
status, started, completed, _ = probe.last()
assert status == STARTED and completed == 0
assert time.monotonic_ns() < ended, "seen to start only after its end"
settle()
status, started, completed, device_ms = probe.last()
assert status == COMPLETED
assert abs(device_ms - 20.0) < 1e-3, device_ms
assert abs(started - began) < SLACK_NS, (started - began)
assert completed - started == int(device_ms * 1e6)

# Several ops, spans used again.
for number in range(20):
    began, ended = op(0.0, 1.0 + number / 10)
    settle()
    status, started, completed, device_ms = probe.last()
    assert status == COMPLETED and abs(device_ms - (1.0 + number / 10)) < 1e-3
    assert abs(completed - ended) < SLACK_NS

# A stream that is being captured into a graph is left alone, and times are back afterwards.
probe.reset()
probe.set_mode(True, False)
assert not probe.begin()
probe.set_mode(False, False)
op(0.0, 1.0)
settle()

# A device that fails switches its times off, and nothing is raised.
probe.reset()
began, ended = op(0.0, 1.0)
settle()
probe.set_mode(False, True)
assert not probe.begin()
probe.set_mode(False, False)
assert not probe.begin(), "once broken, always broken"
print("device times ok")
"""


@pytest.mark.slow
def test_device_times_of_a_made_up_device(tmp_path: Path) -> None:
    """Enqueued, started and completed come when the device says, with its own duration."""
    from rankcall._native import link_flags
    from rankcall.capture.native import build
    from rankcall.capture.native.layout_header import layout_header

    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    (tmp_path / "layout.h").write_text(layout_header())
    command = ["c++", *build.RECORDER.compile_flags(str(tmp_path)), str(HERE / "device_probe.cpp")]
    command += ["-o", str(tmp_path / "device_probe.so"), *link_flags()]
    subprocess.run(command, check=True, timeout=300)
    done = subprocess.run(
        [sys.executable, "-c", CHECKS, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "device times ok" in done.stdout

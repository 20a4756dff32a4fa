"""What the native recorder sees of a thread's stack and of the process, in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankcall.capture.moments import Look
from rankcall.capture.native import NativeCapture, recorder_module
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create

SHAPE = Geometry(64, 8, 4096)
TORCH = "/packages/torch"
LOADER = f"{TORCH}/utils/data/dataloader.py"
WAITS = f"{TORCH}/distributed/distributed_c10d.py"


@pytest.fixture
def capture(tmp_path: Path) -> NativeCapture:
    """Return a capture that records nothing."""
    if not recorder_module().CALL_SITES:
        pytest.skip("the frames of this Python are not known")
    ring = create(tmp_path / "x.ring", Identity(rank=0, world_size=1, host="h"), SHAPE)
    return NativeCapture(ring, SHAPE)


def function(file: str, name: str) -> Callable[..., Any]:
    """Return a function that calls another one, as if it stood in that file."""
    scope: dict[str, Any] = {}
    exec(compile(f"def {name}(inner, *more):\n    return inner(*more)\n", file, "exec"), scope)
    made: Callable[..., Any] = scope[name]
    return made


def seen_in(capture: NativeCapture, *functions: Callable[..., Any]) -> Look:
    """Return what is seen of a thread that waits inside these functions, the outermost first."""
    inside, seen = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        seen.wait(30)

    outermost, *rest = [*functions, wait]
    thread = threading.Thread(target=outermost, args=tuple(rest))
    thread.start()
    try:
        assert inside.wait(30)
        assert thread.ident is not None
        return capture.look(thread.ident)
    finally:
        seen.set()
        thread.join(30)


@pytest.mark.parametrize(
    ("places", "doing"),
    [
        ([("/home/me/train.py", "__next__")], ""),
        ([("/home/me/train.py", "step"), (LOADER, "__next__")], "data_loader"),
        ([(LOADER, "__next__"), ("/home/me/data.py", "read")], "data_loader"),
        ([(LOADER, "__len__")], ""),
        ([("/home/me/mytorch/utils/data/dataloader.py", "__next__")], ""),
        ([(f"{TORCH}/serialization.py", "save")], "checkpoint"),
        ([(f"{TORCH}/distributed/checkpoint/state_dict_saver.py", "save")], "checkpoint"),
        ([(f"{TORCH}/distributed/checkpoint/state_dict_loader.py", "load")], "checkpoint"),
        ([(f"{TORCH}/_dynamo/convert_frame.py", "_compile")], "compilation"),
        ([(f"{TORCH}/_inductor/compile_fx.py", "compile_fx_inner")], "compilation"),
        # The innermost counts: a dataset that loads a checkpoint; a save that waits for others.
        ([(LOADER, "__next__"), (f"{TORCH}/serialization.py", "load")], "checkpoint"),
        ([(f"{TORCH}/serialization.py", "save"), (WAITS, "all_reduce")], ""),
    ],
)
def test_functions_of_torch(
    capture: NativeCapture, places: list[tuple[str, str]], doing: str
) -> None:
    """They are found by the end of their file's path, and by their name."""
    assert seen_in(capture, *(function(*place) for place in places)).doing == doing


def test_a_thread_that_is_not_there(capture: NativeCapture) -> None:
    """Nothing is known of it."""
    assert capture.look(0).doing is None
    assert capture.look(1).doing is None


def test_no_frame_is_kept(capture: NativeCapture) -> None:
    """What a function that was seen has as local variables is freed when it returns."""

    class Local:
        pass

    freed: list[bool] = []

    def holds() -> None:
        local = Local()
        reference = weakref.ref(local)
        assert capture.look(threading.get_ident()).doing == ""
        del local
        freed.append(reference() is None)

    def returns(inner: Callable[[], object]) -> object:
        local = Local()
        inner()
        return weakref.ref(local)

    holds()
    assert freed == [True]
    reference: Any = returns(lambda: capture.look(threading.get_ident()))
    assert reference() is None


def test_deep_recursion_ends(capture: NativeCapture) -> None:
    """The walk has a bound; the frames beyond it are not seen."""

    def down(left: int) -> Look:
        return down(left - 1) if left else capture.look(threading.get_ident())

    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(5000)
    try:
        assert function(LOADER, "__next__")(down, 500).doing == "data_loader"
        assert function(LOADER, "__next__")(down, 2000).doing == ""
    finally:
        sys.setrecursionlimit(limit)


STOPPED = """
import sys, threading
from pathlib import Path
from rankcall.capture.native import NativeCapture
from rankcall.ring.layout import Geometry
from rankcall.ring.writer import Identity, create, put

shape = Geometry(64, 8, 4096)
ring = create(Path(sys.argv[1]), Identity(rank=0, world_size=1, host="h"), shape)
put(ring, "train_thread", threading.get_native_id())
capture = NativeCapture(ring, shape)
capture.start()
while capture.look(0).stopped_ns is None:
    threading.Event().wait(0.05)
print("runs", flush=True)
sys.stdin.readline()
threading.Event().wait(1)
print(*capture.look(0)[1:], flush=True)
capture.stop()
"""


@pytest.mark.slow
def test_a_stopped_process(tmp_path: Path) -> None:
    """It has counted most of the time that it was stopped, and not more than that."""
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "x.ring")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            began = time.monotonic()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate("\n", timeout=60)
            stopped_ns, blocked_ns, sleeping_ns = map(int, out.split())
            assert 2.5 <= stopped_ns / 1e9 <= time.monotonic() - began
            assert blocked_ns >= 0
            assert sleeping_ns >= 0
        finally:
            process.kill()

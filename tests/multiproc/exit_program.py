"""A job of one rank that ends while rankcall's threads are idle, busy or blocked.

Run as ``exit_program.py FOLDER STATE ENDING [THREAD ...]``: it brings the named threads into the
state, writes the time on stdout, and ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankcall
from rankcall.background import exit_budget

folder, state, ending, *threads = sys.argv[1:]
# Kept to the end: if a thread of Gloo frees a tensor while the interpreter ends, torch ends the
# process by SIGABRT (PyTorch's issue 190489).
TENSOR = torch.ones(1)
reached: dict[str, threading.Event] = {}  # by the name of a thread that is to be trapped


def trapped(*_: Any) -> None:
    """Note that a thread has come here, and keep it for ever if the test wants that."""
    event = reached.get(threading.current_thread().name)
    if event is None:  # the main thread also calls some of these functions
        return
    event.set()
    while state == "busy":
        pass
    if state == "blocked":
        threading.Event().wait()
    if state == "ended":
        raise SystemExit


def expect(thread: str) -> None:
    """Wait for this thread to be trapped before the program goes on."""
    reached[thread] = threading.Event()


def trap_hooks() -> None:
    """Trap the thread that calls hooks, in a hook."""
    expect("rankcall-hooks")
    rankcall.hooks.register_collective_end_hook(trapped)


def trap_trace() -> None:
    """Trap the thread that feeds sinks, in a sink."""

    class Sink:
        open = close = staticmethod(lambda *_: None)
        write = staticmethod(trapped)

    expect("rankcall-trace")
    rankcall.trace.enable("ALL", sinks=[Sink()])


def trap_watch() -> None:
    """Trap the watcher while it reads the rings of its node."""
    from rankcall.job import watcher

    expect("rankcall-watch")
    rankcall.watch.start(hang_after=1.0, run_dir=f"{folder}/run")
    watcher.Watcher._turn = trapped  # type: ignore[method-assign, assignment]


def trap_lines() -> None:
    """Trap the thread that reads source lines while it reads a file on a stuck disk."""
    from rankcall.capture import source_lines

    expect("rankcall-lines")
    source_lines.line_text = trapped  # type: ignore[assignment]


def trap_heart() -> None:
    """Trap the thread that beats the heart."""
    from rankcall.capture.recording import Recording

    expect("rankcall-heart")
    Recording._note_leaving = trapped  # type: ignore[method-assign, assignment]


def trap_join() -> None:
    """Leave a Join's listening thread blocked in a request to the store."""
    from rankcall.join.error_channel import ErrorChannel

    channel = ErrorChannel([0, 1], lambda: 0, lambda: 0)
    channel.start()
    assert channel._thread is not None
    assert channel._thread.is_alive()


def trap_agree() -> None:
    """Trap the watcher's helper in a store that does not answer."""
    from rankcall.background import BackgroundCall

    expect("rankcall-store")
    BackgroundCall(trapped, "rankcall-store")


def trap_lock() -> None:
    """Keep the lock of the recording, as a thread does that builds the recorder."""
    from rankcall.capture import session

    def build() -> None:
        with session._state.lock:
            trapped()

    expect("builder")
    threading.Thread(target=build, name="builder", daemon=True).start()


def never_ends() -> None:
    """Be a request that does not end."""
    reached["rpc"].set()
    threading.Event().wait()


def trap_rpc() -> None:
    """Trap a thread of the RPC agent in a request."""
    from torch.distributed.rpc import rpc_async

    from rankcall import rpc
    from rankcall.rpc.backends.zmq import ZmqRpcBackendOptions

    expect("rpc")
    options = ZmqRpcBackendOptions(init_method=f"file://{folder}/rpc")
    rpc.init_rpc("self", rank=0, world_size=1, rpc_backend_options=options)
    rpc_async("self", never_ends)


def begin() -> None:
    """Record, trap the threads, and wait until each has come to its trap."""
    if "heart" in threads:
        trap_heart()
    rankcall.enable(f"{folder}/run", capture=os.environ["CAPTURE"])
    traps: dict[str, Callable[[], None]] = {
        "hooks": trap_hooks,
        "trace": trap_trace,
        "watch": trap_watch,
        "lines": trap_lines,
        "heart": lambda: None,
        "join": trap_join,
        "agree": trap_agree,
        "lock": trap_lock,
        "rpc": trap_rpc,
    }
    for name in threads:
        traps[name]()
    deadline = time.monotonic() + 60
    for _ in range(3):
        dist.all_reduce(TENSOR)
    for thread, event in reached.items():
        assert event.wait(max(0.0, deadline - time.monotonic())), thread


def end() -> None:
    """Come to the end of the program, in the way that the test wants."""
    sys.stdout.write(f"{time.monotonic_ns()}\n")
    sys.stdout.flush()
    if ending == "exit":
        sys.exit(3)
    if ending == "raise":
        raise ValueError("the user's own")
    if ending == "os_exit":
        os._exit(4)
    if ending in ("sigterm", "interrupt"):
        # A shell that starts the tests in the background has them ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGTERM if ending == "sigterm" else signal.SIGINT)
        time.sleep(60)  # until the signal is here


# Registered first, so called last: how long all waits at exit took.
atexit.register(lambda: print(f"waited {exit_budget.spent}", file=sys.stderr, flush=True))
store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
Path(folder).mkdir(exist_ok=True)
if state != "off":
    begin()
end()

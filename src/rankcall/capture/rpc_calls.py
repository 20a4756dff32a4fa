"""Notice what this process's RPC agent waits for and runs, on every back end.

No agent of torch's tells which worker a call waits for; only the number of calls is in its debug
information. But a thread in ``rpc_sync`` has the worker and the function in its Python frame, and a
thread that runs a function for another worker has that function. So the recording's heartbeat
thread looks at the frames twice a second, and nothing happens when a call is made. A call whose
future is waited for later, or whose RRef is fetched, shows no worker: it is only counted.

A call is the same as at the last look if its future is. Futures are referred to weakly. Nothing
else of the user's is kept from one look to the next.
"""

from __future__ import annotations

import inspect
import mmap
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rankcall.errors import warn_once
from rankcall.ring.layout import HEADER
from rankcall.ring.rpc_state import MOST, RpcRun, RpcState, RpcWait
from rankcall.ring.writer import put_text

_DEEPEST = 200  # frames of a thread: it is looked at twice a second, with the GIL held
_ROOM = HEADER.fields["rpc"][0].itemsize - 1  # type: ignore[index]


@dataclass
class _Thread:
    """What one thread does for RPC, by its frames."""

    future: Any = None  # that it waits for in rpc_sync, weakly
    to: str = ""
    function: str = ""
    call_line: str = ""
    runs: str = ""  # the function that it runs for another worker
    line: str = ""  # the newest line of the user's
    place: tuple[int, int] = field(default=(0, 0))  # of its newest frame, to see whether it moves


@dataclass(frozen=True)
class _Known:
    """A thread at the last look: what it waited for and ran, and since when."""

    future: Any
    wait_ns: int
    runs: str
    run_ns: int


class RpcCalls:
    """Publishes the calls in a ring's header. ``look`` runs on the heartbeat thread."""

    def __init__(self, ring: mmap.mmap) -> None:
        self._ring = ring
        self._text = ""
        self._threads: dict[int, _Known] = {}
        self._signature: Any = None
        self._active_ns = 0
        self._has_new_calls = False

    def look(self) -> None:
        """Publish what is under way now."""
        text, rpc = "", sys.modules.get("torch.distributed.rpc")
        try:
            if rpc is not None and hasattr(rpc, "_is_current_rpc_agent_set"):
                text = self._state(rpc)
        except Exception as error:
            warn_once(f"cannot learn which RPCs have no answer: {type(error).__name__}: {error}")
        if text != self._text:
            self._text = text
            put_text(self._ring, "rpc", text)

    def _state(self, rpc: Any) -> str:
        if not rpc._is_current_rpc_agent_set():
            self._threads, self._signature = {}, None
            return ""
        try:
            agent = rpc.api._get_current_rpc_agent()
            figures: dict[str, str] = agent.get_debug_info()
            worker: str = agent.get_worker_info().name
            counts = agent.counts() if hasattr(agent, "counts") else None  # ours counts all calls
        except RuntimeError:  # another thread has just shut it down
            return ""
        del agent
        threads = dict(_threads(rpc))
        now_ns = time.monotonic_ns()
        self._note(threads, now_ns)
        places = tuple((ident, thread.place) for ident, thread in sorted(threads.items()))
        signature = (counts, sorted(figures.items()), places)
        if signature != self._signature or self._has_new_calls:
            self._signature, self._active_ns = signature, now_ns
        return self._published(worker, figures, threads).encode(_ROOM)

    def _note(self, threads: dict[int, _Thread], now_ns: int) -> None:
        """Note since when each thread waits for the same future and runs the same function."""
        before, self._threads, self._has_new_calls = self._threads, {}, False
        for ident, thread in threads.items():
            known = before.get(ident)
            future = thread.future() if thread.future is not None else None
            same = known is not None and future is not None and known.future() is future
            self._has_new_calls |= bool(thread.to) and not same
            run_ns = known.run_ns if known is not None and known.runs == thread.runs else now_ns
            wait_ns = known.wait_ns if known is not None and same else now_ns
            kept = thread.future if thread.future is not None else _no_future
            self._threads[ident] = _Known(kept, wait_ns, thread.runs, run_ns)

    def _published(
        self, worker: str, figures: dict[str, str], threads: dict[int, _Thread]
    ) -> RpcState:
        waits = [
            RpcWait(
                thread.to,
                thread.function,
                thread.call_line,
                thread.runs,
                self._threads[ident].wait_ns,
            )
            for ident, thread in threads.items()
            if thread.to
        ]
        runs = [
            RpcRun(thread.runs, thread.line, bool(thread.to), self._threads[ident].run_ns)
            for ident, thread in threads.items()
            if thread.runs
        ]
        # The oldest of each kind that a reader tells apart; one that does not wait comes first.
        waits = _oldest(waits, lambda wait: (wait.to, wait.function, wait.during))
        runs = _oldest(runs, lambda run: (run.function, run.waits))
        runs.sort(key=lambda run: run.waits)
        return RpcState(
            worker,
            int(figures.get("agent.client_active_calls", 0)),
            int(figures.get("agent.num_idle_threads", 0)),
            self._active_ns,
            tuple(waits[:MOST]),
            tuple(runs[:MOST]),
        )


def _no_future() -> None:
    return None


def _oldest(calls: list[Any], key: Any) -> list[Any]:
    """Return the oldest call of each kind, the oldest first."""
    kinds: dict[Any, Any] = {}
    for call in sorted(calls, key=lambda call: call.since_ns):
        kinds.setdefault(key(call), call)
    return list(kinds.values())


def _threads(rpc: Any) -> Iterator[tuple[int, _Thread]]:
    """Yield each thread that waits in ``rpc_sync`` or runs a function for another worker."""
    waits_in = inspect.unwrap(rpc.api.rpc_sync).__code__
    runs_in = rpc.internal._run_function.__code__
    own = threading.get_ident()
    for ident, newest in sys._current_frames().items():
        if ident == own:
            continue
        thread = _Thread(place=(id(newest.f_code), newest.f_lasti))
        frame: types.FrameType | None = newest
        in_call = False
        for _ in range(_DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            if code is waits_in and not thread.to and not thread.runs:
                _read_wait(thread, frame.f_locals)
                in_call = True
            elif code is runs_in:
                if not thread.runs:  # the innermost, if a call to itself runs on the same thread
                    thread.runs = _name(getattr(frame.f_locals.get("python_udf"), "func", None))
            elif not _is_internal(code.co_filename):
                line = f"{code.co_filename}:{frame.f_lineno}"
                thread.line = thread.line or line
                if in_call:
                    thread.call_line, in_call = line, False
            frame = frame.f_back
        del frame, newest
        if thread.to or thread.runs:
            yield ident, thread


def _read_wait(thread: _Thread, local: dict[str, Any]) -> None:
    """Read from the locals of ``rpc_sync`` which worker is to call which function."""
    future = local.get("fut")
    thread.future = None if future is None else weakref.ref(future)
    thread.to = _worker(local.get("to"))
    thread.function = _name(local.get("func"))


def _worker(to: Any) -> str:
    """Return the name of a worker that was given by its name, id or WorkerInfo."""
    if isinstance(to, str):
        return to
    name = getattr(to, "name", None) if type(to).__name__ == "WorkerInfo" else None
    return name if isinstance(name, str) else f"#{to}" if type(to) is int else "a worker"


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def _name(function: Any) -> str:
    """Name a function. No code of the user's runs: other callables are named by their type."""
    if not isinstance(function, _FUNCTIONS):
        return type(function).__qualname__
    module, name = function.__module__, function.__qualname__
    return f"{module}.{name}" if isinstance(module, str) and module != "__main__" else name


def _is_internal(file: str) -> bool:
    """Return whether a file is torch's, rankcall's or Python's own, so that no call is in it."""
    return file.startswith(_internal_folders())


def _internal_folders() -> tuple[str, ...]:
    global _folders
    if not _folders:
        package = os.path.dirname(os.path.dirname(__file__))
        folders = (
            os.path.dirname(str(sys.modules["torch"].__file__)),
            package,
            os.path.dirname(os.__file__),
        )
        _folders = (*(f"{folder}{os.sep}" for folder in folders), "<frozen")
    return _folders


_folders: tuple[str, ...] = ()

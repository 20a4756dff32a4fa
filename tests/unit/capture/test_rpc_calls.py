"""What the heartbeat thread sees of RPCs, on functions that stand in for torch's two."""

from __future__ import annotations

import gc
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch  # noqa: F401  # before its module is replaced

from rankcall.capture.rpc_calls import RpcCalls
from rankcall.ring.layout import HEADER, HEADER_BYTES
from rankcall.ring.rpc_state import RpcState, decode


class Future:
    """A future that a call waits for."""

    def __init__(self) -> None:
        self.done = threading.Event()


def rpc_sync(to: Any, func: Any, args: Any, started: list[Any]) -> None:
    """Wait for an answer, as torch's function of this name: with the same names of locals."""
    fut = Future()
    started.append(fut.done)
    fut.done.wait(60)


def _run_function(python_udf: Any) -> Any:
    """Run a function for another worker, as torch's."""
    return python_udf.func(*python_udf.args)


class Agent:
    """An agent with one call in flight."""

    def get_debug_info(self) -> dict[str, str]:
        """Return what both back ends tell."""
        return {"agent.client_active_calls": "1", "agent.num_idle_threads": "3"}

    def get_worker_info(self) -> Any:
        """Return this worker."""
        return SimpleNamespace(name="worker0")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> RpcCalls:
    """Return an observer of this process, with functions of this file in place of torch's."""
    api = SimpleNamespace(rpc_sync=rpc_sync, _get_current_rpc_agent=Agent)
    rpc = SimpleNamespace(
        api=api,
        internal=SimpleNamespace(_run_function=_run_function),
        _is_current_rpc_agent_set=lambda: True,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed.rpc", rpc)  # type: ignore[arg-type]
    return RpcCalls(mmap.mmap(-1, HEADER_BYTES))


def look(calls: RpcCalls) -> RpcState:
    """Look once; return what is in the ring then."""
    calls.look()
    at = HEADER.fields["rpc"][1]  # type: ignore[index]
    state = decode(calls._ring[at : at + 768].partition(b"\0")[0].decode())
    assert state is not None
    return state


def in_thread(call: Callable[[], Any], started: list[Any]) -> threading.Thread:
    """Run a call on a thread, and wait until it waits."""
    count = len(started)
    thread = threading.Thread(target=call)
    thread.start()
    deadline = threading.Event()
    while len(started) == count:
        deadline.wait(0.001)
    return thread


@pytest.fixture
def started() -> Iterator[list[threading.Event]]:
    """Return the list of the futures' events; all are set in the end."""
    events: list[threading.Event] = []
    yield events
    for event in events:
        event.set()


def wanted() -> None:
    """Stand for a function of the user's."""


def test_a_wait_has_its_worker_function_and_line(
    calls: RpcCalls, started: list[threading.Event]
) -> None:
    """The same call keeps its time from look to look, and nothing else happens meanwhile."""
    thread = in_thread(lambda: rpc_sync("worker1", wanted, (), started), started)
    first, second = look(calls), look(calls)
    (wait,) = first.waits
    assert (first.worker, first.open_calls, first.idle, first.runs) == ("worker0", 1, 3, ())
    assert (wait.to, wait.function, wait.during) == ("worker1", f"{__name__}.wanted", "")
    assert wait.line.rpartition(":")[0].endswith("test_rpc_calls.py")
    assert second == first
    started[0].set()
    thread.join(60)
    assert look(calls).waits == ()


def test_another_call_at_the_same_line_is_another_wait(
    calls: RpcCalls, started: list[threading.Event]
) -> None:
    """Its frame may have the address of the one before; its future is another one."""

    def call_twice() -> None:
        for _ in range(2):
            rpc_sync("worker1", wanted, (), started)

    thread = in_thread(call_twice, started)
    look(calls)
    first = look(calls)
    count = len(started)
    started[0].set()
    while len(started) == count:
        threading.Event().wait(0.001)
    second = look(calls)
    assert second.waits[0].since_ns > first.waits[0].since_ns
    assert second.active_ns > first.active_ns
    started[1].set()
    thread.join(60)


def test_a_function_that_waits_for_another_worker(
    calls: RpcCalls, started: list[threading.Event]
) -> None:
    """The thread runs the one function, and waits for the other one during it."""

    def serve() -> None:
        rpc_sync("worker2", wanted, (), started)

    thread = in_thread(lambda: _run_function(SimpleNamespace(func=serve, args=())), started)
    state = look(calls)
    (wait,), (run,) = state.waits, state.runs
    assert wait.during == run.function
    assert run.function.endswith("serve")
    assert run.waits
    assert run.line == wait.line
    started[0].set()
    thread.join(60)


class Loader:
    """A callable whose attributes must not be read: that would run the user's code."""

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__class"):
            read.append(name)
        return object.__getattribute__(self, name)

    def __call__(self) -> None:
        """Do nothing."""


read: list[str] = []


def test_no_code_of_the_users_runs(calls: RpcCalls, started: list[threading.Event]) -> None:
    """A callable object is named by its type."""
    thread = in_thread(lambda: rpc_sync("worker1", Loader(), (), started), started)
    read.clear()
    assert look(calls).waits[0].function == "Loader"
    assert not read
    started[0].set()
    thread.join(60)


class Tensor:
    """Stands for an argument."""


def test_the_arguments_die_with_the_call(calls: RpcCalls, started: list[threading.Event]) -> None:
    """Two looks at a call keep neither its arguments nor its future once it has returned."""
    references: list[weakref.ref[Any]] = []

    def call() -> None:
        argument = Tensor()
        references.append(weakref.ref(argument))
        rpc_sync("worker1", wanted, (argument,), started)

    gc.disable()
    try:
        thread = in_thread(call, started)
        look(calls)
        look(calls)
        (known,) = calls._threads.values()
        started[0].set()
        thread.join(60)
        assert references[0]() is None
        assert known.future() is None
    finally:
        gc.enable()


def test_without_an_agent_nothing_is_said(
    calls: RpcCalls, monkeypatch: pytest.MonkeyPatch, started: list[threading.Event]
) -> None:
    """The text is emptied when the agent is shut down, also in the middle of a look."""
    thread = in_thread(lambda: rpc_sync("worker1", wanted, (), started), started)
    assert look(calls).waits

    def gone() -> Any:
        raise RuntimeError("Current RPC agent is not set!")

    monkeypatch.setattr(sys.modules["torch.distributed.rpc"].api, "_get_current_rpc_agent", gone)
    calls.look()
    at = HEADER.fields["rpc"][1]  # type: ignore[index]
    assert calls._ring[at] == 0
    started[0].set()
    thread.join(60)

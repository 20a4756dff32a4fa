"""Helpers for the tests of hooks: both captures, a group of one, a hook that blocks its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist
from seen import WAIT_S, Seen

from rankcall.hooks import CollectiveStatus


@pytest.fixture(params=["native", "python"], autouse=True)
def capture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run every test with both captures."""
    monkeypatch.setenv("RANKCALL_CAPTURE", request.param)
    return str(request.param)


@pytest.fixture
def group() -> Iterator[None]:
    """A Gloo group of one."""
    init()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def init() -> None:
    """Make the default group, of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def all_reduce(times: int = 1, group: dist.ProcessGroup | None = None) -> None:
    """Issue that many collectives."""
    for _ in range(times):
        dist.all_reduce(torch.ones(2), group=group)


class Held(Seen):
    """A hook that keeps its statuses, and blocks the thread of hooks until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self._entered, self._gate = threading.Event(), threading.Event()

    def __call__(self, status: CollectiveStatus) -> None:
        super().__call__(status)
        self._entered.set()
        assert self._gate.wait(WAIT_S)

    def while_held(self, call: Callable[[], object]) -> None:
        """Issue a collective, ``call`` while its hook blocks the thread, and release the hook."""
        all_reduce()
        assert self._entered.wait(WAIT_S)
        call()
        self._gate.set()


def hook_threads() -> list[threading.Thread]:
    """Return the threads of hooks: one or none."""
    return [thread for thread in threading.enumerate() if thread.name == "rankcall-hooks"]


def until_gone(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(WAIT_S)
    assert not thread.is_alive()

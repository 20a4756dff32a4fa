"""Hooks in one process: hooks that fail, hooks that issue ops, drops and order."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import numpy as np
import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch.distributed as dist
from hooking import WAIT_S, Held, Seen, all_reduce, capture, group, hook_threads, until_gone

import rankcall
from rankcall import hooks
from rankcall.events import dispatch
from rankcall.hooks import CollectiveStatus
from rankcall.ring.follower import Batch

__all__ = ["capture", "group"]  # fixtures


# --- failing hooks ---


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, MemoryError])
def test_a_hook_that_raises_stays_registered(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Not even BaseException ends the thread; other hooks are called; one traceback is logged."""
    calls, seen = Seen(), Seen()

    def bad(status: CollectiveStatus) -> None:
        calls(status)
        raise error("no")

    with caplog.at_level(logging.ERROR, "rankcall"):
        with (
            hooks.register_collective_end_hook(bad),
            hooks.register_collective_end_hook(seen),
        ):
            all_reduce(5)
            seen.wait(5)
    assert len(calls.statuses) == 5
    (logged,) = caplog.records
    assert "bad failed; it stays registered" in logged.getMessage()
    assert logged.exc_info is not None
    assert logged.exc_info[0] is error


@pytest.mark.usefixtures("group")
def test_a_process_group_hook_that_raises_is_not_fatal(caplog: pytest.LogCaptureFixture) -> None:
    """The group is made all the same, and the hook is called for the next one."""
    calls = []

    def bad(process_group: dist.ProcessGroup, name: str) -> None:
        calls.append(name)
        raise SystemExit(1)

    with hooks.register_process_group_hook(bad, existing=False):
        assert dist.new_group([0]) is not None
        assert dist.new_group([0]) is not None
    assert len(calls) == 2
    assert len(caplog.records) == 1


def test_failures_are_logged_once_with_traceback_then_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Later ones at most once a minute, with their count."""
    now = 1000.0

    def bad() -> None:
        raise ValueError("no")

    failures = hooks.FailureLog("end hook", bad, clock=lambda: now)
    for moment in (0, 1, 59, 61, 62, 120, 122):
        now = 1000.0 + moment
        failures.call()
    messages = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    name = "end hook test_failures_are_logged_once_with_traceback_then_once_a_minute.<locals>.bad"
    assert messages == [
        (f"{name} failed; it stays registered", True),
        (f"{name} failed 3 more times; last: ValueError('no')", False),
        (f"{name} failed 3 more times; last: ValueError('no')", False),
    ]


@pytest.mark.usefixtures("group")
def test_the_tenth_failure_of_its_own_stops_the_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine are logged, the tenth is the one warning; a new registration starts it again."""
    seen, turns = Seen(), []
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_FAILURE_SECONDS", 0)
        patch.setattr(dispatch.Subscription, "_turn", lambda self: turns.append(1) or 1 / 0)
        first = hooks.register_collective_end_hook(seen)
        for thread in hook_threads():
            until_gone(thread)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["ERROR"] * 9 + ["WARNING"]
    assert "failed 10 times: it stops" in caplog.records[-1].getMessage()
    assert len(turns) == 10
    with hooks.register_collective_end_hook(Seen()):
        all_reduce()
        seen.wait(1)
    first.remove()


# --- what hooks may do ---


@pytest.mark.usefixtures("group")
def test_a_hook_may_take_a_lock_that_the_training_thread_holds() -> None:
    """The training thread issues collectives under a lock the hook waits for: it never waits."""
    lock, entered, seen = threading.Lock(), threading.Event(), Seen()

    def locked(status: CollectiveStatus) -> None:
        entered.set()
        with lock:
            seen(status)

    with hooks.register_collective_start_hook(locked):
        with lock:
            all_reduce()
            assert entered.wait(WAIT_S)
            all_reduce(100)
            assert seen.statuses == []
        assert len(seen.wait(101)) == 101


@pytest.mark.usefixtures("group")
def test_a_hook_may_issue_collectives_on_another_group() -> None:
    """They are recorded and delivered like others, on the same thread."""
    other = dist.new_group([0])
    seen = Seen()

    def reduce_on_other(status: CollectiveStatus) -> None:
        if status.pg_name == "0":
            all_reduce(group=other)
        seen(status)

    with hooks.register_collective_end_hook(reduce_on_other):
        all_reduce(10)
        statuses = seen.wait(20)
    for name in {status.pg_name for status in statuses}:
        numbers = [status.sequence_number for status in statuses if status.pg_name == name]
        assert numbers == list(range(1, 11))


# --- drops and order ---


@pytest.mark.usefixtures("group")
def test_the_drop_count_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that is slow on a small ring: the next event has the number of missed ones."""
    monkeypatch.setenv("RANKCALL_CAPACITY", "64")
    held = Held()
    with hooks.register_collective_start_hook(held), hooks.register_collective_end_hook(held):
        held.while_held(lambda: all_reduce(1000))
        statuses = held.wait(lambda seen: seen[-1].sequence_number == 1001 and not seen[-2].error)
        statuses = held.wait(len(statuses) + (statuses[-1].status == "started"))
    assert len(statuses) + sum(status.drop_count for status in statuses) == 2 * 1001
    late = [status for status in statuses if status.drop_count]
    assert len(late) == 1
    assert late[0].sequence_number == 1001 - 64 + 1


@pytest.mark.usefixtures("group")
def test_drops_are_told_to_end_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only ends are wanted, the count waits for the next end; both events count."""
    monkeypatch.setenv("RANKCALL_CAPACITY", "64")
    held = Held()
    with hooks.register_collective_end_hook(held):
        held.while_held(lambda: all_reduce(100))
        statuses = held.wait(lambda seen: seen[-1].sequence_number == 101)
    assert [status.drop_count for status in statuses if status.drop_count] == [2 * (100 - 64)]


@pytest.mark.usefixtures("group")
def test_drops_wait_for_the_next_event_that_is_wanted(tmp_path: Path) -> None:
    """A count that comes with starts only is kept for the end that comes after them."""
    with rankcall.enable(tmp_path / "run") as recording:
        all_reduce()
        source = dispatch.EventSource.of(recording)
        rows = source.follower.poll(1).rows  # type: ignore[union-attr]
        seen, subscriber = Seen(), hooks.Hooks()
        subscriber.end_hooks = (hooks.FailureLog("end hook", seen),)
        yes, no = np.array([True]), np.array([False])
        batches = [Batch(rows, yes, no, 5), Batch(rows, no, yes, 2), Batch(rows, no, yes, 0)]
        subscriber.take([dispatch.Delivery(source, batches, rows[:0])], is_last=False)
    assert [status.drop_count for status in seen.statuses] == [7, 0]


@pytest.mark.usefixtures("group")
def test_several_threads_issue() -> None:
    """Each group's numbers come in order, each event once, from whichever thread."""
    groups = [dist.new_group([0]) for _ in range(4)]
    seen = Seen()
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        threads = [threading.Thread(target=all_reduce, args=(200, group)) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        statuses = seen.wait(2 * 4 * 200)
    names = {status.pg_name for status in statuses}
    assert len(names) == 4
    for name in names:
        for kind in ("started", "completed"):
            numbers = [
                status.sequence_number
                for status in statuses
                if status.pg_name == name and status.status == kind
            ]
            assert numbers == list(range(1, 201))

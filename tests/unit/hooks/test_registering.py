"""Hooks in one process: the API, registration, and recording switched on and off meanwhile."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
from pathlib import Path

import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist
from hooking import Seen, all_reduce, capture, group, hook_threads, init, until_gone

import rankcall
from rankcall import hooks
from rankcall.capture import session
from rankcall.hooks import CollectiveStatus

__all__ = ["capture", "group"]  # fixtures


# --- the API ---


def test_status_has_the_documented_fields_and_defaults() -> None:
    """Names, order and defaults are those users know, then what rankcall adds."""
    assert dataclasses.asdict(CollectiveStatus()) == {
        "pg_name": "unknown",
        "backend": "unknown",
        "sequence_number": -1,
        "operation": "unknown",
        "timestamp": 0,
        "duration": None,
        "drop_count": 0,
        "status": "unknown",
        "error": None,
        "record": None,
    }
    assert next(iter(dataclasses.fields(CollectiveStatus))).name == "pg_name"


def test_what_is_no_hook_is_refused() -> None:
    """TypeError, and nothing is switched on for it."""
    for register in (
        hooks.register_collective_start_hook,
        hooks.register_collective_end_hook,
        hooks.register_process_group_hook,
    ):
        with pytest.raises(TypeError, match="must be callable; got str"):
            register("hook")  # type: ignore[arg-type]
    assert session.current() is None
    assert not hook_threads()


@pytest.mark.parametrize("kind", ["collective_start", "collective_end", "process_group"])
def test_without_torch_it_says_so(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported; registering names what is missing."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(rankcall.errors.TorchMissingError, match="needs torch"):
        getattr(hooks, f"register_{kind}_hook")(print)


@pytest.mark.usefixtures("group")
def test_start_and_end_of_collectives() -> None:
    """Each op has a start, then an end, with times that agree with the wall clock."""
    seen = Seen()
    before = time.time_ns()
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        all_reduce()
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        dist.barrier()
        statuses = seen.wait(6)
    after = time.time_ns()
    assert [(status.operation, status.sequence_number, status.status) for status in statuses] == [
        ("all_reduce", 1, "started"),
        ("all_reduce", 1, "completed"),
        ("broadcast", 2, "started"),
        ("broadcast", 2, "completed"),
        ("barrier", 3, "started"),
        ("barrier", 3, "completed"),
    ]
    for start, end in zip(statuses[::2], statuses[1::2], strict=True):
        assert start.duration is None
        assert end.duration is not None
        assert before - 1e6 <= start.timestamp <= end.timestamp <= after + 1e6
        assert end.duration == pytest.approx((end.timestamp - start.timestamp) / 1e6, abs=1e-6)
    for status in statuses:
        assert (status.pg_name, status.backend) == ("0", "gloo")
        assert (status.drop_count, status.error) == (0, None)
        assert status.record is not None
        assert status.record["op"] == status.operation
        assert status.record["seq"] == status.sequence_number
        assert status.record["group_ranks"] == [0]
    assert "test_registering.py" in str(statuses[2].record["call_site"])  # type: ignore[index]


@pytest.mark.usefixtures("group")
def test_only_the_wanted_events_come() -> None:
    """A start hook alone gets starts, an end hook alone ends."""
    starts, ends = Seen(), Seen()
    with hooks.register_collective_start_hook(starts):
        all_reduce(3)
        assert {status.status for status in starts.wait(3)} == {"started"}
    with hooks.register_collective_end_hook(ends):
        all_reduce(3)
        assert {status.status for status in ends.wait(3)} == {"completed"}
    assert len(starts.statuses) == 3


def test_process_group_hook_names_groups_as_statuses_do() -> None:
    """Inline at creation, on the creating thread, with the name that the ops' statuses carry."""
    named: list[tuple[dist.ProcessGroup, str, int]] = []
    seen = Seen()

    def note(process_group: dist.ProcessGroup, name: str) -> None:
        named.append((process_group, name, threading.get_ident()))

    with hooks.register_process_group_hook(note), hooks.register_collective_end_hook(seen):
        init()
        assert [(pg, thread) for pg, _, thread in named] == [
            (dist.group.WORLD, threading.get_ident())
        ]
        other = dist.new_group([0])
        assert named[1][0] is other
        all_reduce()
        all_reduce(group=other)
        statuses = seen.wait(2)
    dist.new_group([0])
    assert [name for _, name, _ in named] == [status.pg_name for status in statuses]
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_existing_groups_are_told_at_registration_unless_declined() -> None:
    """``existing`` is true unless said otherwise; no thread is needed for these hooks."""
    first, second = [], []
    with hooks.register_process_group_hook(lambda pg, name: first.append(name)):
        with hooks.register_process_group_hook(
            lambda pg, name: second.append(name), existing=False
        ):
            assert (first, second) == (["0"], [])
            dist.new_group([0])
            assert not hook_threads()
    assert len(first) == 2
    assert second == first[1:]


# --- registration ---


@pytest.mark.usefixtures("group")
def test_the_thread_lives_from_the_first_handle_to_the_last() -> None:
    """One daemon thread that is not ours; remove() may be called again; recording ends with it."""
    seen = Seen()
    first = hooks.register_collective_start_hook(seen)
    (thread,) = hook_threads()
    assert thread.daemon
    second = hooks.register_collective_end_hook(seen)
    assert hook_threads() == [thread]
    first.remove()
    first.remove()
    all_reduce()
    assert [status.status for status in seen.wait(1)] == ["completed"]
    second.remove()
    until_gone(thread)
    assert session.current() is None
    all_reduce()
    assert len(seen.statuses) == 1


@pytest.mark.usefixtures("group")
def test_registering_again_begins_anew() -> None:
    """A hook registered after the last was removed gets what comes then, once."""
    for _ in range(20):
        seen = Seen()
        with hooks.register_collective_end_hook(seen):
            all_reduce()
            assert len(seen.wait(1)) == 1


@pytest.mark.usefixtures("group")
def test_hooks_may_register_and_remove_hooks() -> None:
    """A hook removed by the one before it is not called any more; one it adds is."""
    handles: dict[str, hooks.Handle] = {}
    removed, added = Seen(), Seen()
    first = Seen()

    def change(status: CollectiveStatus) -> None:
        if "removed" in handles:
            handles.pop("removed").remove()
            handles["added"] = hooks.register_collective_end_hook(added)
        first(status)

    handles["change"] = hooks.register_collective_end_hook(change)
    handles["removed"] = hooks.register_collective_end_hook(removed)
    all_reduce()
    first.wait(1)
    all_reduce()
    assert added.wait(lambda seen: bool(seen) and seen[-1].sequence_number == 2)
    assert removed.statuses == []
    for handle in handles.values():
        handle.remove()


@pytest.mark.usefixtures("group")
def test_a_hook_may_remove_itself() -> None:
    """The last one to go ends its own thread."""
    seen = Seen()

    def once(status: CollectiveStatus) -> None:
        handle.remove()
        seen(status)

    handle = hooks.register_collective_end_hook(once)
    (thread,) = hook_threads()
    all_reduce(3)
    until_gone(thread)
    assert len(seen.statuses) == 1
    assert session.current() is None


# --- recording, on and off ---


def test_registration_may_come_before_init_and_outlives_destroy() -> None:
    """One registration for two lives of the default group, whose names differ."""
    seen = Seen()
    with hooks.register_collective_end_hook(seen):
        for _ in range(2):
            init()
            all_reduce(2)
            dist.destroy_process_group()
        statuses = seen.wait(4)
    assert [status.sequence_number for status in statuses] == [1, 2, 1, 2]
    first, second = statuses[1].pg_name, statuses[2].pg_name
    assert first == statuses[0].pg_name != second == statuses[3].pg_name


@pytest.mark.usefixtures("group")
def test_enable_before_registration(tmp_path: Path) -> None:
    """Hooks join the recording that is on; it goes on without them."""
    seen = Seen()
    with rankcall.enable(tmp_path / "run") as recording:
        all_reduce()
        with hooks.register_collective_end_hook(seen):
            all_reduce()
            assert seen.wait(1)[0].sequence_number == 2
        assert session.current() is recording
        all_reduce()
    assert rankcall.load(tmp_path / "run").records["seq"].to_list() == [1, 2, 3]


@pytest.mark.usefixtures("group")
def test_enable_after_registration_continues_the_numbers(tmp_path: Path) -> None:
    """The hooks' unnamed ring is given a name: what came before enable() is in the run too."""
    seen = Seen()
    with hooks.register_collective_end_hook(seen):
        all_reduce(2)
        with rankcall.enable(tmp_path / "run"):
            all_reduce()
        all_reduce()  # disable() came, the hooks remain
        assert [status.sequence_number for status in seen.wait(4)] == [1, 2, 3, 4]
    assert rankcall.load(tmp_path / "run").records["seq"].to_list() == [1, 2, 3, 4]


@pytest.mark.usefixtures("group")
def test_a_ring_that_cannot_be_named_is_followed_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where enable() has to begin a new ring, hooks get the events of both."""
    with monkeypatch.context() as patch:
        patch.setattr("rankcall.capture.own_ring.live_base", lambda: tmp_path / "nowhere")
        seen = Seen()
        handle = hooks.register_collective_end_hook(seen)
    all_reduce(2)
    with rankcall.enable(tmp_path / "run"):
        all_reduce()
        assert [status.sequence_number for status in seen.wait(3)] == [1, 2, 1]
    handle.remove()


def test_pending_without_a_recording_is_empty() -> None:
    """Asking costs nothing and switches nothing on."""
    assert hooks.pending() == []
    assert session.current() is None

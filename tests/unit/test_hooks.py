"""Hooks in one process: registration, delivery, failures, order, drops, and the cost at rest."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist

import rankcall
from rankcall import hooks
from rankcall.capture import delivery, session
from rankcall.capture.events import StatusMaker
from rankcall.capture.tail import Batch, RingTail
from rankcall.hooks import CollectiveStatus

WAIT_S = 20.0  # far more than anything here takes


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


class Seen:
    """A hook that keeps what it gets, and lets a test wait for it."""

    def __init__(self) -> None:
        self.statuses: list[CollectiveStatus] = []
        self._changed = threading.Condition()

    def __call__(self, status: CollectiveStatus) -> None:
        with self._changed:
            self.statuses.append(status)
            self._changed.notify_all()

    def wait(
        self, enough: int | Callable[[list[CollectiveStatus]], bool]
    ) -> list[CollectiveStatus]:
        """Return everything, once there is enough of it."""

        def there() -> bool:
            if callable(enough):
                return enough(self.statuses)
            return len(self.statuses) >= enough

        with self._changed:
            came = self._changed.wait_for(there, WAIT_S)
            assert came, f"only {len(self.statuses)}, the last: {self.statuses[-3:]}"
            return list(self.statuses)

    @property
    def numbers(self) -> list[int]:
        return [status.sequence_number for status in self.statuses]


def hook_threads() -> list[threading.Thread]:
    """Return the dispatcher's threads: one or none."""
    return [each for each in threading.enumerate() if each.name == "rankcall-hooks"]


def until_gone(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(WAIT_S)
    assert not thread.is_alive()


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
    with pytest.raises(rankcall.TorchMissing, match="needs torch"):
        getattr(hooks, f"register_{kind}_hook")(print)


@pytest.mark.usefixtures("group")
def test_start_and_end_of_collectives() -> None:
    """Each op is told twice: its start, then its end, with times that agree with the wall clock."""
    seen = Seen()
    before = time.time_ns()
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        all_reduce()
        dist.broadcast(torch.ones(3), 0, async_op=True).wait()
        dist.barrier()
        statuses = seen.wait(6)
    after = time.time_ns()
    assert [(each.operation, each.sequence_number, each.status) for each in statuses] == [
        ("all_reduce", 1, "started"), ("all_reduce", 1, "completed"),
        ("broadcast", 2, "started"), ("broadcast", 2, "completed"),
        ("barrier", 3, "started"), ("barrier", 3, "completed"),
    ]  # fmt: skip
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
    assert "test_hooks.py" in str(statuses[0].record["call_site"])  # type: ignore[index]


@pytest.mark.usefixtures("group")
def test_only_the_wanted_events_come() -> None:
    """A start hook alone gets starts, an end hook alone ends."""
    starts, ends = Seen(), Seen()
    with hooks.register_collective_start_hook(starts):
        all_reduce(3)
        assert {each.status for each in starts.wait(3)} == {"started"}
    with hooks.register_collective_end_hook(ends):
        all_reduce(3)
        assert {each.status for each in ends.wait(3)} == {"completed"}
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
    assert [each.status for each in seen.wait(1)] == ["completed"]
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

    failures = delivery.FailureLog("end hook", bad, clock=lambda: now)
    for moment in (0, 1, 59, 61, 62, 120, 122):
        now = 1000.0 + moment
        failures.call()
    said = [(record.getMessage(), record.exc_info is not None) for record in caplog.records]
    name = "end hook test_failures_are_logged_once_with_traceback_then_once_a_minute.<locals>.bad"
    assert said == [
        (f"{name} failed; it stays registered", True),
        (f"{name} failed 3 more times; last: ValueError('no')", False),
        (f"{name} failed 3 more times; last: ValueError('no')", False),
    ]


@pytest.mark.usefixtures("group")
def test_the_tenth_failure_of_its_own_stops_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nine are logged, the tenth is the one warning; a new registration starts it again."""
    seen, pauses = Seen(), []
    with monkeypatch.context() as patch:
        patch.setattr(delivery, "_OWN_FAILURE_SECONDS", 0)
        patch.setattr(delivery.Delivery, "_turn", lambda self: pauses.append(1) or 1 / 0)
        first = hooks.register_collective_end_hook(seen)
        for thread in hook_threads():
            until_gone(thread)
    levels = [record.levelname for record in caplog.records]
    assert levels == ["ERROR"] * 9 + ["WARNING"]
    assert "failed 10 times: it stops" in caplog.records[-1].getMessage()
    assert len(pauses) == 10
    with hooks.register_collective_end_hook(Seen()):
        all_reduce()
        seen.wait(1)
    first.remove()


def test_own_failures_are_a_second_apart() -> None:
    """A dispatcher that fails all the time does not spin."""
    assert delivery._OWN_FAILURE_SECONDS == 1.0


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
        numbers = [each.sequence_number for each in statuses if each.pg_name == name]
        assert numbers == list(range(1, 11))


# --- drops and order ---


@pytest.mark.usefixtures("group")
def test_the_drop_count_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that is slow on a small ring: what was missed is counted on the next event."""
    monkeypatch.setenv("RANKCALL_CAPACITY", "64")
    gate, entered, seen = threading.Event(), threading.Event(), Seen()

    def slow(status: CollectiveStatus) -> None:
        seen(status)
        entered.set()
        assert gate.wait(WAIT_S)

    with hooks.register_collective_start_hook(slow), hooks.register_collective_end_hook(slow):
        all_reduce()
        assert entered.wait(WAIT_S)
        all_reduce(1000)
        gate.set()
        statuses = seen.wait(lambda seen: seen[-1].sequence_number == 1001 and not seen[-2].error)
        statuses = seen.wait(len(statuses) + (statuses[-1].status == "started"))
    assert len(statuses) + sum(status.drop_count for status in statuses) == 2 * 1001
    late = [status for status in statuses if status.drop_count]
    assert len(late) == 1
    assert late[0].sequence_number == 1001 - 64 + 1


@pytest.mark.usefixtures("group")
def test_drops_are_told_to_end_hooks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only ends are wanted, the count waits for the next end; both events count."""
    monkeypatch.setenv("RANKCALL_CAPACITY", "64")
    gate, entered, seen = threading.Event(), threading.Event(), Seen()

    def slow(status: CollectiveStatus) -> None:
        seen(status)
        entered.set()
        assert gate.wait(WAIT_S)

    with hooks.register_collective_end_hook(slow):
        all_reduce()
        assert entered.wait(WAIT_S)
        all_reduce(100)
        gate.set()
        statuses = seen.wait(lambda seen: seen[-1].sequence_number == 101)
    assert [status.drop_count for status in statuses if status.drop_count] == [2 * (100 - 64)]


@pytest.mark.usefixtures("group")
def test_drops_wait_for_the_next_event_that_is_wanted(tmp_path: Path) -> None:
    """A count that comes with starts only is kept for the end that comes after them."""
    with rankcall.enable(tmp_path / "run") as recording:
        all_reduce()
        rows = RingTail(recording.ring, recording.geometry).poll(1).rows  # type: ignore[union-attr]
        seen, maker = Seen(), StatusMaker(recording)
        thread = delivery.Delivery(recording, CollectiveStatus, wake_fd=-1)  # not started
        thread.end_hooks = (delivery.FailureLog("end hook", seen),)
        yes, no = np.array([True]), np.array([False])
        thread._call_hooks(Batch(rows, yes, no, dropped=5), maker)
        assert seen.statuses == []
        thread._call_hooks(Batch(rows, no, yes, dropped=2), maker)
        thread._call_hooks(Batch(rows, no, yes, dropped=0), maker)
    assert [status.drop_count for status in seen.statuses] == [7, 0]


@pytest.mark.usefixtures("group")
def test_several_threads_issue() -> None:
    """Each group's numbers come in order, each event once, from whichever thread."""
    groups = [dist.new_group([0]) for _ in range(4)]
    seen = Seen()
    with hooks.register_collective_start_hook(seen), hooks.register_collective_end_hook(seen):
        threads = [threading.Thread(target=all_reduce, args=(200, each)) for each in groups]
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
                each.sequence_number
                for each in statuses
                if each.pg_name == name and each.status == kind
            ]
            assert numbers == list(range(1, 201))


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
    assert [each.sequence_number for each in statuses] == [1, 2, 1, 2]
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
        assert [each.sequence_number for each in seen.wait(4)] == [1, 2, 3, 4]
    assert rankcall.load(tmp_path / "run").records["seq"].to_list() == [1, 2, 3, 4]


@pytest.mark.usefixtures("group")
def test_a_ring_that_cannot_be_named_is_followed_into_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where enable() has to begin a new ring, hooks get the events of both."""
    with monkeypatch.context() as patch:
        patch.setattr("rankcall.capture.recording.live_base", lambda: tmp_path / "nowhere")
        seen = Seen()
        handle = hooks.register_collective_end_hook(seen)
    all_reduce(2)
    with rankcall.enable(tmp_path / "run"):
        all_reduce()
        assert [each.sequence_number for each in seen.wait(3)] == [1, 2, 1]
    handle.remove()


def test_pending_without_a_recording_is_empty() -> None:
    """Asking costs nothing and switches nothing on."""
    assert hooks.pending() == []
    assert session.current() is None


# --- at rest, and at the end ---


def switches(thread: threading.Thread) -> int:
    """Return how often a thread has gone to sleep."""
    text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    return int(text.split("voluntary_ctxt_switches:")[1].split()[0])


@pytest.mark.usefixtures("group")
def test_an_idle_process_is_left_alone() -> None:
    """Without events the thread wakes at most a few times a second, also with an op in flight."""
    seen = Seen()
    with hooks.register_collective_end_hook(seen):
        all_reduce()
        seen.wait(1)
        (thread,) = hook_threads()
        threading.Event().wait(0.1)  # the nap after the event is over
        before = switches(thread)
        threading.Event().wait(1.5)  # the window that is measured
        assert 1 <= switches(thread) - before <= 8


@pytest.mark.usefixtures("group")
def test_a_burst_is_delivered_in_batches() -> None:
    """After each delivery the thread naps for a millisecond, whatever comes meanwhile."""
    seen = Seen()
    with hooks.register_collective_end_hook(seen):
        all_reduce()
        seen.wait(1)
        began = time.monotonic()
        for number in range(100):
            all_reduce()
            seen.wait(2 + number)
        assert time.monotonic() - began > 0.099


def run_script(text: str, timeout: float = 60) -> tuple[str, float]:
    """Run a script; return what it printed, and how long its exit took after the line "exit"."""
    prelude = """
        import os, sys, time, torch, torch.distributed as dist
        from rankcall import hooks
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(text)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, check=False
    )
    ended = time.time()
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    exits = [float(line.split()[1]) for line in done.stdout.splitlines() if "exit" in line]
    return done.stdout, ended - exits[0]


def test_what_was_issued_just_before_exit_is_delivered() -> None:
    """The interpreter's exit drains."""
    out, _ = run_script("""
        count = 0
        def ended(status):
            global count
            count += 1
            if count == 500:
                os.write(1, b"all %d\\n" % status.sequence_number)
        hooks.register_collective_end_hook(ended)
        for _ in range(500):
            dist.all_reduce(torch.ones(1))
        os.write(1, b"exit %r\\n" % time.time())
    """)
    assert "all 500" in out


def test_a_hook_that_never_returns_holds_up_the_exit_for_two_seconds_at_most() -> None:
    """Draining has a limit, and an end in order."""
    _, took = run_script("""
        import threading
        inside = threading.Event()
        def stuck(status):
            inside.set()
            threading.Event().wait()
        hooks.register_collective_end_hook(stuck)
        dist.all_reduce(torch.ones(1))
        assert inside.wait(20)
        os.write(1, b"exit %r\\n" % time.time())
    """)
    assert 1.9 < took < 8  # what the interpreter itself takes on a busy machine comes on top

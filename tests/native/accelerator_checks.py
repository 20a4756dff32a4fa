"""Checks of the simulated accelerator, each of which fails if the simulator overlooks something.

Run as a script: prints, as JSON, how each check ended. The accelerator cannot be taken out of a
process, so the tests that need it run this file.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import accelerator as sim
import pytest
import torch
import torch.distributed as dist
from accelerator import Stream

DEFAULT = Stream(0, 0)


def ones(device: int = 0) -> torch.Tensor:
    """Return a tensor on a simulated device."""
    return torch.ones(16, device=f"{sim.DEVICE}:{device}")


def on_other_thread(call: Callable[[], object]) -> None:
    """Run a call on a thread of its own, to its end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert not failures, failures


def an_event_completes_with_the_work_before_it() -> None:
    """Only the clock completes an event, and each query of it is counted."""
    sim.freeze()
    sim.put(DEFAULT, 5.0)
    event = torch.Event(sim.DEVICE)
    event.record()
    assert not event.query()
    sim.advance(4.9)
    assert not event.query()
    sim.advance(0.2)
    assert event.query()
    assert sim.counts()["queryEvent"] == 3
    assert sim.counts()["recordEvent"] == 1


def a_stream_that_waits_is_a_dependency() -> None:
    """A wait for an event moves the waiting stream, and is logged with both streams."""
    sim.freeze()
    other = torch.Stream(sim.DEVICE)
    sim.hang(DEFAULT)
    event = torch.Event(sim.DEVICE)
    event.record()
    assert sim.stuck() == {0}
    other.wait_event(event)
    assert sim.stuck() == {0, other.stream_id}
    (made,) = sim.dependencies()
    assert (made.waiter, made.awaited) == (Stream(0, other.stream_id), DEFAULT)
    assert made.reason == "event"
    assert made.stuck


def a_future_s_callback_takes_a_stream_of_the_pool() -> None:
    """``Future.then`` makes a pool stream wait and records each output on it: both are seen."""
    group = sim.new_group("own")
    own = sim.own_stream(group)
    sim.hang(own)
    work = dist.all_reduce(ones(), group=group, async_op=True)
    before = sim.stuck()
    sim.clear_log()
    for _ in range(sim.POOL):
        work.get_future().then(lambda done: done.value())
    assert before == {own.number}
    assert sim.stuck() >= set(range(1, sim.POOL + 1))
    counts = sim.counts()
    assert counts["getFuture"] == sim.POOL
    assert counts["getStreamFromGlobalPool"] == sim.POOL
    assert counts["recordStream"] >= sim.POOL
    assert all(made.stuck for made in sim.dependencies() if made.awaited == own)


def an_op_of_own_waits_for_its_caller_s_stream() -> None:
    """A collective follows what its caller has enqueued, and the caller's stream waits for it."""
    sim.freeze()
    group = sim.new_group("own", op_ms=3.0)
    own = sim.own_stream(group)
    sim.put(DEFAULT, 2.0)
    sim.clear_log()
    work = dist.all_reduce(ones(), group=group, async_op=True)
    assert abs(sim.busy_ms(own) - 5.0) < 1e-6
    assert abs(sim.busy_ms(DEFAULT) - 2.0) < 1e-6
    work.wait()
    assert abs(sim.busy_ms(DEFAULT) - 5.0) < 1e-6
    assert [made.reason for made in sim.dependencies()] == ["input", "wait"]
    sim.clear_log()
    dist.all_reduce(ones(), group=group)  # torch waits for a synchronous op's Work
    assert [made.reason for made in sim.dependencies()] == ["input", "wait"]


def a_synchronous_op_of_caller_has_no_work() -> None:
    """It runs on the stream of its caller, unlike an asynchronous one."""
    sim.freeze()
    group = sim.new_group("caller", op_ms=3.0)
    own = sim.own_stream(group)
    tensors = [ones()]
    options = dist.AllreduceOptions()
    options.asyncOp = False
    assert group.allreduce(tensors, options) is None
    assert abs(sim.busy_ms(DEFAULT) - 3.0) < 1e-6
    options.asyncOp = True
    assert group.allreduce(tensors, options) is not None
    assert abs(sim.busy_ms(DEFAULT) - 3.0) < 1e-6
    assert abs(sim.busy_ms(own) - 6.0) < 1e-6


def a_communicator_runs_one_op_at_a_time() -> None:
    """An op on the caller's stream waits for the one before it on the back end's own stream."""
    sim.freeze()
    group = sim.new_group("caller", op_ms=3.0)
    sim.hang(sim.own_stream(group))
    dist.all_reduce(ones(), group=group, async_op=True)
    assert 0 not in sim.stuck()
    dist.all_reduce(ones(), group=group)
    assert 0 in sim.stuck()
    assert "communicator" in {made.reason for made in sim.dependencies()}


def collectives_and_messages_are_counted_apart() -> None:
    """A message has a number of its own kind, and a batch of them one number and one Work."""
    sim.freeze()
    group = sim.new_group("own")
    peer = 1
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    assert sim.status(group)["enqueued"] == 3
    dist.isend(ones(), peer, group=group)
    assert sim.status(group)["enqueued"] == 1
    batch = [dist.P2POp(op, ones(), peer, group) for op in (dist.isend, dist.irecv)]
    works = dist.batch_isend_irecv(batch)
    assert len(works) == 1
    assert sim.status(group)["enqueued"] == 2
    assert group._get_sequence_number_for_group() == 3


def only_the_watchdog_sees_ends() -> None:
    """The status changes when the watchdog looks, to what the clock says, for each group alone."""
    sim.freeze()
    stuck, well = sim.new_group("own"), sim.new_group("own")
    unknown = {"enqueued": -1, "started": -1, "completed": -1}
    assert sim.status(stuck) == {}
    dist.all_reduce(ones(), group=stuck, async_op=True)
    assert sim.status(stuck) == {**unknown, "enqueued": 1}
    sim.advance(5.0)
    assert sim.status(stuck)["completed"] == -1
    sim.tick()
    assert sim.status(stuck) == {"enqueued": 1, "started": 1, "completed": 1}
    sim.hang(sim.own_stream(stuck))
    for group in (stuck, well):
        dist.all_reduce(ones(), group=group, async_op=True)
    sim.advance(5.0)
    sim.tick()
    assert sim.status(stuck) == {"enqueued": 2, "started": 1, "completed": 1}
    assert sim.status(well) == {"enqueued": 1, "started": 1, "completed": 1}
    assert sim.backend_of(stuck).outstanding() == 1


def both_kinds_share_one_number() -> None:
    """A message that completes overwrites the number of the last collective, as with NCCL."""
    sim.freeze()
    group = sim.new_group("own")
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    sim.advance(5.0)
    sim.tick()
    assert sim.status(group)["completed"] == 3
    dist.isend(ones(), 1, group=group)
    sim.advance(5.0)
    sim.tick()
    assert sim.status(group)["completed"] == 1


def a_message_does_not_wait_for_the_group_s_ops() -> None:
    """An unbatched message has a communicator and a stream of its own; a batch has the group's."""
    sim.freeze()
    group = sim.new_group("own")
    sim.hang(sim.own_stream(group))
    dist.all_reduce(ones(), group=group, async_op=True)
    before = sim.stuck()
    sim.clear_log()
    dist.isend(ones(), 1, group=group)
    assert sim.stuck() == before
    assert sim.counts()["recordStream"] == 1
    sim.advance(5.0)
    sim.tick()
    assert sim.status(group)["completed"] == 1
    batch = [dist.P2POp(dist.isend, ones(), 1, group)]
    dist.batch_isend_irecv(batch)
    sim.tick()
    assert sim.backend_of(group).outstanding() == 2


def entries_query_events() -> None:
    """A dump with entries asks two events of each outstanding op; one without asks none."""
    sim.freeze()
    group = sim.new_group("own")
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    sim.clear_log()
    dump: Any = torch._C._distributed_c10d._dump_nccl_trace_json  # type: ignore[attr-defined]
    assert "entries" not in json.loads(dump(includeCollectives=False))
    assert sim.count(*sim.QUERIES) == 0
    assert "entries" in json.loads(dump())
    assert sim.count(*sim.QUERIES) == 6
    assert sim.count("readStatus") == 1


def a_silent_back_end_has_no_status() -> None:
    """With the Flight Recorder switched off nothing is known of a group."""
    group = sim.new_group("silent")
    dist.all_reduce(ones(), group=group, async_op=True)
    sim.tick()
    assert sim.status(group) == {}


def a_query_by_any_thread_invalidates_a_capture() -> None:
    """That holds for events recorded before the capture, too."""
    event = torch.Event(sim.DEVICE)
    event.record()
    with sim.capture(DEFAULT) as quiet:
        dist.all_reduce(ones(), group=sim.new_group("own"), async_op=True).wait()
    assert quiet.invalidated_by == 0
    with sim.capture(DEFAULT) as disturbed:
        on_other_thread(event.query)
        on_other_thread(event.synchronize)
    assert disturbed.invalidated_by == 2
    made = [call for call in sim.calls() if call.name in sim.QUERIES]
    assert all(call.during_capture for call in made)
    event.query()
    assert not all(call.during_capture for call in sim.calls() if call.name in sim.QUERIES)


def a_captured_op_runs_when_its_graph_does() -> None:
    """Nothing runs meanwhile, the watchdog does not know of the op, and a replay does the work."""
    sim.freeze()
    group = sim.new_group("own", op_ms=3.0)
    tensor, own = ones(), sim.own_stream(group)
    with sim.capture(DEFAULT):
        dist.all_reduce(tensor, group=group, async_op=True).wait()
    assert sim.backend_of(group).outstanding() == 0
    assert sim.status(group) == {}
    assert sim.busy_ms(own) == 0
    assert sim.replay() == 1
    assert abs(sim.busy_ms(own) - 3.0) < 1e-6


def a_planned_failure_hits_timing_events_only() -> None:
    """A timing event cannot be made; all else goes on."""
    sim.fail_events()
    torch.Event(sim.DEVICE).record()
    with pytest.raises(RuntimeError, match="simulated device error"):
        torch.Event(sim.DEVICE, enable_timing=True).record()
    sim.fail_events(False)
    torch.Event(sim.DEVICE, enable_timing=True).record()


def events_tell_distances() -> None:
    """Two timing events are as far apart as the work between them; others cannot tell."""
    sim.freeze()
    begin, end = (torch.Event(sim.DEVICE, enable_timing=True) for _ in range(2))
    begin.record()
    sim.put(DEFAULT, 7.5)
    end.record()
    sim.advance(7.5)
    assert abs(begin.elapsed_time(end) - 7.5) < 1e-6
    assert sim.counts()["elapsedTime"] == 1


def a_call_makes_a_context_on_the_thread_s_device() -> None:
    """A thread that sets no device uses device 0, which is seen by a rank that has device 1."""
    torch.accelerator.set_device_index(1)
    try:
        event = torch.Event(f"{sim.DEVICE}:1")
        event.record(torch.accelerator.current_stream(1))
        sim.clear_log()
        event.query()
        assert sim.contexts() == {1}

        def query_on_device_1() -> None:
            torch.accelerator.set_device_index(1)
            event.query()

        on_other_thread(query_on_device_1)
        assert sim.contexts() == {1}
        assert sim.counts(by_others=True) == {"setDevice": 1, "queryEvent": 1}
        on_other_thread(event.query)
        assert sim.contexts() == {0, 1}
    finally:
        torch.accelerator.set_device_index(0)


def a_hung_stream_holds_whoever_synchronises() -> None:
    """The wait ends with the work, and not before."""
    sim.freeze()
    sim.put(DEFAULT, 5.0)
    event = torch.Event(sim.DEVICE)
    event.record()
    began, over = threading.Event(), threading.Event()

    def synchronise() -> None:
        began.set()
        event.synchronize()
        over.set()

    thread = threading.Thread(target=synchronise, daemon=True)
    thread.start()
    assert began.wait(30)
    assert not over.wait(0.05)
    sim.advance(5.0)
    assert over.wait(30)
    thread.join(30)


def a_work_tells_its_duration_if_asked_to() -> None:
    """``getDuration`` needs timing, and counts as a query."""
    sim.freeze()
    group = sim.new_group("own", op_ms=3.0)
    untimed = dist.all_reduce(ones(), group=group, async_op=True)
    with pytest.raises(RuntimeError, match="timing"):
        untimed._get_duration()
    group._enable_collectives_timing()
    timed = dist.all_reduce(ones(), group=group, async_op=True)
    sim.advance(10.0)
    assert abs(timed._get_duration() - 3.0) < 1e-3
    assert sim.counts()["getDuration"] == 1


def all_ops_are_there() -> None:
    """Each op that the back ends support counts once, on either device."""
    sim.freeze()
    for device in range(sim.DEVICES):
        group, tensor = sim.new_group("own"), ones(device)
        parts = [ones(device), ones(device)]
        half, double = (torch.ones(size, device=tensor.device) for size in (8, 32))
        dist.all_reduce(tensor, group=group)
        dist.broadcast(tensor, 0, group=group)
        dist.reduce(tensor, 0, group=group)
        dist.all_gather(parts, tensor, group=group)
        group._allgather_base(double, tensor)
        dist.reduce_scatter(tensor, parts, group=group)
        group._reduce_scatter_base(half, tensor)
        dist.all_to_all(parts, parts, group=group)
        dist.all_to_all_single(tensor, ones(device), group=group)
        options = dist.BarrierOptions()
        options.device = tensor.device
        group.barrier(options).wait()
        assert sim.status(group)["enqueued"] == 10
        dist.send(tensor, 1, group=group)
        dist.recv(tensor, 1, group=group)
        assert sim.status(group)["enqueued"] == 2


CHECKS = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name not in ("ones", "on_other_thread")
}


def main() -> None:
    """Run the checks, each on a device without work, and print how they ended."""
    sim.start()
    ended: dict[str, str] = {}
    for name, check in CHECKS.items():
        sim.reset()
        try:
            check()
        except BaseException:
            ended[name] = traceback.format_exc()
        else:
            ended[name] = ""
    sim.reset()
    dist.destroy_process_group()
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main()

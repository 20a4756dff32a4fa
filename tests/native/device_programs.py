"""Programs on the simulated accelerator, each run with recording off, native and in Python.

Run as a script with a back end, a way to record ("off", "native", "python"), a folder for the run
and, if only some are wanted, names of programs. It prints what each program has seen, as JSON. With
recording on, a program also says what is in flight and how the records ended. A program that has
failed says so under "error".
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerator as sim
import torch
import torch.distributed as dist
from accelerator import Stream

import rankcall
from rankcall import hooks

LOOK_SECONDS = 8.0  # rankcall looks at the status once a second; a busy machine is slower
# Calls that cost the job something: recording must not add any.
CHARGED = (
    "recordEvent",
    "recordTimingEvent",
    "waitEvent",
    "recordStream",
    "getFuture",
    "setDevice",
    "getStreamFromGlobalPool",
    "getNewStream",
    "readEntries",
    *sim.QUERIES,
)

Seen = dict[str, Any]


class Job:
    """A program's back end, and rankcall's recording if it is on."""

    def __init__(self, backend: str, recording: Any) -> None:
        self.backend = backend
        self.recording = recording

    def group(self, op_ms: float = 1.0, backend: str | None = None) -> Any:
        """Return a new group, after an op that has completed: first ops do things of their own."""
        group = sim.new_group(backend or self.backend, op_ms=op_ms)
        dist.all_reduce(ones(), group=group, async_op=True)
        sim.advance(1000.0)
        sim.tick()
        return group

    def look(self, times: int = 2) -> None:
        """Wait until rankcall has read the back ends' status so many times more."""
        if self.recording is None:
            return
        wanted = sim.count("readStatus") + times
        until(lambda: sim.count("readStatus") >= wanted)

    def in_flight(self, group: Any) -> list[tuple[str, int]]:
        """Return which ops of a group are in flight, oldest first."""
        if self.recording is None:
            return []
        return [
            (status.operation, status.sequence_number)
            for status in hooks.pending()
            if status.pg_name == group.group_name
        ]

    def records(self, group: Any) -> list[Seen]:
        """Return the records of a group, oldest first."""
        if self.recording is None:
            return []
        table = rankcall.load(self.recording.path).records
        columns = ["op", "seq", "status", "abandoned", "started_ns", "completed_ns", "device_ms"]
        rows = table.select("group", "enqueued_ns", *columns).to_dicts()
        return [row for row in rows if row.pop("group") == group.group_name]


def until(reached: Callable[[], bool]) -> bool:
    """Wait until something is so, or for as long as a busy machine may need; return whether."""
    deadline = time.monotonic() + LOOK_SECONDS
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def ones(device: int = 0) -> torch.Tensor:
    """Return a tensor on a simulated device."""
    return torch.ones(16, device=f"{sim.DEVICE}:{device}")


def charged() -> Seen:
    """Return the requests that the device got since the log was cleared."""
    counts, others = sim.counts(), sim.counts(by_others=True)
    return {
        "calls": {name: counts[name] for name in CHARGED if counts[name]},
        "by other threads": {name: others[name] for name in CHARGED if others[name]},
        "contexts": sorted(sim.contexts()),
        "dependencies": sorted(
            [*made.waiter, *made.awaited, made.reason, made.stuck] for made in sim.dependencies()
        ),
        "stuck": [sorted(sim.stuck(device)) for device in range(sim.DEVICES)],
    }


def ended_of(records: list[Seen]) -> list[Seen]:
    """Return the records that say when their op ended."""
    return [record for record in records if record["completed_ns"] is not None]


# --- the programs ---


def stuck_collective(job: Job) -> Seen:
    """32 ops are enqueued behind one that hangs, and another group's op beside them."""
    sim.freeze()
    hung, well = job.group(), job.group()
    sim.hang(sim.own_stream(hung))
    sim.clear_log()
    for _ in range(32):
        dist.all_reduce(ones(), group=hung, async_op=True)
    dist.all_reduce(ones(), group=well, async_op=True)
    sim.advance(1000.0)
    sim.tick()
    job.look()
    until(lambda: not job.in_flight(well))
    return {**charged(), "hung": job.in_flight(hung), "well": job.in_flight(well)}


def ends(job: Job) -> Seen:
    """Ops end when the back end's watchdog has seen their ends, and not before."""
    sim.freeze()
    group = job.group()
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    job.look()
    before = job.in_flight(group)
    sim.advance(2.0)  # each takes 1 ms: two of them are over
    job.look()
    unseen = job.in_flight(group)
    sim.tick()
    until(lambda: len(job.in_flight(group)) <= 1)
    partly = job.in_flight(group)
    sim.advance(2.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {
        "before": before,
        "unseen": unseen,
        "partly": partly,
        "after": job.in_flight(group),
        "records": job.records(group),
    }


def synchronous(job: Job) -> Seen:
    """Ops that are not asynchronous: "caller" returns no Work from them, as NCCL."""
    sim.freeze()
    group = job.group()
    sim.clear_log()
    for _ in range(3):
        dist.all_reduce(ones(), group=group)
    job.look()
    before = job.in_flight(group)
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {
        **charged(),
        "before": before,
        "after": job.in_flight(group),
        "records": job.records(group),
    }


def captured(job: Job) -> Seen:
    """Two collectives are captured into a graph while ops from before are in flight."""
    sim.freeze()
    group = job.group()
    tensor = ones()
    for _ in range(3):
        dist.all_reduce(tensor, group=group, async_op=True)
    job.look(1)
    sim.clear_log()
    with sim.capture(Stream(0, 0)) as capture:
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        dist.all_reduce(tensor, group=group)
        job.look()
    seen = {**charged(), "invalidated by": capture.invalidated_by, "replayed": sim.replay()}
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {**seen, "after": job.in_flight(group), "records": job.records(group)}


def coalesced_collectives(job: Job) -> Seen:
    """Broadcasts inside a coalescing block are launched together when it ends."""
    sim.freeze()
    group = sim.new_group(job.backend)
    device = torch.device(sim.DEVICE, 0)
    sim.clear_log()
    with dist.distributed_c10d._coalescing_manager(group, device, async_ops=True) as block:
        for _ in range(2):
            dist.broadcast(ones(), 0, group=group, async_op=True)
    block.wait()
    job.look()
    seen = {**charged(), "before": ended_of(job.records(group))}
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {**seen, "after": job.in_flight(group), "records": job.records(group)}


def batched_messages(job: Job) -> Seen:
    """A batch of sends and receives: they have no Work of their own."""
    sim.freeze()
    group = sim.new_group(job.backend)
    sim.clear_log()
    batch = [dist.P2POp(op, ones(), 1, group) for op in (dist.isend, dist.irecv)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    job.look()
    seen = {**charged(), "before": ended_of(job.records(group))}
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {**seen, "after": job.in_flight(group), "records": job.records(group)}


def messages(job: Job) -> Seen:
    """Sends end as collectives do, in a group that issues nothing else."""
    sim.freeze()
    group = sim.new_group(job.backend)
    for _ in range(3):
        dist.isend(ones(), 1, group=group)
    job.look()
    before = job.in_flight(group)
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {"before": before, "after": job.in_flight(group), "records": job.records(group)}


def message_beside_a_hang(job: Job) -> Seen:
    """A send completes, with the number that the hung collective has."""
    sim.freeze()
    group = sim.new_group(job.backend)
    sim.hang(sim.own_stream(group))
    dist.all_reduce(ones(), group=group, async_op=True)
    dist.isend(ones(), 1, group=group)
    sim.advance(1000.0)
    sim.tick()
    job.look()
    return {"completed": sim.status(group)["completed"], "records": job.records(group)}


def both_kinds(job: Job) -> Seen:
    """Collectives and sends take turns, and all of them complete: their numbers share one field."""
    sim.freeze()
    group = sim.new_group(job.backend)
    for number in range(4):
        if number % 2:
            dist.isend(ones(), 1, group=group)
        else:
            for _ in range(3):
                dist.all_reduce(ones(), group=group, async_op=True)
        sim.advance(1000.0)
        sim.tick()
        job.look()
    until(lambda: not job.in_flight(group))
    return {"after": job.in_flight(group), "records": job.records(group)}


def both_kinds_between_looks(job: Job) -> Seen:
    """A send overwrites the collectives' number before it is read; then the job goes on."""
    sim.freeze()
    group = sim.new_group(job.backend)
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    sim.advance(1000.0)
    sim.tick()
    dist.isend(ones(), 1, group=group)
    sim.advance(1000.0)
    sim.tick()
    for _ in range(4):
        dist.all_reduce(ones(), group=group, async_op=True)
        sim.advance(1000.0)
        sim.tick()
        job.look()
    until(lambda: not job.in_flight(group))
    return {"after": job.in_flight(group), "records": job.records(group)}


def second_device(job: Job) -> Seen:
    """A rank that uses device 1 has nothing to do with device 0."""
    torch.accelerator.set_device_index(1)
    try:
        sim.freeze()
        group, tensor = sim.new_group(job.backend), ones(1)
        sim.clear_log()
        for _ in range(3):
            dist.all_reduce(tensor, group=group, async_op=True)
        job.look()
        before = job.in_flight(group)
        sim.advance(1000.0)
        sim.tick()
        until(lambda: not job.in_flight(group))
        return {**charged(), "before": before, "after": job.in_flight(group)}
    finally:
        torch.accelerator.set_device_index(0)


def several_threads(job: Job) -> Seen:
    """Two threads issue ops on a group each; no third one touches the device."""
    sim.freeze()
    groups = [job.group(), job.group()]
    sim.clear_log()

    def issue(group: Any) -> None:
        for _ in range(8):
            dist.all_reduce(ones(), group=group, async_op=True)

    threads = [threading.Thread(target=issue, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    issuing = {thread.native_id for thread in threads} | {threading.get_native_id()}
    job.look()
    foreign = [
        call.name for call in sim.calls() if call.thread not in issuing and call.name in CHARGED
    ]
    in_flight = [len(job.in_flight(group)) for group in groups]
    sim.advance(1000.0)
    sim.tick()
    until(lambda: not any(job.in_flight(group) for group in groups))
    after = [job.in_flight(group) for group in groups]
    return {"foreign": foreign, "in flight": in_flight, "after": after}


def failing_events(job: Job) -> Seen:
    """No timing event can be made: the ops go on, and are in flight all the same."""
    sim.freeze()
    group = job.group()
    sim.fail_events()
    sim.clear_log()
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    sim.fail_events(False)
    job.look()
    return {**charged(), "in flight": job.in_flight(group)}


def no_status(job: Job) -> Seen:
    """The back end's status cannot be read, so the end of an op is never known."""
    sim.freeze()
    group = sim.new_group("silent")
    sim.clear_log()
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True)
    job.look()
    until(lambda: not job.in_flight(group))
    return {**charged(), "after": job.in_flight(group), "records": job.records(group)}


def another_back_end(job: Job) -> Seen:
    """The group's back end for the device is of another kind and has no number for its groups."""
    group = dist.new_group(backend="fake")
    fake = group._get_backend(torch.device("cpu"))
    group._register_backend(torch.device(sim.DEVICE), dist.ProcessGroup.BackendType.CUSTOM, fake)
    dist.all_reduce(ones(), group=group, async_op=True)
    until(lambda: not job.in_flight(group))
    return {"after": job.in_flight(group), "records": job.records(group)}


def many_in_flight(job: Job) -> Seen:
    """3,000 ops are in flight, and more than that have completed."""
    sim.freeze()
    group, tensor = job.group(), ones()
    sim.clear_log()
    for _ in range(3000):
        dist.all_reduce(tensor, group=group, async_op=True)
    job.look(1)
    began, cpu_ns = time.monotonic(), helper_cpu_ns()
    job.look()
    seconds = time.monotonic() - began
    used_ms = (helper_cpu_ns() - cpu_ns) / 1e6
    queries = sim.count(*sim.QUERIES, "readEntries")
    number = len(job.in_flight(group))
    sim.advance(1e6)
    sim.tick()
    until(lambda: not job.in_flight(group))
    return {
        "queries": queries,
        "in flight": number,
        "after": len(job.in_flight(group)),
        "CPU, ms a second": used_ms / max(seconds, 1e-9),
    }


def helper_cpu_ns() -> int:
    """Return the CPU time of all threads of this process but the caller's."""
    total = 0
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != threading.get_native_id():
            total += int((task / "schedstat").read_text().split()[0])
    return total


PROGRAMS: dict[str, Callable[[Job], Seen]] = {
    program.__name__: program
    for program in (
        stuck_collective,
        ends,
        synchronous,
        captured,
        coalesced_collectives,
        batched_messages,
        messages,
        message_beside_a_hang,
        both_kinds,
        both_kinds_between_looks,
        second_device,
        several_threads,
        failing_events,
        no_status,
        another_back_end,
        many_in_flight,
    )
}


def main() -> None:
    """Run the programs (all, or those named) one after the other, each on a device without work."""
    backend, how, folder, *names = sys.argv[1:]
    sim.start()
    recording = None if how == "off" else rankcall.enable(folder, capture=how)
    job = Job(backend, recording)
    seen: dict[str, Seen] = {}
    for name, program in PROGRAMS.items():
        if names and name not in names:
            continue
        sim.reset()
        try:
            seen[name] = program(job)
        except BaseException:
            seen[name] = {"error": traceback.format_exc()}
    json.dump(seen, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # how a process ends is tested on its own


if __name__ == "__main__":
    main()

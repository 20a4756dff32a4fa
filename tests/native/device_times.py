"""Programs on the simulated accelerator with RANKCALL_DEVICE_TIMES=1; prints what they saw."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import accelerator as sim
import torch.distributed as dist
from accelerator import Stream
from device_programs import Job, ones

import rankcall

Seen = dict[str, Any]
OP_MS = 5.0


def times(job: Job, group: Any) -> list[float | None]:
    """Return how long the group's ops took, as far as it is known."""
    return [record["device_ms"] for record in job.records(group)]


def look_for_ends(group: Any) -> None:
    """Let all ops end, and issue one more: the thread that issues looks for the ends."""
    sim.advance(10_000.0)
    dist.all_reduce(ones(), group=group, async_op=True)


def one_after_the_other(job: Job) -> Seen:
    """Each op is waited for before the next is issued."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    for _ in range(4):
        dist.all_reduce(ones(), group=group)
        sim.advance(20.0)
    look_for_ends(group)
    return {"times": times(job, group)[:4]}


def all_at_once(job: Job) -> Seen:
    """Ten ops are issued one behind the other, as DDP issues its buckets, and then waited for."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    for work in [dist.all_reduce(ones(), group=group, async_op=True) for _ in range(10)]:
        work.wait()
    look_for_ends(group)
    return {"times": times(job, group)[:10]}


def not_waited_for(job: Job) -> Seen:
    """No stream of the caller's ever stands behind the op."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    dist.all_reduce(ones(), group=group, async_op=True)
    look_for_ends(group)
    return {"times": times(job, group)[:1]}


def hung(job: Job) -> Seen:
    """An op never ends; one that was over before it is timed, and the others are not."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    dist.all_reduce(ones(), group=group, async_op=True).wait()
    sim.advance(1000.0)
    sim.tick()
    for stream in (sim.own_stream(group), Stream(0, 0)):
        sim.hang(stream)
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True).wait()
    look_for_ends(group)
    sim.tick()
    job.look()
    return {"times": times(job, group)[:4], "in flight": len(job.in_flight(group))}


def captured(job: Job) -> Seen:
    """Ops from before are not looked for while the issuing thread captures a graph."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    dist.all_reduce(ones(), group=group, async_op=True).wait()
    sim.advance(1000.0)
    with sim.capture(Stream(0, 0)) as capture:
        dist.all_reduce(ones(), group=group, async_op=True).wait()
        job.look()
    look_for_ends(group)
    return {"times": times(job, group)[:2], "invalidated by": capture.invalidated_by}


def failing(job: Job) -> Seen:
    """Events fail for a while: these ops have no times, they are in flight, and later ones do."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    sim.fail_events()
    for _ in range(3):
        dist.all_reduce(ones(), group=group, async_op=True).wait()
    sim.fail_events(False)
    in_flight = len(job.in_flight(group))
    sim.advance(1000.0)
    dist.all_reduce(ones(), group=group, async_op=True).wait()
    look_for_ends(group)
    return {"times": times(job, group)[:4], "in flight": in_flight}


def many(job: Job) -> Seen:
    """Only the oldest op of each stream is polled, however many are outstanding."""
    group = sim.new_group(job.backend, op_ms=OP_MS)
    for _ in range(500):
        dist.all_reduce(ones(), group=group, async_op=True).wait()
    sim.clear_log()
    for _ in range(100):
        dist.all_reduce(ones(), group=group, async_op=True).wait()
    return {"queries": sim.count("queryEvent")}


def main() -> None:
    """Run the programs one after the other, each on a device without work."""
    backend, folder = sys.argv[1:]
    os.environ["RANKCALL_DEVICE_TIMES"] = "1"
    sim.start()
    seen: dict[str, Seen] = {}
    for program in (
        one_after_the_other,
        all_at_once,
        not_waited_for,
        hung,
        captured,
        failing,
        many,
    ):
        sim.reset()
        sim.freeze()
        sim.clear_log()
        job = Job(backend, rankcall.enable(f"{folder}/{program.__name__}", capture="native"))
        result = program(job)
        others = sim.counts(by_others=True)
        result["others"] = {name: count for name, count in others.items() if name != "readStatus"}
        shared = ("recordStream", "getFuture", "getStreamFromGlobalPool", "getNewStream")
        result["shared"] = {name: sim.count(name) for name in shared if sim.count(name)}
        result["synchronised"] = sim.count("synchronizeEvent", "synchronizeStream")
        seen[program.__name__] = result
        rankcall.disable()
    json.dump(seen, sys.stdout)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""The device cannot tell whether its job is recorded: each thread's calls of CUDA are counted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from recorded_jobs import RecordedJob, RecordedJobs, torch_version

# Each kind of op, twice: the first one makes communicators. Then a graph, and ops that hang.
PROGRAM = """
init(); x = torch.ones(64, device="cuda"); y = torch.ones(64, device="cuda")
second = dist.new_group()
def message(): (dist.send if rank == 0 else dist.recv)(y, 1 - rank)
def issue():
    for _ in range(10):
        dist.all_reduce(x); dist.broadcast(y, 0, async_op=True).wait(); message()
    ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, y, 1 - rank)]
    for work in dist.batch_isend_irecv(ops): work.wait()
    with dist._coalescing_manager(device=x.device, async_ops=True) as works:
        dist.all_reduce(x); dist.all_reduce(y)
    works.wait()
def issue_on_second():
    torch.cuda.set_device(rank)
    for _ in range(10): dist.all_reduce(z, group=second)
z = torch.ones(64, device="cuda"); ids = []
def on_a_thread(function):
    thread = threading.Thread(target=lambda: (ids.append(threading.get_native_id()), function()))
    thread.start(); thread.join(60); assert not thread.is_alive()
    return ids[-1]
issue(); issue_on_second(); torch.cuda.synchronize()
time.sleep(0.002)  # device times: looks are a millisecond apart
before, seen = calls(), {}

issue(); torch.cuda.synchronize()
seen["issued"] = called_since(before)
seen["issued by a thread"] = called_since(before, on_a_thread(issue_on_second))
torch.cuda.synchronize(); before = calls()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): dist.all_reduce(x)
for _ in range(3): graph.replay()
torch.cuda.synchronize()
seen["captured"] = called_since(before); before = calls()
if rank == 0:
    for _ in range(300): dist.all_reduce(x, async_op=True)  # rank 1 does not come
seen["hung"] = called_since(before)
say("issued"); wait_told("looked")
counted = calls()
ours = rankcalls_threads()
seen["by threads of rankcall"] = {tid: counted[tid] for tid in ours & counted.keys()}
seen["threads of rankcall"] = len(ours)
say("SEEN", json.dumps(seen)); os._exit(0)
"""
# They read what the host knows, and ask nothing of a device. torch asks the same at each op.
QUESTIONS = ("cudaStreamGetCaptureInfo", "cudaStreamIsCapturing", "cudaGetDevice")
# torch takes an event that its watchdog is done with, and makes one if there is none yet.
BY_CHANCE = ("cudaEventCreateWithFlags", "cudaEventDestroy")
# The back end of torch 2.15 queries the event of an op whose future it is asked for, which rankcall
# does once. By itself it queries events at each op. How often it does, and how often a stream waits
# for an event, differs between two jobs that are not recorded, too, unless all ops hang.
ASKS_ONCE = torch_version() >= (2, 15)
QUERIES = ("cudaEventQuery", "cudaGetLastError") if ASKS_ONCE else ()
BY_CHANCE_TOO = (*QUERIES, "cudaStreamWaitEvent") if ASKS_ONCE else ()
MORE = {
    "issued": BY_CHANCE_TOO,
    "issued by a thread": BY_CHANCE_TOO,
    "captured": (),
    "hung": QUERIES,
}


def seen_by(job: RecordedJob, rank: int) -> dict[str, Any]:
    """Return what a rank has printed of its calls."""
    (line,) = [line for line in job.job.ranks[rank].output.splitlines() if line[:5] == "SEEN "]
    result: dict[str, Any] = json.loads(line[5:])
    return result


def run(jobs: RecordedJobs, program: str, **env: str) -> list[dict[str, Any]]:
    """Run a program; between its ops and its last count, all heartbeats look twice."""
    job = jobs.start(2, program, **env)
    for rank in (0, 1):
        job.job.wait_for("issued", rank)
    if env["RANKCALL_CAPTURE"] != "off":
        for _ in range(2):
            job.after_a_look()
    job.tell("looked")
    job.job.succeed()
    return [seen_by(job, rank) for rank in (0, 1)]


def added(usual: dict[str, Any], recorded: dict[str, Any], phase: str) -> dict[str, int]:
    """Return by how much the calls of a phase differ, by function."""
    functions = usual[phase].keys() | recorded[phase].keys()
    return {
        name: difference
        for name in functions
        if (difference := recorded[phase].get(name, 0) - usual[phase].get(name, 0))
    }


def test_the_device_cannot_tell(counted_jobs: RecordedJobs, capture: str) -> None:
    """Threads that issue make the same calls as without recording, and rankcall's make none.

    No event is recorded, queried or waited for, no stream is used, no device is set, and no memory
    is taken: also beside a capture, and with 300 ops in flight that hang. On torch 2.15, the event
    of each op is queried once.
    """
    usual, recorded = (run(counted_jobs, PROGRAM, RANKCALL_CAPTURE=how) for how in ("off", capture))
    for rank in (0, 1):
        assert usual[rank]["issued"]["ncclAllReduce"] >= 12
        assert usual[rank]["captured"]["cudaGraphLaunch"] == 3
        assert usual[rank]["issued by a thread"]["ncclAllReduce"] == 10
        assert recorded[rank]["threads of rankcall"] > 0
        assert recorded[rank]["by threads of rankcall"] == {}
        for phase in MORE:
            more = added(usual[rank], recorded[rank], phase)
            assert more.keys() <= {*QUESTIONS, *BY_CHANCE, *MORE[phase]}, (rank, phase, more)
    assert usual[0]["hung"]["ncclAllReduce"] == 300
    more = Counter(added(usual[0], recorded[0], "hung"))
    # torch takes back the error of each query of an event that is not reached, as those of all ops
    # that hang. Other queries are of ops before: chance decides which thread finds them over first.
    assert more["cudaGetLastError"] <= (300 if ASKS_ONCE else 0), more


def test_device_times_only_use_events(counted_jobs: RecordedJobs) -> None:
    """With device times, threads that issue record two events for an op, and ask for earlier ones.

    They wait for no event, synchronise nothing and use no stream of their own. They leave CUDA's
    mode of captures while they ask, and come back to it. Rankcall's threads call nothing. With 300
    ops in flight that hang, only the oldest is asked for.
    """
    env = {"RANKCALL_CAPTURE": "native", "RANKCALL_DEVICE_TIMES": "1"}
    usual = run(counted_jobs, PROGRAM, RANKCALL_CAPTURE="off")
    timed = run(counted_jobs, PROGRAM, **env)
    allowed = {
        *QUESTIONS,
        *BY_CHANCE,
        *("cudaEventRecord", "cudaEventRecordWithFlags"),
        *("cudaEventQuery", "cudaEventElapsedTime", "cudaGetLastError"),
        "cudaThreadExchangeStreamCaptureMode",
    }
    # The ops of each phase, and how often each of them may ask: for one that has ended, and for the
    # next one, which has not.
    back_end = 1 if ASKS_ONCE else 0
    phases = {
        "issued": (34, 2 + back_end),
        "issued by a thread": (10, 2 + back_end),
        "captured": (0, 0),
        "hung": (300, 1 + back_end),  # were each asked for, they would be 45,000
    }
    for rank in (0, 1):
        assert timed[rank]["threads of rankcall"] > 0
        assert timed[rank]["by threads of rankcall"] == {}
        for phase, (ops, queries) in phases.items():
            more = Counter(added(usual[rank], timed[rank], phase))
            assert more.keys() <= {*allowed, *MORE[phase]}, (rank, phase, more)
            assert more["cudaThreadExchangeStreamCaptureMode"] % 2 == 0
            assert more["cudaEventRecord"] + more["cudaEventRecordWithFlags"] <= 2 * ops
            # The ends of a phase's last ops are found in the next one.
            assert more["cudaEventQuery"] <= queries * ops + 44, (rank, phase, more)
        assert added(usual[rank], timed[rank], "issued")["cudaEventElapsedTime"] > 0


def test_nothing_is_asked_about_the_default_stream(counted_jobs: RecordedJobs) -> None:
    """It cannot be captured, so the native recorder asks only whether other streams are.

    To ask, torch sets the device twice, at each op.
    """
    program = """
    init(); x = torch.ones(64, device="cuda"); side, seen = torch.cuda.Stream(), {}
    def issue():
        for _ in range(10): dist.all_reduce(x)
    for stream in (torch.cuda.default_stream(), side):
        with torch.cuda.stream(stream):
            issue(); torch.cuda.synchronize(); before = calls()
            issue(); seen["default" if stream != side else "side"] = called_since(before)
    say("SEEN", json.dumps(seen)); torch.cuda.synchronize(); dist.destroy_process_group()
    """
    usual, recorded = (
        counted_jobs.run(2, program, RANKCALL_CAPTURE=how) for how in ("off", "native")
    )
    for rank in (0, 1):
        seen = [seen_by(job, rank) for job in (usual, recorded)]
        assert added(*seen, "default").get("cudaStreamIsCapturing", 0) == 0
        assert added(*seen, "side")["cudaStreamIsCapturing"] == 10

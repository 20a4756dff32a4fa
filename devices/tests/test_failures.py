"""What NCCL and torch do when ranks are missing, disagree, die or are aborted."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from simulated_devices.testing import Jobs

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
# torch's watchdog sleeps four times this long after a failure, by default for a minute, so that all ranks can dump.
QUICK_END = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}


def test_a_missing_rank_and_an_abort(jobs: Jobs) -> None:
    """A collective stays pending while a rank is missing, and an abort releases the stream behind it."""
    jobs.run(
        2,
        """
        init()
        store = dist.distributed_c10d._get_default_store()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            after = torch.cuda.Event(); work.wait(); after.record()
            assert not work.is_completed() and not after.query()
            dist.distributed_c10d._abort_process_group()
            after.synchronize(); assert after.query()
            store.set("aborted", "yes")
        else:
            store.wait(["aborted"]); dist.distributed_c10d._abort_process_group()
        """,
    )


def test_the_watchdog_fires(jobs: Jobs) -> None:
    """torch's watchdog sees the timeout, aborts the communicator and ends the process."""
    job = jobs.start(
        2,
        """
        init(timeout=2)
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        if rank == 1:
            say("waits"); signal.pause()
        dist.all_reduce(x); torch.cuda.synchronize()
        """,
        **QUICK_END,
    )
    assert job.zygote.wait(job.ranks[:1], job.deadline), job.report()
    assert job.ranks[0].status != 0
    # torch 2.15 has another process group, with words of its own.
    old, new = "Watchdog caught collective operation timeout", "watchdog detected operation timeout"
    assert old in job.ranks[0].output or new in job.ranks[0].output, job.report()


def test_a_timeout_can_be_handled(jobs: Jobs) -> None:
    """With TORCH_NCCL_BLOCKING_WAIT a wait raises, the program aborts, and both ranks go on in a new group."""
    jobs.run(
        2,
        """
        init(timeout=2)
        store = dist.FileStore(os.environ["RENDEZVOUS"] + "-second", world)
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        if rank == 0:
            try: dist.all_reduce(x, async_op=True).wait()
            except dist.DistBackendError as error: assert "timed out" in str(error) or "Timeout" in str(error) or "timeout" in str(error), error
            else: raise AssertionError("no error")
            store.set("timed out", "yes")
        else:
            store.wait(["timed out"])
        dist.distributed_c10d._abort_process_group()
        os.environ["RENDEZVOUS"] += "-third"
        init(); x = torch.ones(3, device="cuda"); dist.all_reduce(x); same(x, [2.0] * 3); dist.destroy_process_group()
        """,
        TORCH_NCCL_BLOCKING_WAIT="1",
    )


@pytest.mark.parametrize(
    "mine",
    [
        "dist.all_reduce(x[:500])",
        "dist.all_reduce(x.double())",
        "dist.broadcast(x, 0)",
        "dist.all_gather_into_tensor(torch.empty(2000, device='cuda'), x)",
        "dist.all_reduce(x, op=dist.ReduceOp.MAX)",
    ],
    ids=["size", "dtype", "op", "kind", "reduction"],
)
def test_ranks_that_disagree(jobs: Jobs, mine: str) -> None:
    """Ranks that disagree hang or get garbage, as with NCCL, and never crash; an abort ends it."""
    jobs.run(
        2,
        f"""
        init()
        x = torch.ones(1000, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1: {mine}
        else: dist.all_reduce(x)
        for _ in range(3): dist.all_reduce(x)
        store.add("issued", 1); wait_until(lambda: store.add("issued", 0) == 2)
        dist.distributed_c10d._abort_process_group()
        torch.cuda.synchronize()
        """,
    )


def test_a_larger_collective_hangs(jobs: Jobs) -> None:
    """The rank that expects more than the other sends waits for the rest, and the other goes on."""
    jobs.run(
        2,
        """
        init()
        x = torch.ones(1000, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize()
        store = dist.distributed_c10d._get_default_store()
        work = dist.all_reduce(x if rank == 0 else x[:500], async_op=True)
        if rank == 1: work.wait(); torch.cuda.synchronize(); store.set("small one has ended", "yes")
        else: store.wait(["small one has ended"]); assert not work.is_completed()
        dist.distributed_c10d._abort_process_group()
        """,
    )


def test_a_killed_rank_leaves_the_others_hanging(jobs: Jobs) -> None:
    """On one host NCCL does not notice that a peer was killed: its collective hangs until the watchdog."""
    job = jobs.start(
        2,
        """
        init()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
        if rank == 1: signal.pause()
        wait_until(lambda: os.path.exists(os.environ["JOB"] + "/killed"))
        work = dist.all_reduce(x, async_op=True)
        event = torch.cuda.Event(); work.wait(); event.record()
        for _ in range(20): assert not event.query(); time.sleep(0.01)
        dist.distributed_c10d._abort_process_group()
        """,
    )
    job.wait_for("ready", 0), job.wait_for("ready", 1)
    job.kill(1)
    assert job.zygote.wait(job.ranks[1:], job.deadline)
    (job.folder / "killed").touch()
    job.wait()
    assert job.ranks[0].status == 0, job.report()


def test_a_killed_rank_as_a_remote_error(jobs: Jobs) -> None:
    """As over a network, on demand: the death of a peer is an asynchronous error, and torch's watchdog aborts."""
    job = jobs.start(
        2,
        """
        init()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
        if rank == 1: signal.pause()
        dist.all_reduce(x); torch.cuda.synchronize()
        """,
        SIMULATED_DEVICES_PEER_DEATH="error",
        **QUICK_END,
    )
    job.wait_for("ready", 0), job.wait_for("ready", 1)
    job.kill(1)
    job.wait()
    assert job.ranks[0].status != 0
    assert "remote process exited or there was a network error" in job.ranks[0].output, job.report()


def test_ranks_killed_while_they_join(jobs: Jobs) -> None:
    """Files of ranks that died before all had joined are removed by the next job."""
    first = jobs.start(2, "if rank == 0:\n  threading.Thread(target=lambda: (wait_until(lambda: any(n.startswith('simulated-devices-') for n in os.listdir(os.environ['SIMULATED_DEVICES_SHM']))), say('joins')), daemon=True).start()\n  init(device_id=torch.device('cuda', 0))\nelse: signal.pause()")  # fmt: skip
    first.wait_for("joins", 0)
    first.kill()
    first.wait()
    jobs.run(2, "init(); x = torch.ones(2, device='cuda'); dist.all_reduce(x); same(x, [2, 2])")


def test_non_blocking_communicators(jobs: Jobs) -> None:
    """Communicators whose making does not block work, and can be aborted while a rank is missing."""
    jobs.run(
        2,
        """
        init(device_id=torch.device("cuda", rank))
        x = torch.ones(3, device="cuda"); dist.all_reduce(x); same(x, [2] * 3)
        group = dist.new_group([0, 1]); x = torch.ones(3, device="cuda"); dist.all_reduce(x, group=group); same(x, [2] * 3)
        dist.destroy_process_group()
        """,
        TORCH_NCCL_USE_COMM_NONBLOCKING="1",
        TORCH_NCCL_NONBLOCKING_TIMEOUT="30",
    )


@pytest.mark.skipif(TORCH >= (2, 15), reason="torch 2.15's process group waits for a non-blocking communicator itself")
def test_a_missing_rank_of_a_non_blocking_communicator(jobs: Jobs) -> None:
    """torch gives up a communicator that is not made in time, and aborts it."""
    jobs.run(
        2,
        """
        if rank == 1: sys.exit()
        try: init(device_id=torch.device("cuda", rank))
        except dist.DistBackendError as error: say(error)
        else: raise AssertionError("no error")
        os._exit(0)
        """,
        TORCH_NCCL_USE_COMM_NONBLOCKING="1",
        TORCH_NCCL_NONBLOCKING_TIMEOUT="2",
    )


NCCL = """
import ctypes
from ctypes import byref, c_int, c_size_t, c_void_p
find = lambda part: ctypes.CDLL(next(p for p in os.environ["LD_PRELOAD"].split(":") if part in p))
nccl, rt = find("libnccl"), find("libcudart")
class Id(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 128)]
nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, Id, c_int]
nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p
def ok(code): assert code == 0, (code, nccl.ncclGetErrorString(code), nccl.ncclGetLastError(None))
def exchange(name, make):
    path = os.environ["JOB"] + "/" + name
    if rank == 0:
        with open(path + ".part", "wb") as f: f.write(make())
        os.rename(path + ".part", path)
    wait_until(lambda: os.path.exists(path)); return open(path, "rb").read()
def new_id(): i = Id(); ok(nccl.ncclGetUniqueId(byref(i))); return ctypes.string_at(byref(i), 128)
def join(name, size=None, as_rank=None):
    i = Id(); ctypes.memmove(byref(i), exchange(name, new_id), 128); comm = c_void_p()
    ok(nccl.ncclCommInitRank(byref(comm), size or world, i, rank if as_rank is None else as_rank)); return comm
def all_reduce(comm, value, stream=None):
    x = torch.tensor([float(value)], device="cuda"); torch.cuda.synchronize()
    ok(nccl.ncclAllReduce(c_void_p(x.data_ptr()), c_void_p(x.data_ptr()), c_size_t(1), 7, 0, comm, stream)); return x
def state(comm): v = c_int(); ok(nccl.ncclCommGetAsyncError(comm, byref(v))); return v.value
torch.cuda.set_device(rank % torch.cuda.device_count())
"""


def test_shrink_and_revoke(jobs: Jobs) -> None:
    """Survivors revoke or abort what hangs, shrink the communicator without the missing rank, and go on."""
    jobs.run(
        3,
        NCCL
        + """
comm = join("id"); x = all_reduce(comm, rank); torch.cuda.synchronize(); same(x, [3])
if rank == 1: sys.exit()
hanging = all_reduce(comm, rank)
if rank == 0: ok(nccl.ncclCommRevoke(comm, 0)); torch.cuda.synchronize()
excluded, small = (c_int * 1)(1), c_void_p()
ok(nccl.ncclCommShrink(comm, excluded, 1, byref(small), None, 1)); torch.cuda.synchronize()
n, r = c_int(), c_int(); ok(nccl.ncclCommCount(small, byref(n))); ok(nccl.ncclCommUserRank(small, byref(r))); assert (n.value, r.value) == (2, rank // 2)
x = all_reduce(small, rank); torch.cuda.synchronize(); same(x, [2])
assert nccl.ncclAllReduce(None, None, c_size_t(1), 7, 0, comm, None) == 5      # the old one refuses work
ok(nccl.ncclCommDestroy(small)); ok(nccl.ncclCommDestroy(comm))
assert nccl.ncclCommDestroy(comm) == 4                                         # a handle that is gone
""",
    )


def test_split(jobs: Jobs) -> None:
    """ncclCommSplit groups by colour, orders by key, and gives no communicator to those without a colour."""
    jobs.run(
        4,
        NCCL
        + """
comm, part = join("id"), c_void_p()
ok(nccl.ncclCommSplit(comm, rank % 2 if rank != 3 else -1, -rank, byref(part), None))
if rank == 3: assert not part.value
else:
    r = c_int(); ok(nccl.ncclCommUserRank(part, byref(r))); assert r.value == {0: 1, 2: 0, 1: 0}[rank]
    x = all_reduce(part, rank); torch.cuda.synchronize(); same(x, [2 if rank != 1 else 1])
ok(nccl.ncclCommDestroy(comm))
""",
    )


def test_bad_arguments(jobs: Jobs) -> None:
    """Arguments that make no sense are refused with ncclInvalidArgument or ncclInvalidUsage."""
    jobs.run(
        1,
        NCCL
        + """
comm = join("id"); x = torch.ones(1, device="cuda"); p = c_void_p(x.data_ptr())
assert nccl.ncclAllReduce(p, p, c_size_t(1), 99, 0, comm, None) == 4
assert nccl.ncclAllReduce(p, p, c_size_t(1), 7, 77, comm, None) == 4
assert nccl.ncclBroadcast(p, p, c_size_t(1), 7, 5, comm, None) == 4
assert nccl.ncclAllReduce(p, p, c_size_t(1), 7, 0, None, None) == 4
assert nccl.ncclGroupEnd() == 5
assert nccl.ncclCommInitRank(byref(c_void_p()), 2, Id(), 2) == 4
assert nccl.ncclPutSignal() == 5 and nccl.ncclGetLastError(None)
""",
    )


def test_one_process_with_all_devices(jobs: Jobs) -> None:
    """ncclCommInitAll makes the communicators of one process; the collectives of its devices form a group."""
    jobs.run(
        1,
        NCCL
        + """
comms = (c_void_p * 3)(); ok(nccl.ncclCommInitAll(comms, 3, None))
xs = [torch.tensor([float(d)], device=f"cuda:{d}") for d in range(3)]
ok(nccl.ncclGroupStart())
for d in range(3):
    torch.cuda.set_device(d)
    ok(nccl.ncclAllReduce(c_void_p(xs[d].data_ptr()), c_void_p(xs[d].data_ptr()), c_size_t(1), 7, 0, c_void_p(comms[d]), None))
ok(nccl.ncclGroupEnd())
for d in range(3): torch.cuda.synchronize(d); same(xs[d], [3])
""",
    )

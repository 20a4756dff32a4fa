"""Faults on order: each is ordered and lifted while torch's ProcessGroupNCCL runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from simulated_devices import DevicesError, Fault, FaultFolder, environment
from simulated_devices.testing import Jobs


@pytest.fixture
def faults(tmp_path: Path) -> FaultFolder:
    return FaultFolder(tmp_path / "faults")


def at(faults: FaultFolder) -> dict[str, str]:
    """What points a job at the folder."""
    return {"SIMULATED_DEVICES_FAULTS": str(faults.folder)}


# Each rank issues an all_reduce and says whether it ends; the test says when to go on.
PENDING = """
init()
x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
def go(name): wait_until(lambda: os.path.exists(os.environ["JOB"] + "/" + name))
def issue():
    global event
    dist.all_reduce(x); event = torch.cuda.Event(); event.record()
def pending(seconds=0.3):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if event.query(): return False
        time.sleep(0.005)
    return True
go("ordered"); issue()
while not pending(): issue()      # the fault strikes within 0.2 s, both ranks in the same operation
say("pending"); go("lifted"); event.synchronize(); say("ended")
dist.destroy_process_group()
"""


def order_and_lift(jobs: Jobs, faults: FaultFolder, fault: Fault) -> None:
    """A fault that is ordered while the job runs holds its collective back until it is lifted."""
    job = jobs.start(2, PENDING, **at(faults))
    for rank in range(2):
        job.wait_for("ready", rank)
    identity = faults.order(fault)
    (job.folder / "ordered").touch()
    for rank in range(2):
        job.wait_for("pending", rank)
    faults.lift(identity)
    (job.folder / "lifted").touch()
    job.succeed()


def test_a_device_that_does_not_start(jobs: Jobs, faults: FaultFolder) -> None:
    """A stalled device holds its NCCL operations back, and so the other rank's."""
    order_and_lift(jobs, faults, Fault("stall", rank=1))


def test_a_link_that_stalls(jobs: Jobs, faults: FaultFolder) -> None:
    """No byte passes on a stalled link, and everything does when it is lifted."""
    order_and_lift(jobs, faults, Fault("link", rank=0, peer=1))


def test_from_the_nth_operation(jobs: Jobs, faults: FaultFolder) -> None:
    """A stall that is ordered before the job strikes exactly the operation that it names."""
    faults.order(Fault("stall", rank=1, from_op=4))
    jobs.run(
        2,
        """
        init()
        x = torch.ones(8, device="cuda")
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        wait_until(lambda: works[2].is_completed())
        for _ in range(20): assert not works[3].is_completed(); time.sleep(0.01)
        store = dist.distributed_c10d._get_default_store()
        store.add("seen", 1); wait_until(lambda: store.add("seen", 0) == 2)
        dist.distributed_c10d._abort_process_group(); torch.cuda.synchronize()
        """,
        **at(faults),
    )


def test_a_stalled_device_with_all_its_work(jobs: Jobs, faults: FaultFolder) -> None:
    """With scope=all a device starts nothing, kernels neither."""
    faults.order(Fault("stall", device=1, scope="all"))
    job = jobs.start(
        1,
        """
        a, b = torch.ones(8, device="cuda:0") + 1, torch.ones(8, device="cuda:1")
        same(a, [2.0] * 8)
        with torch.cuda.device(1): c = b + 1; event = torch.cuda.Event(); event.record()
        for _ in range(20): assert not event.query(); time.sleep(0.01)
        say("pending"); event.synchronize(); same(c, [2.0] * 8)
        """,
        **at(faults),
    )
    job.wait_for("pending", 0)
    faults.lift()
    job.succeed()


def test_a_slow_device(jobs: Jobs, faults: FaultFolder) -> None:
    """On a slow device kernels take their time times the factor, which events on it measure."""
    faults.order(Fault("slow", rank=0, factor=1000.0))
    job = jobs.start(
        1,
        """
        def measure():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            x = torch.ones(8, device="cuda"); torch.cuda.synchronize()
            start.record()
            for _ in range(10): x.mul_(1.0)
            end.record(); issued = end.query(); end.synchronize(); return start.elapsed_time(end), issued
        took, issued = measure()
        assert took >= 95 and not issued, took     # ten kernels of at least 10 us, a thousand times
        say("slow"); wait_until(lambda: os.path.exists(os.environ["JOB"] + "/lifted"))
        wait_until(lambda: measure()[0] < 95)
        """,
        **at(faults),
    )
    job.wait_for("slow", 0)
    faults.lift()
    (job.folder / "lifted").touch()
    job.succeed()


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Fault("xid", rank=1, code=79), "unknown error"),
        (Fault("ecc", rank=1), "uncorrectable ECC error"),
        (Fault("xid", rank=1, code=74), "uncorrectable NVLink error"),
    ],
    ids=["xid 79", "ecc", "xid 74"],
)
def test_a_device_that_fails(jobs: Jobs, faults: FaultFolder, fault: Fault, text: str) -> None:
    """Every call on a failed device fails for good; the peer's collective stays pending until it aborts."""
    job = jobs.start(
        2,
        """
        init()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
        def fails():
            try: torch.cuda.synchronize(); return False
            except RuntimeError as error: say(error); return True
        if rank == 1:
            wait_until(fails)
            assert fails()                                       # it stays
            wait_until(lambda: os.path.exists(os.environ["JOB"] + "/lifted")); assert fails()
            os._exit(7)
        dist.all_reduce(x); event = torch.cuda.Event(); event.record()
        wait_until(lambda: os.path.exists(os.environ["JOB"] + "/lifted")); assert not event.query()
        dist.distributed_c10d._abort_process_group(); torch.cuda.synchronize()
        """,
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        **at(faults),
    )
    for rank in range(2):
        job.wait_for("ready", rank)
    faults.order(fault)
    job.wait_for(text, 1)
    faults.lift()
    (job.folder / "lifted").touch()
    job.wait()
    # torch's watchdog may meet the error before the program has ended, and then ends the process.
    assert job.ranks[0].status == 0 and job.ranks[1].status in (7, -signal.SIGABRT), job.report()


def test_a_lost_device_under_torchs_watchdog(jobs: Jobs, faults: FaultFolder) -> None:
    """torch's watchdog sees the device's error and ends the process, as after a real Xid."""
    job = jobs.start(
        2,
        """
        init()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
        if rank == 0: signal.pause()
        work = dist.all_reduce(x, async_op=True); signal.pause()
        """,
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="100",
        **at(faults),
    )
    job.wait_for("ready", 0), job.wait_for("ready", 1)
    faults.order(Fault("xid", rank=1, code=79))
    assert job.zygote.wait(job.ranks[1:], job.deadline), job.report()
    assert job.ranks[1].status != 0
    assert "CUDA error: unknown error" in job.ranks[1].output, job.report()


def test_out_of_memory(jobs: Jobs, faults: FaultFolder) -> None:
    """While it is ordered, allocations beyond the size that is left fail; afterwards they succeed."""
    identity = faults.order(Fault("oom", rank=0, bytes=64 << 20))
    job = jobs.start(
        1,
        """
        small = torch.empty(32 << 20, dtype=torch.uint8, device="cuda")
        try: torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError: say("out of memory")
        else: raise AssertionError("no error")
        wait_until(lambda: torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0] < 64 << 20)
        torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        """,
        **at(faults),
    )
    job.wait_for("out of memory", 0)
    faults.lift(identity)
    job.succeed()


def test_a_network_error(jobs: Jobs, faults: FaultFolder) -> None:
    """NCCL's asynchronous error reaches torch's watchdog, which aborts the collective and ends the process."""
    job = jobs.start(
        2,
        """
        init()
        x = torch.ones(64, device="cuda"); dist.all_reduce(x); torch.cuda.synchronize(); say("ready")
        if rank == 1: signal.pause()
        dist.all_reduce(x); say("issued"); torch.cuda.synchronize()
        """,
        TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="100",
        **at(faults),
    )
    job.wait_for("issued", 0)
    faults.order(Fault("network", rank=0))
    assert job.zygote.wait(job.ranks[:1], job.deadline), job.report()
    assert job.ranks[0].status != 0
    assert "remote process exited or there was a network error" in job.ranks[0].output, job.report()


def test_an_init_that_hangs(jobs: Jobs, faults: FaultFolder) -> None:
    """While it is ordered for one rank, that rank's communicator is not made, and no file is left in /dev/shm."""
    faults.order(Fault("init", rank=1))
    job = jobs.start(
        2,
        """
        def make(): init(device_id=torch.device("cuda", rank))
        torch.cuda.set_device(rank)
        maker = threading.Thread(target=make); maker.start()
        if rank == 1:
            maker.join(0.5); assert maker.is_alive()
            say("hangs")
        maker.join(); x = torch.ones(2, device="cuda"); dist.all_reduce(x); same(x, [2, 2]); dist.destroy_process_group()
        """,
        **at(faults),
    )
    job.wait_for("hangs", 1)
    faults.lift()
    job.succeed()


def test_nvml_reports_the_xid(faults: FaultFolder) -> None:
    """A monitor that is no rank of the job gets the Xid as an event, and then a lost device."""
    code = """
import ctypes, os, sys
nvml = ctypes.CDLL(next(p for p in os.environ["LD_PRELOAD"].split(":") if "nvidia-ml" in p))
class Event(ctypes.Structure): _fields_ = [("device", ctypes.c_void_p), ("type", ctypes.c_ulonglong), ("data", ctypes.c_ulonglong), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]
events, device, event = ctypes.c_void_p(), ctypes.c_void_p(), Event()
assert nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByIndex_v2(1, ctypes.byref(device)) == 0
assert nvml.nvmlEventSetCreate(ctypes.byref(events)) == 0 and nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(8), events) == 0
assert nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), 0) == 10
print("waits", flush=True)
assert nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), 20000) == 0
assert event.device == device.value and event.data == 79, (event.device, event.data)
name = ctypes.create_string_buffer(99)
assert nvml.nvmlDeviceGetName(device, name, 99) == 15
sys.stdin.readline()
assert nvml.nvmlDeviceGetName(device, name, 99) == 0 and name.value == b"Simulated device"
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(faults=faults.folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "waits\n"
        faults.order(Fault("xid", rank=1, code=79))
        # It reports the event before the fault is lifted: it waits for the line that comes after.
        while process.poll() is None and not _sleeps_in_readline(process.pid):
            pass
        faults.lift()
        process.stdin.write("lifted\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def _sleeps_in_readline(pid: int) -> bool:
    """Whether the process reads from its pipe, which is system call 0 on descriptor 0."""
    try:
        return Path(f"/proc/{pid}/syscall").read_text().startswith("0 0x0 ")
    except OSError:
        return False


def test_the_command(tmp_path: Path) -> None:
    """`devices fault` orders, lists and lifts, and refuses what makes no sense with status 2."""

    def devices(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "simulated_devices", "fault", "--at", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert devices("stall", "--rank", "1", "--from-op", "20").stdout == "1\n"
    assert devices("oom", "--bytes", "64MiB").stdout == "2\n"
    assert devices("list").stdout == "1 stall rank=1 from_op=20\n2 oom bytes=67108864\n"
    assert devices("lift", "1").returncode == 0
    assert devices("list").stdout == "2 oom bytes=67108864\n"
    assert devices("lift", "9").returncode == 2
    assert devices("slow").returncode == 2
    assert devices("lift").returncode == 0
    assert devices("list").stdout.strip() == ""
    with pytest.raises(DevicesError, match="there is no fault 'fire'"):
        Fault("fire")


def test_a_bad_file_is_reported_once(jobs: Jobs, faults: FaultFolder) -> None:
    """Unknown faults and keys in the file are named on stderr and ignored."""
    (faults.folder / "faults").write_text("1 fire rank=0\n2 stall rank=5 colour=red\n")
    (rank,) = jobs.run(1, "x = torch.ones(3, device='cuda'); same(x + 1, [2, 2, 2])", **at(faults))
    assert rank.output.count("unknown fault 'fire'") == 1
    assert rank.output.count("unknown key 'colour'") == 1

"""Whether the verdict names why a rank is late, and how soon it names what can never end.

One rank of two is late for a cause that is planted, all along (``late``) or until the watcher has
spoken (``hung``). A job is right if its verdict names exactly the planted cause, or none if none is
planted. ``recall``: of the jobs with a planted cause, the part that is right. ``wrong_causes``:
jobs in which another cause is named. ``structural_seconds_median``: from when the last
rank has come to a call that cannot end, to the verdict, with a threshold of an hour.

Causes that this machine cannot have are in ``skipped``, with the reason. ``peers`` has what other
tools say where they are installed. ``py-spy``, beside each job that hangs, shows a line of the late
rank, from which a person may guess the cause. ``traceml`` (traceml-ai on PyPI) gives its diagnosis
of a training loop that is instrumented for it, one for each cause.

The planted causes take what they need from the machine: on one that others use as well, ranks wait
for a CPU in all jobs, and then ``no_cpu`` may be true where another cause is planted. ``load`` says
how busy it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MULTIPROC = Path(__file__).resolve().parents[1] / "tests/multiproc"
sys.path.insert(0, str(MULTIPROC))
HANG_AFTER_S = 4.0
JOB_S = 300.0  # a job that takes longer is broken
HANGS = "rankcall-runs/latest/hangs/0001/verdict.json"
CPU_CGROUP = Path("/sys/fs/cgroup/cpu")  # version 1; of version 2, the cgroup itself
NAMED = ("late_because", "absent_because")
_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
_PY_SPY = shutil.which("py-spy", path=_PATH)
_TRACEML = shutil.which("traceml", path=_PATH)

# ``take`` makes its rank late by about so many s. It runs on rank 1 in each step, ``begin`` before.
BEFORE = """
import contextlib, ctypes, gc, os, signal, subprocess, sys, threading, time
from pathlib import Path
import torch, torch.distributed as dist

def begin(): pass
def end(): pass
"""
AFTER = """
is_late = os.environ["RANK"] == "1"
if is_late:
    begin()
dist.init_process_group("gloo")
total = torch.ones(1)
try:
    for step in range(14):
        if is_late and MODE == "late":
            take(0.25)
        while is_late and MODE == "hung" and step == 6 and not os.path.exists(HANGS):
            Path("late.pid").write_text(str(os.getpid()))
            take(0.25)
        dist.all_reduce(total)
finally:
    if is_late:
        end()
dist.destroy_process_group()
"""
# The same as a loop that TraceML can measure: it needs a loader, a backward and an optimizer.
FOR_TRACEML = """
import traceml_ai
is_late = os.environ["RANK"] == "1"
if is_late:
    begin()
dist.init_process_group("gloo")
traceml_ai.init(mode="auto")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for batch in torch.utils.data.DataLoader(torch.ones(160, 8), batch_size=4):
        with traceml_ai.trace_step(model.module):
            if is_late:
                take(0.25)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
finally:
    if is_late:
        end()
dist.destroy_process_group()
"""
SPINS = """
def spin(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass
"""


@dataclass(frozen=True)
class Planted:
    """A cause: what it is called in facts (empty: none is to be named), and the code.

    Of several names with a stroke between them, any is right.
    """

    cause: str
    code: str
    has_slow_line: bool = False  # two hosts, joined by a line with a delay; no rank is late


PLANTED = {
    "gc": Planted(
        "gc",
        """
objects = []
def begin():
    objects.extend([number] for number in range(200_000))
def take(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        gc.collect()
""",
    ),
    "cpu hog": Planted(
        "no_cpu",
        SPINS
        + """
hogs = []
def begin():
    cpu = min(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpu})
    loop = f"import os; os.sched_setaffinity(0, {{{cpu}}})\\nwhile True: pass"
    hogs.extend(subprocess.Popen([sys.executable, "-c", loop]) for _ in range(4))
def take(seconds):
    spin(seconds / 4)
def end():
    for hog in hogs:
        hog.kill()
        hog.wait()
""",
    ),
    "cgroup limit": Planted(
        "throttled",
        SPINS
        + f"""
group = Path("{CPU_CGROUP}") / f"rankcall-bench-{{os.getpid()}}"
def begin():
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text("100000")
    (group / "cpu.cfs_quota_us").write_text("20000")
    (group / "cgroup.procs").write_text(str(os.getpid()))
def take(seconds):
    spin(seconds / 4)
def end():
    (group.parent / "cgroup.procs").write_text(str(os.getpid()))
    with contextlib.suppress(OSError):
        group.rmdir()
""",
    ),
    "disk": Planted(
        "disk|blocked",  # the former if the kernel counts delays
        """
def take(seconds):
    until = time.monotonic() + seconds
    with open("data", "wb") as file:
        while time.monotonic() < until:
            file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
""",
    ),
    "page cache": Planted(
        "disk|blocked",
        """
import mmap, random
def begin():
    with open("data", "wb") as file:
        for _ in range(64):
            file.write(os.urandom(1 << 20))
        file.flush()
        os.fsync(file.fileno())
def take(seconds):
    until = time.monotonic() + seconds
    with open("data", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
        data.madvise(mmap.MADV_RANDOM)
        while time.monotonic() < until:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            for _ in range(64):
                data[random.randrange(len(data))]
            data.madvise(mmap.MADV_DONTNEED)
""",
    ),
    "slow loader": Planted(
        "data_loader",
        """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, number):
        time.sleep(0.25)
        return number
batches = None
def take(seconds):
    global batches
    batches = batches or iter(torch.utils.data.DataLoader(Slow(), num_workers=1))
    next(batches)
""",
    ),
    "slow network": Planted(
        "",
        "def take(seconds): pass\n",
        has_slow_line=True,
    ),
    "sigstop": Planted(
        "stopped",
        """
helper = None
HELP = '''
import os, signal, sys, time
for line in sys.stdin:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(0.3)
    os.kill(os.getppid(), signal.SIGCONT)
    print("done", flush=True)
'''
def begin():
    global helper
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    helper = subprocess.Popen([sys.executable, "-c", HELP], **pipes)
def take(seconds):
    print("stop", file=helper.stdin, flush=True)
    helper.stdout.readline()
def end():
    helper.kill()
    helper.wait()
""",
    ),
    "lock held in C": Planted(
        "gil",
        """
def take(seconds):
    holder = threading.Thread(target=ctypes.PyDLL(None).usleep, args=(int(seconds * 1e6),))
    holder.start()
    holder.join()
""",
    ),
    "checkpoint": Planted(
        "checkpoint",
        """
state = None
def take(seconds):
    global state
    state = state or {str(number): torch.ones(4) for number in range(20_000)}
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch.save(state, os.devnull)
""",
    ),
    "compilation": Planted(
        "compilation",
        """
def long(x):
    for _ in range(100):
        x = (x.sin() + 1).cos()
    return x
def begin():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))  # the first one imports for long
def take(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch._dynamo.reset()
        torch.compile(long, backend="eager")(torch.ones(3))
""",
    ),
    "sleep": Planted("", "def take(seconds): time.sleep(seconds)\n"),
}

# Calls that never end: both ranks note when they have come.
ENDLESS = {
    "another op": "dist.barrier() if rank else dist.all_reduce(total)",
    "another size": "dist.all_reduce(torch.ones(1 + rank))",
    "groups in other orders": (
        "[dist.all_reduce(total, group=group) for group in (groups if rank else groups[::-1])]"
    ),
    "fails, and does not end": "fail() if rank else dist.all_reduce(total)",
}
ENDLESS_JOB = """
import atexit, os, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist

def fail():
    atexit.register(time.sleep, 600)
    raise ValueError("planted")

dist.init_process_group("gloo", timeout=timedelta(seconds=600))
rank, total = dist.get_rank(), torch.ones(1)
groups = [dist.new_group(), dist.new_group()]
for _ in range(3):
    for group in (None, *groups):
        dist.all_reduce(total, group=group)
time.sleep(0.3 * rank)
Path(f"came.{rank}").write_text(str(time.time()))
"""


@dataclass
class Figures:
    """What the jobs showed."""

    jobs: list[dict[str, Any]] = field(default_factory=list)
    structural_s: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    traceml: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """Print one JSON object with the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON (it always does)")
    parser.add_argument("--rounds", type=int, default=1, help="jobs of each kind")
    parser.add_argument("--only", default="", help="only these causes, with commas between them")
    parser.add_argument("--modes", default="late,hung", help="of them, only one of the two modes")
    parser.add_argument("--list", action="store_true", help="print the causes, and run nothing")
    parser.add_argument("--progress", action="store_true", help="print each job to stderr")
    options = parser.parse_args()
    if options.list:
        print(*PLANTED, "structural", sep="\n")
        return 0
    wanted = options.only.split(",") if options.only else [*PLANTED, "structural"]
    unknown = set(wanted) - {*PLANTED, "structural"}
    modes = options.modes.split(",")
    if unknown or not {"late", "hung"}.issuperset(modes):
        parser.error(f"no such cause or mode: {', '.join(sorted(unknown)) or options.modes}")
    figures, load = Figures(), os.getloadavg()[0]
    for name, planted in PLANTED.items():
        if name not in wanted:
            continue
        why_not = _why_not(name)
        if why_not:
            figures.skipped[name] = why_not
            continue
        for mode in modes * options.rounds:
            if planted.has_slow_line and mode == "hung":
                continue  # nobody is late
            figures.jobs.append(_job(name, planted, mode))
            if options.progress:
                print(figures.jobs[-1], file=sys.stderr, flush=True)
        if _TRACEML and "late" in modes and not planted.has_slow_line:
            figures.traceml[name] = _traceml(planted)
    for name in ENDLESS if "structural" in wanted else ():
        for _ in range(options.rounds):
            seconds = _endless(name)
            figures.structural_s.setdefault(name, []).append(seconds)
            if options.progress:
                print(name, seconds, file=sys.stderr, flush=True)
    print(json.dumps(_summary(figures, load), indent=1))
    return 0


def _summary(figures: Figures, load: float) -> dict[str, Any]:
    planted = [job for job in figures.jobs if job["planted"]]
    seconds = [second for row in figures.structural_s.values() for second in row]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "jobs": len(figures.jobs),
        "recall": round(sum(map(_is_right, planted)) / len(planted), 3) if planted else None,
        "wrong_causes": sum(bool(job["named"]) and not _is_right(job) for job in figures.jobs),
        "structural_seconds_median": round(statistics.median(seconds), 2) if seconds else None,
        "structural_seconds": figures.structural_s,
        "skipped": figures.skipped,
        "peers": {
            "py-spy": "beside each job" if _PY_SPY else "not installed",
            "traceml": figures.traceml if _TRACEML else "not installed",
        },
        "by_job": figures.jobs,
    }


def _is_right(job: dict[str, Any]) -> bool:
    return job["named"] in job["planted"].split("|")


def _why_not(name: str) -> str:
    """Return why this machine cannot have a cause; empty if it can."""
    if name == "cgroup limit" and not os.access(CPU_CGROUP / "cpu.cfs_quota_us", os.F_OK):
        probe = CPU_CGROUP / f"rankcall-probe-{os.getpid()}"
        try:
            probe.mkdir()
            is_there = (probe / "cpu.cfs_quota_us").exists()
            probe.rmdir()
        except OSError as error:
            return f"no CPU cgroup can be made: {error.strerror}"
        return "" if is_there else "the CPU cgroup has no quota"
    if name in ("disk", "page cache") and not _is_on_a_disk(Path(tempfile.gettempdir())):
        return "the folder of temporary files is in memory"
    if name == "slow network":
        has_all = os.geteuid() == 0 and os.path.exists("/dev/net/tun") and shutil.which("ip")
        return "" if has_all else "hosts of its own need root, /dev/net/tun and the command ip"
    return ""


def _is_on_a_disk(folder: Path) -> bool:
    """Whether the file system of a folder is on a device of blocks."""
    device = os.stat(folder).st_dev
    return os.path.exists(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


@contextlib.contextmanager
def _running(script: str, hang_after: float) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Run two ranks of a script; end them with the block."""
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as name:
        folder = Path(name)
        (folder / "job.py").write_text(script)
        options = ["--hang-after", str(hang_after), "--nproc-per-node", "2"]
        command = [sys.executable, "-m", "rankcall", "run", *options, "job.py"]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        # A pipe that nobody reads would fill up, and stop the job.
        reader = threading.Thread(target=_keep, args=(process, folder / "stderr"), daemon=True)
        reader.start()
        try:
            yield folder, process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(10)


@contextlib.contextmanager
def _over_a_line(script: str) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Run a rank of a script on each of two hosts, whose packets take 20 ms to the other one."""
    from slowline import Line, address, joined  # type: ignore[import-not-found]

    with (
        tempfile.TemporaryDirectory(prefix="rankcall-bench-") as name,
        contextlib.ExitStack() as end,
    ):
        folder = Path(name)
        (folder / "job.py").write_text(script)
        end.enter_context(joined(Line(delay_s=0.02, loss=0.0, bits_per_s=1e9), folder))
        launchers = []
        for node in (0, 1):
            command = [sys.executable, "-m", "rankcall", "run", "--hang-after", str(HANG_AFTER_S)]
            command += ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
            command += ["--master-addr", address(0), "--master-port", "29400", "job.py"]
            enter = f"import os, slowline; slowline.enter({node}, {name!r}, 1500)"
            launchers.append(
                subprocess.Popen(
                    [sys.executable, "-c", f"{enter}; os.execv({command[0]!r}, {command!r})"],
                    cwd=folder,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "GLOO_SOCKET_IFNAME": "line",
                        "RANKCALL_HOST": f"node-{node}",
                        "PYTHONPATH": str(MULTIPROC),
                    },
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
            end.callback(launchers[-1].wait)
            end.callback(launchers[-1].kill)
        yield folder, launchers[0]
        launchers[1].wait(JOB_S)


def _keep(process: subprocess.Popen[str], file: Path) -> None:
    assert process.stderr is not None
    text = process.stderr.read()
    with contextlib.suppress(OSError):
        file.write_text(text)


def _job(name: str, planted: Planted, mode: str) -> dict[str, Any]:
    """Run one job, and return the cause that its verdict names."""
    constants = f"MODE, HANGS = {mode!r}, {HANGS!r}\n"
    script = BEFORE + planted.code + constants + AFTER
    began, peer = time.monotonic(), ""
    ran = _over_a_line(script) if planted.has_slow_line else _running(script, HANG_AFTER_S)
    with ran as (folder, process):
        late = folder / "late.pid"
        if mode == "hung" and _PY_SPY:
            _until(late.exists, process)
            peer = _py_spy(_read(str(late)))
        process.wait(JOB_S)
        if mode == "hung":
            findings = json.loads((folder / HANGS).read_text())["findings"]
        else:
            asked = [sys.executable, "-m", "rankcall", "diagnose", "--json", "rankcall-runs/latest"]
            done = subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=False)
            findings = json.loads(done.stdout)["findings"]
    facts = [fact for finding in findings for fact in finding["facts"]]
    causes = {fact["values"]["cause"] for fact in facts if fact["relation"] in NAMED}
    return {
        "cause": name,
        "mode": mode,
        "planted": planted.cause,
        "named": " ".join(sorted(causes)),
        "shares": [round(fact["number"]) for fact in facts if fact["relation"] in NAMED],
        "kinds": [finding["kind"] for finding in findings],
        "seconds": round(time.monotonic() - began, 1),
        "py-spy": peer,
    }


def _py_spy(pid: str) -> str:
    """Return the line at which py-spy sees the main thread."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        spied = subprocess.run(
            [str(_PY_SPY), "dump", "--pid", pid],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        lines = spied.stdout.splitlines()
        main_thread = [n for n, line in enumerate(lines) if "MainThread" in line]
        if main_thread and len(lines) > main_thread[0] + 1:
            return lines[main_thread[0] + 1].strip()
    return ""


def _traceml(planted: Planted) -> str:
    """Return what TraceML says of a job with this cause."""
    with tempfile.TemporaryDirectory(prefix="rankcall-bench-") as folder:
        Path(folder, "job.py").write_text(BEFORE + planted.code + FOR_TRACEML)
        done = subprocess.run(
            [str(_TRACEML), "run", "--nproc-per-node", "2", "--logs-dir", "logs", "job.py"],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PATH": _PATH},
            capture_output=True,
            text=True,
            check=False,
            timeout=JOB_S,
        )
        for summary in Path(folder).glob("logs/*/final_summary.json"):
            diagnosis = json.loads(summary.read_text())["primary_diagnosis"]
            return f"{diagnosis['kind']}: {diagnosis['summary']}"
        return f"no summary: exit status {done.returncode}"


def _endless(name: str) -> float:
    """Return how many s after the last rank came the verdict was kept."""
    with _running(ENDLESS_JOB + ENDLESS[name] + "\n", 3600.0) as (folder, process):
        verdict = folder / HANGS
        _until(verdict.exists, process)
        came = [float(_read(str(file))) for file in folder.glob("came.*")]
        return round(verdict.stat().st_mtime - max(came), 2)


def _until(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + JOB_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the job ended, or did nothing, before that came true")
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main())

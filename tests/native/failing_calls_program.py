"""Runs a phase of rankcall many times, each time with one system call of ours that fails.

usage: failing_calls_program.py LIBRARY FOLDER PHASE CASES [NAME]. The library is preloaded. Each
case runs in a child that is forked after all imports, and prints a line of JSON: what failed, and
what the child did. The first case counts the calls. CASES is how many others there are at most; 0
means each call with each error. NAME: only calls of that name count.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

LIBRARY, FOLDER, PHASE, CASES = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
RUN, LIVE, KEPT = FOLDER / "run", FOLDER / "live", FOLDER / "kept"
os.environ["RANKCALL_SHM"] = str(LIVE)
os.environ["RANKCALL_RUN_DIR"] = str(RUN)
TEMPORARY = FOLDER / "tmp"
TEMPORARY.mkdir(exist_ok=True)
os.environ["TMPDIR"] = str(TEMPORARY)
CACHE = FOLDER / "cache"
os.environ["RANKCALL_CACHE"] = str(CACHE)
ERRORS = (errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EACCES, errno.ENOMEM)

failing = ctypes.CDLL(LIBRARY)
failing.failed_call.restype = ctypes.c_char_p
failing.count_only("".join(sys.argv[5:]).encode())

with_torch = PHASE in ("record", "without", "killed", "run")
if with_torch:  # the others need none of it, and a fork without it is far cheaper
    import _rankcall_hook

    if PHASE not in ("without", "run"):
        os.environ["RANKCALL"] = "1"
        _rankcall_hook.install()
    import torch
    import torch.distributed as dist

    import rankcall.watch

if PHASE == "run":
    import rankcall.cli.run
import rankcall.cli.diagnose  # noqa: E402
import rankcall.cli.exec  # noqa: E402
import rankcall.cli.report  # noqa: E402, F401
from rankcall.analysis.verdicts.finding import Finding  # noqa: E402
from rankcall.analysis.verdicts.verdict import Origin, Verdict  # noqa: E402
from rankcall.cli import main  # noqa: E402
from rankcall.job.keep import keep_verdict  # noqa: E402

if PHASE in ("serve", "page"):
    import serving_in_process

# vfork cannot be replaced by a function, and posix_spawn hides the fork.
subprocess._USE_VFORK = subprocess._USE_POSIX_SPAWN = False  # type: ignore[attr-defined]


def job() -> None:
    """Issue some collectives, and print what they give."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.arange(4.0)
    for _ in range(5):
        dist.all_reduce(tensor)
    dist.barrier()
    group = dist.new_group([0])
    dist.broadcast(tensor, 0, group=group)
    print("result", tensor.tolist(), dist.get_world_size(), flush=True)
    dist.destroy_process_group()


def killed_job() -> None:
    """Leave a live ring behind."""
    job()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def report() -> None:
    """Settle the ring of the killed job, and report and diagnose it."""
    statuses = [main([command, str(RUN)]) for command in ("report", "diagnose")]
    print("statuses", statuses, flush=True)


def verdict() -> None:
    """Keep a verdict with a stack."""
    said = Verdict("run", [Finding("missing", (0,), stops=True)], origin=Origin("x", "b", 1, 1, 1))
    try:
        keep_verdict(RUN, said, {0: "a stack"}, lambda known: True)
    except OSError as error:
        print("OSError", error, file=sys.stderr)
    print("kept", flush=True)


def launch(*launcher: str) -> None:
    """Run a shell below one of our launchers."""
    options = [f"--run-dir={RUN}", "--capture=python"]
    status = main([launcher[0], *options, *launcher[1:], "/bin/sh", "-c", "echo result; exit 7"])
    print("status", status, flush=True)


def serve() -> None:
    """Ask the page for all that it has, twice; the second time, no call fails any more."""
    serving_in_process.ask_for_all(RUN, at_last=stop_failing)


def page() -> None:
    """Show the page to a viewer who asks again until it is answered."""
    with uncounted():
        ended, ends = os.pipe()
        viewer = os.fork()
        if viewer == 0:
            os.close(ends)
            asked = serving_in_process.view(FOLDER / "out", ended)
            (FOLDER / "asked").write_text(asked)
            if not select.select([ended], [], [], 0)[0]:
                os.kill(os.getppid(), signal.SIGINT)
            os._exit(0)
    status = main(["serve", str(RUN), "--port", "0"])
    with uncounted():
        os.close(ends)
        os.waitpid(viewer, 0)
    print("status", status, (FOLDER / "asked").read_text(), flush=True)


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count no calls in this block, which are not rankcall's, and let none of them fail."""
    failing.set_paused(1)
    yield
    failing.set_paused(0)


def stop_failing() -> None:
    """Note what failed, and let all calls succeed from here on."""
    global made
    made = failing.failed_call().decode(), failing.calls_made()
    failing.fail_at(b"/nowhere", 0, 0)


made: tuple[str, int] | None = None  # what failed, and how many calls there were, if it is noted

PHASES: dict[str, Callable[[], None]] = {
    "without": job,
    "record": job,
    "report": report,
    "verdict": verdict,
    "exec": lambda: launch("exec", "--"),
    "run": lambda: launch("run", "--nproc-per-node=1", "--no-python"),
    "serve": serve,
    "page": page,
}
PREPARED = ("report", "serve", "page")  # they begin with what a killed job left
# Of which phases calls count that touch no file. In the others, they may be torchrun's.
NOT_ON_FILES = {"record": "threads", "exec": "sockets", "page": "sockets"}


def in_child(phase: Callable[[], None], number: int, error: int) -> tuple[int, str, str, str, int]:
    """Run a phase in a child; return its status, what it printed, what failed and its calls."""
    files = [FOLDER / name for name in ("out", "err", "calls")]
    pid = os.fork()
    if pid == 0:
        for fd, file in enumerate(files[:2], 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), fd)
        import atexit

        def note() -> None:
            now = failing.failed_call().decode(), failing.calls_made()
            files[2].write_text(json.dumps(made or now))

        atexit.register(note)  # runs last
        folders = [RUN, LIVE, CACHE]
        if PHASE != "run":  # torchrun has files of its own there
            folders.append(TEMPORARY)
        roots = [*map(str, folders), NOT_ON_FILES.get(PHASE, "/nowhere")]
        failing.fail_at("\n".join(roots).encode(), number, error)
        phase()
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    out, err = (file.read_text() for file in files[:2])
    failed, calls = json.loads(files[2].read_text()) if files[2].exists() else ("", 0)
    files[2].unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(status), out, err, failed, calls


def fresh() -> None:
    """Begin with empty folders, or with those of the killed job."""
    for folder in (RUN, LIVE):
        shutil.rmtree(folder, ignore_errors=True)
        if (KEPT / folder.name).exists():
            shutil.copytree(KEPT / folder.name, folder)
    LIVE.mkdir(exist_ok=True, mode=0o700)
    if PHASE == "verdict":
        RUN.mkdir(exist_ok=True)


def run() -> None:
    """Run all cases."""
    fresh()
    if PHASE in PREPARED:
        command = [sys.executable, __file__, LIBRARY, FOLDER, "killed", "0"]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        KEPT.mkdir()
        for folder in (RUN, LIVE):
            if folder.exists():
                shutil.copytree(folder, KEPT / folder.name)
    *_, calls = tell(0, 0)
    chosen = [(number, error) for number in range(1, calls + 1) for error in ERRORS]
    if CASES:
        # Each call has its turn with one error, spread over all calls.
        step = max(1, calls // CASES)
        chosen = [(n, ERRORS[n // step % len(ERRORS)]) for n in range(1, calls + 1, step)]
    for number, error in chosen:
        tell(number, error)


def tell(number: int, error: int) -> tuple[int, str, str, str, int]:
    """Run one case and print it; then look at the run without any failure."""
    fresh()
    done = in_child(PHASES[PHASE], number, error)
    after = in_child(report, 0, 0)[1] if PHASE == "report" else ""
    names = ("status", "out", "err", "failed", "calls")
    line = dict(zip(names, done, strict=True))
    line |= {"number": number, "error": errno.errorcode.get(error, ""), "after": after}
    print(json.dumps(line), flush=True)
    return done


if PHASE == "killed":
    killed_job()
else:
    run()

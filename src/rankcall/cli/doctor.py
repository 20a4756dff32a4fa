"""``rankcall doctor``: say whether recording will work here, on one screen."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import typer

from rankcall.capture.own_ring import MORE_ROOM, ring_sizes
from rankcall.capture.session import check_torch
from rankcall.errors import (
    CaptureUnavailableError,
    CorruptRunError,
    RankcallError,
    local_world_size,
)
from rankcall.file_systems import check_mappable
from rankcall.folders import reason
from rankcall.interpreter import run_command
from rankcall.ring.layout import DEFAULT_SAMPLES, Geometry
from rankcall.run.load import load
from rankcall.run.paths import live_base
from rankcall.whole_numbers import whole_number

__all__ = ["command"]

OK, WEAK, BAD = "ok", "weak", "FAIL"
_TRIAL_S = 60.0  # the job imports torch, which alone takes seconds
_STORE_S = 3.0  # to connect to a store; one that drops packets would take minutes to fail
_RANKS = 8  # on a host whose launcher and devices do not say how many
_TRIAL = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))  # line 5
dist.destroy_process_group()
"""
# The variable that each launcher sets in the environment of its processes.
_LAUNCHERS = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "SLURM_JOB_ID": "Slurm",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "an MPI launcher",
    "RAY_JOB_ID": "Ray",
    "KUBERNETES_SERVICE_HOST": "a pod",
}


@dataclass(frozen=True)
class Check:
    """One line of the result: its subject, its state, and advice."""

    topic: str
    state: str
    text: str


def command() -> None:
    """Say whether recording will work here, and what to do if not.

    Every line begins with ok, weak (recording works, but something is missing) or FAIL. Exits with
    1 if recording will not work.
    """
    states = set()
    for look in (_python, _torch, _recorder, _memory, _stacks, _started, _store, _devices, _trial):
        for check in _looked(look):
            states.add(check.state)
            typer.echo(f"{check.state:5} {check.topic:14} {check.text}")
    if BAD in states:
        typer.echo("recording will not work here: see the lines that begin with FAIL")
        raise typer.Exit(1)
    typer.echo("recording works here: rankcall exec -- COMMAND, with any command that starts ranks")


def _looked(look: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Yield the checks of one look. If the look itself fails, that is one more."""
    try:
        yield from look()
    except Exception as error:
        topic = look.__name__.strip("_")
        yield Check(topic, BAD, f"{type(error).__name__}: {' '.join(str(error).split())}")


def _python() -> Iterator[Check]:
    version = sys.version.split()[0]
    yield Check("python", OK, f"{version} in {sys.prefix}")


def _torch() -> Iterator[Check]:
    try:
        check_torch()
    except RankcallError as error:
        yield Check("torch", BAD, str(error))
        return
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    yield Check("torch", OK, f"{torch.__version__}, built {built}")


def _recorder() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        return
    if os.environ.get("RANKCALL_CAPTURE") == "python":
        text = "recording in Python, which is slower, as RANKCALL_CAPTURE says; unset it for the "
        yield Check("recorder", WEAK, f"{text}native recorder")
        return
    from rankcall.capture.native import RECORDER

    try:
        was_built = RECORDER.path().exists()
        chosen = RECORDER.choose()
        import torch  # noqa: F401  # whose libraries it needs

        RECORDER.load_from(chosen.path)
    except CaptureUnavailableError as error:
        yield Check("recorder", WEAK, f"recording in Python, which is slower: {error}")
        return
    if chosen.is_of_wheel:
        yield Check("recorder", OK, f"native, of the wheel ({chosen.why}): {chosen.path}")
        return
    how = "compiled before" if was_built else "has just been compiled"
    yield Check("recorder", OK, f"native, {how} because {chosen.why}: {chosen.path}")


def _memory() -> Iterator[Check]:
    base = live_base()
    topic = "shared memory"
    if not base.is_dir() or not os.access(base, os.W_OK):
        text = f"{base} cannot be written: rings are kept in the run directory"
        yield Check(topic, WEAK, text)
        return
    try:
        check_mappable(base)
    except OSError as error:
        yield Check(topic, WEAK, f"{reason(error)}: records stay in memory until the end")
        return
    space = shutil.disk_usage(base)
    sizes, (ranks, why) = ring_sizes(Geometry(sample_capacity=DEFAULT_SAMPLES)), _ranks_here()
    fitting = [size for size in sizes if size.file_bytes * ranks <= space.free]
    text = f"{base} has {space.free / 1e6:,.1f} of {space.total / 1e6:,.1f} MB free; the rings of "
    text += f"{ranks} {'rank' if ranks == 1 else 'ranks'} ({why}) take "
    text += f"{sizes[0].file_bytes * ranks / 1e6:,.1f} MB"
    if not fitting:
        yield Check(topic, WEAK, f"{text}: some go to the run directory; {MORE_ROOM}")
    elif fitting[0] != sizes[0]:
        text += f": each ring will hold {fitting[0].capacity:,} records, not {sizes[0].capacity:,}"
        yield Check(topic, WEAK, f"{text}; {MORE_ROOM}")
    else:
        yield Check(topic, OK, text)


def _ranks_here() -> tuple[int, str]:
    """Return how many ranks a job is likely to have on this host, and by what."""
    size = local_world_size()
    if size is not None:
        return size, "as the launcher says"
    if importlib.util.find_spec("torch") is not None:
        import torch

        if torch.cuda.device_count():
            return torch.cuda.device_count(), "one for each GPU"
    return _RANKS, "if a job has so many here"


def _stacks() -> Iterator[Check]:
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    allowed = os.geteuid() == 0 or not scope.exists() or scope.read_text().strip() == "0"
    if spy is None:
        text = (
            "the ranks write their own; for those of stopped ranks: pip install 'rankcall[stacks]'"
        )
        yield Check("stacks", WEAK, text)
    elif not allowed:
        text = "py-spy may not trace other processes (ptrace_scope): the ranks write their own"
        yield Check("stacks", WEAK, text)
    else:
        yield Check("stacks", OK, "py-spy is installed, and may trace the ranks")


def _started() -> Iterator[Check]:
    names = [name for variable, name in _LAUNCHERS.items() if os.environ.get(variable)]
    text = f"this shell is below {' and '.join(names)}" if names else "none: this is a plain shell"
    yield Check("launcher", OK, text)
    line = Path(sysconfig.get_path("purelib")) / "rankcall.pth"
    switch = os.environ.get("RANKCALL")
    if switch == "0":
        yield Check("RANKCALL", BAD, "is 0 here, which switches recording off everywhere")
    elif line.exists() or _torch_calls_us():
        how = "is set: every job is recorded" if switch else "is not set; RANKCALL=1 records a job"
        yield Check("RANKCALL", OK, how)
    else:
        text = f"has no effect: {line} is missing; rankcall run and rankcall exec work without it"
        yield Check("RANKCALL", WEAK, text)


def _torch_calls_us() -> bool:
    """Return whether torch switches recording on at the end of its import."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":  # torch then calls no entry point
        return False
    return any(entry.name == "rankcall" for entry in entry_points(group="torch.backends"))


def _store() -> Iterator[Check]:
    host, named = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not named:
        yield Check("store", OK, "MASTER_ADDR and MASTER_PORT are not set; a launcher sets them")
        return
    port = whole_number(named, most=65535)
    if port is None:
        yield Check("store", BAD, f"MASTER_PORT is {named[:40]!r}, which is no port")
        return
    try:
        socket.create_connection((host, port), _STORE_S).close()
        yield Check("store", OK, f"{host}:{port} answers")
    except OSError as error:
        text = f"{host}:{port} does not answer ({error}); it does once the job's rank 0 runs"
        yield Check("store", WEAK, text)


def _devices() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    if not torch.cuda.is_available():
        yield Check("GPU", OK, "none; Gloo and MPI are recorded with their times")
        return
    count, name = torch.cuda.device_count(), torch.cuda.get_device_name(0)
    text = f"{count} x {name}: each call and its completion are recorded; times on the device "
    yield Check("GPU", OK, text + "are experimental (RANKCALL_DEVICE_TIMES=1)")


def _trial() -> Iterator[Check]:
    """Record a job of one rank as a launcher would start it, and read the records."""
    with tempfile.TemporaryDirectory(prefix="rankcall-doctor-") as scratch:
        folder = Path(scratch)
        (folder / "trial.py").write_text(_TRIAL)
        job = {name: value for name, value in os.environ.items() if name not in _JOB}
        command = run_command("exec", "--run-dir=run", "--")
        try:
            done = subprocess.run(
                [*command, sys.executable, "trial.py"],
                cwd=folder,
                env={**job, "RANKCALL": "1"},
                capture_output=True,
                text=True,
                timeout=_TRIAL_S,
            )
            yield _judged(done, folder / "run")
        except subprocess.TimeoutExpired:
            text = f"a job of one rank did not end in {_TRIAL_S:g} s"
            yield Check("trial", BAD, text)


# These belong to the job that doctor itself runs in.
_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANKCALL_WORKER")


def _judged(done: subprocess.CompletedProcess[str], run_dir: Path) -> Check:
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode:
        return Check("trial", BAD, f"a job of one rank failed: {last}")
    try:
        run = load(run_dir)
        (ring,) = run.rings
        (op,) = run.frame(ring)["op"]
        site, capture = next(iter(ring.tables.sites.values()), None), ring.header.capture
    except (CorruptRunError, RankcallError, OSError, ValueError) as error:
        return Check("trial", BAD, f"a job of one rank left no records ({error}): {last}")
    if site is None or site.line != 5:
        text = f"{op} was recorded, but not the line that issued it: Python "
        return Check("trial", WEAK, f"{text}{sys.version.split()[0]} is not known")
    how = "by the native recorder" if capture == "native" else "in Python"
    return Check("trial", OK, f"{op} of a job of one rank was recorded {how}, with its line")

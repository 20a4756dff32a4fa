"""``rankcall run``: torchrun, with recording armed in every worker.

The engine is torchrun itself, in this process: its options, rendezvous, restarts and exit status.
Recording is armed by environment variables alone (see ``_boot/sitecustomize.py``), so the script
needs no change.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from rankcall import watch
from rankcall.analysis.verdicts.evidence import HANG_AFTER_S
from rankcall.capture.session import check_torch
from rankcall.cli import _aftermath
from rankcall.cli._engine import (
    USAGE_ERROR,
    Job,
    Outcome,
    arming,
    environment,
    parse,
    say,
    torchrun,
    tracing,
)
from rankcall.cli._exits import noting_exits
from rankcall.errors import CaptureUnavailable, CorruptRun
from rankcall.ring.header import Header, parse_header
from rankcall.ring.layout import HEADER_BYTES
from rankcall.run import format_ranks
from rankcall.rundir import (
    RUNS,
    about_job,
    create_run,
    default_run_dir,
    host_name,
    live_dir,
    ring_paths,
    settle,
)

__all__ = ["CONTEXT_SETTINGS", "command"]

# Ours come first; from the first word that is no option on, everything is torchrun's.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class OnHang(str, Enum):
    """What the watcher does after it has said who hangs the job."""

    report = "report"
    abort = "abort"


class Trace(str, Enum):
    """Which collectives are described while the job runs."""

    all = "ALL"
    crossnode = "CROSSNODE"
    none = "NONE"


class Capture(str, Enum):
    """Which recorder the workers use."""

    auto = "auto"
    native = "native"
    python = "python"


def command(
    args: Annotated[list[str], typer.Argument(metavar="SCRIPT", help="What torchrun gets.")],
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Where the records go; else to rankcall-runs/<UTC time>-<script>."),
    ] = None,
    capture: Annotated[
        Capture,
        typer.Option(envvar="RANKCALL_CAPTURE", help="The recorder; auto: native where it builds."),
    ] = Capture.auto,
    hang_after: Annotated[
        float,
        typer.Option(
            envvar="RANKCALL_HANG_AFTER",
            min=0.0,
            help="Seconds in flight before a collective counts as hung; 0: do not watch.",
        ),
    ] = HANG_AFTER_S,
    on_hang: Annotated[
        OnHang,
        typer.Option(
            envvar="RANKCALL_ON_HANG", help="After the verdict: watch on, or end the job."
        ),
    ] = OnHang.report,
    trace: Annotated[
        Trace | None,
        typer.Option(
            case_sensitive=False,
            help="Describe collectives while the job runs, in the run directory's trace/; "
            "RANKCALL_TRACE_SINKS names other sinks.",
        ),
    ] = None,
    history: Annotated[
        bool,
        typer.Option("--history", help="Keep every record, as Parquet in history/ of the run."),
    ] = False,
) -> None:
    """Run a script as torchrun does, and record and watch every collective of every rank.

    The options below come first; what follows is torchrun's: its options
    (--nproc-per-node, -m, --nnodes, ...), the script and the script's own
    arguments. Several nodes make one run where they have the same --rdzv-id,
    or the same --run-dir, on a shared file system.
    """
    # A launcher inside a recorded worker is no worker, and its workers are not that one's children.
    with environment({"RANKCALL_ARM": None, "RANKCALL_WORKER": None}):
        check_torch()
        job = parse(args)
        if job.is_file and not Path(job.script).exists():
            say(f"no such script: {job.script} (for a module: -m, for a program: --no-python)")
            raise typer.Exit(USAGE_ERROR)
        recorder = _prepare(capture.value)
        where = _run_dir(run_dir, job, hang_after)
        before = {path.name for path in ring_paths(where)}
        told_before = _aftermath.verdict_ids(where)
        outcome = Outcome(1)
        variables = {
            **arming(where, recorder, job),
            watch.HANG_AFTER: f"{hang_after:g}",
            watch.ON_HANG: on_hang.value,
            **tracing(trace.value if trace else None, history),
        }
        with environment(variables):
            try:
                with noting_exits(where, host_name()):
                    outcome = torchrun(job.argv)
            finally:
                with _undisturbed():
                    _finish(where, job, before, outcome)
                    _say_why(where, outcome, hang_after or HANG_AFTER_S, told_before)
    raise typer.Exit(outcome.status)


def _prepare(capture: str) -> str:
    """Build the native recorder once, before all workers want it; return the capture they get."""
    if capture == "python":
        return capture
    try:
        from rankcall.capture.native.build import library_path, prebuild

        if not library_path().exists():
            say("building the native recorder, once for this torch and Python")
        prebuild()
    except CaptureUnavailable as error:
        if capture == "native":
            raise
        say(f"{error}; recording with the slower Python capture")
        return "python"
    return capture


def _run_dir(asked: Path | None, job: Job, hang_after: float) -> Path:
    """Make the run directory and return its path; the job starts without one, too."""
    path = asked or _default(job)
    if path.exists() and not path.is_dir():
        say(f"--run-dir {path} is not a directory")
        raise typer.Exit(USAGE_ERROR)
    if job.max_nodes == 1 and ring_paths(path):
        say(f"{path} holds a run already: its records and the new ones will be read as one run")
    import torch

    about = about_job(
        job.argv, torch.__version__, max_nodes=job.max_nodes, nproc_per_node=job.nproc,
        hang_after_s=hang_after,
    )  # fmt: skip
    try:
        create_run(path, about)
    except OSError as error:
        say(f"cannot write the run directory {path}: {error.strerror}; the job runs all the same")
    return path


def _default(job: Job) -> Path:
    """Name a run: by its rendezvous where several nodes have to agree on it, else by the time."""
    path = default_run_dir(job.label)
    if job.max_nodes > 1 and job.rdzv_id:
        script = path.name.partition("-")[2]
        return Path(RUNS) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', job.rdzv_id).strip('.')}-{script}"
    if job.max_nodes > 1:
        say(
            "several nodes and neither --rdzv-id nor --run-dir: "
            "each node's records go to a run directory of its own"
        )
    return _unused(path)


def _unused(path: Path) -> Path:
    """Return ``path``, or with a number behind it where a run of the same second has it."""
    number, candidate = 1, path
    while True:
        try:
            candidate.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            number += 1
            candidate = path.with_name(f"{path.name}-{number}")
        except OSError:
            return candidate  # create_run says why
        else:
            return candidate


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Let no further Ctrl-C or SIGTERM interrupt the moving of the records."""
    kept = {
        each: signal.signal(each, signal.SIG_IGN)
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def _say_why(
    run_dir: Path, outcome: Outcome, hang_after: float, told_before: frozenset[str]
) -> None:
    """Say why workers failed: in our words, or by torchrun's table where we know no better."""
    if outcome.failed:
        why = _aftermath.verdict(run_dir, outcome, hang_after, told_before)
        typer.echo(f"\n{why or outcome.table}", err=True)


def _finish(run_dir: Path, job: Job, before: set[str], outcome: Outcome) -> None:
    """Move the records to the run directory; say where they are and whose are missing."""
    try:
        settle(run_dir)
        headers = _headers(run_dir, before)
        _aftermath.note_ends(run_dir, outcome, headers)
        _summarise(run_dir, job, before, headers)
    except OSError as error:  # the job's own exit status is worth more than this
        say(f"cannot look after the records in {run_dir}: {error.strerror}")


def _headers(run_dir: Path, before: set[str]) -> list[Header]:
    """Read the headers of the rings that this node's workers left."""
    rings = [path for path in ring_paths(run_dir) if path.name not in before]
    return [header for header in map(_header, rings) if header and header.host == host_name()]


def _summarise(run_dir: Path, job: Job, before: set[str], headers: list[Header]) -> None:
    rings = [path for path in ring_paths(run_dir) if path.name not in before]
    stuck = any(path.parent == live_dir(run_dir) for path in rings)
    ranks = sorted({header.rank for header in headers})
    place = run_dir if not stuck or (run_dir / "rings").is_dir() else live_dir(run_dir)
    if ranks:
        say(
            f"recorded rank {format_ranks(ranks)} in {place}; read it with: rankcall report {place}"
        )
    missing = _missing(job, headers)
    if missing:
        say(
            f"no records of {missing}: the process ended before it imported torch, never did, or "
            "was started as python -I, -E or -S (they ignore PYTHONPATH, which arms recording)"
        )


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            return parse_header(file.read(HEADER_BYTES), str(path))
    except (OSError, CorruptRun):
        return None


def _missing(job: Job, headers: list[Header]) -> str:
    """Name the workers of this node's last attempt that left no ring; empty where all did."""
    attempt = max((header.attempt for header in headers), default=0)
    found = {header.rank for header in headers if header.attempt == attempt}
    firsts = [header.rank - header.local_rank for header in headers if header.local_rank >= 0]
    if job.max_nodes == 1:
        first = 0
    elif firsts:
        first = min(firsts)  # a node's ranks are consecutive
    else:
        return f"any of this node's {job.nproc} workers"
    lost = set(range(first, first + job.nproc)) - found
    return f"rank {format_ranks(sorted(lost))}" if lost else ""

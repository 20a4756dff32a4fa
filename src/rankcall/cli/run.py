"""``rankcall run``: torchrun, with recording switched on in every worker.

torchrun itself runs in this process, with its options, rendezvous, restarts and exit status.
Environment variables alone switch recording on (see ``_boot/sitecustomize.py``), so the script
needs no change.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from rankcall.capture.session import check_torch
from rankcall.cli import stderr
from rankcall.cli.common import say
from rankcall.cli.environment import environment
from rankcall.cli.exits import noting_exits
from rankcall.cli.job_options import JobOptions, Reaction, prepare, takes_job_options
from rankcall.cli.outcome import explain_failure, keep_outcome, note_failures, verdict_ids
from rankcall.cli.page import page_of
from rankcall.cli.torchrun import (
    USAGE_ERROR,
    Outcome,
    TorchrunJob,
    arming,
    parse,
    torchrun,
)
from rankcall.imports.node import ask_node, oom_kills
from rankcall.job import notices
from rankcall.process import host_name
from rankcall.ranks import with_noun
from rankcall.ring.layout import Header, read_header
from rankcall.run.paths import (
    RUNS,
    about_job,
    create_run,
    default_run_dir,
    live_dir,
    new_run_dir,
    ring_paths,
)
from rankcall.run.settle import settle

__all__ = ["CONTEXT_SETTINGS", "command"]

T = TypeVar("T")

# torchrun's own limit, if the user gives none. The policy of recoveries ends the job long before.
MAX_RESTARTS = 1000
# rankcall's options come first here (``own_options_first``). torchrun gets all unknown options, and
# everything after the first word that is not an option.
CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def _command(args: list[str], options: JobOptions) -> None:
    """Run a script as torchrun does, and record and watch every collective of every rank.

    The options below and torchrun's (--nproc-per-node, -m, --nnodes, ...)
    come in any order, then the script and the script's arguments. Several
    nodes write one run if they have the same --rdzv-id or the same
    --run-dir, on a shared file system.
    """
    # This launcher may itself run inside a recorded worker. It must not count as that worker.
    with environment({"RANKCALL_WORKER": None, "RANKCALL_PLACES": None}):
        check_torch()
        job = parse(args)
        if job.is_file and not Path(job.script).exists():
            say(f"no such script: {job.script} (for a module: -m, for a program: --no-python)")
            raise typer.Exit(USAGE_ERROR)
        options.check()
        recorder = prepare(options.capture.value)
        chosen_dir = _run_dir(options.run_dir, job, options.hang_after)
        rings_before = {path.name for path in _readable(lambda: ring_paths(chosen_dir))}
        verdicts_before = frozenset(_readable(lambda: verdict_ids(chosen_dir)))
        began, oom_kills_before = time.time(), oom_kills()
        outcome = Outcome(1)
        variables = {**arming(chosen_dir, recorder, job), **options.variables()}
        variables[stderr.FOLDER] = str(chosen_dir.resolve())
        with page_of(chosen_dir, options.serve, options.hang_after), environment(variables):
            try:
                with noting_exits(chosen_dir, host_name()):
                    ours = [*stderr.options_for(job.argv), *_restarts(options)]
                    outcome = torchrun([*ours, *job.argv])
            finally:
                with _undisturbed():
                    stderr.finish()
                    _finish(chosen_dir, job, rings_before, outcome)
                    began_ns = int(began * 1e9)
                    keep_outcome(chosen_dir, outcome.status, began_ns, was_asked=outcome.was_asked)
                    _say_why(chosen_dir, outcome, options.judged_after, verdicts_before)
                    _say_what_the_node_knows(outcome, began, oom_kills_before)
    notices.wait(notices.LAST_S)
    raise typer.Exit(outcome.status)


command = takes_job_options(
    _command,
    Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="torchrun's options, the script and its arguments."),
    ],
)


def _restarts(options: JobOptions) -> list[str]:
    """Return the option that lets torchrun restart workers; one of the user's own comes later."""
    return [f"--max-restarts={MAX_RESTARTS}"] if options.on_hang is Reaction.recover else []


def _run_dir(asked: Path | None, job: TorchrunJob, hang_after: float) -> Path:
    """Make the run directory and return its path. The job starts even if that fails."""
    path = asked or _default(job)
    if job.max_nodes == 1 and _readable(lambda: ring_paths(path)):
        say(f"{path} already has a run: this job becomes a new attempt of it")
    import torch

    about = about_job(
        job.argv,
        torch.__version__,
        max_nodes=job.max_nodes,
        nproc_per_node=job.nproc,
        hang_after_s=hang_after,
    )
    try:
        create_run(path, about)
    except OSError as error:
        say(f"cannot write the run directory {path}: {error.strerror}; the job runs anyway")
    return path


def _readable(look: Callable[[], Collection[T]]) -> Collection[T]:
    """Return what is in the run directory; nothing if it cannot be read: the job starts anyway."""
    try:
        return look()
    except OSError:
        return ()


def _default(job: TorchrunJob) -> Path:
    """Name a run by its rendezvous id if several nodes must agree on a name, else by the time."""
    path = default_run_dir(job.label)
    if job.max_nodes > 1 and job.rdzv_id:
        script = path.name.partition("-")[2]
        return Path(RUNS) / f"{re.sub(r'[^A-Za-z0-9_.-]+', '_', job.rdzv_id).strip('.')}-{script}"
    if job.max_nodes > 1:
        say(
            "several nodes and neither --rdzv-id nor --run-dir: "
            "each node writes a run directory of its own"
        )
    return new_run_dir(path)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM, so that they do not interrupt the moving of the records."""
    handlers = {
        number: signal.signal(number, signal.SIG_IGN)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _say_why(
    run_dir: Path, outcome: Outcome, hang_after: float, verdicts_before: frozenset[str]
) -> None:
    """Print why workers failed: rankcall's verdict if there is one, or else torchrun's table.

    A job that somebody ended may have hung before.
    """
    if outcome.failed or outcome.was_asked:
        reason = explain_failure(run_dir, outcome, hang_after, verdicts_before) or outcome.table
        if reason:
            typer.echo(f"\n{reason}", err=True)


def _say_what_the_node_knows(outcome: Outcome, began: float, oom_kills_before: int) -> None:
    """If workers failed, print what the kernel of this node has reported since the job began."""
    if outcome.failed:
        node = ask_node(began, oom_kills_before)
        if node.is_news:
            typer.echo(f"\n{node.text()}", err=True)


def _finish(run_dir: Path, job: TorchrunJob, rings_before: set[str], outcome: Outcome) -> None:
    """Move the records to the run directory; print their path and the ranks without records."""
    try:
        settle(run_dir)
        headers = _headers(run_dir, rings_before)
        note_failures(run_dir, outcome, headers)
        _say_what_is_recorded(run_dir, rings_before, headers)
        missing = _missing(job, headers) if outcome.has_run else ""
        if missing:
            say(
                f"no records of {missing}: the process never created a process group, or was "
                "started as python -I, -E or -S (they ignore PYTHONPATH, which switches recording "
                "on)"
            )
    except OSError as error:  # must not replace the job's own exit status
        say(f"cannot move the records in {run_dir}: {error.strerror}")


def _headers(run_dir: Path, rings_before: set[str]) -> list[Header]:
    """Read the headers of the rings that this node's workers left."""
    rings = [path for path in ring_paths(run_dir) if path.name not in rings_before]
    return [header for header in map(read_header, rings) if header and header.host == host_name()]


def _say_what_is_recorded(run_dir: Path, rings_before: set[str], headers: list[Header]) -> None:
    rings = [path for path in ring_paths(run_dir) if path.name not in rings_before]
    stuck = any(path.parent == live_dir(run_dir) for path in rings)
    ranks = sorted({header.rank for header in headers})
    place = run_dir if not stuck or (run_dir / "rings").is_dir() else live_dir(run_dir)
    if ranks:
        say(f"recorded {with_noun(ranks)} in {place}; read it with: rankcall report {place}")


def _missing(job: TorchrunJob, headers: list[Header]) -> str:
    """Name the workers of this node's last attempt that left no ring; "" if all left one."""
    attempt = max((header.attempt for header in headers), default=0)
    # A node may have other ranks in each attempt.
    last = [header for header in headers if header.attempt == attempt]
    recorded = {header.rank for header in last}
    firsts = [header.rank - header.local_rank for header in last if header.local_rank >= 0]
    if job.max_nodes == 1:
        first = 0
    elif firsts:
        first = min(firsts)  # a node's ranks are consecutive
    else:
        return f"any of this node's {job.nproc} workers"
    missing = set(range(first, first + job.nproc)) - recorded
    return with_noun(missing) if missing else ""

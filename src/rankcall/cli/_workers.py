"""Run torchrun in this process, and note how each of its workers ends.

A worker is a child of the launcher to which torchrun gave a RANK. A pidfd of each worker wakes one
thread when the worker ends. The thread reads the exit status and leaves it there for torchrun,
which reaps the worker. If torchrun was faster, the status is gone, and it is noted as unknown.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import typer

from rankcall.analysis.verdicts import diagnose
from rankcall.cli import say
from rankcall.errors import RankcallError
from rankcall.report import terminal as diagnosis_report
from rankcall.ring import Header
from rankcall.run.load import Run, load
from rankcall.run.outcomes import id_of, kept_hangs, text_of
from rankcall.run.settle import LAUNCHER, Exit, note_exit, read_exits
from rankcall.watch import ABORT_STATUS

# Run torchrun in this process: parse its arguments, set the environment, keep its exit status.


BOOT = Path(__file__).resolve().parents[1] / "_boot"
OPTIONS = (
    "--run-dir",
    "--capture",
    "--trace",
    "--history",
    "--hang-after",
    "--on-hang",
    "--collect-to",
    "--serve",
)  # rankcall's own options; all others are torchrun's
USAGE_ERROR = 2  # the exit status that argparse and click use


@dataclass(frozen=True)
class Job:
    """A job as torchrun's arguments describe it."""

    argv: tuple[str, ...]
    script: str
    is_file: bool  # the script is a Python file, not a module or another program
    max_nodes: int
    nproc: int
    rdzv_id: str | None
    local_addr: str | None

    @property
    def label(self) -> str:
        """The part of a run's name that comes from the script."""
        return self.script if "/" in self.script or self.is_file else self.script.replace(".", "-")


def _refuse(message: str) -> NoReturn:
    """Exit with a message of one line. argparse would print torchrun's two dozen options first."""
    own_options = [name for name in OPTIONS if name in message]
    hint = ""
    if own_options:
        hint = f" ({own_options[0]} is rankcall's: it comes before torchrun's options)"
    say(f"torchrun does not take these arguments: {message}{hint}")
    raise typer.Exit(USAGE_ERROR)


def parse(argv: Sequence[str]) -> Job:
    """Parse torchrun's arguments with torchrun's own parser. Exits with 2 if they are wrong."""
    from torch.distributed import run

    parser = run.get_args_parser()
    parser.error = _refuse  # type: ignore[method-assign]
    args = parser.parse_args(list(argv))
    try:
        _, max_nodes = run.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        _refuse(f"--nnodes {args.nnodes} is neither a number nor MIN:MAX")
    try:
        nproc = run.determine_local_world_size(args.nproc_per_node)
    except (ValueError, RuntimeError) as error:
        _refuse(f"--nproc-per-node {args.nproc_per_node}: {error}")
    _point_out_own_options(args.training_script, args.training_script_args)
    return Job(
        argv=tuple(argv),
        script=args.training_script,
        is_file=not (args.module or args.no_python) or bool(args.run_path),
        max_nodes=max_nodes,
        nproc=nproc,
        rdzv_id=None if args.rdzv_id == "none" or args.standalone else args.rdzv_id,
        local_addr=args.local_addr,
    )


def _point_out_own_options(script: str, script_args: Sequence[str]) -> None:
    """Say which of the script's arguments are named like options of rankcall's."""
    given = [argument.partition("=")[0] for argument in script_args]
    for option in OPTIONS:
        if option in given:
            say(
                f"{option} goes to the script, because it comes after {script}. For rankcall's "
                f"{option}, write: rankcall run {option} ... {script}"
            )


def arming(run_dir: Path, capture: str, job: Job) -> dict[str, str]:
    """Return the environment variables that make every worker of this process record."""
    variables = {
        **hooking(),
        "RANKCALL_SETTLES": str(run_dir.resolve()),
        "RANKCALL_CAPTURE": capture,
        "RANKCALL_RUN_DIR": str(run_dir.resolve()),
    }
    if job.local_addr and not os.environ.get("RANKCALL_HOST"):
        variables["RANKCALL_HOST"] = job.local_addr
    return variables


def hooking() -> dict[str, str]:
    """Return the environment variables that load the hook in every Python below this process.

    If ``RANKCALL`` is 0, it stays so: that switches recording off everywhere.
    """
    path = os.environ.get("PYTHONPATH")
    return {
        # An empty entry would put the working directory on every worker's path.
        "PYTHONPATH": f"{BOOT}{os.pathsep}{path}" if path else str(BOOT),
        "RANKCALL": os.environ.get("RANKCALL") or "1",
    }


def tracing(mode: str | None, history: bool) -> dict[str, str]:
    """Return the environment variables that make every worker trace, or keep its history."""
    variables = {} if mode is None else {"RANKCALL_TRACE": "1", "TORCH_DISTRIBUTED_TRACING": mode}
    return {**variables, **({"RANKCALL_HISTORY": "1"} if history else {})}


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None removes one), and restore them at the end."""
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(frozen=True)
class Outcome:
    """How torchrun ended. ``failed``: this node's workers that failed, by (rank, pid)."""

    status: int
    failed: Mapping[tuple[int, int], int] = field(default_factory=dict)  # exit codes; < 0: signals
    table: str = ""  # torchrun's table of failed workers


def torchrun(argv: Sequence[str]) -> Outcome:
    """Run torchrun in this process. Errors go to stderr, except failed workers."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(list(argv))
        return Outcome(0)
    except ChildFailedError as failed:
        codes = {(rank, failure.pid): failure.exitcode for rank, failure in failed.failures.items()}
        return Outcome(1, codes, str(failed))
    except SignalException as ended:
        say(f"the job was ended by {ended.sigval.name}")
    except KeyboardInterrupt:
        say("the job was interrupted before its workers ran")
    except Exception as error:
        reason = " ".join(str(error).split())
        say(f"torchrun could not run the job: {type(error).__name__}: {reason}")
    return Outcome(1)


_POLL_S = 0.1  # a worker needs longer than that to import torch
_PEEK = os.WEXITED | os.WNOHANG | os.WNOWAIT
_TERMINATED = -15  # torchrun ends the remaining workers with SIGTERM, and some with SIGKILL
_ENDED_BY_TORCHRUN = (_TERMINATED, -9)
_TO_STOP = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@dataclass(frozen=True)
class _Worker:
    pid: int
    rank: int
    attempt: int


class ExitWatch:
    """Watches the children of this process, from its own thread."""

    def __init__(self, run_dir: Path, host: str) -> None:
        self._run_dir, self._host = run_dir, host
        self._known: set[int] = set()
        self._stop_noted = False  # the launcher got a signal to stop, and its workers end with it
        self._failed = False  # a worker has failed, so torchrun ends the others
        self._stopping = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._thread = threading.Thread(target=self._run, name="rankcall-exits", daemon=True)

    def start(self) -> None:
        """Begin to watch. Call it on the main thread, because Python requires that for signals."""
        reading, self._signals = socket.socketpair()
        for end in (reading, self._signals):
            end.setblocking(False)
        self._selector.register(reading, selectors.EVENT_READ)
        # Python writes one byte into the descriptor for each signal that arrives.
        self._wakeup_before = signal.set_wakeup_fd(
            self._signals.fileno(), warn_on_full_buffer=False
        )
        self._thread.start()

    def stop(self) -> None:
        """Note the workers that ended since the last poll, and stop watching."""
        signal.set_wakeup_fd(self._wakeup_before)
        self._stopping.set()
        self._thread.join(timeout=5)
        self._signals.close()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._poll(_POLL_S)
            self._poll(0)
        except OSError:
            return  # no free descriptor, or a kernel without pidfds; the job goes on
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is None:
                    key.fileobj.close()  # type: ignore[union-attr]
                else:
                    os.close(key.fd)
            self._selector.close()

    def _poll(self, seconds: float) -> None:
        for pid in _children() - self._known:
            worker = _worker(pid)
            if worker is not None:
                self._known.add(pid)
                try:
                    self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, worker)
                except ProcessLookupError:
                    self._note(worker)
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._note_signals(os.read(key.fd, 64))
            else:
                self._note(key.data)
                self._forget(key.fd)

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)

    def _note_signals(self, arrived: bytes) -> None:
        """Note that the launcher got a signal to stop, which is why its workers end."""
        for number in _TO_STOP.intersection(arrived):
            if not self._stop_noted:
                self._stop_noted = True
                self._write(LAUNCHER, 0, os.getpid(), -number)

    def _note(self, worker: _Worker) -> None:
        """Note a worker's exit. After the job, ``note_failures`` adds codes that torchrun knows."""
        try:
            status = os.waitid(os.P_PID, worker.pid, _PEEK)
        except ChildProcessError:  # torchrun has reaped the worker already
            self._write(worker.rank, worker.attempt, worker.pid, None)
            return
        if status is None:
            return
        code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        by_launcher = self._failed and code in _ENDED_BY_TORCHRUN
        self._failed = self._failed or code != 0
        self._write(worker.rank, worker.attempt, worker.pid, code, by_launcher=by_launcher)

    def _write(
        self, rank: int, attempt: int, pid: int, code: int | None, *, by_launcher: bool = False
    ) -> None:
        ended = Exit(rank, attempt, self._host, pid, code, time.time_ns(), by_launcher)
        with contextlib.suppress(OSError):  # the run directory cannot be written: the note is lost
            note_exit(self._run_dir, ended)


def _children() -> set[int]:
    """Return the pids of this process's children; empty if the kernel does not list them."""
    children: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            children.update(map(int, (task / "children").read_text().split()))
    return children


def _worker(pid: int) -> _Worker | None:
    """Return the worker that a child is, or None if it is not a worker, or not yet."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition(b"=") for entry in environ.split(b"\0"))
    values = {name: value for name, _, value in pairs if name in _WANTED}
    try:
        rank, attempt = (int(values[name]) for name in _WANTED)
    except (KeyError, ValueError):
        return None
    return _Worker(pid, rank, attempt)


_WANTED = (b"RANK", b"TORCHELASTIC_RESTART_COUNT")


@contextlib.contextmanager
def noting_exits(run_dir: Path, host: str) -> Iterator[ExitWatch]:
    """Note how the workers end, until the end of the block."""
    watch = ExitWatch(run_dir, host)
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


# --- after the job ---


def note_failures(run_dir: Path, outcome: Outcome, headers: Sequence[Header]) -> None:
    """Note in the run the exit codes that only torchrun has read.

    Args:
        run_dir: The run directory.
        outcome: How torchrun ended. It counts workers as failed that it ended itself after another
            worker had failed.
        headers: The headers of this node's rings.

    Raises:
        OSError: The run directory cannot be written.
    """
    noted = {(known.rank, known.pid) for known in read_exits(run_dir) if known.code is not None}
    others_failed = any(code != _TERMINATED for code in outcome.failed.values())
    for header in headers:
        code = outcome.failed.get((header.rank, header.pid))
        if code is not None and (header.rank, header.pid) not in noted:
            by_launcher = others_failed and code == _TERMINATED
            process = header.rank, header.attempt, header.host, header.pid
            note_exit(run_dir, Exit(*process, code, header.last_sign_epoch_ns, by_launcher))


def note_own_exit(run: Run, pid: int, code: int) -> None:
    """Note how a child of this process ended, if it is itself a rank of the run.

    The note is lost if the run directory cannot be written.
    """
    for header in (head.header for head in run.heads):
        if header.pid == pid and header.process_state() == "gone":  # not "unknown": of this host
            process = header.rank, header.attempt, header.host, header.pid
            with contextlib.suppress(OSError):
                note_exit(run.path, Exit(*process, code, time.time_ns()))


def verdict_ids(run_dir: Path) -> frozenset[str]:
    """Return the ids of the verdicts that a run has now."""
    return frozenset(map(id_of, kept_hangs(run_dir)))


def explain_failure(
    run_dir: Path, outcome: Outcome, hang_after: float, earlier_ids: Collection[str]
) -> str:
    """Return a text that says why workers failed.

    Args:
        run_dir: The run directory.
        outcome: How torchrun ended.
        hang_after: Seconds after which a call counts as hung.
        earlier_ids: The ids of the verdicts that the run had before the job.

    Returns:
        The text, or "" if torchrun's own table says as much.
    """
    if ABORT_STATUS in outcome.failed.values():
        new = [kept for kept in kept_hangs(run_dir) if id_of(kept) not in earlier_ids]
        if new:
            return f"{text_of(new[-1])}\nthe watcher ended the job: {new[-1]['place']}"
    try:
        diagnosis = diagnose(load(run_dir), hang_after)
    except (RankcallError, OSError):
        return ""
    return diagnosis_report.diagnosis_text(diagnosis) if diagnosis.findings else ""

"""``rankcall exec``: run any command, and record every process below it that creates a group."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from rankcall._native import cache_dir
from rankcall._prebuilt import FOLDER
from rankcall.analysis.verdicts.ends import ASKED
from rankcall.cli import stderr
from rankcall.cli.common import open_run, say
from rankcall.cli.environment import environment, hooking
from rankcall.cli.job_options import JobOptions, Reaction, prepare, takes_job_options
from rankcall.cli.outcome import explain_failure, keep_outcome, note_own_exit
from rankcall.cli.page import page_of
from rankcall.cli.torchrun import Outcome
from rankcall.errors import RankcallError
from rankcall.folders import make_folder
from rankcall.job import notices
from rankcall.ranks import with_noun
from rankcall.run.paths import default_run_dir, new_run_dir
from rankcall.run.stderr_tails import STDERR, take_tails

__all__ = ["CONTEXT_SETTINGS", "command"]

# Everything after the first word that is not an option of rankcall's belongs to the command.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # the exit statuses of shells
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)  # the command gets these from the terminal itself
_PLACES = "places"
_MOST_PLACES = 1 << 20  # bytes of the file in which ranks note their runs


def _command(args: list[str], options: JobOptions) -> None:
    """Run a command, and record and watch every rank that it starts.

    The command may be any launcher or a Python script: rankcall exec -- accelerate launch train.py.
    Each process below it that creates a process group is recorded. The command keeps its terminal
    and its exit status, and gets the signals that this process gets.
    """
    began_ns = time.time_ns()
    options.check()
    _check(args[0])
    recorder = options.capture.value
    if not _has_recorder():
        with contextlib.suppress(RankcallError):  # without torch here, the ranks say what is wrong
            recorder = prepare(recorder)
    needs_run = bool(options.serve) or options.on_hang is Reaction.recover
    run_dir = _planned_run_dir(args, options) if needs_run else options.run_dir
    with _scratch() as scratch:
        variables = {
            **hooking(),
            "RANKCALL_CAPTURE": recorder,
            "RANKCALL_PLACES": str(scratch / _PLACES) if scratch else None,
            "RANKCALL_RUN_DIR": str(run_dir.absolute()) if run_dir else None,
            "RANKCALL_WORKER": None,
            "RANKCALL_SETTLES": None,
            stderr.FOLDER: str(scratch) if scratch else None,
            **options.variables(),
        }
        if run_dir is None and os.environ.get("RANKCALL_RUN_DIR"):
            del variables["RANKCALL_RUN_DIR"]
        with _page(run_dir, options), environment(variables):
            pid, status = _run(_keeping_stderr(args))
        receiver = {notices.NOTIFY: options.notify or None}
        with _ignoring(*_FROM_TERMINAL, *_FORWARDED), environment(receiver):
            if scratch and not _finish(scratch, pid, status, options.judged_after, began_ns):
                _tell_without_records(run_dir, status, began_ns)
    notices.wait(notices.LAST_S)
    if status < 0:
        _end_like(-status)
    raise typer.Exit(status)


command = takes_job_options(
    _command,
    Annotated[list[str], typer.Argument(metavar="COMMAND", help="The command and its arguments.")],
)


def _planned_run_dir(args: list[str], options: JobOptions) -> Path:
    """Make the run directory before there is a rank, and return its path.

    Otherwise the ranks choose the run, because only they know who is rank 0 and where it works. A
    live page begins before there is a rank, and torchrun's agent, which decides about restarts,
    is none.
    """
    asked = options.run_dir or os.environ.get("RANKCALL_RUN_DIR")
    if not asked:
        script = next((word for word in args if word.endswith(".py")), args[0])
        return new_run_dir(default_run_dir(script))
    path = Path(asked)
    with contextlib.suppress(OSError):  # the ranks say why it cannot be made
        if not path.is_dir():
            make_folder(path, private=False)
    return path


def _page(run_dir: Path | None, options: JobOptions) -> contextlib.AbstractContextManager[None]:
    if run_dir is None:
        return contextlib.nullcontext()
    return page_of(run_dir, options.serve, options.hang_after)


def _has_recorder() -> bool:
    """Return whether there is a native recorder. Which one fits only torch knows."""
    for folder in (cache_dir(), FOLDER):
        with contextlib.suppress(OSError):  # whatever the cache is on does not answer
            if any(folder.glob("rankcall_recorder-*.so")):
                return True
    return False


def _check(program: str) -> None:
    """Exit as a shell does if there is no such program."""
    if shutil.which(program) is None:
        is_file = Path(program).is_file()
        say(f"{program}: {'not executable' if is_file else 'command not found'}")
        raise typer.Exit(_NOT_EXECUTABLE if is_file else _NOT_FOUND)


def _keeping_stderr(args: list[str]) -> list[str]:
    """Return the command, with the option that keeps the ranks' stderr if it is a torchrun.

    It must be the one beside this Python: another one would not find our entry point, and fail.
    """
    program = Path(shutil.which(args[0]) or args[0])
    head = 1 if program.name == "torchrun" else 0
    if program.name.startswith("python") and args[1:3] == ["-m", "torch.distributed.run"]:
        head = 3
    if not head or program.parent.resolve() != Path(sys.executable).parent.resolve():
        return args
    return [*args[:head], *stderr.options_for(args[head:]), *args[head:]]


def _run(args: list[str]) -> tuple[int, int]:
    """Run the command; return its pid and its exit code, negative if a signal ended it."""
    child: list[subprocess.Popen[bytes]] = []
    pending: list[int] = []

    # A signal can come between the handler and the child's pid. It is forwarded afterwards.
    def forward(number: int, frame: FrameType | None) -> None:
        if child:
            child[0].send_signal(number)
        else:
            pending.append(number)

    with _handling(forward, *_FORWARDED), _handling(_ignore, *_FROM_TERMINAL):
        try:
            child.append(subprocess.Popen(args))
        except OSError as error:
            say(f"{args[0]}: {error.strerror}")
            return 0, _NOT_EXECUTABLE
        for number in pending:
            child[0].send_signal(number)
        return child[0].pid, child[0].wait()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike SIG_IGN, a command that this process starts does not inherit it."""


@contextlib.contextmanager
def _handling(handler: object, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals, unless they are ignored: nohup sets that for the command, too."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def _ignoring(*numbers: signal.Signals) -> contextlib.AbstractContextManager[None]:
    return _handling(signal.SIG_IGN, *numbers)


def _end_like(number: int) -> None:
    """End by the signal that ended the command, so that the caller sees the same status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core of this process would be misleading
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _scratch() -> Iterator[Path | None]:
    """Make a folder for what the ranks note. Without one, the command runs all the same.

    A folder that cannot be removed is left: how the command ended is known by then.
    """
    scratch = None
    try:
        scratch = Path(tempfile.mkdtemp(prefix="rankcall-exec-"))
        (scratch / _PLACES).touch(mode=0o600)
        usable: Path | None = scratch
    except OSError as error:
        say(f"no temporary folder can be made ({error.strerror}): not told where the records are")
        usable = None
    try:
        yield usable
    finally:
        # rmtree lets some errors out in spite of ignore_errors.
        with contextlib.suppress(OSError):
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)


def _finish(scratch: Path, pid: int, status: int, hang_after: float, began_ns: int) -> bool:
    """Report on the runs that the ranks noted, and return whether there are any.

    A failure must not replace the command's status.
    """
    noted: list[Path] = []
    try:
        noted = _places(scratch / _PLACES)
        for place in noted:
            with contextlib.suppress(OSError):
                take_tails(scratch / STDERR, place)
        _report(noted, pid, status, hang_after, began_ns)
    except OSError as error:
        say(f"not known where the records are: {error.strerror}")
    return bool(noted)


def _tell_without_records(planned: Path | None, status: int, began_ns: int) -> None:
    """Write how the command ended into the run that was asked for, although no rank has come."""
    asked = planned or os.environ.get("RANKCALL_RUN_DIR")
    if not asked:
        return
    run_dir = Path(asked)
    with contextlib.suppress(OSError):
        make_folder(run_dir, private=False)
    keep_outcome(run_dir, status, began_ns, was_asked=status in ASKED)


def _places(noted: Path) -> list[Path]:
    """Return the runs that ranks on this host have noted, in their order."""
    with noted.open("rb") as file:
        paths = file.read(_MOST_PLACES).split(b"\0")[:-1]
    return [Path(os.fsdecode(path)) for path in dict.fromkeys(paths)]


def _report(places: list[Path], pid: int, status: int, hang_after: float, began_ns: int) -> None:
    """Move what killed ranks left into their runs, and say where the records are.

    ``status`` is that of the process ``pid``. If that is a rank, its run gets a note of it.
    """
    if not places:
        say(
            "nothing was recorded: no process below the command created a process group, or each "
            "was started as python -I, -E or -S, or without this environment"
        )
    for place in places:
        try:
            run = open_run(place)
        except (OSError, RankcallError) as error:
            say(f"the records in {place} cannot be read: {error}")
            continue
        note_own_exit(run, pid, status)
        keep_outcome(run.path, status, began_ns, was_asked=status in ASKED)
        ranks = sorted({head.header.rank for head in run.heads})
        where = run.path  # another one, if a rank could not make the run directory
        say(f"recorded {with_noun(ranks)} in {where}; read it with: rankcall report {where}")
        reason = explain_failure(where, Outcome(status), hang_after, ()) if status else ""
        if reason:
            typer.echo(f"\n{reason}", err=True)

"""Run torchrun in this process: parse its arguments, and tell how its workers ended."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import typer

from rankcall.cli.common import say
from rankcall.cli.environment import hooking
from rankcall.cli.job_options import FLAGS, OPTIONS
from rankcall.recovery.agent import install
from rankcall.recovery.supervisor import JobStopped, NodeBarred
from rankcall.run.outcome import REPEATS

USAGE_ERROR = 2  # the exit status that argparse and click use
TERMINATED = -15  # torchrun ends the remaining workers with SIGTERM, and some with SIGKILL


@dataclass(frozen=True)
class TorchrunJob:
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


def own_options_first(argv: Sequence[str]) -> list[str]:
    """Move rankcall's options from among torchrun's to the front, where the command reads them.

    The first word that is no option, nor the value of one, is the script: all behind it is the
    script's own. Only torchrun's parser knows which of its options take a value.
    """
    named = [word.partition("=")[0] for word in argv]
    if not set(named) & set(OPTIONS):
        return list(argv)
    try:
        from torch.distributed import run
    except ImportError:  # the command says so
        return list(argv)
    actions = run.get_args_parser()._actions
    sizes = {
        name: 1 if action.nargs == 0 else 2 for action in actions for name in action.option_strings
    }
    ours: list[str] = []
    theirs: list[str] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "--":
        name, has_value, _ = argv[at].partition("=")
        is_ours = name in OPTIONS and name not in sizes
        if has_value or name in FLAGS:
            size = 1
        elif is_ours:
            size = 2
        else:  # argparse takes the beginning of a name for the whole
            size = next((size for full, size in sizes.items() if full.startswith(name)), 1)
        (ours if is_ours else theirs).extend(argv[at : at + size])
        at += size
    return [*ours, *theirs, *argv[at:]]


def parse(argv: Sequence[str]) -> TorchrunJob:
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
    return TorchrunJob(
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


def arming(run_dir: Path, capture: str, job: TorchrunJob) -> dict[str, str]:
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


@dataclass(frozen=True)
class Outcome:
    """How torchrun ended.

    ``failed`` has this node's workers that failed, by (rank, pid). ``has_run`` is false if the
    launcher may have ended before it started any worker.
    """

    status: int
    failed: Mapping[tuple[int, int], int] = field(default_factory=dict)  # exit codes; < 0: signals
    table: str = ""  # torchrun's table of failed workers
    was_asked: bool = False  # to end, by a signal or Ctrl-C
    has_run: bool = True


def torchrun(argv: Sequence[str]) -> Outcome:
    """Run torchrun in this process. Errors go to stderr, except failed workers."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    install()
    try:
        main(list(argv))
        return Outcome(0)
    except ChildFailedError as failed:
        codes = {(rank, failure.pid): failure.exitcode for rank, failure in failed.failures.items()}
        return Outcome(1, codes, str(failed))
    except JobStopped as stopped:
        return Outcome(REPEATS, stopped.codes)
    except NodeBarred as barred:
        return Outcome(int(barred.code or 1), has_run=False)
    except SignalException as ended:
        say(f"the job was ended by {ended.sigval.name}")
        return Outcome(1, was_asked=True)
    except KeyboardInterrupt:
        say("the job was interrupted before its workers ran")
        return Outcome(1, was_asked=True)
    except Exception as error:
        reason = " ".join(str(error).split())
        say(f"torchrun could not run the job: {type(error).__name__}: {reason}")
    return Outcome(1, has_run=False)

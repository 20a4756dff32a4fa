"""The options that ``rankcall run`` and ``rankcall exec`` share: defined once, as ``JobOptions``.

``takes_job_options`` gives them to a command. ``variables`` turns them into the environment
variables that the ranks read.
"""

from __future__ import annotations

import inspect
import stat
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rankcall import watch
from rankcall.analysis.verdicts.lasting import HANG_AFTER_S
from rankcall.cli.common import COMPILING, say, working
from rankcall.errors import CaptureUnavailableError
from rankcall.job.evidence import COLLECT_TO
from rankcall.job.notices import NOTIFY, check_receiver
from rankcall.job.sealing import job_secret
from rankcall.job.uploads import check_url
from rankcall.recovery.policy import MAX_RECOVERIES, WINDOW_S
from rankcall.recovery.supervisor import (
    BAR_AFTER,
    BAR_AFTER_VARIABLE,
    HEALTH_VARIABLE,
    MAX_VARIABLE,
    WINDOW_VARIABLE,
)


class Reaction(str, Enum):
    """The watcher's action after a verdict."""

    report = "report"
    abort = "abort"
    recover = "recover"


class TraceMode(str, Enum):
    """The collectives that are described while the job runs."""

    all = "ALL"
    crossnode = "CROSSNODE"
    none = "NONE"


class Recorder(str, Enum):
    """The recorder that the ranks use."""

    auto = "auto"
    native = "native"
    python = "python"


@dataclass(frozen=True)
class JobOptions:
    """The options of a command that starts a job, with their help texts."""

    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The directory for the records. Without it: rankcall-runs/<UTC time>-<script>. "
            "With exec, rank 0 chooses it in its own working directory.",
        ),
    ] = None
    capture: Annotated[
        Recorder,
        typer.Option(
            envvar="RANKCALL_CAPTURE", help="The recorder; auto: the native one if it can be built."
        ),
    ] = Recorder.auto
    hang_after: Annotated[
        float,
        typer.Option(
            envvar="RANKCALL_HANG_AFTER",
            metavar="SECONDS",
            min=0.0,
            help="Seconds in flight before a collective counts as hung; 0: do not watch.",
        ),
    ] = HANG_AFTER_S
    on_hang: Annotated[
        Reaction,
        typer.Option(
            envvar="RANKCALL_ON_HANG",
            help="After a verdict: go on watching, end the job, or have torchrun restart its "
            "workers.",
        ),
    ] = Reaction.report
    max_recoveries: Annotated[
        int,
        typer.Option(
            envvar=MAX_VARIABLE,
            metavar="N",
            min=0,
            help="With --on-hang recover: restart at most so often within the window.",
        ),
    ] = MAX_RECOVERIES
    recovery_window: Annotated[
        float,
        typer.Option(
            envvar=WINDOW_VARIABLE,
            metavar="SECONDS",
            min=0.0,
            help="The window for --max-recoveries.",
        ),
    ] = WINDOW_S
    bar_after: Annotated[
        int,
        typer.Option(
            envvar=BAR_AFTER_VARIABLE,
            metavar="K",
            min=0,
            help="With --on-hang recover and --nnodes MIN:MAX: a node leaves the job once its "
            "ranks were the culprits so often; 0: never.",
        ),
    ] = BAR_AFTER
    health_check: Annotated[
        str,
        typer.Option(
            envvar=HEALTH_VARIABLE,
            metavar="COMMAND",
            help="With --on-hang recover: check each node before each attempt, with this command "
            "and rankcall's own checks (true: only those). A node that fails leaves the job, if it "
            "goes on without it.",
        ),
    ] = ""
    notify: Annotated[
        str,
        typer.Option(
            envvar=NOTIFY,
            metavar="URL",
            help="Tell a program there of verdicts, restarts and the end of the job, by POST; "
            "kubeflow: the status of the TrainJob.",
        ),
    ] = ""
    collect_to: Annotated[
        str,
        typer.Option(
            envvar=COLLECT_TO,
            metavar="URL",
            help="Write the newest records of each node there at a verdict and at the end, by "
            "fsspec.",
        ),
    ] = ""
    trace: Annotated[
        TraceMode | None,
        typer.Option(
            case_sensitive=False,
            help="Describe collectives while the job runs, in trace/ of the run directory; "
            "RANKCALL_TRACE_SINKS names other sinks.",
        ),
    ] = None
    history: Annotated[
        bool,
        typer.Option(
            "--history", help="Keep every record, as Parquet in history/ of the run directory."
        ),
    ] = False
    serve: Annotated[
        str,
        typer.Option(
            envvar="RANKCALL_SERVE",
            metavar="[HOST:]PORT",
            help="Show the job on a live page while it runs; port 0 takes a free one.",
        ),
    ] = ""

    @property
    def judged_after(self) -> float:
        """The threshold for a verdict after the job, s: without a watcher, the usual one."""
        return self.hang_after or HANG_AFTER_S

    def check(self) -> None:
        """Exit with 2, or raise ``RankcallError``, if the job could not be started like this."""
        if self.run_dir is not None and _is_taken(self.run_dir):
            say(f"--run-dir {self.run_dir} is not a directory")
            raise typer.Exit(2)
        if self.collect_to:
            check_url(self.collect_to)
        if self.notify:
            check_receiver(self.notify)
        job_secret()  # a secret that no rank could use is the user's mistake

    def variables(self) -> dict[str, str]:
        """Return the environment variables for the ranks, except the run's directory."""
        variables = {
            watch.HANG_AFTER: f"{self.hang_after:g}",
            watch.ON_HANG: self.on_hang.value,
        }
        if self.on_hang is Reaction.recover:
            variables[MAX_VARIABLE] = str(self.max_recoveries)
            variables[WINDOW_VARIABLE] = f"{self.recovery_window:g}"
            variables[BAR_AFTER_VARIABLE] = str(self.bar_after)
            if self.health_check:
                variables[HEALTH_VARIABLE] = self.health_check
        if self.notify:
            variables[NOTIFY] = self.notify
        if self.collect_to:
            variables[COLLECT_TO] = self.collect_to
        if self.trace is not None:
            variables["RANKCALL_TRACE"] = "1"
            variables["TORCH_DISTRIBUTED_TRACING"] = self.trace.value
        if self.history:
            variables["RANKCALL_HISTORY"] = "1"
        return variables


# torchrun gets all other options.
OPTIONS = tuple(f"--{field.name.replace('_', '-')}" for field in fields(JobOptions))
FLAGS = ("--history",)  # those without a value


def takes_job_options(
    command: Callable[[list[str], JobOptions], None], argument: Any
) -> Callable[..., None]:
    """Return a command that takes the shared options one by one, as typer needs them.

    typer reads a command's options from the signature and the annotations of its function, and has
    no way to share a list of options between functions.

    Args:
        command: The command. It gets the words after the options, and the options.
        argument: The annotation of the words: ``Annotated[list[str], typer.Argument(...)]``.
    """

    def with_options(args: list[str], **values: Any) -> None:
        command(args, JobOptions(**values))

    hints = get_type_hints(JobOptions, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("args", keyword, annotation=argument)]
    parameters += [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=hints[field.name])
        for field in fields(JobOptions)
    ]
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {item.name: item.annotation for item in parameters}
    with_options.__doc__ = command.__doc__
    return with_options


def _is_taken(path: Path) -> bool:
    """Tell whether something else than a folder is there. If nobody can look, the ranks say why."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False


def prepare(capture: str) -> str:
    """Build the native recorder once for all ranks; return the capture that they use."""
    if capture == "python":
        return capture
    try:
        from rankcall.capture.native import RECORDER

        if not RECORDER.is_ready():
            say(f"{COMPILING}, once for this torch and Python")
        with working(COMPILING):
            RECORDER.prebuild()
    except CaptureUnavailableError as error:
        if capture == "native":
            raise
        say(f"{error}; recording with the slower Python capture")
        return "python"
    return capture

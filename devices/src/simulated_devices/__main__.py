"""The command ``devices``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from . import __version__
from ._environment import environment, parse_size
from ._errors import DevicesError
from ._faults import KINDS, Fault, FaultFolder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; errors are one sentence on stderr and exit status 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except DevicesError as error:
        print(f"devices: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="devices", description="Run an unmodified torch on simulated CUDA devices.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("exec", help="run a command on simulated devices")
    _add_environment_options(run)
    run.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND...",
        help="the command and its arguments",
    )
    run.set_defaults(run=_exec)

    show = commands.add_parser("env", help="print the environment as lines for a shell's eval")
    _add_environment_options(show)
    show.set_defaults(run=_env)

    build = commands.add_parser("build", help="compile the libraries now")
    build.set_defaults(run=_build)

    fault = commands.add_parser(
        "fault",
        help="order or lift a fault while a job runs",
        epilog="Faults: " + "; ".join(f"{kind}: {text}" for kind, text in KINDS.items()) + ".",
    )
    fault.add_argument("--at", required=True, metavar="DIR", help="the folder given to `devices exec --faults`")
    fault.add_argument("kind", choices=[*KINDS, "lift", "list"], metavar="|".join([*KINDS, "lift", "list"]))
    fault.add_argument("number", nargs="?", type=int, help="of a lift: the fault's number; without, all are lifted")
    for name in ("rank", "device", "peer", "from-op"):
        fault.add_argument(f"--{name}", type=int)
    fault.add_argument("--factor", type=float, help="of a slow device")
    fault.add_argument("--code", type=int, help="of an Xid")
    fault.add_argument("--bytes", help="of an out of memory: the size left, for example 64MiB")
    fault.add_argument("--scope", choices=["nccl", "all"], help="of a stall")
    fault.set_defaults(run=_fault)
    return parser


def _add_environment_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2, help="devices of this machine (default 2)")
    parser.add_argument("--memory", default="8GiB", help="memory of each device (default 8GiB)")
    parser.add_argument("--faults", metavar="DIR", help="a folder in which `devices fault` orders faults")
    parser.add_argument(
        "--no-aten",
        action="store_true",
        help="do not compute torch's operations, only its communication",
    )


def _environment(options: argparse.Namespace) -> dict[str, str]:
    return environment(options.gpus, options.memory, faults=options.faults, aten=not options.no_aten)


def _exec(options: argparse.Namespace) -> int:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise DevicesError(
            "there is no command to run: write it after --, for example `devices exec -- python train.py`."
        )
    variables = _environment(options)
    path = shutil.which(command[0])
    if path is None:
        raise DevicesError(f"the command {command[0]} was not found.")
    # The command takes the place of this process, so that signals and the exit status are its own.
    os.execve(path, command, variables)


def _env(options: argparse.Namespace) -> int:
    for name, value in sorted(_environment(options).items()):
        if name == "LD_PRELOAD" or name.startswith("SIMULATED_DEVICES"):
            print(f"export {name}='{value}'")
    return 0


def _build(_options: argparse.Namespace) -> int:
    environment()
    return 0


def _fault(options: argparse.Namespace) -> int:
    folder = FaultFolder(options.at)
    if options.kind == "list":
        print("\n".join(folder.ordered()))
    elif options.kind == "lift":
        folder.lift(options.number)
    else:
        size = None if options.bytes is None else (0 if options.bytes == "0" else parse_size(options.bytes))
        fault = Fault(
            options.kind,
            options.rank,
            options.device,
            options.peer,
            options.from_op,
            options.factor,
            options.code,
            size,
            options.scope,
        )
        print(folder.order(fault))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``rankcall profile``: what some ranks do at this moment, line by line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from rankcall.analysis.looks import suspect_and_peer
from rankcall.cli.common import Attempt, RunPath, open_run, report_problems, say, working
from rankcall.errors import RankcallError
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind
from rankcall.run.profiles import MOST_RANKS, Profile, alive, parse_ranks, take_profiles

__all__ = ["command"]


def command(
    run: RunPath = None,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks",
            metavar="RANKS",
            help=f"The ranks to profile, as in 5,6 or 0-3; {MOST_RANKS} at most, all on this host. "
            "Without it: a rank that holds the others up, and one that does not.",
        ),
    ] = None,
    seconds: Annotated[
        int, typer.Option(min=1, max=60, metavar="SECONDS", help="For how long.")
    ] = 3,
    rate: Annotated[
        int, typer.Option(min=1, max=200, metavar="N", help="Samples per second.")
    ] = 50,
    attempt: Attempt = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Profile ranks of a job that runs on this host, and keep the profiles in its run.

    Give it the rank that is late and a healthy one, and see at which lines they differ. It needs
    py-spy (pip install 'rankcall[stacks]'), which pauses a rank for some milliseconds at each
    sample; before and after, nothing is added to the job.
    """
    opened = open_run(run, attempt, exits_only=True)
    if opened.source is not None and not opened.source.is_dir():
        raise RankcallError("an archive has no ranks that run: profile the job on its host")
    chosen = suspect_and_peer(opened) if ranks is None else _parsed(ranks)
    if not chosen:
        raise RankcallError("no rank of this host stands out: say which to profile with --ranks")
    headers = alive(opened, chosen)
    with working(f"profiling for {seconds} s"):
        profiles = take_profiles(opened.path, headers, seconds, rate)
    _print(profiles, as_json=as_json)
    report_problems(
        [
            Problem(ProblemKind.UNREADABLE, f"rank {profile.header.rank}: {profile.problem}")
            for profile in profiles
            if profile.problem
        ]
    )


def _parsed(text: str) -> list[int]:
    """Return the ranks that an option names."""
    try:
        return parse_ranks(text)
    except ValueError as error:
        raise typer.BadParameter(f"--ranks takes {error}") from error


def _print(profiles: Sequence[Profile], *, as_json: bool) -> None:
    if as_json:
        content = [profile.as_object() for profile in profiles]
        typer.echo(json.dumps({"profiles": content}, indent=1))
        return
    for profile in profiles:
        header = profile.header
        typer.echo(clean(f"rank {header.rank} ({header.host}, pid {header.pid})"))
        for share, line in profile.lines:
            typer.echo(clean(f"  {share:4.0%}  {line}"))
    kept = [profile.path for profile in profiles if profile.path is not None]
    if kept:
        say(f"kept in {kept[0].parent}: open the files at https://www.speedscope.app")

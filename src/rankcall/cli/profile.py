"""``rankcall profile``: what some ranks do at this moment, line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from rankcall.analysis.looks import diagnose_asking
from rankcall.cli.common import Attempt, RunPath, open_run, report_problems, say, working
from rankcall.errors import RankcallError
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind
from rankcall.ring.layout import Header
from rankcall.run.load import Run
from rankcall.run.profiles import MOST_RANKS, Profile, take_profiles

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
    chosen = _suspect_and_peer(opened) if ranks is None else _parsed(ranks)
    headers = _alive(opened, chosen)
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
    chosen: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last - first >= MOST_RANKS:
            raise typer.BadParameter(f"--ranks takes ranks, as in 5,6 or 0-3; got {clean(text)!r}")
        chosen += range(first, last + 1)
    chosen = sorted(set(chosen))
    if len(chosen) > MOST_RANKS:
        raise typer.BadParameter(f"--ranks takes {MOST_RANKS} ranks at most; got {len(chosen)}")
    return chosen


def _suspect_and_peer(run: Run) -> list[int]:
    """Return a rank that the verdict names, and one that it does not name."""
    findings = diagnose_asking(run, None).findings
    here = {head.header.rank for head in run.heads if head.header.process_state() == "alive"}
    named = {rank for finding in findings for rank in finding.ranks}
    suspects = sorted(here.intersection(findings[0].ranks)) if findings else []
    if not suspects:
        raise RankcallError("no rank of this host stands out: say which to profile with --ranks")
    return [suspects[0], *sorted(here - named)[:1]]


def _alive(run: Run, ranks: Sequence[int]) -> list[Header]:
    """Return the headers of these ranks' processes; say which of them do not run here."""
    by_rank = {head.header.rank: head.header for head in run.heads}
    states = {
        rank: by_rank[rank].process_state() if rank in by_rank else "unknown" for rank in ranks
    }
    absent = [rank for rank in ranks if states[rank] != "alive"]
    if absent:
        rank = absent[0]
        why = {
            "gone": "has ended",
            "stopped": "is stopped, and does nothing: see rankcall diagnose --stacks",
            "unknown": "does not run on this host, or is not in this run",
        }
        raise RankcallError(f"rank {rank} {why.get(states[rank], 'cannot be profiled')}")
    return [by_rank[rank] for rank in ranks]


def _print(profiles: Sequence[Profile], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"profiles": [_object(profile) for profile in profiles]}, indent=1))
        return
    for profile in profiles:
        header = profile.header
        typer.echo(clean(f"rank {header.rank} ({header.host}, pid {header.pid})"))
        for share, line in profile.lines:
            typer.echo(clean(f"  {share:4.0%}  {line}"))
    kept = [profile.path for profile in profiles if profile.path is not None]
    if kept:
        say(f"kept in {kept[0].parent}: open the files at https://www.speedscope.app")


def _object(profile: Profile) -> dict[str, Any]:
    return {
        "rank": profile.header.rank,
        "host": profile.header.host,
        "pid": profile.header.pid,
        "file": None if profile.path is None else str(profile.path),
        "lines": [{"share": round(share, 3), "line": line} for share, line in profile.lines],
        "problem": profile.problem or None,
    }

"""``rankcall compare``: what differs between two runs, or since when one run is slower."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rankcall.analysis.comparing_runs import (
    Change,
    Difference,
    PartMedians,
    change_in,
    differences,
    measured,
)
from rankcall.cli.common import bar, open_run, report_problems
from rankcall.printable import clean
from rankcall.ranks import with_noun
from rankcall.report.formatting import time

__all__ = ["command"]

_SHOWN = 10  # lines; --json has all


def command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run directory or an archive.")],
    second: Annotated[
        Path | None,
        typer.Argument(
            metavar="B", help="The run to compare it with. Without it: look for changes within A."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what differs between two runs, or since when the steps of one run take another time.

    Compared are the time of steps, the time of each rank before each call, and the time that calls
    take once all ranks have come, by op and line. Nothing is said of what noise explains. It is not
    said why they differ: another machine is a difference, too.
    """
    runs = [open_run(path) for path in (first, second) if path is not None]
    with bar("reading records") as progress:
        figures = [measured(run, progress) for run in runs]
    if second is None:
        _show_change(change_in(figures[0]), as_json=as_json)
    else:
        _show_differences(figures[0], figures[1], as_json=as_json)
    report_problems([problem for run in runs for problem in run.problems])


def _show_change(change: Change | None, *, as_json: bool) -> None:
    if as_json:
        differences_then = () if change is None else change.differences
        differing = [_object(difference) for difference in differences_then]
        step = None if change is None else change.step
        typer.echo(json.dumps({"since_step": step, "differences": differing}, indent=1))
    elif change is None:
        typer.echo("The time of a step does not change, beyond noise.")
    else:
        typer.echo(f"Since step {change.step:,}:")
        _print(change.differences)


def _show_differences(before: PartMedians, after: PartMedians, *, as_json: bool) -> None:
    differing = differences(before, after)
    common = len(before.parts.keys() & after.parts.keys())
    if as_json:
        objects = [_object(difference) for difference in differing]
        typer.echo(json.dumps({"compared": common, "differences": objects}, indent=1))
    elif differing:
        _print(differing)
    else:
        typer.echo(f"The runs do not differ, beyond noise, in the {common:,} figures they share.")


def _print(differing: Sequence[Difference]) -> None:
    lines = list(_lines(differing))
    for line in lines[:_SHOWN]:
        typer.echo(clean(line))
    if len(lines) > _SHOWN:
        typer.echo(f"and {len(lines) - _SHOWN:,} more: --json has all")


def _lines(differing: Sequence[Difference]) -> Iterator[str]:
    """Write a line for each difference; ranks that differ at one call share a line."""
    alike: dict[tuple[str, str, str], list[Difference]] = {}
    for difference in differing:
        alike.setdefault(difference.figure[:3], []).append(difference)
    for (kind, op, line), group in alike.items():
        at = f"{op} at {line}" if line else op
        worst = max(group, key=lambda difference: abs(difference.after_s - difference.before_s))
        times = f"{time(worst.after_s * 1e3)}, before {time(worst.before_s * 1e3)}"
        longer = f"{abs(worst.share):.0%} {'longer' if worst.share > 0 else 'shorter'}"
        if kind == "step":
            yield f"steps take {longer} ({times})"
        elif kind == "in":
            yield f"{at} takes {longer} once all ranks have come ({times})"
        else:
            change_s = worst.after_s - worst.before_s
            ranks = sorted(difference.figure.rank for difference in group)
            verb = "comes" if len(ranks) == 1 else "come"
            when = "later" if change_s > 0 else "sooner"
            yield (
                f"{with_noun(ranks)} {verb} {time(abs(change_s) * 1e3)} {when} to {at} "
                f"({'' if len(ranks) == 1 else f'rank {worst.figure.rank}: '}{times})"
            )


def _object(difference: Difference) -> dict[str, Any]:
    figure = difference.figure
    return {
        "kind": figure.kind,
        "op": figure.op or None,
        "line": figure.line or None,
        "rank": figure.rank if figure.rank >= 0 else None,
        "before_s": difference.before_s,
        "after_s": difference.after_s,
        "chance": difference.chance,
    }

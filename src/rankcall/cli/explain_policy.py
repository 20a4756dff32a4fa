"""``rankcall explain-policy``: the policy of restarts, and what it says about a run."""

from __future__ import annotations

import typer

from rankcall.cli.common import Attempt, RunPath, console_for_result, open_run, say
from rankcall.printable import clean
from rankcall.recovery.history import history_of
from rankcall.recovery.policy import POLICY, Failure, decide
from rankcall.report.node_checks import lines_of
from rankcall.run.recoveries import newest_checks, read_recoveries

__all__ = ["command"]


def command(run: RunPath = None, attempt: Attempt = None) -> None:
    """Print the policy of --on-hang recover, and what it says about the last failure of a run.

    The first row that fits decides. If the run was not started with --on-hang recover, the command
    says what the policy would do about the failure that it finds there. The limits are the
    defaults, because a run does not keep its own. What --health-check found is shown as well.
    """
    opened = open_run(run, attempt)
    history = history_of(opened)
    case = history.case if history else None
    _print(decide(case).rule if case else "")
    for line in lines_of(newest_checks(read_recoveries(opened.path))):
        typer.echo(f"node {line}")
    if case is None:
        say(f"nothing has failed in {opened.path}")
        return
    for failure in case.earlier:
        typer.echo(clean(f"before: {_words(failure)}"))
    decision = decide(case)
    typer.echo(clean(f"last:   {_words(case.failure)}"))
    done = "stop" if decision.stops else "restart"
    pause = f" after {decision.delay_s:g} s" if decision.delay_s else ""
    typer.echo(clean(f"so:     {done}{pause} ({decision.rule}): {decision.reason}"))


def _words(failure: Failure) -> str:
    at = f", at step {failure.step:,}" if failure.step >= 0 else ""
    return f"{failure.signature} ({failure.family}){at}"


def _print(rule: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("", "rule", "if", "then"):
        table.add_column(name, overflow="fold")
    for row in POLICY:
        table.add_row(">" if row.rule == rule else "", row.rule, row.when, row.then)
    console_for_result(wraps=False).print(table, markup=False)

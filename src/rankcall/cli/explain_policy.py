"""``rankcall explain-policy``: the policy of restarts, and what it says about a run."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from rankcall.cli.common import Attempt, RunPath, console_for_result, open_run, say
from rankcall.printable import clean
from rankcall.recovery.failures import Cause, cause_in
from rankcall.recovery.policy import POLICY, Case, Failure, decide
from rankcall.run.recoveries import AttemptEnd, Recoveries, read_recoveries

_RULES = frozenset(row.rule for row in POLICY)

__all__ = ["command"]


def command(run: RunPath = None, attempt: Attempt = None) -> None:
    """Print the policy of --on-hang recover, and what it says about the last failure of a run.

    The first row that fits decides. If the run was not started with --on-hang recover, the command
    says what the policy would do about the failure that it finds there. The limits are the
    defaults, because a run does not keep its own.
    """
    opened = open_run(run, attempt)
    ends = _decided(read_recoveries(opened.path))
    if ends:
        failures = [_failure(end) for end in ends]
    else:
        cause = cause_in(opened)
        failures = [] if cause is None else [_of_cause(cause)]
    case = Case(failures[-1], failures[:-1]) if failures else None
    _print(decide(case).rule if case else "")
    if case is None:
        say(f"nothing has failed in {opened.path}")
        return
    for failure in failures[:-1]:
        typer.echo(clean(f"before: {_words(failure)}"))
    decision = decide(case)
    typer.echo(clean(f"last:   {_words(case.failure)}"))
    done = "stop" if decision.stops else "restart"
    pause = f" after {decision.delay_s:g} s" if decision.delay_s else ""
    typer.echo(clean(f"so:     {done}{pause} ({decision.rule}): {decision.reason}"))


def _decided(agents: Sequence[Recoveries]) -> Sequence[AttemptEnd]:
    """Return the failures that one node's agent decided about: the one that decided most often.

    Each node's agent notes a failure that its workers had part in, and has only its own to judge
    by. An agent also notes those restarts about which another node decided.
    """
    decided = [[end for end in agent.ends if end.rule in _RULES] for agent in agents]
    return max(decided, key=len, default=[])


def _failure(end: AttemptEnd) -> Failure:
    return Failure(
        *(end.signature, end.family, end.step, end.progressed, end.noticed_ns / 1e9),
        by_window=end.lost >= 0,
    )


def _of_cause(cause: Cause) -> Failure:
    step = cause.steps if cause.saved < 0 else cause.saved + cause.since_saved
    return Failure(cause.signature, cause.family, step, cause.steps > 0, by_window=cause.saved >= 0)


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
    console_for_result().print(table, markup=False)

"""The top of the live page: the state of the run, the verdict, and what is not known."""

from __future__ import annotations

from typing import Any

from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.printable import clean
from rankcall.report.formatting import digits, percent, plural
from rankcall.report.going import healthy
from rankcall.report.html.attempts import line_of
from rankcall.report.html.first_screen import FirstScreen, verdict_of_finding
from rankcall.report.html.stacks import clock
from rankcall.report.standing import world
from rankcall.serve.live_run import ENDED, LIVE, LOST, WAITING, Look

_MOST_PROBLEMS = 4  # the others are in /api/diagnosis


def run_lines(look: Look) -> dict[str, Any]:
    """Return the lines around the verdict: the run's state, and the figures beside it."""
    verdict = look.diagnosis
    facts: list[tuple[str, str]] = []
    if verdict is not None:
        facts.append((world(verdict), ""))
        steps = max((position.process.steps for position in verdict.ranks), default=0)
        facts += [(f"step {steps:,}", "")] if steps else []
    speed = look.figures
    if speed is not None:
        if speed.steps_per_s is not None:
            facts.append((digits(speed.steps_per_s), "steps/s"))
        elif speed.calls_per_s is not None:
            facts.append((digits(speed.calls_per_s), "calls/s"))
        if speed.share is not None:
            facts.append((percent(speed.share), "of the time in communication"))
    state = {WAITING: "no data yet", LIVE: "running", ENDED: "ended", LOST: "not readable"}
    if look.state == LIVE and look.hangs:
        state[LIVE] = "hangs"
    problem = clean(look.problem)
    if look.state == LOST:
        problem = f"{problem}. The page shows the last state that could be read."
    return {
        "state": look.state,
        "words": state[look.state],
        "run": clean(look.run),
        "facts": facts,
        "attempts": line_of(look.attempts),
        "since": clock(look.epoch_s) if look.state == LOST else "",
        "problem": problem,
        "tone": _tone(look),
    }


def _tone(look: Look) -> str:
    if look.state in (WAITING, LOST):
        return "unsure"
    if look.diagnosis is not None and look.diagnosis.findings:
        return "alarm" if look.hangs else "warn"
    return "fine"


def title(look: Look) -> FirstScreen:
    """Return the first words of the page."""
    verdict = look.diagnosis
    if look.state == WAITING or verdict is None:
        why = "The page shows the ranks as soon as the first one has recorded something."
        return FirstScreen("No data yet", why, False)
    if verdict.findings:
        return verdict_of_finding(verdict.findings[0])
    text = healthy(verdict)
    whole, known = (
        len(verdict.ranks),
        sum(not position.blind for position in verdict.ranks),
    )
    count = plural(whole, "rank")
    if look.state == ENDED:
        how = text.removeprefix("healthy: ").removeprefix("nothing found: ")
        return FirstScreen("The job has ended", how.capitalize(), False)
    if text.startswith("nothing found yet"):
        return FirstScreen("Nothing found yet", text.partition(": ")[2].capitalize(), False)
    title = f"Healthy: {'the rank goes' if whole == 1 else f'all {count} go'} on"
    if known < whole:
        title = f"{known:,} of {count} go on, the others are not known"
    return FirstScreen(title, text.partition(". ")[2], False)


def problem_lines(verdict: Verdict) -> list[str]:
    """Return what is not known, a line each, and how many lines are left out."""
    problems = verdict.problems
    shown = [clean(problem) for problem in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(shown)
    return [*shown, f"and {more:,} more (in /api/diagnosis)"] if more else shown

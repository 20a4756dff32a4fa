"""From a look to the page's sections as HTML, once for all viewers; ``report.top`` has the rows."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import Any

from rankcall.analysis.snapshot import END_UNKNOWN, RankPosition
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.printable import clean
from rankcall.report import top
from rankcall.report.formatting import digits, percent, plural
from rankcall.report.going import healthy
from rankcall.report.html import asset, digest, environment
from rankcall.report.html.stacks import clock, stack_rows
from rankcall.report.html.top import FirstScreen, item_of_finding, verdict_of_finding
from rankcall.report.standing import shortened_ranks, world
from rankcall.serve.history import KEPT_S, History, Sample
from rankcall.serve.live_run import ENDED, LIVE, LOST, WAITING, Look

SECTIONS = ("verdict", "ranks", "figures", "stacks")
_MOST_RANK_CELLS = 2048  # with more ranks, a cell is a host
_MOST_PLACES, _MOST_PROBLEMS = 24, 4
_MOST_CURVES = 3
_CHART = 420, 90
_SILENT_S = 5.0
_OLD_S = 30.0  # figures of a job that hangs are not those of now

# How a rank stands, the worst first: key and words.
STANDINGS = {
    "culprit": "named by the verdict",
    "gone": "gone",
    "stopped": "stopped",
    "silent": "silent",
    "unknown": "no records",
    "call": "in a call",
    "issued": "issued, end unknown",
    "code": "in no call",
    "ended": "ended",
}
_ORDER = {name: number for number, name in enumerate(STANDINGS)}


@functools.cache
def _templates() -> Any:
    return environment(
        **{
            "live.html.j2": _file("live.html.j2"),
            "live.parts.j2": _file("live.parts.j2"),
        }
    )


@functools.cache
def _static() -> dict[str, str]:
    """Return the page's own style and script, with the digest that its policy names."""
    script = _file("live.js")
    return {
        "style": asset("page.css") + _file("live.css"),
        "script": script,
        "script_digest": digest(script),
    }


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def policy() -> str:
    """Return the content security policy: the page's own script, and nothing from elsewhere."""
    return (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; connect-src 'self'; "
        f"script-src 'sha256-{_static()['script_digest']}'; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def page(look: Look, parts: dict[str, str]) -> str:
    """Return the whole page with these sections. It can be read without its script."""
    template = _templates().get_template("live.html.j2")
    name = clean(PurePath(look.run).name)
    html: str = template.render(**_static(), run=name, sections=parts, title=_title(look).title)
    return html


def login_page(problem: str = "") -> str:
    """Return the page that asks for the token."""
    template = _templates().get_template("live.html.j2")
    html: str = template.render(
        **_static(), run="", sections={}, title="rankcall: the token", problem=problem
    )
    return html


def sections(look: Look, history: History) -> dict[str, str]:
    """Return the page's sections by name."""
    parts = _templates().get_template("live.parts.j2").module
    verdict = look.diagnosis
    if verdict is None:
        nothing = dict.fromkeys(SECTIONS, "")
        return {**nothing, "verdict": parts.verdict(_top(look), _title(look), [], [])}
    lines = top.lines_of(verdict)
    return {
        "verdict": parts.verdict(
            _top(look),
            _title(look),
            [item_of_finding(finding) for finding in verdict.findings],
            _problems(verdict),
        ),
        "ranks": parts.ranks(_grid(verdict, lines), _places(verdict, lines)),
        "figures": parts.figures(_charts(look, history), look.figures, look.state == LIVE),
        "stacks": parts.stacks(_stacks(look), look.state == LIVE),
    }


# --- the verdict ---


def _top(look: Look) -> dict[str, Any]:
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


def _title(look: Look) -> FirstScreen:
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
        return FirstScreen("The job has ended", text.removeprefix("healthy: ").capitalize(), False)
    if text.startswith("nothing found yet"):
        return FirstScreen("Nothing found yet", text.partition(": ")[2].capitalize(), False)
    title = f"Healthy: {'the rank goes' if whole == 1 else f'all {count} go'} on"
    if known < whole:
        title = f"{known:,} of {count} go on, the others are not known"
    return FirstScreen(title, text.partition(". ")[2], False)


def _problems(verdict: Verdict) -> list[str]:
    problems = verdict.problems
    shown = [clean(problem) for problem in problems[:_MOST_PROBLEMS]]
    more = len(problems) - len(shown)
    return [*shown, f"and {more:,} more (in /api/diagnosis)"] if more else shown


# --- where every rank stands ---


@dataclass(frozen=True)
class Cell:
    """A rank, or a host, in the grid. ``place``: the index of its row in the table; -1: none."""

    label: str
    standing: str
    place: int = -1


@dataclass(frozen=True)
class HostCells:
    """The cells of one host."""

    host: str
    cells: tuple[Cell, ...]


def _grid(verdict: Verdict, lines: Sequence[top.Line]) -> dict[str, Any]:
    place_of = {place.rank: n for n, line in enumerate(lines) for place in line.places}
    culprits = verdict.culprits
    standings = [_standing(position, culprits) for position in verdict.ranks]
    by_host: dict[str, list[Cell]] = {}
    for position, standing in zip(verdict.ranks, standings, strict=True):
        cell = Cell(str(position.rank), standing, place_of.get(position.rank, -1))
        by_host.setdefault(clean(position.process.host) or "host not known", []).append(cell)
    hosts = [HostCells(host, tuple(cells)) for host, cells in by_host.items()]
    if len(standings) > _MOST_RANK_CELLS:
        hosts = [HostCells("", tuple(map(_host_cell, hosts)))]
    counts = Counter(standings)
    return {
        "hosts": hosts,
        "of_hosts": len(standings) > _MOST_RANK_CELLS,
        "large": len(standings) <= 64,
        "key": [(name, STANDINGS[name], counts[name]) for name in STANDINGS if counts[name]],
        "places": [_tip(line, verdict) for line in lines[:_MOST_RANK_CELLS]],
    }


def _standing(position: RankPosition, culprits: set[int]) -> str:
    state = position.process
    if state.rank in culprits:
        return "culprit"
    if state.blind:
        return "unknown"
    if state.closed or state.exit == 0:
        return "ended"
    if state.state == "gone" or state.exit is not None:
        return "gone"
    if state.state == "stopped":
        return "stopped"
    if state.mute_s > _SILENT_S:
        return "silent"
    if position.how == END_UNKNOWN:
        return "issued"
    return "call" if position.in_call else "code"


def _host_cell(host: HostCells) -> Cell:
    """Return one cell for a host: as the worst of its ranks stands."""
    worst = min(host.cells, key=lambda cell: _ORDER[cell.standing])
    count = sum(cell.standing == worst.standing for cell in host.cells)
    label = f"{host.host}: {count} of {plural(len(host.cells), 'rank')} {STANDINGS[worst.standing]}"
    return Cell(label, worst.standing, worst.place)


def _tip(line: top.Line, verdict: Verdict) -> str:
    """Return what the tip of a rank says, after the rank's number and host."""
    cells = _row(line, verdict)
    where = f" at {cells['line']}" if cells["line"] else ""
    return ", ".join(filter(None, (cells["state"], f"{cells['call']}{where}")))


def _row(line: top.Line, verdict: Verdict) -> dict[str, str]:
    total = max(1, len(verdict.ranks))
    _, _, state, call, name, age = top.cells(verdict, line, total)
    return {
        "state": clean(state),
        "call": clean(call),
        "line": clean(name),
        "site": clean(verdict.stands_at(line.places[0]) or line.places[0].shown_line),
        "age": age,
    }


def _places(verdict: Verdict, lines: Sequence[top.Line]) -> dict[str, Any]:
    """Return the table of the lines at which ranks are: culprits first, then the many."""
    total = max(1, len(verdict.ranks))
    rows = [
        {
            **_row(line, verdict),
            "ranks": shortened_ranks([place.rank for place in line.places]),
            "count": len(line.places),
            "share": len(line.places) / total,
            "named": line.named,
        }
        for line in lines[:_MOST_PLACES]
    ]
    rest = sum(len(line.places) for line in lines[_MOST_PLACES:])
    more = f"and {plural(rest, 'more rank')} at other lines" if rest else ""
    return {"rows": rows, "more": more}


# --- waiting and bandwidth over time ---


def _charts(look: Look, history: History) -> dict[str, Any]:
    samples = list(history.samples)
    now = look.epoch_s
    waiting = [(sample.epoch_s, sample.waiting) for sample in samples if sample.waiting is not None]
    kinds = Counter(key for sample in samples for key in sample.busbw)
    order = [(row.op, row.group, row.bucket) for row in (look.figures.rows if look.figures else ())]
    order += [key for key, _ in kinds.most_common() if key not in order]
    known = [key for key in order if kinds[key]][:_MOST_CURVES]
    curves = {key: _points(samples, key) for key in known}
    highest = max((value for points in curves.values() for _, value in points), default=0.0)
    most_waiting = max((value for _, value in waiting), default=0.0)
    scale = next((limit for limit in (0.05, 0.1, 0.25, 0.5) if most_waiting <= limit), 1.0)
    return {
        "waiting": _path(waiting, now, scale),
        "waiting_now": percent(waiting[-1][1]) if waiting else "",
        "old": bool(samples) and now - samples[-1].epoch_s > _OLD_S,
        "waiting_scale": percent(scale),
        "curves": [
            {
                "name": f"{op}, group {clean(group)}",
                "bucket": bucket,
                "path": _path(points, now, highest),
                "now": digits(points[-1][1]),
            }
            for (op, group, bucket), points in curves.items()
        ],
        "highest": digits(highest) if highest else "",
        "wide": _CHART[0],
        "tall": _CHART[1],
        "minutes": round(KEPT_S / 60),
    }


def _points(samples: Sequence[Sample], key: tuple[str, str, int]) -> list[tuple[float, float]]:
    return [(sample.epoch_s, sample.busbw[key]) for sample in samples if key in sample.busbw]


def _path(points: Sequence[tuple[float, float]], now: float, highest: float) -> str:
    """Return a line through the points; the right edge is now, the left one minutes ago."""
    wide, tall = _CHART
    if not points or highest <= 0:
        return ""
    places = [
        (wide * (1 - (now - at) / KEPT_S), tall * (1 - min(value / highest, 1.0)))
        for at, value in points
    ]
    if len(places) == 1:
        places.insert(0, (places[0][0] - 2, places[0][1]))
    return "".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))


# --- stacks ---


def _stacks(look: Look) -> dict[str, Any]:
    if look.stacks is None:
        return {"classes": [], "when": "", "by_watcher": False, "asked": False, "more": ""}
    return {
        **stack_rows(look.stacks.by_rank),
        "when": clock(look.stacks.epoch_s),
        "by_watcher": look.stacks.by_watcher,
        "asked": True,
    }

"""From a look to the live page and its sections as HTML, once for all viewers."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import PurePath
from typing import Any

from rankcall.printable import clean
from rankcall.report.formatting import percent
from rankcall.report.html import asset, digest, environment
from rankcall.report.html.first_screen import item_of_finding
from rankcall.report.html.stacks import clock, stack_rows
from rankcall.report.top_lines import lines_of
from rankcall.serve.figures_section import charts
from rankcall.serve.history import History
from rankcall.serve.live_run import LIVE, PROFILE_S, Look
from rankcall.serve.ranks_section import folds, grid, places
from rankcall.serve.verdict_section import problem_lines, run_lines, title

SECTIONS = ("verdict", "ranks", "figures", "stacks", "profiles")


@functools.lru_cache(maxsize=4)
def _templates(folder: str = "") -> Any:
    """Return the templates for a job that was started in a folder."""
    return environment(
        folder,
        **{
            "live.html.j2": _file("live.html.j2"),
            "live.parts.j2": _file("live.parts.j2"),
        },
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
    html: str = template.render(**_static(), run=name, sections=parts, title=title(look).title)
    return html


def login_page(problem: str = "") -> str:
    """Return the page that asks for the token."""
    template = _templates().get_template("live.html.j2")
    html: str = template.render(
        **_static(), run="", sections={}, title="rankcall: the token", problem=problem
    )
    return html


def sections(look: Look, history: History) -> dict[str, str]:
    """Return the page's sections by name, with the ranks by host."""
    parts = _templates(look.folder).get_template("live.parts.j2").module
    verdict = look.diagnosis
    if verdict is None:
        nothing = dict.fromkeys(SECTIONS, "")
        return {**nothing, "verdict": parts.verdict(run_lines(look), title(look), [], [], {})}
    return {
        "verdict": parts.verdict(
            run_lines(look),
            title(look),
            [item_of_finding(finding) for finding in verdict.findings],
            problem_lines(verdict),
            {line: clean(text) for line, text in look.stacks.lines.items()} if look.stacks else {},
        ),
        "ranks": ranks(look),
        "figures": parts.figures(charts(look, history), look.figures, look.state == LIVE),
        "stacks": parts.stacks(_stacks(look), look.state == LIVE),
        "profiles": parts.profiles(_profiles(look), look.state == LIVE),
    }


def ranks(look: Look, by: str = "") -> str:
    """Return the section of the ranks, in the rows of a fold; by host if there is none ``by`` it.

    Empty without a verdict.
    """
    verdict = look.diagnosis
    if verdict is None:
        return ""
    ways, lines = folds(verdict), lines_of(verdict)
    fold = next((way for way in ways if way.title == by), ways[0])
    parts = _templates(look.folder).get_template("live.parts.j2").module
    html: str = parts.ranks(grid(verdict, lines, ways, fold), places(verdict, lines))
    return html


def _stacks(look: Look) -> dict[str, Any]:
    if look.stacks is None:
        return {"classes": [], "when": "", "by_watcher": False, "asked": False, "more": ""}
    return {
        **stack_rows(look.stacks.by_rank),
        "when": clock(look.stacks.epoch_s),
        "by_watcher": look.stacks.by_watcher,
        "asked": True,
    }


def _profiles(look: Look) -> dict[str, Any]:
    if look.profiles is None:
        return {"ranks": [], "when": "", "seconds": PROFILE_S}
    ranks = [
        {
            "rank": profile.header.rank,
            "host": clean(profile.header.host),
            "lines": [(percent(share), line) for share, line in profile.lines],
            "file": profile.path is not None,
            "problem": clean(profile.problem),
        }
        for profile in look.profiles.taken
    ]
    return {"ranks": ranks, "when": clock(look.profiles.epoch_s), "seconds": PROFILE_S}

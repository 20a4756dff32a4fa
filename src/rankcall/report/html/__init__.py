"""A run as one page: no network, no server; it opens from a mail attachment.

The charts are SVG and PNG made here, so that the page can be read without its script, and in
print. The script (some 8 KiB) adds hovering, choosing and zooming.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from importlib import resources
from pathlib import PurePath
from typing import Any

from rankcall._version import __version__
from rankcall.analysis.call_sites import SiteBranch
from rankcall.analysis.details import Details
from rankcall.analysis.recoveries import PHASES
from rankcall.analysis.summary import Summary, size_name
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import lines_beside, stacks_beside
from rankcall.analysis.verdicts.verdict import Kept
from rankcall.errors import ExtraMissingError
from rankcall.printable import clean
from rankcall.ranks import with_noun
from rankcall.report.formatting import percent, plural, rate, size, time
from rankcall.report.html import charts
from rankcall.report.html.attempts import line_of
from rankcall.report.html.curves import curves
from rankcall.report.html.first_screen import items, verdict
from rankcall.report.html.stacks import clock, stack_rows
from rankcall.report.node_checks import lines_of
from rankcall.report.time_sources import times_of_ops
from rankcall.run.paths import job_folder

__all__ = ["render"]

_MOST_SITES, _MOST_ROWS, _MOST_RECOVERIES = 200, 400, 100
_MOST_BRANCHES = 24  # at each level of the tree of call sites
# What a line must not end in: an option, a number with its unit, and a call or a group with its
# number.
_WHOLE = re.compile(
    r"(?<![\w-])--[a-z][a-z-]*|\b\d[\d,.]* (?:s|ms|µs|min|h|%|[kMGT]?i?B|GB/s)(?!\w)"
    r"|\b[a-z_]{1,24} #\d+|\bgroup \d{1,6}\b"
)


def render(details: Details, findings: Sequence[Finding] = (), kept: Sequence[Kept] = ()) -> str:
    """Return the page as HTML text.

    Every name is escaped, and control characters are replaced. The page's policy lets no other
    script run and nothing be fetched.

    Args:
        details: The figures of the run.
        findings: The diagnosis, root cause first. One that stops the run comes before the figures.
        kept: The verdicts that the job's own watcher kept. If the run was stopped, the page shows
            the stacks beside the newest one.

    Raises:
        ExtraMissingError: jinja2 is not installed.
    """
    template = environment(job_folder(details.summary.about)).get_template("page.html.j2")
    script, style = asset("page.js"), asset("page.css")
    html: str = template.render(
        **_content(details, findings),
        code=_code(details, kept),
        stacks=_stacks(findings, kept),
        script=script,
        style=style,
        script_digest=digest(script),
    )
    return html


def _code(details: Details, kept: Sequence[Kept]) -> dict[str, str]:
    """Return source text by ``file:line``: of call sites, and of where ranks stood in a hang."""
    calls = {row.site.shown: row.code for row in details.summary.call_sites if row.code}
    stood = lines_beside(kept[-1]) if kept else {}
    return {line: clean(text) for line, text in {**stood, **calls}.items()}


def _stacks(findings: Sequence[Finding], kept: Sequence[Kept]) -> dict[str, Any]:
    if not kept or not any(finding.stops for finding in findings):
        return {"classes": []}
    newest = kept[-1]
    when = clock(newest.verdict.origin.epoch_ns / 1e9)
    return {**stack_rows(stacks_beside(newest)), "when": when}


def digest(script: str) -> str:
    """Return the hash of a script, as a content security policy names it."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def environment(folder: str = "", **templates: str) -> Any:
    """Return jinja2's environment for this folder's templates and ``templates``, by name.

    Names from records are escaped, and their control characters replaced. Paths below the job's
    ``folder`` are written without it, except by the filter ``hover``. Raises ``ExtraMissingError``.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ExtraMissingError(
            "the HTML report needs jinja2: pip install 'rankcall[report]'"
        ) from error
    short = _below(folder)

    def readable(value: Any) -> Any:
        """Replace control characters in a name; markup of the template itself stays."""
        is_name = isinstance(value, str) and not hasattr(value, "__html__")
        return short(clean(value)) if is_name else value

    shared = {name: asset(name) for name in ("parts.html.j2", "page.html.j2")}
    jinja_environment = jinja2.Environment(
        loader=jinja2.DictLoader({**shared, **templates}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=readable,
    )
    jinja_environment.globals["version"] = __version__
    jinja_environment.filters.update(
        clean=clean,
        percent=percent,
        size=size,
        time=time,
        seconds=lambda seconds: time(None if seconds is None else seconds * 1e3),
        ranks=with_noun,
        rate=rate,
        size_name=size_name,
        px=partial(round, ndigits=2),
        prose=lambda text: _prose(short(clean(text))),
        hover=lambda text, shown=None: _hover(text, short(clean(text)) if shown is None else shown),
    )
    return jinja_environment


def _below(folder: str) -> Callable[[str], str]:
    """Return a function that writes the paths below a folder without that folder."""
    start = f"{folder.rstrip('/')}/"
    if start == "/":
        return lambda text: text
    whole = re.compile(rf"(?<![\w./-]){re.escape(start)}")
    return lambda text: whole.sub("", text) if start in text else text


def _hover(text: str, shown: str) -> Any:
    """Return the attribute that has a text with whole paths, unless it is shown already."""
    import markupsafe

    whole = clean(text)
    return markupsafe.Markup(' title="{}"').format(whole) if whole != shown else ""


def _prose(text: str) -> Any:
    """Return a sentence as markup in which no line ends inside what belongs together."""
    import markupsafe

    escaped = str(markupsafe.escape(text))
    return markupsafe.Markup(_WHOLE.sub(r'<span class="whole">\g<0></span>', escaped))


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _content(details: Details, findings: Sequence[Finding]) -> dict[str, Any]:
    summary = details.summary
    bandwidth_curves = curves(summary)
    columns, maps = charts.columns(details), charts.late_maps(details)
    traffic, moments = charts.host_matrix(details), charts.timeline(details)
    return {
        "run": clean(PurePath(summary.path).name),
        "verdict": verdict(details, findings),
        "items": items(details, bandwidth_curves, findings),
        "facts": _facts(summary),
        "stats": _stats(summary),
        "overall": charts.overall(details.splits),
        "columns": columns,
        "timeline": moments,
        "maps": maps,
        "bandwidth": charts.bandwidth(bandwidth_curves),
        "traffic": traffic,
        "sites": _sites(summary),
        "tree": _tree(details.site_tree),
        "more_sites": max(0, len(summary.call_sites) - _MOST_SITES),
        "collectives": summary.collectives[:_MOST_ROWS],
        "more_rows": max(0, len(summary.collectives) - _MOST_ROWS),
        "groups": [known.label for known in summary.groups],
        "stragglers": summary.stragglers,
        "recoveries": summary.carried.recoveries[-_MOST_RECOVERIES:],
        "more_recoveries": max(0, len(summary.carried.recoveries) - _MOST_RECOVERIES),
        "attempts": line_of(summary.carried.attempts),
        "checks": lines_of(summary.carried.checked)[:_MOST_RECOVERIES],
        "phases": PHASES,
        "goodput": summary.carried.goodput,
        "is_waiting_known": summary.sources.is_waiting_known,
        "data": _data(details, columns, moments, maps, traffic),
    }


def _data(
    details: Details,
    columns: dict[str, Any] | None,
    moments: dict[str, Any] | None,
    maps: dict[str, Any] | None,
    traffic: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the data that the script needs and that is not in the page already."""
    host_of = {row.rank: clean(row.host) for row in details.summary.ranks}
    data: dict[str, Any] = {"hosts": host_of}
    if columns:
        data["columns"] = {key: columns[key] for key in ("left", "wide", "rows", "height", "unit")}
    if moments:
        data["timeline"] = {key: moments[key] for key in ("rows", "bins", "fold", "bin_s")}
    if maps:
        data["map"] = {key: maps[key] for key in ("bins", "bin_s", "highest_ms")}
        of_each = ("rows", "fold", "names", "height")
        data["map"]["maps"] = [{key: late_map[key] for key in of_each} for late_map in maps["maps"]]
    if traffic and traffic["src"]:
        data["traffic"] = {key: traffic[key] for key in ("hosts", "highest")}
    return data


def _facts(summary: Summary) -> list[tuple[str, str]]:
    numbers = {row.rank for row in summary.ranks}
    hosts = {row.host for row in summary.ranks}
    world = f" of {summary.world_size:,}" if summary.missing_ranks else ""
    lost = f", {summary.dropped:,} lost" if summary.dropped else ""
    torch = summary.about.get("torch")
    captures = "/".join(sorted({row.capture for row in summary.ranks}))
    facts = [
        ("ranks", f"{len(numbers):,}{world} on {plural(len(hosts), 'host')}"),
        ("records", f"{summary.records:,}{lost}"),
        ("groups", f"{len(summary.groups):,}"),
        ("capture", captures + (f", torch {torch}" if isinstance(torch, str) else "")),
        ("started", _started(summary)),
    ]
    if source := times_of_ops(summary.sources):
        facts.append(("times", source))
    if summary.missing_ranks:
        facts.insert(1, ("missing", with_noun(summary.missing_ranks)))
    return facts


def _started(summary: Summary) -> str:
    if summary.started_epoch_ns is None:
        return "not known"
    try:
        moment = datetime.fromtimestamp(summary.started_epoch_ns / 1e9, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return "at an impossible date"
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _stats(summary: Summary) -> list[tuple[str, str, str]]:
    """Return the figures beside the verdict, each as value, name and details."""
    steps = max((row.steps for row in summary.ranks), default=0)
    lasts = sorted(step.ms for step in summary.steps)
    about = [plural(steps, "step")] if steps else []
    if any(row.unfinished for row in summary.collectives):
        # Else it would contradict the verdict, which says for how much longer ranks waited.
        about.append("to the last end of a call")
    figures = [(time(summary.duration_ms), "run", ", ".join(about))]
    if lasts:
        figures.append(
            (time(lasts[len(lasts) // 2]), "a step", f"median; longest {time(lasts[-1])}")
        )
    if summary.comm_share is not None:
        figures.append((percent(summary.comm_share), "in communication", "of all ranks' time"))
    return figures


def _tree(files: Sequence[SiteBranch]) -> dict[str, Any] | None:
    """Return the call sites by file and function; None if the table shows it as well."""
    if sum(len(branch.functions) for branch in files) < 2:
        return None
    longest = max((branch.total_ms or 0.0 for branch in files), default=0.0)

    def level(branches: Sequence[SiteBranch]) -> dict[str, Any]:
        shown = [
            {
                "name": clean(branch.name),
                "branch": branch,
                "share": (branch.total_ms or 0.0) / longest if longest else 0.0,
                "below": level(branch.functions),
                "rows": [
                    {"row": row, "share": (row.total_ms or 0.0) / longest if longest else 0.0}
                    for row in branch.rows[:_MOST_BRANCHES]
                ],
                "more": max(0, len(branch.rows) - _MOST_BRANCHES),
            }
            for branch in branches[:_MOST_BRANCHES]
        ]
        return {"branches": shown, "more": max(0, len(branches) - _MOST_BRANCHES)}

    return level(files)


def _sites(summary: Summary) -> list[dict[str, Any]]:
    longest = max((row.total_ms or 0.0 for row in summary.call_sites), default=0.0)
    return [
        {
            "where": row.site.shown if row.site.line else "(not known)",
            "row": row,
            "share": (row.total_ms or 0.0) / longest if longest else 0.0,
        }
        for row in summary.call_sites[:_MOST_SITES]
    ]

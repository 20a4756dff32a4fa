"""Numbers, names and paragraphs as text, in every report and on every page."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from io import StringIO
from pathlib import PurePath

from rich.console import Console

from rankcall.analysis.gaps import Gap
from rankcall.analysis.verdicts.wording import IN_HOURS, IN_MINUTES

INDENT = 2  # columns, of what belongs to the line above
_TIMES = ((IN_HOURS * 1e3, 3.6e6, "h"), (IN_MINUTES * 1e3, 6e4, "min"), (1e3, 1e3, "s"))
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


def as_text(show: Callable[[Console], object], width: int) -> str:
    """Return what ``show`` prints as plain text, no line of it wider than ``width``.

    Left to itself, rich prints into the notebook if a kernel has imported it, and the text is lost.
    """
    out = StringIO()
    show(Console(file=out, width=width, color_system=None, highlight=False, force_jupyter=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def digits(value: float) -> str:
    """Write a number with three significant digits: ``1.23``, ``45.6``, ``789``, ``12,345``."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def time(ms: float | None) -> str:
    """Write a duration: ``154 µs``, ``20.2 ms``, ``66.8 s``, ``12.5 min``."""
    if ms is None:
        return "-"
    if ms <= 0:
        return "0"
    for least, unit, name in _TIMES:
        if ms >= least * 0.9995:
            return f"{digits(ms / unit)} {name}"
    if ms >= 0.9995:
        return f"{digits(ms)} ms"
    return f"{ms * 1e3:.0f} µs" if ms >= 0.00995 else f"{ms * 1e3:.1f} µs"


def size(count: float) -> str:
    """Write an amount of bytes in decimal units: ``175 GB``."""
    for name in _DECIMAL:
        if count < 999.5 or name == _DECIMAL[-1]:
            return f"{count:.0f} B" if name == "B" else f"{digits(count)} {name}"
        count /= 1000
    return ""


def line_names(call_site: str, user_line: str) -> str:
    """Write a line as ``train.py:12``, or with a framework's ``train.py:12 (trainer.py:340)``."""
    name = PurePath(call_site).name
    return f"{PurePath(user_line).name} ({name})" if user_line else name


def gap_text(gap: Gap) -> str:
    """Write a gap: ``rank 2: 15.2 ms between stage.py:15 and :18, 60 times; others 3.10 ms``."""
    after, before = (line_names(str(site), site.user_line) for site in (gap.after, gap.before))
    name, _, line = before.rpartition(":")
    if name == after.rpartition(":")[0] and line.isdecimal():
        before = f":{line}"
    lines = f"between {after} and {before}" if after != before else f"from {after} to its next call"
    usual = f"; others {time(gap.usual_ms)}" if gap.usual_ms is not None else ""
    return f"rank {gap.rank}: {time(gap.median_ms)} {lines}, {plural(gap.times, 'time')}{usual}"


def rate(gbps: float | None) -> str:
    """Write a bandwidth in GB/s."""
    if gbps is None:
        return "-"
    return "<0.01" if 0 < gbps < 0.01 else digits(gbps)


def percent(share: float | None) -> str:
    """Write a share: ``88 %``; ``<1 %`` for a small share that is not 0."""
    if share is None:
        return "-"
    if 0 < share < 0.01:
        return "<1 %"
    return f"{100 * min(share, 0.99):.0f} %" if 0.99 < share < 1 else f"{100 * share:.0f} %"


def plural(count: int, singular: str, many: str = "") -> str:
    """Write a count with its noun: ``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {singular if count == 1 else many or singular + 's'}"


def wrapped(text: str, width: int) -> str:
    """Break a text into lines, but not between a number and its unit, nor inside a name.

    A path that is longer than a line is broken behind slashes.
    """
    glued = re.sub(r"(?<=\d) (?=%|\w{1,3}\b)", "\N{NO-BREAK SPACE}", re.sub(r"\s", " ", text))
    too_long = rf"\S{{{width + 1},}}"
    broken = re.sub(too_long, lambda path: re.sub("(?<=[^/])/", "/\v", path[0]), glued)
    lines = textwrap.fill(
        broken, width, break_on_hyphens=False, break_long_words=False, replace_whitespace=False
    )
    return lines.replace("\N{NO-BREAK SPACE}", " ").replace("\v", "")

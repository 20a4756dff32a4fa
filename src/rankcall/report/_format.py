"""Numbers, names and paragraphs for a reader, safe to print on a terminal."""

from __future__ import annotations

import re
import textwrap

from rankcall.files import clean as clean

_TIMES = ((60_000.0 * 60, 3_600_000.0, "h"), (60_000.0 * 10, 60_000.0, "min"), (1e3, 1e3, "s"))
_DECIMAL = ("B", "kB", "MB", "GB", "TB", "PB", "EB")


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


def plural(count: int, one: str, many: str = "") -> str:
    """Write a count with its noun: ``1 rank``, ``1,024 ranks``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def wrapped(text: str, width: int) -> str:
    """Break a text into lines, but not between a number and its unit, nor inside a path."""
    glued = re.sub(r"(?<=\d) (?=%|\w{1,3}\b)", "\N{NO-BREAK SPACE}", text)
    return textwrap.fill(glued, width, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")

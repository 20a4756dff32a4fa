"""Words that all reports of a verdict share: counts, durations, numbers of calls."""

from __future__ import annotations


def count_of(count: int, singular: str) -> str:
    """Write a count with its noun: ``1 rank``, ``1,023 ranks``."""
    return f"{count:,} {singular}{'' if count == 1 else 's'}"


# From where on a duration is in hours, and in minutes, in s. Sentences and tables write the same
# duration in the same unit, because they stand beside each other; only tables need three digits.
IN_HOURS, IN_MINUTES = 3 * 3600.0, 300.0


def duration(seconds: float) -> str:
    """Write a duration: ``0.4 s``, ``72 s``, ``12 min``, ``3.1 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < IN_MINUTES:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < IN_HOURS else f"{seconds / 3600:.1f} h"


def short_duration(seconds: float) -> str:
    """Write a short duration: ``0.35 ms``, ``20 ms``, ``1.2 s``."""
    if seconds >= 1:
        return duration(seconds)
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def begin_sentence(text: str) -> str:
    """Return a text with a capital first letter."""
    return text[:1].upper() + text[1:]


def ordinal(number: int) -> str:
    """Write a place in a row: ``1st``, ``2nd``, ``11th``, ``83rd``."""
    teens = 10 < number % 100 < 14
    ending = "th" if teens else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def numbered(op: str, seq: int) -> str:
    """Return ``recv #51``, or ``recv`` if it has no number before its message comes."""
    return f"{op} #{seq}" if seq > 0 else op

"""All attempts of a job on one line of time, for the macro ``attempts_line`` of both pages."""

from __future__ import annotations

from typing import Any

from rankcall.analysis.attempts import Attempts
from rankcall.report.attempts_line import in_words

_MOST_DOWNS = 100  # the newest times in which nothing went on
# Per cent of the line, about a pixel: a short pause in a long job is seen, too.
_LEAST_WIDTH = 0.1


def line_of(known: Attempts) -> dict[str, Any] | None:
    """Return the line of time: where nothing went on, in per cent of it; None without restarts."""
    length = known.until_ns - known.began_ns
    if len(known.attempts) < 2 or length <= 0:
        return None
    downs = [
        {
            "left": min((begin - known.began_ns) / length * 100, 100 - _LEAST_WIDTH),
            "width": max((end - begin) / length * 100, _LEAST_WIDTH),
        }
        for begin, end in known.downs_ns[-_MOST_DOWNS:]
    ]
    return {"downs": downs, "words": in_words(known)}

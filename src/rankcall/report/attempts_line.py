"""Draw all attempts of a job as one line of text, and say in words what they show."""

from __future__ import annotations

from rankcall.analysis.attempts import Attempts
from rankcall.printable import clean
from rankcall.ranks import with_noun
from rankcall.report.formatting import plural, time

_SHADES = "█▓▒░"  # from "works all the time" to "nothing goes on"


def bar(attempts: Attempts, columns: int) -> str:
    """Draw the line of time: a column is the paler, the longer nothing went on in it.

    A column in which nothing went on for a moment is not a full one, however short that was.
    """
    most = len(_SHADES) - 1
    return "".join(
        _SHADES[0 if share <= 0 else min(most, 1 + int(share * most))]
        for share in attempts.down_shares(max(1, columns))
    )


def in_words(attempts: Attempts) -> str:
    """Return how many attempts there were, how long nothing went on, and what failed last."""
    down_ns = sum(end - begin for begin, end in attempts.downs_ns)
    count = plural(len(attempts.attempts), "attempt")
    text = f"{count}, {time(down_ns / 1e6)} down"
    ends = [attempt.end for attempt in attempts.attempts if attempt.end is not None]
    if not ends:
        return text
    last = ends[-1]
    culprits = f" ({with_noun(last.culprits)})" if last.culprits else ""
    where = f" at step {last.step:,}" if last.step > 0 else ""
    return f"{text}; last failure: {clean(last.signature.kind)}{culprits}{where}"

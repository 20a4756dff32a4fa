"""What a process said last on stderr: its traceback, what a C++ exception says, or its last lines.

A launcher keeps the end of each rank's stderr (``run.stderr_tails``). Of a rank that failed, the
lines that say why are kept in its ``RankState``, from where a verdict quotes them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankcall.analysis.snapshot import RankState
from rankcall.printable import clean
from rankcall.run.redaction import redact_text
from rankcall.run.stderr_tails import Tail, name_in_tails

MOST_LINES = 16  # of a quotation: a traceback of a few frames, with its message
_FIRST_LINES = 2  # of them, from the beginning, if more are left out
_LONGEST = 300  # characters of a line
_LAST_LINES = 3  # if there is neither a traceback nor a C++ exception
_NEAR = 100  # lines: what was followed by more of them did not end the process
_MOST_QUOTED = 4  # ranks of a run: those that failed first
_MOST_OF_MESSAGE = 8  # lines; what comes after may be of others
_BY_TORCH = re.compile(r"^\[rank\d{1,7}\]:[EWIF]? ?")  # before each line of its own traceback
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = re.compile(
    r"The above exception was the direct cause of|During handling of the above exception"
)
# What C++ libraries, the C library, Rust and the interpreter itself write before they abort.
_ABORT = re.compile(
    r"terminate called|Fatal Python error: |Fatal glibc error|\*\*\* .{1,200} \*\*\*"
    r"|.{1,200}: Assertion [`\'].{1,200} failed|malloc\(\): |free\(\): |double free or corruption"
    r"|thread \'.{0,80}\' .{0,40}panicked at |munmap_chunk\(\): |corrupted size vs"
)
_OWN = "rankcall: "


def last_words(text: str) -> tuple[str, ...]:
    """Return the lines at the end of a stderr that say why its process ended; () if it is empty.

    They hold no secrets that are known as such, and no control characters. A line of several
    states, as a progress bar writes it, is what was to be seen last.
    """
    lines = [_BY_TORCH.sub("", line.rstrip("\r").rpartition("\r")[2]) for line in text.split("\n")]
    lines = [line.rstrip() for line in lines]
    start, end = max(_last_abort(lines), _last_traceback(lines))
    block = lines[start:end] if len(lines) - end <= _NEAR else []
    if not block:
        block = [line for line in lines if line and not line.startswith(_OWN)][-_LAST_LINES:]
    if len(block) > MOST_LINES:
        # The end of a traceback names the line that failed; its beginning says what this is.
        left_out = len(block) - MOST_LINES + 1
        block = [
            *block[:_FIRST_LINES],
            f"  [{left_out:,} lines left out]",
            *block[_FIRST_LINES + left_out :],
        ]
    return tuple(_quoted(line) for line in block)


def _quoted(line: str) -> str:
    # Cut after secrets were taken out: half of one is not recognised.
    text = redact_text(line[: 2 * _LONGEST].replace("\t", "    "))
    return clean(text[:_LONGEST])


def _last_traceback(lines: Sequence[str]) -> tuple[int, int]:
    """Return where the last traceback is, from the first of a chain of exceptions; or (0, 0)."""
    starts = [number for number, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    if not starts:
        return 0, 0
    last = start = starts.pop()
    while starts and any(_CHAINED.match(line) for line in lines[starts[-1] : start]):
        start = starts.pop()
    end = last + 1
    while end < len(lines) and lines[end][:1].isspace():  # frames and their code
        end += 1
    return start, _end_of_message(lines, end)


def _last_abort(lines: Sequence[str]) -> tuple[int, int]:
    """Return where the words of the last abort are; or (0, 0)."""
    for number in range(len(lines) - 1, -1, -1):
        if _ABORT.match(lines[number]):
            # faulthandler writes its own line after what the C++ exception says.
            before = range(max(0, number - _MOST_OF_MESSAGE), number)
            start = next((line for line in before if _ABORT.match(lines[line])), number)
            return start, _end_of_message(lines, start)
    return 0, 0


def _end_of_message(lines: Sequence[str], start: int) -> int:
    """Return where a message ends that begins there: it may have several lines."""
    end = start
    for line in lines[start : start + _MOST_OF_MESSAGE]:
        if not line or line.startswith(_OWN):
            break
        end += 1
    return end


def with_last_words(
    states: Sequence[RankState], tails: Sequence[Tail], began_ns: Mapping[int, int]
) -> list[RankState]:
    """Return the states, with the words of the ranks that failed first.

    Args:
        states: The states of all ranks.
        tails: The tails of the ranks that ``failed_first`` names, the newest first.
        began_ns: When each rank's process ran already, in epoch ns. Earlier and later attempts of
            the run have left tails as well; the process's own is the newest that is older.
    """
    words = {}
    for state in failed_first(states):
        host = name_in_tails(state.host)
        for tail in tails:
            known_ns = began_ns.get(state.rank, 0)
            if (tail.rank, tail.host) == (state.rank, host) and tail.started_ns <= known_ns:
                words[state.rank] = "\n".join(last_words(tail.text()))
                break
    return [replace(state, words=words.get(state.rank, state.words)) for state in states]


def failed_first(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks of a run whose processes failed by themselves, the first ones first."""
    failed = [
        state
        for state in states
        if (state.failure or state.vanished or state.exit not in (None, 0))
        and not (state.ended_by_launcher or state.aborted)
    ]
    return sorted(failed, key=lambda state: -(state.gone_s or 0.0))[:_MOST_QUOTED]

"""A row of the table of messages, its source, and the readings that several sources share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

from rankcall.imports.logs.facts import Aborting, Fact, Fragment, Outside, Trouble
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.reading import Repeated
from rankcall.ranks import MAX_RANKS
from rankcall.record import op_of_variant
from rankcall.whole_numbers import whole_number

_MOST_RANKS = 1 << 13  # of one message; a line is too short for many more
# A web server also writes "Connection reset by peer". These words, or a rank before the line, show
# that a line is about the ranks of a job.
_OF_RANKS = re.compile(
    r"c10d|[Gg]loo|TCPStore|ProcessGroup|[NRH]CCL|Dist\w*Error|torch|\brank\b|RayTask|[Aa]ctor"
)
Reading = Callable[[Line, "re.Match[str]"], Fact | None]


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        meaning: What has happened, for the documentation.
        markers: Words of the message; a line of interest contains one of them.
        pattern: The whole message. None: it has several lines, which ``job`` puts together.
        read: Makes the fact. None as for ``pattern``.
        example: A line as it was seen.
        seen_in: Where: a version, or a public issue.
        follow: How many lines after the marker belong to the message.
        repeated: For a message that healthy jobs write all the time: only its newest lines are
            read.
    """

    meaning: str
    markers: tuple[str, ...]
    pattern: re.Pattern[str] | None
    read: Reading | None
    example: str
    seen_in: str
    follow: int = 0
    repeated: Repeated | None = None


@dataclass(frozen=True)
class Source:
    """A program that writes such messages. ``prefix`` says what stands before them."""

    name: str
    prefix: str
    messages: tuple[Message, ...]


def any_of(*markers: str) -> re.Pattern[str]:
    """Return the pattern of a message that has nothing but one of these words."""
    return re.compile("|".join(map(re.escape, markers)))


@functools.lru_cache(maxsize=256)
def op_name(op_type: str) -> str:
    """Return our name of an op that torch writes as ``ALLREDUCE`` or ``_ALLGATHER_BASE``."""
    if not op_type:
        return ""
    known = op_of_variant(op_type.lower())
    return known if known != "unknown" else op_type.lower()


def ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks in ``4, 5`` or ``0-3,7``; nothing if they cannot be real."""
    ranks: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        begin = whole_number(first, most=MAX_RANKS - 1)
        end = whole_number(last, most=MAX_RANKS - 1) if last else begin
        if begin is None or end is None or end < begin:
            return ()
        if end - begin + len(ranks) > _MOST_RANKS:
            return ()
        ranks.update(range(begin, end + 1))
    return tuple(sorted(ranks))


def trouble(line: Line, match: re.Match[str]) -> Fact | None:
    """Read a message about a broken connection, if it is of ranks."""
    return Trouble(line) if line.writer.rank >= 0 or _OF_RANKS.search(line.text) else None


def outside(line: Line, match: re.Match[str]) -> Fact:
    """Read a message that something outside the job ended it."""
    return Outside(line, " ".join(match[0].split()))


def not_started(line: Line, match: re.Match[str]) -> Fact:
    """Read a message that the job could not start: the first group, or all of it, says why."""
    return Outside(line, " ".join(match[match.lastindex or 0].split()), at_start=True)


def aborting(line: Line, match: re.Match[str]) -> Fact:
    """Read a message that a process ends; another line says why."""
    return Aborting(line)


def failed(line: Line, match: re.Match[str]) -> Fact:
    """Read a message that only says that something failed."""
    return Fragment(line)


def waited(line: Line, match: re.Match[str]) -> Fact:
    """Read a message of a process that has waited for others in vain."""
    return Trouble(line)

"""The table of messages that rankcall knows: who writes them, their words, and the fact in them.

The reader searches logs for the markers of this table, ``facts_of`` makes facts of its patterns,
and docs/log-messages.md is written from it (``python tools/log_messages.py``). Each row has one
line as it was seen: the line is the example in the documentation and a test.

To add a message, add a row to its source, in the module of the programs that write it. ``markers``
are words that only this message contains; a row whose message can be split over lines by a terminal
has several, one for each part. Its ``pattern`` covers the whole message, so that an incomplete one
is told from one of another form.
"""

from __future__ import annotations

import functools

from rankcall.imports.logs.facts import Fact, Fragment
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.reading import Marker, Repeated
from rankcall.imports.logs.sources import frameworks, launchers, libraries, nodes, pytorch
from rankcall.imports.logs.sources.message import Message, Source, failed

__all__ = [
    "SOURCES",
    "Message",
    "Source",
    "facts_of",
    "is_incomplete",
    "is_whole",
    "markers",
    "repeated",
]

SOURCES: tuple[Source, ...] = (
    *pytorch.SOURCES,
    *launchers.SOURCES,
    *libraries.SOURCES,
    *nodes.SOURCES,
    *frameworks.SOURCES,
)

_MESSAGES = tuple(message for source in SOURCES for message in source.messages)
_READERS = tuple(
    (words, message)
    for message in _MESSAGES
    if message.pattern is not None
    for words in message.markers
)
# Markers of failures that no other program writes: a line with one tells of a failure even if the
# rest of the message is cut off.
_FRAGMENTS = (
    "Watchdog caught",
    "watchdog thread terminated",
    "Detected mismatch between",
    "failed to pass monitoredBarrier",
    "store based barrier",
    "seconds waiting for clients",
    "Process failed for slice",
    " Peer host id: ",
)


@functools.cache
def markers() -> tuple[Marker, ...]:
    """Return what the reader searches for: no word that contains another one."""
    follow_of: dict[str, int] = {}
    for message in _MESSAGES:
        for words in message.markers if message.repeated is None else ():
            follow_of[words] = max(follow_of.get(words, 0), message.follow)
    return tuple(
        Marker(words, follow)
        for words, follow in follow_of.items()
        if not any(
            other != words and other in words and follow_of[other] >= follow for other in follow_of
        )
    )


@functools.cache
def repeated() -> tuple[Repeated, ...]:
    """Return what healthy jobs write all the time: the reader keeps the newest lines of it."""
    return tuple(message.repeated for message in _MESSAGES if message.repeated is not None)


def facts_of(line: Line) -> list[Fact]:
    """Return the facts in a line; an empty list if it has none of the messages above.

    An error that has no row of its own is a fragment of what is known.
    """
    facts: list[Fact] = []
    done: set[int] = set()
    is_fragment = False
    for words, message in _READERS:
        if words not in line.text or id(message) in done:
            continue
        done.add(id(message))
        assert message.pattern is not None  # by _READERS
        assert message.read is not None
        match = message.pattern.search(line.text)
        fact = message.read(line, match) if match else None
        if fact is not None:
            facts.append(fact)
        is_fragment = is_fragment or (match is None and words in _FRAGMENTS)
    if is_fragment and not facts:
        return [Fragment(line)]
    other = pytorch.of_no_row(line) if not facts else None
    return facts if other is None else [other]


def is_whole(text: str, *, also_failed: bool = False) -> bool:
    """Whether a line has a whole message that says more than that something failed.

    ``also_failed``: Or one that says no more.
    """
    return any(
        words in text
        and message.pattern is not None
        and (also_failed or message.read is not failed)
        and message.pattern.search(text)
        for words, message in _READERS
    )


def is_incomplete(text: str) -> bool:
    """Whether a line has a marker of a message and not the whole message: it may go on below."""
    patterns = [
        message.pattern
        for words, message in _READERS
        # Words that only say that something failed stand in incomplete messages, too.
        if words in text and message.pattern is not None and message.read is not failed
    ]
    return bool(patterns) and not any(pattern.search(text) for pattern in patterns)

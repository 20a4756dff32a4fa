"""Files with the dumps of several ranks: one JSON of all ranks, or a table (``tables``)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rankcall.errors import CorruptRunError
from rankcall.imports.dumps.tables import dumps_in, is_table
from rankcall.printable import clean
from rankcall.ranks import MAX_RANKS

__all__ = ["Part", "begins_like_several", "parts_of"]

_MOST_CONTAINERS = 4_000_000  # lists and dicts of one file
_SPACE = re.compile(r"\s*")
# ``{"rank0.json": {`` or ``{"0": {``; the keys of a single dump have no digits.
_BEGINS = re.compile(rb'\s*(?:\[\s*\{|\{\s*"[^"\\]{0,200}\d[^"\\]{0,100}"\s*:\s*\{)')


class Part(NamedTuple):
    """The dump of one rank. ``written_ns``: when, if the file's own time does not tell; else 0."""

    rank: int
    dump: Any
    written_ns: int = 0


def begins_like_several(head: bytes) -> bool:
    """Whether JSON begins like an object of dumps by rank, or like a list of dumps."""
    return _BEGINS.match(head) is not None


def parts_of(path: Path, raw: bytes) -> Iterator[Part]:
    """Yield the dump of each rank in a file.

    Raises:
        CorruptRunError: The file is damaged, or gives one rank twice.
    """
    seen: set[int] = set()
    parts = (Part(*dump) for dump in dumps_in(path, raw))
    for part in parts if is_table(path) else _of_json(path, raw):
        if not 0 <= part.rank < MAX_RANKS or part.rank in seen:
            raise CorruptRunError(
                f"{path}: it does not tell which rank wrote each of its dumps: name them by rank"
            )
        seen.add(part.rank)
        yield part


def _of_json(path: Path, raw: bytes) -> Iterator[Part]:
    """Yield the values of the outermost object or list, one after the other.

    Only one of them is in memory at a time.
    """
    if raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS:
        raise CorruptRunError(f"{path}: more objects than any dumps of Flight Recorder")
    decoder = json.JSONDecoder()
    text = raw.decode("utf-8", "replace")
    try:
        at = _after_space(text, 0)
        is_list, at = text[at] == "[", at + 1
        for number in range(MAX_RANKS):
            at = _after_space(text, at)
            if text[at] in "]}":
                return
            if number:
                at = _after_space(text, _after(text, at, ","))
            key: Any = number
            if not is_list:
                key, at = decoder.raw_decode(text, at)
                at = _after_space(text, _after(text, _after_space(text, at), ":"))
            dump, at = decoder.raw_decode(text, at)
            yield Part(_rank(key, dump), dump)
    except (ValueError, IndexError, RecursionError) as error:
        why = clean(str(error)[:200])
        raise CorruptRunError(f"{path}: not dumps of Flight Recorder, or damaged: {why}") from error


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _after(text: str, at: int, mark: str) -> int:
    if text[at] != mark:
        raise ValueError(f"no {mark!r} at character {at}")
    return at + 1


def _rank(key: Any, dump: Any) -> int:
    """Return the rank that a dump tells, or its key, like ``rank0.json``; -1 if none does."""
    own = dump.get("rank") if isinstance(dump, dict) else None
    if type(own) is int:
        return own
    if type(key) is int:
        return key
    numbers = re.findall(r"\d{1,9}", key) if isinstance(key, str) else []
    named = re.search(r"rank[_\-.]?(\d{1,9})", key, re.IGNORECASE) if numbers else None
    return int(named[1]) if named else int(numbers[-1]) if numbers else -1

"""Read one Flight Recorder dump: its records, and what it says about its groups.

This is all that can be done with one dump alone, so several processes can do it with many.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rankcall.errors import CorruptRun
from rankcall.files import clean
from rankcall.imports.dump_files import read_dump
from rankcall.imports.dump_records import DumpRecords, records_of

_MOST_TEXT = 4096  # characters of a description


@dataclass
class DumpContents:
    """The contents of one dump."""

    host: str
    groups: dict[str, tuple[str, str]]  # by name: the description, and the ranks as ``[0, 1]``
    records: DumpRecords
    modified_ns: int  # when the file was last written


class DumpAnswer(NamedTuple):
    """The contents of a dump, or None if it is left out, and the lines that say so."""

    contents: DumpContents | None
    problems: list[str]


def contents_of_dump(path: Path, *, isolated: bool = False) -> DumpAnswer:
    """Return what a file contains. ``isolated``: see ``read_dump``."""
    problems: list[str] = []
    try:
        return DumpAnswer(_contents(path, read_dump(path, problems, isolated=isolated)), problems)
    except CorruptRun as error:
        problems.append(str(error))
    except OSError as error:
        problems.append(f"{path}: cannot be read: {error.strerror}")
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        problems.append(f"{path}: damaged: {clean(str(error)[:200])}")
    return DumpAnswer(None, problems)


def _contents(path: Path, dump: dict[str, Any]) -> DumpContents:
    config, host = dump.get("pg_config"), dump.get("host_name")
    groups = {}
    for name, about in (config if isinstance(config, dict) else {}).items():
        ranks = about.get("ranks") if isinstance(about, dict) else None
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            ranks = str(ranks)
        if isinstance(ranks, str) and isinstance(name, (str, int)):
            description = about.get("desc", "")
            groups[str(name)] = _text(description), ranks
    return DumpContents(
        clean(host[:63]) if isinstance(host, str) else "",
        groups,
        records_of(dump["entries"]),
        path.stat().st_mtime_ns,
    )


def _text(value: Any) -> str:
    return str(value)[:_MOST_TEXT] if isinstance(value, (str, int)) else ""

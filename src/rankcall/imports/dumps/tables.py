"""The tables that torch's debug server makes of the dumps of all ranks.

``start_debug_server(dump_dir=...)`` asks all ranks for their dumps again and again, and writes what
torch's analyser makes of them as tables. These have no times and no source lines. So a call counts
as begun at the time of the first table in which it is, and its age is the least that it can be.
"""

from __future__ import annotations

import calendar
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["begins_like_tables", "dumps_in", "is_table"]

_MOST_TABLES = 100  # of one folder; the server writes one a minute
_MOST_TABLE_BYTES = 1 << 26
_TABLE = re.compile(r"(?:torchcomms_)?fr_trace_(\d{8}_\d{6})\.txt")
_CALL = re.compile(
    r"\s*\d+ +(?:(\d+) +)?(\S+) +(\d{1,7}) +\d+  +(\S+:\S+(?: \d{1,7}(?:->|<-)\d{1,7})?) +(\[.*)"
)
_COLLECTIVE = re.compile(
    r"\s*(\d+) +\S+ +(?:True|False) +(\d{1,18}) +\d+ +\d+  .{0,4000}?\} +"
    r"(scheduled|started|completed)\b"
)
_MEMBER = re.compile(r"\s*(\S+) +(\d{1,7})\s*")
_GROUP = re.compile(r"\s*(\S+) +(\S.*?) +(\d{1,7})\s*")
_SIZES = re.compile(r"[\[\]\d, ]{2,4000}")


class _Call(NamedTuple):
    group: str
    rank: int
    seq: int
    name: str
    sizes: Any
    state: str


class _Tables(NamedTuple):
    calls: list[_Call]
    members: dict[str, set[int]]  # by the group's long name, which begins with its name
    descriptions: dict[str, str]


def is_table(path: Path) -> bool:
    """Whether a file has the name of a table of the debug server."""
    return _TABLE.fullmatch(path.name) is not None


def begins_like_tables(head: bytes) -> bool:
    """Whether a file begins like a table of the debug server."""
    return b" FR Trace ===" in head


def dumps_in(path: Path, raw: bytes) -> Iterator[tuple[int, Any, int]]:
    """Yield each rank, a dump of what the tables say of it, and when they were written, in ns."""
    tables = _tables(raw)
    written_ns = _time_ns(path)
    begun = _begun(path, tables, written_ns)
    first_ns = min(begun.values(), default=written_ns)  # calls that have ended began before
    calls_of: dict[int, list[_Call]] = defaultdict(list)
    for call in tables.calls:
        calls_of[call.rank].append(call)
    for ranks in tables.members.values():
        for rank in ranks:
            calls_of[rank]  # a rank that has called nothing has a dump, too
    for rank, calls in sorted(calls_of.items()):
        config = {
            name: group
            for name in dict.fromkeys(call.group for call in calls)
            if (group := _config(tables, name, rank)) is not None
        }
        entries = [
            {
                "record_id": number,
                "process_group": (call.group, config.get(call.group, {}).get("desc", "")),
                "collective_seq_id": call.seq,
                "profiling_name": call.name,
                "input_sizes": call.sizes,
                "state": call.state,
                "is_p2p": "->" in call.name or "<-" in call.name,
                "time_created_ns": begun.get(call[:4], first_ns),
            }
            for number, call in enumerate(calls)
        ]
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        yield rank, dump, written_ns


def _tables(raw: bytes) -> _Tables:
    tables = _Tables([], defaultdict(set), {})
    collectives: dict[str, tuple[int, str]] = {}  # the number in the group and the state of each
    newest: dict[tuple[str, int], int] = {}
    section = ""
    for line in raw[:_MOST_TABLE_BYTES].decode("utf-8", "replace").splitlines():
        if line.startswith("=== "):
            collectives = {}
        elif line.startswith("--- "):
            section = line.strip("- ")
        elif section == "Groups" and (match := _GROUP.fullmatch(line)):
            tables.descriptions[match[1]] = match[2]
        elif section == "Memberships" and (match := _MEMBER.fullmatch(line)):
            tables.members[match[1]].add(int(match[2]))
        elif section == "Collectives" and (match := _COLLECTIVE.match(line)):
            collectives[match[1]] = int(match[2]), match[3]
        elif section == "NCCL Calls" and (match := _CALL.fullmatch(line)):
            key = match[2], int(match[3])
            # torch's analyser gives no number to a call that not all members have issued.
            seq, state = collectives.get(match[1] or "", (newest.get(key, 0) + 1, "scheduled"))
            newest[key] = seq
            sizes = json.loads(match[5]) if _SIZES.fullmatch(match[5].rstrip()) else []
            tables.calls.append(_Call(*key, seq, match[4], sizes, state))
    return tables


def _config(tables: _Tables, name: str, rank: int) -> dict[str, str] | None:
    """Return the description and the members of a rank's group; None if they are not clear."""
    groups = [
        group for group, ranks in tables.members.items() if group.startswith(name) and rank in ranks
    ]
    if len(groups) != 1:
        return None
    ranks = ", ".join(map(str, sorted(tables.members[groups[0]])))
    return {"desc": tables.descriptions.get(groups[0], ""), "ranks": f"[{ranks}]"}


def _time_ns(path: Path) -> int:
    """Return the time in the name of a table, in the server's time zone; 0 if there is none."""
    match = _TABLE.fullmatch(path.name)
    try:
        return calendar.timegm(time.strptime(match[1] if match else "", "%Y%m%d_%H%M%S")) * 10**9
    except ValueError:
        return 0


def _begun(path: Path, tables: _Tables, written_ns: int) -> dict[tuple[Any, ...], int]:
    """Return when each unfinished call was first seen: in older tables of the folder."""
    begun = {call[:4]: written_ns for call in tables.calls if call.state != "completed"}
    name = path.name[: -len("20260314_090236.txt")]
    older = [
        other
        for other in path.parent.iterdir()
        if other.name.startswith(name) and is_table(other) and other.name < path.name
    ]
    for other in sorted(older, reverse=True)[:_MOST_TABLES]:
        try:
            with other.open("rb") as file:
                calls = {call[:4] for call in _tables(file.read(_MOST_TABLE_BYTES)).calls}
        except OSError:
            break
        still = {call for call in begun if call in calls}
        if not still:
            break
        begun.update(dict.fromkeys(still, _time_ns(other)))
    return begun

"""A ring file's side tables: process groups, call sites, strings, sizes; decoded and encoded.

Every length, count and number is checked, because any user may have written the file.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankcall.budget import MEMBER_BYTES, Budget
from rankcall.errors import CorruptRunError
from rankcall.ranks import compress_ranks, count_ranks, expand_ranks

ENTRY_HEADER = np.dtype([("commit", "<u4"), ("kind", "<u4"), ("length", "<u4"), ("crc32", "<u4")])
ENTRY_STRING, ENTRY_GROUP, ENTRY_SITE, ENTRY_SIZES, ENTRY_LINE = range(1, 6)  # UTF-8 text; JSON

_ENTRY = struct.Struct("<IIII")
assert _ENTRY.size == ENTRY_HEADER.itemsize
_MOST_OF_A_LINE = 400  # characters; a longer line is generated code, and no screen shows it whole
_GROUPS_KEPT = 1 << 20  # members of the groups that rings share: 8 MiB of them
ERA = 1000  # epochs of one init_process_group; a name used again within it adds one


# The ``api`` of a ``Join``'s own calls, and of those that it answers for a rank without inputs.
JOIN = "Join"


@dataclass(frozen=True)
class Group:
    """A process group, as one of its members knew it. ``ranks`` are global, in group order."""

    name: str
    epoch: int
    backend: str
    description: str
    ranks: tuple[int, ...]

    @property
    def label(self) -> str:
        """Torch's name for the group, with a suffix if earlier groups had the same name.

        ``#2`` means after the second init_process_group, and ``.1`` that the name was used again
        after the same init_process_group.
        """
        era, again = divmod(self.epoch, ERA)
        return self.name + (f"#{era + 1}" if era else "") + (f".{again}" if again else "")


# Of a record whose group is not in the side tables: there was no room, or the file is damaged.
UNKNOWN_GROUP = Group("unknown", 0, "", "", ())


@dataclass(frozen=True)
class UserLine:
    """A line of the user's own code: neither installed nor Python's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class CallSite:
    """The line that issued an op, and the public function it called.

    If that line is a framework's, ``user`` is the nearest line of the user's own that led there, or
    None if only installed code did.
    """

    file: str
    line: int
    function: str
    api: str
    user: UserLine | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def user_line(self) -> str:
        """The user's line behind a framework's, as ``file:line``; else empty."""
        return str(self.user or "")

    @property
    def own(self) -> CallSite | UserLine:
        """The line to show first: the user's, or the only one that is known."""
        return self.user or self

    @property
    def shown(self) -> str:
        """Both lines, the user's first: ``train.py:12 (through .../trainer.py:340)``."""
        return both_lines(str(self), self.user_line)


def both_lines(call_site: str, user_line: str) -> str:
    """Write a call site, with the user's line before the framework's if there are two."""
    return f"{user_line} (through {call_site})" if user_line else call_site


@dataclass
class Tables:
    """A ring's side tables, by id."""

    strings: dict[int, str] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    sites: dict[int, CallSite] = field(default_factory=dict)
    lines: dict[int, str] = field(default_factory=dict)  # the source lines of call sites
    # By shape hash: the number of elements of each tensor of a coalesced op.
    numels: dict[int, tuple[int, ...]] = field(default_factory=dict)
    damaged: bool = False


class Entry(NamedTuple):
    """One entry of the side tables. ``end`` is where the next one begins."""

    number: int
    kind: int
    payload: bytes
    end: int


def entries(raw: bytes, number: int = 0) -> Iterator[Entry]:
    """Yield the entries after the ``number``-th, up to the first damaged one."""
    offset = 0
    while offset + ENTRY_HEADER.itemsize <= len(raw):
        commit, kind, length, crc32 = _ENTRY.unpack_from(raw, offset)
        start = offset + ENTRY_HEADER.itemsize
        payload = raw[start : start + length]
        number += 1
        if commit != number or len(payload) != length or zlib.crc32(payload) != crc32:
            return
        offset = start + (length + 7) // 8 * 8
        yield Entry(number, kind, payload, offset)


def parse_tables(raw: bytes, budget: Budget | None = None) -> Tables:
    """Decode the side tables up to the first damaged entry.

    Args:
        raw: The side tables as they are on file.
        budget: What is left for the run that the ring is of. None: this process wrote the ring.

    Raises:
        CorruptRunError: The budget is spent.
    """
    tables, end = Tables(), 0
    for number, kind, payload, begins_next in entries(raw):
        if not _keep_entry(tables, number, kind, payload, budget):
            break
        end = begins_next
    tables.damaged = end + ENTRY_HEADER.itemsize <= len(raw)
    return tables


def _keep_entry(
    tables: Tables, number: int, kind: int, payload: bytes, budget: Budget | None
) -> bool:
    try:
        if kind == ENTRY_STRING:
            tables.strings[number] = payload.decode("utf-8", "replace")
        elif kind == ENTRY_GROUP:
            tables.groups[number] = _groups.get(payload, budget)
        elif kind == ENTRY_SITE:
            tables.sites[number] = decode_site(payload)
        elif kind == ENTRY_LINE:
            fields = json.loads(payload)
            tables.lines[int(fields["site"])] = _text(fields["text"])[:_MOST_OF_A_LINE]
        elif kind == ENTRY_SIZES:
            fields = json.loads(payload)
            tables.numels[int(fields["hash"])] = tuple(_count(numel) for numel in fields["numels"])
        return True
    except CorruptRunError:
        raise
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError):
        return False


class _Groups:
    """Groups by payload. All members of a group write the same payload, and share one object here.

    Otherwise 16,384 rings that each list all ranks would take minutes and gigabytes to read.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Group] = {}
        self._members = 0

    def get(self, payload: bytes, budget: Budget | None) -> Group:
        """Return the group that a payload describes; raises ``ValueError`` or the like."""
        group = self._known.get(payload)
        if group is not None:
            _spend(budget, payload, len(group.ranks))
            return group
        fields = json.loads(payload)
        _spend(budget, payload, count_ranks(fields["ranks"]))
        group = _group(fields)
        self._members += len(group.ranks) + 1
        if self._members > _GROUPS_KEPT:
            self._known, self._members = {}, len(group.ranks) + 1
        self._known[payload] = group
        return group


_groups = _Groups()


def _spend(budget: Budget | None, payload: bytes, members: int) -> None:
    if budget is not None:
        budget.spend_once(payload, members * MEMBER_BYTES)


def decode_site(payload: bytes) -> CallSite:
    """Return the call site that a payload describes; raises ``ValueError`` or the like."""
    return site_from(json.loads(payload))


def site_from(fields: Mapping[str, Any]) -> CallSite:
    """Return a call site from the object that ``site_object`` made; checks every field."""
    user = fields.get("user")  # absent in rings of earlier versions
    return CallSite(
        *_line_from(fields),
        _text(fields["api"]),
        UserLine(*_line_from(user)) if user is not None else None,
    )


def _line_from(fields: Mapping[str, Any]) -> tuple[str, int, str]:
    return _text(fields["file"]), _small(fields["line"]), _text(fields["function"])


def _text(value: Any) -> str:
    """Return a text that can be encoded: JSON can contain lone surrogates, which UTF-8 cannot."""
    return str(value).encode("utf-8", "replace").decode()


def _count(number: Any) -> int:
    """Return a number of elements. Raises ``ValueError`` if it is impossible."""
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{number} is not a number of elements")
    return number


def _small(number: Any) -> int:
    """Return a line or epoch number. Raises ``ValueError`` if it is impossible."""
    if not 0 <= int(number) < 1 << 31:
        raise ValueError(f"{number} is not a line or epoch number")
    return int(number)


def _group(fields: dict[str, Any]) -> Group:
    return Group(
        _text(fields["name"]),
        _small(fields["epoch"]),
        _text(fields["backend"]),
        _text(fields["description"]),
        expand_ranks(fields["ranks"]),
    )


def encode_group(group: Group) -> bytes:
    """Return a group's side-table payload."""
    fields = {
        "name": group.name,
        "epoch": group.epoch,
        "backend": group.backend,
        "description": group.description,
        "ranks": compress_ranks(list(group.ranks)),
    }
    return json.dumps(fields).encode()


def encode_site(site: CallSite) -> bytes:
    """Return a call site's side-table payload."""
    return json.dumps(site_object(site)).encode()


def site_object(site: CallSite) -> dict[str, Any]:
    """Return a call site as an object for JSON; without a user's line, that key is absent."""
    fields = vars(site) | {"user": vars(site.user) if site.user is not None else None}
    return {key: value for key, value in fields.items() if value is not None}


def encode_line(site: int, text: str) -> bytes:
    """Return the side-table payload of a call site's source line."""
    return json.dumps({"site": site, "text": text}).encode()

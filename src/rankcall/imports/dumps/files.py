"""Read Flight Recorder's dumps: pickles or JSON, one file for each rank, under any name.

Any user may have written a file, so each is limited in size, in depth and in the number of objects
that it can create, and a pickle can create nothing but numbers, texts, lists, tuples and dicts.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import pickletools
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rankcall.budget import Budget
from rankcall.errors import CorruptRunError
from rankcall.imports.dumps.records import DumpRecords, records_of
from rankcall.imports.dumps.tables import begins_like_tables, is_table
from rankcall.imports.dumps.together import Part, begins_like_several, parts_of
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import MAX_RANKS

# Its numbers count the ops of a communicator, and torch's those of a group, in which several ops
# can be one. Its current op may be one that has not begun.
_NCCLX = (
    "the dumps also have NCCLX's own trace (nccl_comm_state), which is not read, because its "
    "numbers are not those of torch; look at CT_currentColls of the ranks named here"
)
_MOST_STATES = 64  # communicators that are looked at
_MOST_TEXT = 4096  # characters of a description
_MEMBER_TEXT = 16  # bytes of a rank in a list that is written out
# That an entry costs while its records are made. An entry of Flight Recorder takes 200 bytes and
# more in a pickle, but a pickle can refer to one entry again and again, by two bytes.
_ENTRY_BYTES = 1024


@dataclass
class DumpContents:
    """The contents of one dump. ``rank``: who wrote it, or -1 if only the file's name tells."""

    rank: int
    host: str
    groups: dict[str, tuple[str, str]]  # by name: the description, and the ranks as ``[0, 1]``
    records: DumpRecords
    modified_ns: int  # when the file was last written


class DumpAnswer(NamedTuple):
    """The contents of the dumps in a file; none if it is left out, and the problems that say so."""

    contents: list[DumpContents]
    problems: list[Problem]


def contents_of_dump(path: Path, *, isolated: bool = False) -> DumpAnswer:
    """Return what a file contains. ``isolated``: see ``read_dump``.

    This is all that can be done with one file alone, so several processes can do it with many.
    """
    problems: list[Problem] = []
    budget = Budget()  # of this file alone: the caller spends for what it keeps of all files
    try:
        with path.open("rb") as file, budget.reading(path, os.fstat(file.fileno())):
            if _kind_of(path) != "several":
                dump = read_dump(path, problems, isolated=isolated)
                return DumpAnswer([_contents(path, Part(-1, dump), budget)], problems)
            contents = []
            for part in parts_of(path, _read_bounded(path, _MOST_TOGETHER_BYTES)):
                _check(path, part.dump, problems)
                contents.append(_contents(path, part, budget))
            return DumpAnswer(contents, problems)
    except CorruptRunError as error:
        problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
    except OSError as error:
        problems.append(
            Problem(ProblemKind.UNREADABLE, f"{path}: cannot be read: {error.strerror}")
        )
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        problems.append(
            Problem(ProblemKind.UNREADABLE, f"{path}: damaged: {clean(str(error)[:200])}")
        )
    return DumpAnswer([], problems)


def _contents(path: Path, part: Part, budget: Budget) -> DumpContents:
    dump: dict[str, Any] = part.dump
    config, host = dump.get("pg_config"), dump.get("host_name")
    groups = {}
    for name, about in (config if isinstance(config, dict) else {}).items():
        ranks = about.get("ranks") if isinstance(about, dict) else None
        if isinstance(ranks, list):
            # Before it is written out: a pickle can refer to one long list from many groups.
            budget.spend(len(ranks) * _MEMBER_TEXT)
            sound = all(type(rank) is int and 0 <= rank < MAX_RANKS for rank in ranks)
            ranks = str(ranks) if sound else None
        if isinstance(ranks, str) and isinstance(name, (str, int)):
            description = about.get("desc", "")
            groups[str(name)] = _text(description), ranks
    budget.spend(len(dump["entries"]) * _ENTRY_BYTES)
    return DumpContents(
        part.rank,
        clean(host[:63]) if isinstance(host, str) else "",
        groups,
        records_of(dump["entries"]),
        part.written_ns or path.stat().st_mtime_ns,
    )


def _text(value: Any) -> str:
    return str(value)[:_MOST_TEXT] if isinstance(value, (str, int)) else ""


MOST_FILES = 1 << 17  # one for each rank of the largest jobs
_MOST_BYTES = 1 << 27  # of a pickle; one of 2,000 entries with stacks takes 1 to 3 MB
_MOST_JSON_BYTES = 1 << 26  # of a dump as JSON
_MOST_TOGETHER_BYTES = 1 << 28  # of all ranks, in one file
_MOST_CONTAINERS = 4_000_000  # lists, tuples and dicts of one file
_MOST_ENTRIES = 1 << 20  # of a dump; torch keeps 2,000 unless TORCH_FR_BUFFER_SIZE says more
# A dump has at least one of these keys near its beginning.
_KEYS = (b"entries", b"pg_config", b"pg_status", b"comm_lib_version", b"nccl_version")
_HEAD_BYTES = 4096
_NEWEST = (2, 10)  # the newest version of the format that this module was tested with

# The opcodes that a pickle of plain data needs, with their arguments. An index of the memo has at
# most 21 bits, because the unpickler allocates memory up to the largest index. Texts are left out,
# because ``_is_plain`` steps over them. The only tuple in a dump is a group's name and description.
#
# Nothing follows the repetitions, so they never have to be taken back. The second ``+`` says so to
# Python 3.11 and newer, which are a third faster then.
_ONCE = b"+" if sys.version_info >= (3, 11) else b""
_BARE = rb"[(.N\]})aesud\x86\x88\x89\x94]"  # opcodes without an argument
# Those with the most frequent arguments are in the innermost repetition: if only those with an
# argument of one byte are, this takes a quarter longer.
_FREQUENT = rb"(?:[Khq\x80].|M..|\x8a\x08.{8}|J.{4})"
_OPCODES = re.compile(
    rb"(?:"
    + (rb"(?:" + _BARE + rb"*" + _ONCE + _FREQUENT + rb")+" + _ONCE)
    + (rb"|" + _BARE + rb"+" + _ONCE)
    + rb"|j.{4}|[G\x95].{8}|r..[\x00-\x1f]\x00"
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x09.{9})"
    rb"){1,4096}" + _ONCE,
    re.DOTALL,
)
_TEXTS = {  # opcode: the number of bytes of its length
    **{ord("X"): 4, 0x8C: 1, 0x8D: 8},  # texts
    **{ord("U"): 1, ord("T"): 4, ord("C"): 1, ord("B"): 4},  # bytes
}
_CONTAINERS = (b"]", b"}", b"(", b"\x86")
_FEW_TUPLES = 4
_NO_PARTS = ("MARK", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT")


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants {module}.{name}")


def looks_like_dumps(folder: Path) -> bool:
    """Tell whether a folder or a file may be one of dumps: a file in it begins like a dump."""
    return next(iter(_candidates([folder])), None) is not None


def find_dumps(sources: Sequence[Path]) -> list[tuple[int, Path]]:
    """Return the files that begin like a dump, and the ranks that their names tell, by rank.

    A file with the dumps of several ranks has a negative number. The tables of torch's debug server
    count only if there is nothing better, and only the newest: the server writes new ones again and
    again.

    Args:
        sources: Files, or folders that are searched with the folders in them.

    Raises:
        CorruptRunError: There are too many dumps, or the names do not tell the ranks.
    """
    kinds = [(path, _kind_of(path)) for path in _candidates(sources)]
    if len(kinds) > MOST_FILES:
        raise CorruptRunError(f"{sources[0]}: more than {MOST_FILES:,} dumps")
    single = [path for path, kind in kinds if kind == "one"]
    several = [path for path, kind in kinds if kind == "several"]
    tables = [path for path in several if is_table(path)]
    if tables:
        others = [path for path in several if path not in tables]
        several = others if others or single else [max(tables, key=lambda path: path.name[-19:])]
    return sorted(_ranks_of(single).items()) + [
        (-1 - number, path) for number, path in enumerate(several)
    ]


def _candidates(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        if source.is_dir():
            for folder, below, names in os.walk(source):
                below.sort()
                paths = [Path(folder, name) for name in sorted(names) if name[0] != "."]
                yield from (path for path in paths if _kind_of(path) is not None)
        elif _kind_of(source) is not None:
            yield source


def _kind_of(path: Path) -> Literal["one", "several"] | None:
    """Tell by its first bytes whether a file may hold the dump of one rank, or those of several.

    A file without a number in its name is no rank's dump.
    """
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if is_table(path):
        return "several" if begins_like_tables(head) else None
    if not any(key in head for key in _KEYS):
        return None
    if begins_like_several(head):
        return "several"
    is_one = head.lstrip()[:1] in (b"\x80", b"{") and re.search(r"\d", path.name)
    return "one" if is_one else None


def _ranks_of(paths: Sequence[Path]) -> dict[int, Path]:
    """Return the paths by the rank that their names tell.

    The rank is a number in the name: the one after ``rank`` if all names have that, or else the
    last one that differs between all files.
    """
    if not paths:
        return {}
    texts = [_stem(path) for path in paths]
    after_rank = [re.findall(r"rank[_\-.]?(\d+)", text, re.IGNORECASE) for text in texts]
    choices = []
    if all(after_rank):
        choices.append([name_numbers[-1] for name_numbers in after_rank])
    numbers = [re.findall(r"\d+", text) for text in texts]
    shared = min(map(len, numbers))
    choices += [[name_numbers[-1 - place] for name_numbers in numbers] for place in range(shared)]
    for chosen in choices:
        if len(set(map(int, chosen))) == len(paths):
            ranks = {int(number): path for number, path in zip(chosen, paths, strict=True)}
            if max(ranks) >= MAX_RANKS:
                continue
            return ranks
    return _newest_of_each(choices, paths)


def _newest_of_each(choices: Sequence[Sequence[str]], paths: Sequence[Path]) -> dict[int, Path]:
    """Refuse names that give one rank to several files; the message lists two such files."""
    first: dict[int, Path] = {}
    for number, path in zip(choices[0] if choices else (), paths, strict=False):
        first_path = first.setdefault(int(number), path)
        if first_path is not path:
            raise CorruptRunError(
                f"{path}: its name gives rank {int(number):,}, like that of {first_path}: name one "
                "dump for each rank, of one job"
            )
    raise CorruptRunError(f"{paths[0]}: its name does not tell which rank wrote it")


def _stem(path: Path) -> str:
    """Return a file's name without the endings of its format, which may contain digits."""
    return re.sub(r"\.(?:json|pkl|pickle|bin|dump|txt|trace|p)$", "", path.name, flags=re.I)


def read_dump(path: Path, problems: list[Problem], *, isolated: bool = False) -> dict[str, Any]:
    """Return the content of one dump, with its entries as a list of dicts.

    Args:
        path: The file.
        problems: Gets one if the file may be misread.
        isolated: This process may hang or be ended by the file, because another one watches it. A
            check that is slow is left out then.

    Raises:
        CorruptRunError: The file is damaged, too large, or no dump. The message names it.
    """
    raw = _read_bounded(path, _MOST_BYTES)
    content = _unpickle(path, raw, isolated) if raw[:1] == b"\x80" else _from_json(path, raw)
    _check(path, content, problems)
    checked: dict[str, Any] = content
    return checked


def _read_bounded(path: Path, most: int) -> bytes:
    size = path.stat().st_size
    if size > most:
        raise CorruptRunError(f"{path}: {size:,} bytes, more than any dump of Flight Recorder")
    return path.read_bytes()


def _check(path: Path, content: Any, problems: list[Problem]) -> None:
    """Check the form of a dump; raise ``CorruptRunError`` if it is none."""
    if isinstance(content, dict) and "entries" not in content and "pg_config" in content:
        content["entries"] = []  # JSON of a recorder that has recorded nothing
    if not isinstance(content, dict) or not isinstance(content.get("entries"), (list, tuple)):
        raise CorruptRunError(f"{path}: not a dump of Flight Recorder: it has no list of entries")
    entries = content["entries"]
    if len(entries) > _MOST_ENTRIES or not set(map(type, entries)) <= {dict}:
        raise CorruptRunError(f"{path}: not a dump of Flight Recorder: damaged entries")
    _check_version(path, content.get("version"), problems)
    if _has_trace_of_ncclx(content.get("nccl_comm_state")):
        problems.append(Problem(ProblemKind.LIMITED, _NCCLX))


def _has_trace_of_ncclx(states: Any) -> bool:
    """Whether a dump has what NCCLX's ``ncclCommDump`` knows about each communicator."""
    if not isinstance(states, dict):
        return False
    first = (state for _, state in zip(range(_MOST_STATES), states.values(), strict=False))
    return any(isinstance(state, dict) and "CT_pastColls" in state for state in first)


def _check_version(path: Path, version: Any, problems: list[Problem]) -> None:
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", version) if isinstance(version, str) else None
    if match is None or int(match[1]) != _NEWEST[0]:
        shown_version = clean(version[:40]) if isinstance(version, str) else "none"
        raise CorruptRunError(
            f"{path}: version {shown_version} of Flight Recorder's format; this rankcall reads 2.0 "
            f"to {_NEWEST[0]}.{_NEWEST[1]}"
        )
    if int(match[2]) > _NEWEST[1]:
        text = (
            f"dumps of version {version} are newer than the newest that this rankcall knows "
            f"({_NEWEST[0]}.{_NEWEST[1]}): fields that have changed since may be misread"
        )
        problem = Problem(ProblemKind.LIMITED, text)
        if problem not in problems:
            problems.append(problem)


def _unpickle(path: Path, raw: bytes, isolated: bool) -> Any:
    # Each container takes a byte or more, so a small file needs no count.
    if len(raw) > _MOST_CONTAINERS and sum(map(raw.count, _CONTAINERS)) > _MOST_CONTAINERS:
        raise CorruptRunError(f"{path}: more objects than any dump of Flight Recorder")
    if not _is_plain(raw) or not (isolated or _has_flat_tuples(raw)):
        raise CorruptRunError(
            f"{path}: not a dump of Flight Recorder, or damaged: this pickle does not only hold "
            "plain data"
        )
    try:
        return _PlainUnpickler(io.BytesIO(raw), encoding="utf-8", errors="replace").load()
    except Exception as error:  # a damaged pickle raises almost anything
        why = clean(str(error)[:200])
        raise CorruptRunError(
            f"{path}: not a dump of Flight Recorder, or damaged: {why}"
        ) from error


def _is_plain(raw: bytes) -> bool:
    """Tell whether a pickle consists of the opcodes of plain data, up to its end.

    The opcodes are checked before the unpickler sees them, because it allocates what an opcode
    announces.
    """
    at = 0
    while True:
        match = _OPCODES.match(raw, at)
        at = match.end() if match else at
        if at >= len(raw):
            return True
        if match:
            continue
        width = _TEXTS.get(raw[at])
        if width is None:
            return False
        length = int.from_bytes(raw[at + 1 : at + 1 + width], "little")
        at += 1 + width + length
        if at > len(raw):
            return False


def _has_flat_tuples(raw: bytes) -> bool:
    """Tell whether no tuple of a plain pickle contains a tuple.

    The hash of a tuple visits all that it contains. A tuple that is very deep ends the process, and
    one whose parts are shared again and again takes for ever. This check is slow.
    """
    if raw.count(b"\x86") <= _FEW_TUPLES:
        return True
    # Of the two newest values, and of those in the memo: whether they may be part of a tuple.
    older = newest = False
    memo: dict[int, bool] = {}
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            name = opcode.name
            if name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else int(argument or 0)] = newest
                continue
            if name == "TUPLE2" and not (older and newest):
                return False
            if name in ("BINGET", "LONG_BINGET"):
                older, newest = newest, memo.get(int(argument or 0), False)
            elif name not in ("FRAME", "PROTO"):
                older, newest = newest, not opcode.stack_before and name not in _NO_PARTS
    except ValueError:
        return False
    return True


def _from_json(path: Path, raw: bytes) -> Any:
    if len(raw) > _MOST_JSON_BYTES or raw.count(b"[") + raw.count(b"{") > _MOST_CONTAINERS:
        raise CorruptRunError(f"{path}: {len(raw):,} bytes, more than any dump of Flight Recorder")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        why = clean(str(error)[:200])
        raise CorruptRunError(
            f"{path}: not a dump of Flight Recorder, or damaged: {why}"
        ) from error

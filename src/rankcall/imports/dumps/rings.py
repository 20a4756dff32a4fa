"""Make rings of the Flight Recorder dumps of one job."""

from __future__ import annotations

import contextlib
import gc
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.budget import MEMBER_BYTES, Budget
from rankcall.errors import CorruptRunError
from rankcall.imports.dumps.files import (
    DumpContents,
    find_dumps,
)
from rankcall.imports.dumps.readers import read_contents
from rankcall.imports.dumps.records import DumpRecords, GroupKey
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import MAX_RANKS, format_ranks
from rankcall.record import FLAG_ABANDONED, KINDS, OPS, STATUSES, SYNCHRONISING
from rankcall.ring.spec import RingSpec
from rankcall.ring.tables import Group

_P2P = KINDS.index("p2p")
_COMPLETED, _FAILED = STATUSES.index("completed"), STATUSES.index("failed")
_SYNCHRONISING = [OPS.index(name) for name in SYNCHRONISING]
_JUST_BEGUN_NS = 1_500_000_000  # a call that was issued so short a time before its dump is no hang
# A dump is written when the job hangs, so within the longest timeout. If the file is younger than
# that, it was copied, and its time says nothing.
_MARGIN_NS, _USUAL_TIMEOUT_NS = 120 * 10**9, 1800 * 10**9
_APART_NS = 60 * 10**9  # the clocks of the hosts of one job may differ by so much


@dataclass(eq=False)
class _Rank:
    """One rank's dump."""

    path: Path
    rank: int
    host: str
    listed: dict[str, tuple[int, ...]]  # the ranks of its groups by name, if the dump lists them
    descriptions: dict[str, str]
    content: DumpRecords
    written_ns: int  # when the file was written; 0: not known
    groups: list[Group] = field(default_factory=list)  # by the numbers in its records

    @property
    def first_ns(self) -> int:
        """When its first entry was created; 0: not known."""
        records = self.content.records
        return int(records["enqueued_ns"][0]) if len(records) else 0

    @property
    def begun_ns(self) -> int:
        """When its first entry was created; 0 if older entries are lost."""
        return 0 if self.content.lost else self.first_ns


def rings_of_dumps(
    sources: Sequence[Path], problems: list[Problem], budget: Budget
) -> Iterator[RingSpec]:
    """Yield a ring for each dump.

    Args:
        sources: Dumps, or folders of them.
        problems: Gets one for each file that is left out, and for each limit of the evidence.
        budget: What is left for all dumps.

    Raises:
        CorruptRunError: There is no dump that can be read, or the budget is spent.
    """
    with _without_gc():
        every = _read(sources, problems, budget)
    ranks = _of_one_job(every, problems)
    world_size = _world_size(ranks, problems)
    _find_groups(ranks, world_size, budget)
    _number_messages(ranks)
    now_ns = _set_times(ranks, problems)
    _judge_ends(ranks, budget)
    _judge_endless(ranks, problems, budget)
    # The times of a ring are of a clock that begins with a host's boot.
    began_ns = min((rank.first_ns for rank in ranks if rank.first_ns), default=now_ns) - 10**9
    for rank in ranks:
        yield _ring(rank, world_size, now_ns, began_ns)


def _read(sources: Sequence[Path], problems: list[Problem], budget: Budget) -> list[_Rank]:
    ranks: list[_Rank] = []
    problems_of: dict[int, list[Problem]] = {}
    files = find_dumps(sources)
    for (number, path), (all_contents, dump_problems) in read_contents(files):
        problems_of[number] = dump_problems
        for contents in all_contents:
            named = number if contents.rank < 0 else contents.rank
            try:
                with path.open("rb") as file, budget.reading(path, os.fstat(file.fileno())):
                    rank = _rank_of(named, path, contents, dump_problems, budget)
            except (CorruptRunError, OSError) as error:
                dump_problems.append(Problem(ProblemKind.LEFT_OUT, str(error)))
                break
            if rank is not None:
                ranks.append(rank)
    _check_ranks(ranks)
    for number, _ in files:
        problems += [problem for problem in problems_of[number] if problem not in problems]
    if not ranks:
        why = problems[0].text if problems else f"{sources[0]}: there is no dump of Flight Recorder"
        raise CorruptRunError(why)
    if not any(len(rank.content.records) for rank in ranks):
        raise CorruptRunError(
            f"{ranks[0].path}: no call is in this dump, nor in those of other ranks. Flight "
            "Recorder was off (TORCH_FR_BUFFER_SIZE=2000 turns it on), or the dumps are of another "
            "back end: torch 2.15 has the calls of NCCL in _dump_fr_trace(backend='nccl2')"
        )
    return sorted(ranks, key=lambda rank: rank.rank)


def _check_ranks(ranks: Sequence[_Rank]) -> None:
    """Refuse two dumps of one rank: a file of several ranks may have one that has its own file."""
    first: dict[int, _Rank] = {}
    for rank in ranks:
        other = first.setdefault(rank.rank, rank)
        if other is not rank:
            raise CorruptRunError(
                f"{rank.path}: it has a dump of rank {rank.rank:,}, like {other.path}: name one "
                "dump for each rank, of one job"
            )


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Switch the garbage collector off: it would visit all new objects again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _rank_of(
    number: int, path: Path, contents: DumpContents, problems: list[Problem], budget: Budget
) -> _Rank | None:
    """Return the rank that wrote a dump; None if the dump is left out."""
    budget.spend(contents.records.records.nbytes)
    listed, descriptions = {}, {}
    for name, (description, text) in contents.groups.items():
        budget.spend_once(text, MEMBER_BYTES * (1 + text.count(",")))
        members = _listed_ranks(text)
        if members:
            listed[name], descriptions[name] = members, description
    outside = [name for name, members in listed.items() if number not in members]
    if outside:
        text = (
            f"{path}: its name says rank {number}, but its group {clean(outside[0])} "
            f"has ranks {format_ranks(listed[outside[0]])[:80]}: it is left out"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
        return None
    return _Rank(
        path,
        number,
        contents.host,
        listed,
        descriptions,
        contents.records,
        contents.modified_ns,
    )


@lru_cache(maxsize=1 << 14)
def _listed_ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in ``[0, 1]``; nothing if the text has another form."""
    if not re.fullmatch(r"[\[(]?[\d,\s]*[\])]?", text):
        return ()
    ranks = tuple(map(int, re.findall(r"\d{1,7}", text)))
    sound = len(set(ranks)) == len(ranks) and max(ranks, default=0) < MAX_RANKS
    return ranks if sound else ()


def _of_one_job(ranks: list[_Rank], problems: list[Problem]) -> list[_Rank]:
    """Leave out dumps of processes that had ended before others began: those of another job."""
    began = max(rank.begun_ns for rank in ranks)
    older = [rank for rank in ranks if 0 < rank.content.last_ns < began - _APART_NS]
    if older:
        text = (
            f"{older[0].path}: the dump of rank {format_ranks([r.rank for r in older])} ends "
            "before other ranks began: it is of another job, and left out"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    return [rank for rank in ranks if rank not in older]


def _world_size(ranks: Sequence[_Rank], problems: list[Problem]) -> int:
    listed = (
        max((max(members) for rank in ranks for members in rank.listed.values()), default=-1) + 1
    )
    seen = max(rank.rank for rank in ranks) + 1
    if not listed:
        text = (
            f"the dumps do not list the members of any group: the job is taken to have {seen} "
            "ranks, and a group to have the ranks that have used it"
        )
        problems.append(Problem(ProblemKind.LIMITED, text))
    return max(listed, seen)


def _find_groups(ranks: Sequence[_Rank], world_size: int, budget: Budget) -> None:
    """Give each rank its groups. Groups of one name and different ranks are different groups."""
    users: dict[GroupKey, set[int]] = {}
    for rank in ranks:
        for key in rank.content.groups:
            if key[0] not in rank.listed:
                users.setdefault(key, set()).add(rank.rank)
    budget.spend(MEMBER_BYTES * world_size)
    world = tuple(range(world_size))
    inferred = {
        key: world if _is_world(key) else tuple(sorted(members)) for key, members in users.items()
    }
    known: dict[Group, Group] = {}  # ranks share one object for one group
    for rank in ranks:
        for key in rank.content.groups:
            name, description, backend = key
            members = rank.listed.get(name) or inferred[key]
            if name in rank.listed:
                description = rank.descriptions[name]
            budget.check_time()  # a look-up goes through all members
            group = Group(name, 0, backend, description, members)
            rank.groups.append(known.setdefault(group, group))


def _is_world(key: GroupKey) -> bool:
    return key[1] == "default_pg" or (key[0] == "0" and key[1] in ("", "undefined"))


def _number_messages(ranks: Sequence[_Rank]) -> None:
    """Number the messages of each direction of each pair of ranks, equally at both ends.

    A dump numbers the messages of a rank, not those of a pair. If entries are lost, the newest
    messages that both ends have completed are taken to be the same.
    """
    ends: dict[tuple[Group, int, int], dict[str, tuple[_Rank, Any, int]]] = {}
    for rank in ranks:
        records = rank.content.records
        messages = np.flatnonzero(records["kind"] == _P2P)
        if not len(messages):
            continue
        keys = np.stack([records[name][messages].astype(np.int64) for name in _END])
        _, which = np.unique(keys, axis=1, return_inverse=True)
        # Sorted once: a dump can have as many ends as messages, and each look at all takes time.
        order = np.argsort(which.ravel(), kind="stable")
        cuts = np.flatnonzero(np.diff(which.ravel()[order])) + 1
        for rows in np.split(messages[order], cuts):
            group = rank.groups[int(records["group"][rows[0]])]
            peer, op = int(records["peer"][rows[0]]), OPS[int(records["op"][rows[0]])]
            if not (0 <= peer < len(group.ranks) and rank.rank in group.ranks):
                records["seq"][rows] = np.arange(1, len(rows) + 1)
                continue
            pair = group.ranks.index(rank.rank), peer
            channel = (group, *(pair if op == "send" else pair[::-1]))
            done = int(np.count_nonzero(records["status"][rows] >= _COMPLETED))
            ends.setdefault(channel, {})[op] = rank, rows, done
    for both in ends.values():
        complete = all(rank.content.lost == 0 for rank, _, _ in both.values())
        most = max(done for _, _, done in both.values())
        for rank, rows, done in both.values():
            first = 1 if complete else 1 + most - done
            rank.content.records["seq"][rows] = np.arange(first, first + len(rows))


_END = ("group", "peer", "op")


def _set_times(ranks: Sequence[_Rank], problems: list[Problem]) -> int:
    """Find out when the dumps were written, and return the last moment that is known.

    A call that had only just begun then is no hang: no verdict rests on it.
    """
    last = max(rank.content.last_ns for rank in ranks)
    timeout = max(rank.content.timeout_ns for rank in ranks) or _USUAL_TIMEOUT_NS
    unknown = []
    for rank in ranks:
        if not rank.content.last_ns <= rank.written_ns <= last + timeout + _MARGIN_NS:
            rank.written_ns = 0
            unknown.append(rank.rank)
            continue
        records = rank.content.records
        begun = records["enqueued_ns"] > rank.written_ns - _JUST_BEGUN_NS
        records["flags"][begun & (records["status"] < _COMPLETED)] |= FLAG_ABANDONED
    if unknown:
        text = (
            f"the time at which rank {format_ranks(unknown)} wrote its dump is not known: each age "
            "is the least that it can be"
        )
        problems.append(Problem(ProblemKind.LIMITED, text))
    return max(last, *(rank.written_ns for rank in ranks))


def _judge_ends(ranks: Sequence[_Rank], budget: Budget) -> None:
    """Find out which calls on the CPU have ended, and which of them cannot have succeeded."""
    dumps: dict[int, _Rank] = {rank.rank: rank for rank in ranks}
    users: dict[Group, list[tuple[_Rank, int]]] = {}
    for rank in ranks:
        for number in np.unique(rank.content.records["group"][rank.content.on_cpu]).tolist():
            users.setdefault(rank.groups[number], []).append((rank, number))
    for group, using in users.items():
        budget.check_time()  # each group looks at all records of its ranks
        calls = {rank.rank: _synchronising(rank, number) for rank, number in using}
        newest = {
            member: int(calls[member].seq.max(initial=0)) if member in calls else 0
            for member in group.ranks
            if member in dumps
        }
        if len(newest) == len(group.ranks):
            _mark_ended(using, calls, min(newest.values()))
        _mark_failed(calls, {dumps[member]: came for member, came in newest.items()})


class _Calls(NamedTuple):
    """One rank's calls in a group on the CPU that no member can leave before all have come."""

    content: DumpRecords
    rows: npt.NDArray[np.intp]
    seq: npt.NDArray[np.int64]


def _synchronising(rank: _Rank, number: int) -> _Calls:
    content, records = rank.content, rank.content.records
    mine = content.on_cpu & (records["group"] == number) & (records["kind"] != _P2P)
    rows = np.flatnonzero(mine & np.isin(records["op"], _SYNCHRONISING))
    return _Calls(content, rows, records["seq"][rows].astype(np.int64))


def _mark_ended(
    using: Sequence[tuple[_Rank, int]], calls: Mapping[int, _Calls], reached: int
) -> None:
    """Mark the calls of a group as ended, up to the last one that all have issued and one has left.

    Gloo is late to retire some calls that have ended, or never retires them. ``reached``: the last
    call that all members have issued.
    """
    left = max(
        (
            int(
                rank_calls.seq[
                    rank_calls.content.ended[rank_calls.rows] & (rank_calls.seq <= reached)
                ].max(initial=0)
            )
            for rank_calls in calls.values()
        ),
        default=0,
    )
    for rank, number in using:
        records = rank.content.records
        mine = rank.content.on_cpu & (records["group"] == number) & (records["kind"] != _P2P)
        late = mine & (records["seq"] <= left) & (records["status"] < _COMPLETED)
        records["status"][late] = _COMPLETED


def _mark_failed(calls: Mapping[int, _Calls], newest: Mapping[_Rank, int]) -> None:
    """Mark retired calls as failed if a member had not issued them long after.

    Gloo retires a call that failed like one that succeeded.
    """
    for rank_calls in calls.values():
        records = rank_calls.content.records
        ended = rank_calls.content.ended[rank_calls.rows]
        for member, newest_seq in newest.items():
            if (member.content.lost and not newest_seq) or not member.written_ns:
                continue
            late = records["enqueued_ns"][rank_calls.rows] <= member.written_ns - _JUST_BEGUN_NS
            records["status"][rank_calls.rows[ended & late & (rank_calls.seq > newest_seq)]] = (
                _FAILED
            )


def _judge_endless(ranks: Sequence[_Rank], problems: list[Problem], budget: Budget) -> None:
    """Find out which calls have not ended, of back ends that do not tell.

    No member can leave a collective that synchronises before all have issued it. So one that a
    member had not issued long after is in flight. Of all others, the end is not known.
    """
    dumps = {rank.rank: rank for rank in ranks}
    if any(rank.content.endless.any() for rank in ranks):
        text = (
            "a back end of this job does not tell when an op has ended, or (NCCL in torch 2.15) "
            "when a batch of sends and receives has: of these, only collectives that a member had "
            "not issued are known to be in flight"
        )
        problems.append(Problem(ProblemKind.LIMITED, text))
    for rank in ranks:
        records, endless = rank.content.records, rank.content.endless
        if not endless.any():
            continue
        waits = np.zeros(len(records), bool)
        for number in np.unique(records["group"][endless]).tolist():
            budget.check_time()
            group = rank.groups[number]
            mine = endless & (records["group"] == number) & (records["kind"] != _P2P)
            mine &= np.isin(records["op"], _SYNCHRONISING)
            for member in group.ranks:
                other = dumps.get(member)
                if other is None or other.content.lost or not other.written_ns:
                    continue
                newest = _newest(other, group)
                late = records["enqueued_ns"] <= other.written_ns - _JUST_BEGUN_NS
                waits |= mine & late & (records["seq"].astype(np.int64) > newest)
        records["flags"][endless & ~waits] |= FLAG_ABANDONED


def _newest(rank: _Rank, group: Group) -> int:
    """Return the number of the last collective that a rank issued in a group; 0 if none."""
    records = rank.content.records
    numbers = [number for number, own in enumerate(rank.groups) if own is group]
    mine = np.isin(records["group"], numbers) & (records["kind"] != _P2P)
    return int(records["seq"][mine].max(initial=0))


def _ring(rank: _Rank, world_size: int, now_ns: int, began_ns: int) -> RingSpec:
    content = rank.content
    records = content.records
    begun = max(rank.first_ns or now_ns, began_ns)
    spec = RingSpec(
        rank.rank,
        world_size,
        rank.host,
        capture="imported",
        anchor_mono_ns=begun - began_ns,
        anchor_epoch_ns=begun,
        closed=False,
        native_beat_ns=now_ns - began_ns,
        python_beat_ns=now_ns - began_ns,
        lost=content.lost,
    )
    spec.records = records
    for name in ("enqueued_ns", "started_ns", "completed_ns"):
        known = records[name] > 0
        records[name][known] = np.maximum(records[name][known] - began_ns, 1)
    groups = np.array([spec.group(group) for group in rank.groups] or [0], np.uint32)
    sites = np.array([0, *(spec.site(site) for site in content.sites[1:])], np.uint32)
    records["group"] = groups[records["group"]] if len(records) else 0
    records["call_site"] = sites[records["call_site"]]
    records["commit"] = 0
    return spec

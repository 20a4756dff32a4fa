"""A recorded run as tables: ``load``."""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall._joins import JoinSummary
from rankcall._joins import read as read_joins
from rankcall.archive import is_archive, unpack
from rankcall.errors import CorruptRun
from rankcall.ring.reader import Head, Ring, read_head, read_ring
from rankcall.ring.tables import Group
from rankcall.rundir import find_run, ring_paths, run_about

if TYPE_CHECKING:
    import polars as pl

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RunGroup:
    """A process group as the whole run knows it."""

    label: str
    group: Group
    hosts: tuple[str, ...]  # of its ranks, in group order; "" where a rank's ring is missing

    @property
    def cross_host(self) -> bool:
        """Whether its members are on more than one host."""
        return len({host for host in self.hosts if host}) > 1


@dataclass
class Run:
    """A run: its rings' headers and side tables. Records are read when they are asked for.

    ``iter_rings`` streams them, ring by ring, and keeps nothing; ``rings`` and ``records`` keep
    all of them (192 bytes a record). A live job's records are as of the first such call.
    """

    path: Path  # where its files are; of an archive, the folder it was extracted into
    about: dict[str, Any]
    heads: list[Head]
    problems: list[str] = field(default_factory=list)
    source: Path | None = None  # what was asked for: the run directory, a ring file, an archive
    _census: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False)

    def iter_rings(
        self, progress: Progress | None = None, newest: int | None = None
    ) -> Iterator[Ring]:
        """Read the rings one after the other, by attempt and rank; nothing is kept.

        ``newest``: read only so many records of each, the last ones. What cannot be read (any
        more) is noted in ``problems`` and left out.
        """
        for done, head in enumerate(self.heads, 1):
            ring = self.read(head, newest)
            if ring is not None:
                if newest is None:
                    self._census[head.path] = len(ring.records), ring.dropped
                    self._census[ring.path] = self._census[head.path]
                yield ring
            if progress is not None:
                progress(done, len(self.heads))

    def read(self, head: Head, newest: int | None = None) -> Ring | None:
        """Read one ring, also where its process has ended and it was moved since ``load``.

        ``newest``: only its last so many records. None where it cannot be read any more;
        ``problems`` then says why.
        """
        try:
            moved = self.path / "rings" / head.path.name
            return read_ring(head.path if head.path.exists() else moved, newest)
        except CorruptRun as error:
            self._note(str(error))
            return None

    def _note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    @cached_property
    def rings(self) -> list[Ring]:
        """All rings with their records, kept in memory."""
        rings = list(self.iter_rings())
        # A job that still runs may have made groups since ``load``: names as of the records.
        self.heads = [Head(ring.path, ring.header, ring.tables, ring.problem) for ring in rings]
        for stale in ("hosts", "run_groups", "groups"):
            self.__dict__.pop(stale, None)
        return rings

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Each rank's host, by the ring of its last attempt."""
        ordered = sorted(self.heads, key=lambda head: head.header.attempt)
        return {head.header.rank: head.header.host for head in ordered}

    @property
    def world_size(self) -> int:
        """The largest world size any ring knows (0 without one)."""
        return max((head.header.world_size for head in self.heads), default=0)

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world that left no readable ring."""
        return sorted(set(range(max(self.world_size, 0))) - set(self.hosts))

    @property
    def dropped(self) -> dict[int, int]:
        """Per rank, how many records were overwritten or lost before they could be read."""
        lost: dict[int, int] = {}
        for head in self.heads:
            _, dropped = self.count(head)
            lost[head.header.rank] = lost.get(head.header.rank, 0) + dropped
        return lost

    @property
    def tables_lost(self) -> dict[int, int]:
        """Per rank, how many names found no room in its ring; ranks that lost none are left out."""
        lost: dict[int, int] = {}
        for head in self.heads:
            if head.header.tables_lost:
                lost[head.header.rank] = lost.get(head.header.rank, 0) + head.header.tables_lost
        return lost

    def count(self, head: Head) -> tuple[int, int]:
        """Return how many records a ring holds and how many it dropped."""
        if head.path not in self._census:
            for _ in self.iter_rings():
                pass
        return self._census.get(head.path, (0, 0))

    @cached_property
    def run_groups(self) -> dict[Group, RunGroup]:
        """Every process group of the run, with a label that is unique in it."""
        known = {group for head in self.heads for group in head.tables.groups.values()}
        return label_groups(known, self.hosts)

    @cached_property
    def groups(self) -> pl.DataFrame:
        """One row a process group: its label, name, backend, size, ranks and hosts."""
        from rankcall._frames import groups_frame

        return groups_frame(self)

    @cached_property
    def joins(self) -> list[JoinSummary]:
        """What each ``rankcall.join.Join`` of the run did, in the order they ended."""
        joins, problems = read_joins(self.path)
        for problem in problems:
            self._note(problem)
        return joins

    @cached_property
    def ranks(self) -> pl.DataFrame:
        """One row a ring: rank, host, pid, attempt, capture, records, dropped, steps, closed."""
        from rankcall._frames import ranks_frame

        return ranks_frame(self)

    @cached_property
    def records(self) -> pl.DataFrame:
        """One row a record, ordered by rank and issue; the columns stand in docs/records.md."""
        from rankcall._frames import records_frame

        return records_frame(self)


def label_groups(groups: Iterable[Group], hosts: dict[int, str]) -> dict[Group, RunGroup]:
    """Give every group a label that no other has: its name, and what tells namesakes apart."""
    ordered = sorted(
        set(groups),
        key=lambda group: (
            group.epoch, len(group.name), group.name, group.ranks, group.backend, group.description,
        ),
    )  # fmt: skip
    labels: dict[str, Group] = {}
    for group in ordered:
        label = group.label
        if label in labels:
            label = f"{label}[{format_ranks(group.ranks)}]"
        taken, copy = label, 1
        while label in labels:
            copy += 1
            label = f"{taken}~{copy}"
        labels[label] = group
    return {
        group: RunGroup(label, group, tuple(hosts.get(rank, "") for rank in group.ranks))
        for label, group in labels.items()
    }


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ranks the way people do: ``0-3,8,10-11``."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def load(path: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Run:
    """Read a run: its directory, an archive, a single ring file, or without a path the latest run.

    Works on a live job, a dead one or a copied directory; imports no torch. Records are not read
    before they are asked for. ``progress`` is called with (rings read, rings in all). What is
    damaged or missing is listed in ``Run.problems``. Raises ``RunNotFound``, and ``CorruptRun``
    where no ring can be read.
    """
    source = where = find_run(path)
    if source.is_file() and is_archive(source):
        where = unpack(source)
    try:
        run = _load(where, source, progress)
    except BaseException:
        if where != source:
            shutil.rmtree(where, ignore_errors=True)
        raise
    if where != source:
        weakref.finalize(run, shutil.rmtree, where, ignore_errors=True)
    return run


def _load(where: Path, source: Path, progress: Progress | None) -> Run:
    problems: list[str] = []
    paths = ring_paths(where, problems)
    heads = list(_read_heads(paths, problems, progress))
    if not heads:
        if problems:
            raise CorruptRun(problems[0])
        raise CorruptRun(f"{source}: no ring files: not a run, or nothing was recorded in it")
    heads.sort(key=lambda head: (head.header.attempt, head.header.rank, head.header.pid))
    run = Run(where, run_about(where, problems), heads, problems, source)
    if run.missing_ranks:
        problems.append(
            f"{source}: no ring for rank {format_ranks(run.missing_ranks)} of "
            f"{run.world_size}: what is said is of the others only"
        )
    if run.tables_lost:
        problems.append(_names_lost(run))
    return run


def _names_lost(run: Run) -> str:
    """Word that side tables are full; every report shows it as one of ``Run.problems``."""
    lost = run.tables_lost
    count, ranks = sum(lost.values()), format_ranks(list(lost))
    names = "1 name" if count == 1 else f"{count:,} names"
    return (
        f"{run.source}: the ring's side tables are full on rank {ranks}: {names} (of groups, lines "
        "or error texts) found no room. Calls of groups without a name are taken for calls of one "
        "group, so a verdict on them is less sure; rankcall.disable() and enable() begin a new ring"
    )


def _read_heads(
    paths: Sequence[Path], problems: list[str], progress: Progress | None
) -> Iterator[Head]:
    for done, path in enumerate(paths, 1):
        try:
            head = read_head(path)
        except CorruptRun as error:
            problems.append(str(error))
        else:
            if head.problem:
                problems.append(head.problem)
            yield head
        if progress is not None:
            progress(done, len(paths))

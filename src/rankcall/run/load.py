"""Read a recorded run as tables: ``load``."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankcall.budget import Budget
from rankcall.errors import CorruptRunError, ExtraMissingError, RunNotFoundError
from rankcall.printable import clean
from rankcall.problems import Problem, ProblemKind, without
from rankcall.ranks import format_ranks, with_noun
from rankcall.ring.decode import decode_ring
from rankcall.ring.layout import HeaderMissingError
from rankcall.ring.reader import Head, Ring, read_head, read_ring
from rankcall.ring.tables import Group
from rankcall.run.archive import is_archive
from rankcall.run.exits import read_exits
from rankcall.run.joins import JoinSummary, read_joins
from rankcall.run.paths import create_run, find_run, is_tail, read_about, ring_name, ring_paths
from rankcall.run.unpack import unpack

if TYPE_CHECKING:
    import pandas
    import polars as pl

    from rankcall.imports import EvidenceSource

Progress = Callable[[int, int], None]
_SHOWN_PROBLEMS = 4  # in a notebook


@dataclass(frozen=True)
class RunGroup:
    """A process group as the whole run knows it."""

    label: str
    group: Group
    hosts: tuple[str, ...]  # of its ranks, in group order; "" for a rank without a ring

    @property
    def cross_host(self) -> bool:
        """Whether its members are on more than one host."""
        return len({host for host in self.hosts if host}) > 1


@dataclass(repr=False)
class Run:
    """A run: its rings' headers and side tables. Records are read only if a caller needs them.

    ``iter_rings`` reads ring after ring and keeps nothing. ``rings`` and ``records`` keep all
    records in memory (192 bytes each); of a live job they show the state at the first such call.
    """

    path: Path  # the run directory; for an archive, the folder that it was extracted into
    about: dict[str, Any]
    _heads: Sequence[Head]
    problems: list[Problem] = field(default_factory=list)
    source: Path | None = None  # the path that was loaded: a run directory, a ring file, an archive
    # A part of a run keeps the whole, whose end removes what was unpacked.
    _whole: Run | None = None
    _census: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def __repr__(self) -> str:
        # One line: the fields would be kilobytes in a notebook, most of them side tables.
        return f"<Run {self.source or self.path}: {', '.join(self._in_short())}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the run: the same, as a small table."""
        facts = [
            ("run", str(self.source or self.path)),
            ("records of", ", ".join(self._in_short())),
        ]
        facts += [("problem", str(problem)) for problem in self.problems[:_SHOWN_PROBLEMS]]
        rows = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{html.escape(clean(text))}</td></tr>"
            for name, text in facts
        )
        return f"<table>{rows}</table>"

    def _in_short(self) -> list[str]:
        attempts = {head.header.attempt for head in self.heads}
        parts = [
            f"rank {format_ranks(sorted(self.hosts)) or 'none'} of {self.world_size}",
            f"attempt {format_ranks(sorted(attempts))}" if len(attempts) > 1 else "",
            f"{len(set(self.hosts.values()))} hosts" if len(set(self.hosts.values())) > 1 else "",
            f"problems: {len(self.problems)}" if self.problems else "",
        ]
        return [part for part in parts if part]

    def iter_rings(
        self,
        progress: Progress | None = None,
        newest: int | None = None,
        budget: Budget | None = None,
    ) -> Iterator[Ring]:
        """Read the rings one after the other, by attempt and rank, and keep none of them.

        A ring that cannot be read is left out, and ``problems`` says why.

        Args:
            progress: Called with the number of rings that are done, and of all rings.
            newest: Read only this many records of each ring, the last ones.
            budget: For all rings, if the caller keeps them; by default, each has one of its own.
        """
        for done, head in enumerate(self.heads, 1):
            ring = self.read(head, newest, budget)
            if ring is not None:
                if newest is None:
                    # Under both paths: the ring may have moved since ``load``.
                    self._census[head.path] = len(ring.records), ring.dropped
                    self._census[ring.path] = self._census[head.path]
                yield ring
            if progress is not None:
                progress(done, len(self.heads))

    def read(
        self, head: Head, newest: int | None = None, budget: Budget | None = None
    ) -> Ring | None:
        """Read one ring, also if it was moved into the run directory since ``load``.

        Args:
            head: One of ``heads``.
            newest: Read only this many records, the last ones.
            budget: See ``read_ring``.

        Returns:
            The ring, or None if it cannot be read; ``problems`` then says why.
        """
        try:
            moved = self.path / "rings" / head.path.name
            path = head.path if head.path.exists() else moved
            return read_ring(path, newest, budget=budget)
        except CorruptRunError as error:
            self._note(Problem(ProblemKind.UNREADABLE, str(error)))
            return None

    def _note(self, problem: Problem) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    @property
    def heads(self) -> Sequence[Head]:
        """The header and the side tables of each ring, by attempt and rank. Read-only.

        ``only`` makes a run of some of them.
        """
        return self._heads

    def only(
        self,
        attempt: int | None = None,
        host: str | None = None,
        *,
        ranks: Collection[int] | None = None,
        tails_of: Collection[int] | None = None,
    ) -> Run:
        """Return this run with some of its rings. Arguments that are None leave nothing out.

        Args:
            attempt: Keep the rings of this attempt.
            host: Keep the rings of this host.
            ranks: Keep the rings of these ranks.
            tails_of: Of tails, keep those of these ranks. A tail is what an earlier verdict left of
                a ring that is on another node, so it is older than what that node says itself.

        Raises:
            RunNotFoundError: No ring is of this attempt.
        """
        known = {head.header.attempt for head in self._heads}
        if attempt is not None and attempt not in known:
            raise RunNotFoundError(
                f"{self.source or self.path} has no attempt {attempt}: "
                f"its attempts are {format_ranks(sorted(known))}"
            )
        heads = [
            head
            for head in self._heads
            if attempt in (None, head.header.attempt)
            and host in (None, head.header.host)
            and (ranks is None or head.header.rank in ranks)
            and (tails_of is None or not is_tail(head.path) or head.header.rank in tails_of)
        ]
        part = replace(self, _heads=heads, _census={})
        part._whole = self
        return part

    @cached_property
    def rings(self) -> list[Ring]:
        """All rings with their records, kept in memory."""
        rings = list(self.iter_rings(budget=Budget()))
        # A running job may have made groups since ``load``; these heads know the records' groups.
        self._heads = [Head(ring.path, ring.header, ring.tables, ring.problem) for ring in rings]
        for stale in ("hosts", "run_groups", "groups"):
            self.__dict__.pop(stale, None)
        return rings

    @cached_property
    def hosts(self) -> dict[int, str]:
        """Each rank's host, from the ring of its last attempt."""
        ordered = sorted(self.heads, key=lambda head: head.header.attempt)
        return {head.header.rank: head.header.host for head in ordered}

    @property
    def world_size(self) -> int:
        """The largest world size in any ring (0 if none knows it)."""
        return max((head.header.world_size for head in self.heads), default=0)

    @property
    def missing_ranks(self) -> list[int]:
        """The ranks of the world that left no readable ring."""
        return sorted(set(range(max(self.world_size, 0))) - set(self.hosts))

    @property
    def dropped(self) -> dict[int, int]:
        """How many records of each rank were overwritten, or lost, before they could be read."""
        lost: dict[int, int] = {}
        for head in self.heads:
            _, dropped = self.count(head)
            lost[head.header.rank] = lost.get(head.header.rank, 0) + dropped
        return lost

    @property
    def tables_lost(self) -> dict[int, int]:
        """How many names found no room in each rank's ring; ranks that lost none are left out."""
        lost: dict[int, int] = {}
        for head in self.heads:
            if head.header.tables_lost:
                lost[head.header.rank] = lost.get(head.header.rank, 0) + head.header.tables_lost
        return lost

    def count(self, head: Head) -> tuple[int, int]:
        """Return the number of records that a ring holds, and the number that it has dropped."""
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
        import polars as pl

        rows = [
            {
                "group": known.label,
                "name": known.group.name,
                "epoch": known.group.epoch,
                "description": known.group.description,
                "backend": known.group.backend,
                "size": len(known.group.ranks),
                "ranks": list(known.group.ranks),
                "hosts": list(known.hosts),
                "cross_host": known.cross_host,
            }
            for known in self.run_groups.values()
        ]
        return pl.DataFrame(
            rows,
            schema={
                "group": pl.String,
                "name": pl.String,
                "epoch": pl.Int64,
                "description": pl.String,
                "backend": pl.String,
                "size": pl.Int64,
                "ranks": pl.List(pl.Int64),
                "hosts": pl.List(pl.String),
                "cross_host": pl.Boolean,
            },
        )

    @cached_property
    def joins(self) -> list[JoinSummary]:
        """The sums of each ``rankcall.join.Join`` of the run, in the order in which they ended."""
        joins, problems = read_joins(self.path)
        for problem in problems:
            self._note(problem)
        return joins

    @cached_property
    def ranks(self) -> pl.DataFrame:
        """One row a ring: rank, host, pid, attempt, capture, records, dropped, steps, closed."""
        import polars as pl

        rows = [
            {
                "rank": header.rank,
                "world_size": header.world_size,
                "local_rank": header.local_rank,
                "host": header.host,
                "node": header.node,
                "pid": header.pid,
                "attempt": header.attempt,
                "capture": header.capture,
                "records": self.count(head)[0],
                "dropped": self.count(head)[1],
                "steps": min(header.step, (1 << 63) - 1),
                "closed": header.closed_ns != 0,
            }
            for head in self.heads
            for header in (head.header,)
        ]
        other_types = {"host": pl.String, "capture": pl.String, "closed": pl.Boolean}
        return pl.DataFrame(rows, schema={n: other_types.get(n, pl.Int64) for n in rows[0]})

    @cached_property
    def records(self) -> pl.DataFrame:
        """One row a record, ordered by rank and issue; docs/records.md lists the columns."""
        import polars as pl

        frames = [self.frame(ring) for ring in self.rings]
        return pl.concat(frames, how="vertical") if frames else pl.DataFrame()

    def to_pandas(self) -> pandas.DataFrame:
        """Return ``records`` as a table of pandas. This needs pandas, but not pyarrow.

        Whole numbers that may be missing are of pandas' type ``Int64``: a float could not hold ns.

        Raises:
            ExtraMissingError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ExtraMissingError(
                "to_pandas needs pandas: pip install pandas (run.records is a table of Polars)"
            ) from error
        return pandas.DataFrame({s.name: _for_pandas(s) for s in self.records.get_columns()})

    @cached_property
    def plot(self) -> Any:
        """Pictures for a notebook: ``timeline()``, ``waiting()`` and ``late()`` of ``Plots``."""
        # They rest on the analysis, which rests on this module. So they are found by name, here
        # alone: users of `load` should not have to know where pictures are made.
        return import_module("rankcall.report.plots").Plots(self)

    def frame(self, ring: Ring) -> pl.DataFrame:
        """Return the rows of ``records`` that come from one ring."""
        import polars as pl

        labels = {group: known.label for group, known in self.run_groups.items()}
        columns = decode_ring(ring, labels)
        return pl.DataFrame({name: column.series() for name, column in columns.items()})


def _for_pandas(column: pl.Series) -> Any:
    """Return a column as pandas takes it, without a copy by pyarrow."""
    import pandas

    if column.dtype.is_integer() and column.null_count():
        return pandas.arrays.IntegerArray(
            column.fill_null(0).to_numpy(), column.is_null().to_numpy()
        )
    return column.to_list() if column.null_count() else column.to_numpy()


def label_groups(groups: Iterable[Group], hosts: dict[int, str]) -> dict[Group, RunGroup]:
    """Give every group a unique label: its name, and if others have it too, its ranks."""
    ordered = sorted(set(groups), key=_group_order)
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


def _group_order(group: Group) -> tuple[Any, ...]:
    name = len(group.name), group.name  # "9" comes before "10"
    return group.epoch, *name, group.ranks, group.backend, group.description


def load(
    path: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    *,
    read: Callable[[Path, Budget], Head] = read_head,
    exits_only: bool = False,
) -> Run:
    """Read a run, of a live job or a dead one. This imports no torch.

    Records are read later, if a caller needs them. ``Run.problems`` lists what is damaged or
    missing.

    Args:
        path: A run directory (also a copied one), an archive or a ring file; or Flight Recorder's
            dumps: one, a directory or an archive of them. Without it, the latest run below the
            working directory is read.
        progress: Called with the number of rings that are done, and of all rings.
        read: Reads the head of one ring file, and spends from the budget of the run.
        exits_only: Accept a run without rings if its launcher has noted how ranks ended. Ranks that
            end before they make a process group leave nothing else.

    Raises:
        RunNotFoundError: The path does not exist.
        CorruptRunError: No ring, and no dump, can be read.
    """
    budget = Budget()
    source = where = find_run(path)
    scratch: list[Path] = []
    problems: list[Problem] = []
    try:
        _refuse_log(source)
        if source.is_file() and is_archive(source):
            where = _unpacked(source, budget)
            scratch.append(where)
        paths = ring_paths(where, problems)
        # Dumps may lie in a run directory. They say less than the rings there.
        other = None if any(path.suffix == ".ring" for path in paths) else _source_of(where)
        if other is not None:
            where = _rings_from(other, where, problems, budget)
            scratch.append(where)
            paths = ring_paths(where, problems)
        heads = list(_read_heads(paths, problems, progress, lambda path: read(path, budget)))
        run = _run_of(heads, where, source, problems, exits_only)
    except BaseException:
        _remove(scratch)
        raise
    if scratch:  # records are read from there for as long as somebody has the run
        weakref.finalize(run, _remove, scratch)
    return run


def _refuse_log(path: Path) -> None:
    """Raise ``CorruptRunError`` for a log, which has too little for a run."""
    if not path.is_file() or path.suffix == ".ring":
        return
    from rankcall.imports.logs.reading import is_log

    if is_log(path):
        raise CorruptRunError(
            f"{path}: not a rankcall ring file, but text: to read it as a log, use rankcall "
            f"diagnose --log {path}"
        )


def _unpacked(archive: Path, budget: Budget) -> Path:
    """Extract an archive of a run, or of dumps."""
    try:
        return unpack(archive, budget)
    except CorruptRunError as no_run:
        folder = unpack(archive, budget, dumps=True)
        if _source_of(folder) is not None:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        raise no_run


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _source_of(path: Path) -> EvidenceSource | None:
    """Return the source of evidence that is no run. Ranks that are watched do not load this."""
    from rankcall.imports import source_of

    return source_of(path)


def _rings_from(
    source: EvidenceSource, evidence: Path, problems: list[Problem], budget: Budget
) -> Path:
    """Write the rings of another tool's evidence to a new temporary folder, and return its path."""
    from rankcall.ring.spec import write_ring

    folder = Path(tempfile.mkdtemp(prefix="rankcall-"))
    try:
        create_run(folder, {"evidence": source.name})
        for spec in source.rings([evidence], problems, budget):
            name = ring_name(spec.rank, spec.attempt, spec.host, spec.pid)
            write_ring(folder / "rings" / name, spec)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _run_of(
    heads: list[Head], where: Path, source: Path, problems: list[Problem], exits_only: bool
) -> Run:
    # A ring without a header says no more than no ring.
    damaged = without(problems, ProblemKind.UNFINISHED)
    if not heads and not (exits_only and not damaged and where.is_dir() and read_exits(where)):
        if problems:
            raise CorruptRunError(problems[0].text)
        raise CorruptRunError(
            f"{source}: no ring files: nothing was recorded yet, or this is not a run"
        )
    heads.sort(key=lambda head: (head.header.attempt, head.header.rank, head.header.pid))
    run = Run(where, read_about(where, problems), heads, problems, source)
    if missing := run.missing_ranks:
        left = "dump" if "evidence" in run.about else "ring"
        text = (
            f"{source}: no {left} for {with_noun(missing)} of "
            f"{run.world_size}: the results cover the other ranks only"
        )
        problems.append(Problem(ProblemKind.MISSING_RANKS, text))
    if run.tables_lost:
        problems.append(Problem(ProblemKind.NAMES_LOST, _names_lost(run)))
    return run


def _names_lost(run: Run) -> str:
    """Return the sentence about full side tables; every report shows it among the problems."""
    lost = run.tables_lost
    count, ranks = sum(lost.values()), with_noun(lost)
    names = "1 name" if count == 1 else f"{count:,} names"
    return (
        f"{run.source}: the ring's side tables are full on {ranks}: {names} (of groups, lines "
        "or error texts) found no room. Calls of groups without a name are taken for calls of one "
        "group, so a verdict on them is less sure; rankcall.disable() and enable() begin a new ring"
    )


def _read_heads(
    paths: Sequence[Path],
    problems: list[Problem],
    progress: Progress | None,
    read: Callable[[Path], Head],
) -> Iterator[Head]:
    for done, path in enumerate(paths, 1):
        try:
            head = read(path)
        except HeaderMissingError as error:
            problems.append(Problem(ProblemKind.UNFINISHED, str(error)))
        except CorruptRunError as error:
            problems.append(Problem(ProblemKind.UNREADABLE, str(error)))
        else:
            if head.problem:
                problems.append(Problem(ProblemKind.UNREADABLE, head.problem))
            yield head
        if progress is not None:
            progress(done, len(paths))

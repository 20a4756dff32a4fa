"""The time in collectives by the line that issues them, and as a tree: file, function, line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import MISSING, UNKNOWN_SITE, Columns
from rankcall.analysis.waiting import covered
from rankcall.record import OPS
from rankcall.ring.tables import CallSite, Tables

Key = tuple[CallSite, int]  # a line and the code of the op that it issues


@dataclass(frozen=True)
class SiteRow:
    """One op issued from one line. Times of the calls that ended."""

    site: CallSite
    code: str  # the source line; empty if it is not known
    op: str
    count: int  # calls, on all ranks
    ranks: int
    # Of the rank that spent most in it; calls that overlap count once. None: no duration is known.
    total_ms: float | None
    most_calls: int  # of one rank
    median_ms: float | None
    worst_ms: float | None


@dataclass(frozen=True)
class SiteBranch:
    """The call sites of a file, by function; or of a function, by line."""

    name: str
    count: int  # calls, on all ranks
    ranks: int
    # Of the rank that spent most below it. Calls of one line that overlap count once, and those of
    # two lines twice. None: no duration is known.
    total_ms: float | None
    functions: list[SiteBranch]  # of a file
    rows: list[SiteRow]  # of a function


class SiteTimes:
    """Collects durations by (call site, op), ring by ring."""

    def __init__(self) -> None:
        self._durations: dict[Key, list[npt.NDArray[np.float32]]] = {}
        self._code: dict[CallSite, str] = {}
        self._calls: dict[Key, int] = {}
        self._ranks: dict[Key, dict[int, tuple[int, float]]] = {}

    def add(self, rank: int, columns: Columns, tables: Tables) -> None:
        """Add one ring."""
        key = columns["call_site"].astype(np.int64) * len(OPS) + columns["op"]
        spent = (columns["completed_ns"] - columns["started_ns"]).astype(np.float32)
        spent[columns["completed_ns"] == MISSING] = np.nan
        for number, rows in _split(key):
            site = tables.sites.get(number // len(OPS), UNKNOWN_SITE)
            which = site, number % len(OPS)
            code = tables.lines.get(number // len(OPS))
            if code:
                self._code.setdefault(site, code)
            durations = spent[rows]
            self._calls[which] = self._calls.get(which, 0) + len(durations)
            is_known = ~np.isnan(durations)
            ended = rows[is_known]
            begin, end = columns["started_ns"][ended], columns["completed_ns"][ended]
            if np.any(begin[1:] < begin[:-1]):
                order = np.argsort(begin, kind="stable")
                begin, end = begin[order], end[order]
            known = self._ranks.setdefault(which, {})
            calls, spent_ns = known.get(rank, (0, 0.0))
            known[rank] = calls + len(rows), spent_ns + covered(begin, end)
            self._durations.setdefault(which, []).append(durations[is_known])

    def rows(self) -> list[SiteRow]:
        """Return all sites, those that took most time first."""
        table = self._rows.values()
        return sorted(table, key=lambda row: (-(row.total_ms or 0.0), str(row.site), row.op))

    def tree(self) -> list[SiteBranch]:
        """Return all sites by file and function of the line to show first: see ``CallSite.own``.

        The branches that took most time come first, at each level.
        """
        files: dict[str, dict[str, list[Key]]] = {}
        for key in self._rows:
            own = key[0].own
            files.setdefault(own.file, {}).setdefault(own.function, []).append(key)
        return _slowest_first(self._file(name, functions) for name, functions in files.items())

    def _file(self, name: str, functions: dict[str, list[Key]]) -> SiteBranch:
        keys = [key for some in functions.values() for key in some]
        branches = [self._branch(function, some) for function, some in functions.items()]
        return replace(self._branch(name, keys), functions=_slowest_first(branches), rows=[])

    def _branch(self, name: str, keys: list[Key]) -> SiteBranch:
        spent: dict[int, float] = {}
        for key in keys:
            for rank, (_, spent_ns) in self._ranks[key].items():
                spent[rank] = spent.get(rank, 0.0) + spent_ns
        rows = [self._rows[key] for key in keys]
        is_known = any(row.total_ms is not None for row in rows)
        return SiteBranch(
            name,
            sum(row.count for row in rows),
            len(spent),
            max(spent.values()) / 1e6 if is_known else None,
            [],
            sorted(rows, key=lambda row: (-(row.total_ms or 0.0), row.site.own.line, row.op)),
        )

    @cached_property
    def _rows(self) -> dict[Key, SiteRow]:
        """The rows, once all rings have been added."""
        return {key: self._row(key) for key in self._calls}

    def _row(self, which: Key) -> SiteRow:
        times = np.concatenate(self._durations[which])
        ranks = self._ranks[which].values()
        return SiteRow(
            which[0],
            self._code.get(which[0], ""),
            OPS[which[1]],
            self._calls[which],
            len(ranks),
            max(spent_ns for _, spent_ns in ranks) / 1e6 if len(times) else None,
            max(calls for calls, _ in ranks),
            float(np.median(times)) / 1e6 if len(times) else None,
            float(times.max()) / 1e6 if len(times) else None,
        )


def _slowest_first(branches: Iterable[SiteBranch]) -> list[SiteBranch]:
    return sorted(branches, key=lambda branch: (-(branch.total_ms or 0.0), branch.name))


def _split(key: npt.NDArray[np.int64]) -> Sequence[tuple[int, npt.NDArray[np.intp]]]:
    """Return each key with its rows."""
    if not len(key):
        return []
    # Keys are few and small as a rule, and 16-bit keys sort ten times as fast as 64-bit ones.
    narrow = key.astype(np.uint16) if key.min() >= 0 and key.max() < 1 << 16 else key
    order = np.argsort(narrow, kind="stable")
    pieces = np.split(order, np.flatnonzero(np.diff(key[order])) + 1)
    return [(int(key[piece[0]]), piece) for piece in pieces]

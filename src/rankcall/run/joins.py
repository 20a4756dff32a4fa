"""The sums of each ``Join`` of a run: ``joins.jsonl``, one line for each ``Join``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rankcall.files import append_line, open_regular
from rankcall.problems import Problem, ProblemKind

FILE = "joins.jsonl"
_MOST_LINE = 1 << 23  # bytes: of a Join of 100,000 ranks
_MOST_DAMAGED = 64  # lines


@dataclass
class RankSummary:
    """One rank's part in a ``Join``. ``extra_s`` is the duration of its extra steps, in seconds."""

    rank: int
    batches: int = 0  # its own batches
    shadowed: int = 0  # iterations of other ranks for which it issued the collectives
    replayed: int = 0  # batches that it repeated, at weight 0
    extra_s: float = 0.0

    def pack(self) -> list[int]:
        """Return the fields as integers, the time in microseconds."""
        return [self.rank, self.batches, self.shadowed, self.replayed, round(self.extra_s * 1e6)]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> RankSummary:
        """Undo ``pack``."""
        return cls(row[0], row[1], row[2], row[3], row[4] / 1e6)


@dataclass
class JoinSummary:
    """One ``Join``: its arguments, its line in the program, and each rank's part."""

    on_exhausted: str
    divide_by: str
    call_site: str
    ranks: list[RankSummary]

    def __str__(self) -> str:
        """Return a table, one line a rank."""
        lines = ["rank  batches  shadowed  replayed  extra time"]
        lines += [
            f"{row.rank:4}  {row.batches:7,}  {row.shadowed:8,}  {row.replayed:8,}  "
            f"{row.extra_s:8.3f} s"
            for row in self.ranks
        ]
        return "\n".join(lines)


def append_join(run_dir: Path, join: JoinSummary) -> None:
    """Add a line to the run's list. If the run cannot be written, the line is lost."""
    line = json.dumps(asdict(join)) + "\n"
    with contextlib.suppress(OSError):
        append_line(run_dir / FILE, line.encode())


def read_joins(run_dir: Path) -> tuple[list[JoinSummary], list[Problem]]:
    """Return a run's joins in the order in which they ended, and the damaged lines as problems."""
    path = run_dir / FILE
    joins: list[JoinSummary] = []
    problems: list[Problem] = []
    try:
        with open_regular(path) as file:
            for number, line in enumerate(_lines(file), 1):
                try:
                    joins.append(_parse(json.loads(line)))
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                    text = f"{path}: line {number} is damaged"
                    problems.append(Problem(ProblemKind.UNREADABLE, text))
                    if len(problems) == _MOST_DAMAGED:
                        break  # the lines after it are not of ours either
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        return [], [Problem(ProblemKind.UNREADABLE, f"{path}: cannot be read: {error}")]
    return joins, problems


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, up to one that is longer than any of ours, which is cut."""
    while line := file.readline(_MOST_LINE):
        yield line
        if len(line) == _MOST_LINE:
            return


def _parse(fields: Any) -> JoinSummary:
    policy, divide_by, site = (
        str(fields[key]) for key in ("on_exhausted", "divide_by", "call_site")
    )
    return JoinSummary(policy, divide_by, site, [_parse_rank(row) for row in fields["ranks"]])


def _parse_rank(row: Any) -> RankSummary:
    numbers = [row[name] for name in ("rank", "batches", "shadowed", "replayed")]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("not a count")
    rank, batches, shadowed, replayed = numbers
    return RankSummary(rank, batches, shadowed, replayed, float(row["extra_s"]))


def total_by_rank(joins: Iterable[JoinSummary]) -> list[RankSummary]:
    """Add up each rank's parts in several joins."""
    sums: dict[int, RankSummary] = {}
    for join in joins:
        for part in join.ranks:
            into = sums.setdefault(part.rank, RankSummary(part.rank))
            into.batches += part.batches
            into.shadowed += part.shadowed
            into.replayed += part.replayed
            into.extra_s += part.extra_s
    return [sums[rank] for rank in sorted(sums)]

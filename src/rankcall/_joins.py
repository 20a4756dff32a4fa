"""What a ``Join`` did on each rank, and the run's list of them: ``joins.jsonl``, a line each."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankcall.files import append_line

FILE = "joins.jsonl"


@dataclass
class RankSummary:
    """One rank's part in a ``Join``. ``extra_s``: what its extra steps took, in seconds."""

    rank: int
    batches: int = 0  # of its own
    shadowed: int = 0  # iterations of others that it answered
    replayed: int = 0  # batches handed out again, at weight 0
    extra_s: float = 0.0

    def pack(self) -> list[int]:
        """Return whole numbers; the time in microseconds."""
        return [self.rank, self.batches, self.shadowed, self.replayed, round(self.extra_s * 1e6)]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> RankSummary:
        """Undo ``pack``."""
        return cls(row[0], row[1], row[2], row[3], row[4] / 1e6)


@dataclass
class JoinSummary:
    """One ``Join``: what it was told, where it stands in the program, and each rank's part."""

    on_exhausted: str
    divide_by: str
    call_site: str
    ranks: list[RankSummary]

    def __str__(self) -> str:
        """Return a table, one line a rank."""
        lines = ["rank  batches  shadowed  replayed  extra time"]
        lines += [
            f"{each.rank:4}  {each.batches:7,}  {each.shadowed:8,}  {each.replayed:8,}  "
            f"{each.extra_s:8.3f} s"
            for each in self.ranks
        ]
        return "\n".join(lines)


def append(run_dir: Path, join: JoinSummary) -> None:
    """Add a line to the run's list; a run that cannot be written to is left alone."""
    line = json.dumps(asdict(join)) + "\n"
    with contextlib.suppress(OSError):
        append_line(run_dir / FILE, line.encode())


def read(run_dir: Path) -> tuple[list[JoinSummary], list[str]]:
    """Return a run's joins, in the order they ended, and what could not be read."""
    path, joins, problems = run_dir / FILE, [], []  # type: tuple[Path, list[JoinSummary], list[str]]
    try:
        lines = path.read_text(errors="replace").splitlines() if run_dir.is_dir() else []
    except FileNotFoundError:
        lines = []
    except OSError as error:
        return [], [f"{path}: cannot be read: {error}"]
    for number, line in enumerate(lines, 1):
        try:
            joins.append(_parse(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError):
            problems.append(f"{path}: line {number} is damaged")
    return joins, problems


def _parse(found: Any) -> JoinSummary:
    policy, divide_by, site = (
        str(found[key]) for key in ("on_exhausted", "divide_by", "call_site")
    )
    return JoinSummary(policy, divide_by, site, [_parse_rank(row) for row in found["ranks"]])


def _parse_rank(row: Any) -> RankSummary:
    numbers = [row[name] for name in ("rank", "batches", "shadowed", "replayed")]
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("not a count")
    rank, batches, shadowed, replayed = numbers
    return RankSummary(rank, batches, shadowed, replayed, float(row["extra_s"]))


def total(joins: Iterable[JoinSummary]) -> list[RankSummary]:
    """Add up each rank's parts."""
    sums: dict[int, RankSummary] = {}
    for join in joins:
        for each in join.ranks:
            into = sums.setdefault(each.rank, RankSummary(each.rank))
            into.batches += each.batches
            into.shadowed += each.shadowed
            into.replayed += each.replayed
            into.extra_s += each.extra_s
    return [sums[rank] for rank in sorted(sums)]

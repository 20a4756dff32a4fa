"""What a ``Join`` did on each rank: batches, shadowed and replayed steps, and their time."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rankcall.run import JOINS


@dataclass
class RankSummary:
    """One rank's part in a ``Join``. ``extra_s`` is what its extra steps took, in seconds."""

    rank: int
    batches: int = 0  # of its own
    shadowed: int = 0  # iterations of others that it answered
    replayed: int = 0  # batches handed out again, with weight 0
    extra_s: float = 0.0

    def pack(self) -> list[int]:
        """Return whole numbers; the time in microseconds."""
        return [self.rank, self.batches, self.shadowed, self.replayed, round(self.extra_s * 1e6)]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> RankSummary:
        """Undo ``pack``."""
        return cls(row[0], row[1], row[2], row[3], row[4] / 1e6)


def describe(ranks: Sequence[RankSummary]) -> str:
    """Return a table as text, one line a rank."""
    lines = ["rank  batches  shadowed  replayed  extra time"]
    for each in ranks:
        lines.append(
            f"{each.rank:4}  {each.batches:7,}  {each.shadowed:8,}  {each.replayed:8,}  "
            f"{each.extra_s:8.3f} s"
        )
    return "\n".join(lines)


def keep(
    run_dir: Path, policy: str, divide_by: str, call_site: str, ranks: Sequence[RankSummary]
) -> None:
    """Append one line to the run's list of joins; a run that cannot be written to is left alone."""
    names = [field.name for field in fields(RankSummary)]
    assert names[0] == "rank"
    line = json.dumps(
        {
            "on_exhausted": policy,
            "divide_by": divide_by,
            "call_site": call_site,
            "ranks": [asdict(each) for each in ranks],
        }
    )
    try:
        file = os.open(run_dir / JOINS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line.encode() + b"\n")
        finally:
            os.close(file)
    except OSError:
        pass

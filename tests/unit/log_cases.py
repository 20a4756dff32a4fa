"""Logs of failed jobs, and logs without a failure, each a file in ``tests/logs/cases``.

They tell again what public reports show. Hosts, paths, times and names are invented; the messages,
the ranks and their order are those of the reports. A file begins with a header, and the log
follows:

* ``#: kind:`` the verdict that is right, or several of which one must come;
* ``#: ranks:`` the ranks to name, none if the line is missing; ``none | 1,7`` allows either;
* ``#: says:`` words that the summary or the advice must have;
* ``#: from:`` the report, as ``owner/repository#number``;
* ``#: file:`` the name of the log, if it matters;
* ``#: open:`` why rankcall does not give this verdict yet.

The verdict is what a person reads in the log. It is decided before rankcall judges the log, and is
never changed to what rankcall says.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from rankcall.analysis.logs import diagnose_logs

FOLDER = Path(__file__).parents[1] / "logs" / "cases"
_MARK = "#: "


class LogCase(NamedTuple):
    """A log and its right answer. ``ranks``: the sets of ranks of which any is right."""

    lines: list[str]
    kinds: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...] = ((),)
    says: tuple[str, ...] = ("",)
    file: str = "job.log"
    open: str = ""


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in ``1,7`` or ``0-3``."""
    ranks: list[int] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return tuple(ranks)


def case_of(path: Path) -> LogCase:
    """Read one file."""
    with path.open(newline="") as file:
        lines = file.read().removesuffix("\n").split("\n")
    header = {}
    while lines[0].startswith(_MARK):
        key, _, value = lines.pop(0).removeprefix(_MARK).partition(": ")
        header[key] = value
    return LogCase(
        lines,
        tuple(header["kind"].split(" | ")),
        tuple(
            () if part == "none" else _ranks(part)
            for part in header.get("ranks", "none").split(" | ")
        ),
        tuple(header.get("says", "").split(" | ")),
        header.get("file", "job.log"),
        header.get("open", ""),
    )


ALL = {path.stem: case_of(path) for path in sorted(FOLDER.glob("*.log"))}
HARMLESS = {name: case for name, case in ALL.items() if case.kinds == ("nothing_found",)}
INCIDENTS = {name: case for name, case in ALL.items() if name not in HARMLESS}


def judged(path: Path) -> tuple[str, tuple[int, ...]]:
    """Return the kind and the ranks of the first finding about a log."""
    finding = diagnose_logs([path]).findings[0]
    return finding.kind, finding.ranks


def raised(
    error: str, prefix: str = "", file: str = "/job/train.py", head: str = "Traceback"
) -> list[str]:
    """Return the lines of an exception, as Python writes them."""
    return [
        f"{prefix}{head} (most recent call last):",
        f'{prefix}  File "/job/main.py", line 12, in <module>',
        f"{prefix}    main()",
        f'{prefix}  File "{file}", line 88, in step',
        f"{prefix}    loss.backward()",
        *[f"{prefix}{line}" for line in error.split("\n")],
    ]


def torchrun(rank: int, code: int, others: Iterable[tuple[int, int]] = ()) -> list[str]:
    """Return torchrun's report."""

    def block(number: int, exitcode: int) -> list[str]:
        return [
            f"[{number}]:",
            f"  time      : 2026-04-02_11:02:{'07' if number == rank else '09'}",
            f"  host      : node-{number // 8}",
            f"  rank      : {number} (local_rank: {number % 8})",
            f"  exitcode  : {exitcode} (pid: {5000 + number})",
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: "
            "https://pytorch.org/docs/stable/elastic/errors.html",
        ]

    line = "-" * 60
    return [
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "=" * 60,
        "train.py FAILED",
        line,
        "Failures:",
        *[text for number, exitcode in others for text in block(number, exitcode)],
        line,
        "Root Cause (first observed failure):",
        *block(rank, code),
        "=" * 60,
    ]

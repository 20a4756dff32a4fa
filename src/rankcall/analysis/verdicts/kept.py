"""The verdicts that a job's own watcher kept in its run; ``run.hangs`` has the files' layout."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.verdict import Kept, Verdict
from rankcall.run.hangs import (
    hang_folders,
    kept_lines,
    kept_stacks,
    read_over,
    read_verdict,
    stacks_in,
)
from rankcall.run.load import Run
from rankcall.run.stack_text import tidy

_MOST_STACKS = 4096


def kept_in(path: Path, ranks: int | None = None) -> list[Kept]:
    """Return the verdicts in a run directory, in the order in which they were kept.

    A verdict that is damaged, or that cannot be read, is left out. For ``ranks``, see
    ``read_verdict``.
    """
    verdicts = []
    for folder in hang_folders(path):
        with contextlib.suppress(OSError, ValueError):
            verdict = decode(read_verdict(folder, ranks), with_ranks=False)
            stacks = len(stacks_in(folder))
            verdicts.append(Kept(verdict, folder, str(folder), read_over(folder), stacks))
    return verdicts


def stacks_beside(kept: Kept) -> dict[int, str]:
    """Return the stacks that the watcher kept with a verdict, by rank."""
    stacks = kept_stacks(kept.folder, _MOST_STACKS)
    return {rank: tidy(text) for rank, text in stacks.items()}


def lines_beside(kept: Kept) -> dict[str, str]:
    """Return the source text of the lines at which the ranks stood, by ``file:line``."""
    return kept_lines(kept.folder)


def kept_of(run: Run) -> list[Kept]:
    """Return the verdicts in a run, which may come from an archive that was extracted anywhere."""
    verdicts = kept_in(run.path, run.world_size)
    if run.source in (None, run.path):
        return verdicts
    return [replace(kept, place=str(kept.folder.relative_to(run.path))) for kept in verdicts]


def whole_verdict(kept: Kept) -> Verdict:
    """Return a kept verdict with the positions of the ranks, if its file can still be read."""
    try:
        return decode(read_verdict(kept.folder))
    except (OSError, ValueError):
        return kept.verdict


def waits_that_ended(verdicts: Iterable[Kept]) -> dict[str, float]:
    """Return by line the longest hang there that passed, in s."""
    longest: dict[str, float] = {}
    for kept in verdicts:
        for finding in kept.verdict.findings:
            if finding.call_site and kept.over_s:
                line = finding.shown_line
                longest[line] = max(longest.get(line, 0.0), kept.over_s)
    return longest

"""A problem: what a reader of evidence could not read, left out or cannot know.

A problem has a kind, which programs ask for, and a text, which is only for people. Nothing else
searches the text. Reports show the texts; JSON has them as a list of strings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


class ProblemKind(str, Enum):
    """The kinds of problems. A reader may leave out a kind that it reports in another way."""

    MISSING_RANKS = "missing_ranks"  # ranks of the job left no evidence that can be read
    UNFINISHED = "unfinished"  # a ring has no header: its process makes it, or was killed then
    UNREADABLE = "unreadable"  # a file, or a part of it, is damaged or cannot be read
    UNTRUSTED = "untrusted"  # another user could have written a file, so it is ignored
    LEFT_OUT = "left_out"  # evidence is of another job, or one of several for one rank
    MIXED_JOBS = "mixed_jobs"  # evidence is most likely of several jobs, and none was left out
    NAMES_LOST = "names_lost"  # names found no room in a ring
    LIMITED = "limited"  # the source of the evidence does not know something
    OTHER_NODES = "other_nodes"  # other nodes were not asked, or have not answered


@dataclass(frozen=True)
class Problem:
    """One problem. Two of the same kind and text are equal, so that each is shown once."""

    kind: ProblemKind
    text: str

    def __str__(self) -> str:
        """Return the text, as reports show it."""
        return self.text


def texts(problems: Iterable[Problem]) -> list[str]:
    """Return the texts of problems, for people and JSON."""
    return [problem.text for problem in problems]


def without(problems: Iterable[Problem], kind: ProblemKind) -> list[Problem]:
    """Return the problems of all other kinds."""
    return [problem for problem in problems if problem.kind is not kind]

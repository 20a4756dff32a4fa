"""Evidence that other tools left about a job. Each source becomes rings; only logs do not.

::

    dumps.files       reads a Flight Recorder dump; treats every file as hostile
    dumps.together    reads files with the dumps of several ranks
    dumps.tables      reads the tables of torch's debug server
    dumps.records     turns the entries of one dump into records
    dumps.readers     reads many dumps in several processes
    dumps.rings       makes the rings of one job of them
    logs.reading      finds the lines of logs that are about a failure
    logs.growth       notices new lines about a failure in logs that are still written
    logs.prefixes     takes off what launchers and collectors put before a line
    logs.wrapping     puts lines together that a terminal has wrapped
    logs.sources      the table of messages, by who writes them: turns a line into facts
    logs.tracebacks   messages of several lines
    logs.blame        whose fault an error is, by its words
    node              asks the kernel of this node, on request
    logs.job          collects the facts of all logs of a job, and the ranks that wrote them

A run that is made of the evidence of another tool is read, judged and reported like every other
run. To add a source, write its module and put it into ``SOURCES``. Logs have too little for a run:
``analysis/logs`` judges their facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rankcall.budget import Budget
from rankcall.imports.dumps.files import looks_like_dumps
from rankcall.imports.dumps.rings import rings_of_dumps
from rankcall.problems import Problem
from rankcall.ring.spec import RingSpec

__all__ = ["SOURCES", "EvidenceSource", "source_of"]


class EvidenceSource(NamedTuple):
    """A tool that leaves evidence.

    Attributes:
        name: The name of the tool.
        looks_like: Tells whether a file, or a folder, begins like evidence of that tool.
        rings: Yields a ring for each rank of the evidence in some files and folders. It adds
            a problem to a list for each file that it leaves out, and for what the tool cannot know,
            and it spends from the budget of the run before it makes what is larger than its file.
    """

    name: str
    looks_like: Callable[[Path], bool]
    rings: Callable[[Sequence[Path], list[Problem], Budget], Iterator[RingSpec]]


SOURCES: tuple[EvidenceSource, ...] = (
    EvidenceSource("Flight Recorder", looks_like_dumps, rings_of_dumps),
)


def source_of(path: Path) -> EvidenceSource | None:
    """Return the source whose evidence a file or a folder holds; None if it holds none."""
    return next((source for source in SOURCES if source.looks_like(path)), None)

"""The protocols that a sink follows, and the origin of what it gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from rankcall.capture.marks import Functions
from rankcall.ring.reader import Ring
from rankcall.trace.descriptions import Descriptions


@dataclass(frozen=True)
class Origin:
    """The rank that the descriptions come from. ``in_flight`` may be called from any thread."""

    rank: int
    world_size: int
    local_rank: int
    attempt: int
    host: str
    run_dir: Path | None
    in_flight: Callable[[], Descriptions]


@runtime_checkable
class Sink(Protocol):
    """Takes descriptions. All three methods run on rankcall's trace thread, one at a time.

    If ``open`` or ``write`` raises, rankcall calls it again with the same argument, a few times.
    Then it drops the sink and logs that once. So a ``write`` that raises should leave nothing
    written.
    """

    def open(self, origin: Origin) -> None:
        """Prepare. Called once before the first ``write``, as soon as the rank is known."""

    def write(self, descriptions: Descriptions) -> None:
        """Take the next descriptions: iterate over them, or use their columns, frame or lines."""

    def close(self) -> None:
        """Finish. Called once after ``open``, even if the sink is dropped."""


@runtime_checkable
class RecordSink(Protocol):
    """A sink that takes the records themselves, as they end, in every mode."""

    def open(self, origin: Origin) -> None:
        """Prepare; see ``Sink``."""

    def write_records(self, ring: Ring) -> None:
        """Take the next records of this rank, with the side tables that give names to their ids."""

    def close(self) -> None:
        """Finish; see ``Sink``."""


@runtime_checkable
class AtIssue(Protocol):
    """A sink whose C functions are called on the issuing thread. It gets no descriptions.

    ``enable`` calls ``functions`` once.
    """

    def functions(self) -> Functions | None:
        """Return the functions to call at issue, or None."""

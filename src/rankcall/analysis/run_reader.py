"""Reads a run of processes that live, again and again, and decodes only what has changed."""

from __future__ import annotations

from pathlib import Path

from rankcall.analysis.run_snapshot import SnapshotBuilder
from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.windows import Windows
from rankcall.budget import Budget
from rankcall.ring.reader import Head, Ring, read_ring
from rankcall.run.load import Run, load


class RunReader:
    """Reads the newest records of one run. For one thread at a time.

    Args:
        newest: How many records to read from the end of each ring.
    """

    def __init__(self, newest: int) -> None:
        self._newest = newest
        self._known: dict[str, Ring] = {}
        self._windows = Windows(remember=True)

    def load(self, where: Path) -> Run:
        """Read the rings of a run. Raises as ``run.load.load``."""
        run = load(where, read=self._read)
        names = {head.path.name for head in run.heads}
        self._known = {name: ring for name, ring in self._known.items() if name in names}
        return run

    def _read(self, path: Path, budget: Budget) -> Head:
        """Read the newest records of a ring together with its head."""
        name = path.name
        ring = self._known[name] = read_ring(path, self._newest, self._known.get(name), budget)
        return Head(ring.path, ring.header, ring.tables, ring.problem)

    def snapshot(self, run: Run, window: int) -> Snapshot:
        """Return where the ranks of a run stand that ``load`` has returned, by ``run.heads``.

        Args:
            run: The run, of which a caller may have left out rings.
            window: The number of each rank's newest calls to keep.
        """
        builder = SnapshotBuilder(run, window=window, windows=self._windows)
        for head in run.heads:
            builder.add(self._known[head.path.name])
        return builder.finish()

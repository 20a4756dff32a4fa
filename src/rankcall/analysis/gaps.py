"""Where a rank that keeps others waiting spends its time: between which lines of its program.

A gap is the time from the end of a rank's ops to its next op. The stages of a pipeline run the same
lines, so the gap of a slow stage can be compared with that of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rankcall.analysis.arrivals import Floats
from rankcall.record import FLAG_DEVICE
from rankcall.ring.reader import Ring
from rankcall.ring.tables import CallSite
from rankcall.run.load import Run

_COMPARED = 4  # other ranks that are read
_WORTH_IT = 0.2  # of all that the rank computes: a gap that costs less is not named
_FEWEST = 3  # times that a rank passes between two lines

Lines = tuple[CallSite, CallSite]


@dataclass(frozen=True)
class Gap:
    """The time that a rank spends between two lines, in no op.

    ``usual_ms``: what other ranks spend between them, at the median; None if none pass there.
    """

    rank: int
    after: CallSite
    before: CallSite
    times: int
    median_ms: float
    total_ms: float
    usual_ms: float | None


def gaps_of(run: Run, ranks: Sequence[int]) -> list[Gap]:
    """Return for each of some ranks the gap that costs most beyond what it costs other ranks."""
    if not ranks:
        return []
    others = [rank for rank in sorted(run.hosts) if rank not in ranks][:_COMPARED]
    compared: dict[Lines, list[float]] = {}
    for rank in others:
        for lines, lasted in _between_lines(run, rank).items():
            compared.setdefault(lines, []).append(float(np.median(lasted)))
    gaps = (_largest(rank, _between_lines(run, rank), compared) for rank in ranks)
    return [gap for gap in gaps if gap is not None]


def _largest(
    rank: int, between: dict[Lines, Floats], compared: dict[Lines, list[float]]
) -> Gap | None:
    excess: dict[Lines, float] = {}
    for lines, lasted in between.items():
        usual = float(np.median(compared[lines])) if lines in compared else 0.0
        # By the median, which is what is shown: one long pass, such as the first, is no slow stage.
        excess[lines] = len(lasted) * (float(np.median(lasted)) - usual)
    whole = sum(float(lasted.sum()) for lasted in between.values())
    if not excess:
        return None
    lines = max(excess, key=lambda key: excess[key])
    if excess[lines] < _WORTH_IT * whole or len(between[lines]) < _FEWEST:
        return None
    lasted, usual_ns = between[lines], compared.get(lines)
    return Gap(
        rank,
        *lines,
        len(lasted),
        float(np.median(lasted)) / 1e6,
        float(lasted.sum()) / 1e6,
        float(np.median(usual_ns)) / 1e6 if usual_ns else None,
    )


def _between_lines(run: Run, rank: int) -> dict[Lines, Floats]:
    """Return how long a rank was in no op between each two of its lines, in ns, each time."""
    parts: dict[Lines, list[Floats]] = {}
    for ring in _rings(run, rank):
        records = ring.records
        if len(records) < 2 or (records["flags"] & FLAG_DEVICE).any():
            continue  # the host does not wait for a device where it issues
        issued, ended = (records[name].astype(np.int64) for name in ("enqueued_ns", "completed_ns"))
        order = np.argsort(issued, kind="stable")
        issued, ended, sites = issued[order], ended[order], records["call_site"][order]
        reach = np.maximum.accumulate(np.maximum(ended, issued))
        lasted = np.maximum(issued[1:] - reach[:-1], 0).astype(np.float64)
        keys = np.stack([sites[:-1], sites[1:]]).astype(np.int64)
        for key in np.unique(keys, axis=1).T:
            known = [ring.tables.sites.get(int(number)) for number in key]
            if known[0] is not None and known[1] is not None:
                rows = (keys == key[:, None]).all(axis=0)
                parts.setdefault((known[0], known[1]), []).append(lasted[rows])
    return {lines: np.concatenate(lasted) for lines, lasted in parts.items()}


def _rings(run: Run, rank: int) -> Iterable[Ring]:
    for head in run.heads:
        if head.header.rank == rank:
            ring = run.read(head)
            if ring is not None:
                yield ring

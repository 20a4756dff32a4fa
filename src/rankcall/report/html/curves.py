"""Bandwidth by message size: one curve for each op in each group, and the outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rankcall.analysis.summary import Summary, size_name

MOST_CURVES = 240
# A point is slow below so much of the median of its peers: the same op, size and number of members.
# Of fewer peers, or of fewer collectives, the median says little.
_SLOW, _LEAST_PEERS, _LEAST_COUNT = 0.6, 3, 5


@dataclass(frozen=True)
class Point:
    """One size bucket: busbw in GB/s, from so many collectives."""

    bucket: int
    busbw: float
    count: int


@dataclass
class Curve:
    """One op in one group, by size. ``peers``: the median of other curves, if there are any.

    Peers are the same op in other groups of any size: busbw does not depend on the group's size
    while the same links carry it. Without such groups they are the group's other ops, and
    without those all others of the run.
    """

    op: str
    group: str
    points: list[Point]
    total_ms: float
    peers: list[Point] = field(default_factory=list)
    peers_are: str = ""
    same_op: bool = True  # the peers are the same op in other groups


@dataclass(frozen=True)
class BelowPeers:
    """A curve that stays far below its peers at one size."""

    op: str
    group: str
    size: str
    busbw: float
    expected: float
    peers: int
    ratio: float


def curves(summary: Summary) -> list[Curve]:
    """Return the curves, those that took most time first. Ops without bandwidth have no curve."""
    curve_of: dict[tuple[str, str], Curve] = {}
    for row in summary.collectives:
        if row.busbw_gbps is None or row.busbw_gbps <= 0 or row.op == "send":
            continue
        curve = curve_of.setdefault((row.op, row.group), Curve(row.op, row.group, [], 0.0))
        curve.points.append(Point(row.bucket, row.busbw_gbps, row.count))
        curve.total_ms += row.total_ms or 0.0
    kept = sorted(curve_of.values(), key=lambda curve: -curve.total_ms)[:MOST_CURVES]
    for curve in kept:
        curve.points.sort(key=lambda point: point.bucket)
    for curve in kept:
        _add_peers(curve, kept)
    return kept


def _add_peers(curve: Curve, kept: Sequence[Curve]) -> None:
    others = [peer for peer in kept if peer is not curve]
    same = [peer for peer in others if peer.op == curve.op]
    curve.peers_are, curve.same_op = f"{curve.op} in other groups", bool(same)
    if not same:
        same = [peer for peer in others if peer.group == curve.group]
        curve.peers_are = f"other ops in group {curve.group}"
    if not same:
        same, curve.peers_are = others, "all other ops and groups"
    by_size: dict[int, list[Point]] = {}
    for peer in same:
        for point in peer.points:
            by_size.setdefault(point.bucket, []).append(point)
    curve.peers = [
        Point(bucket, median(point.busbw for point in points), len(points))
        for bucket, points in sorted(by_size.items())
    ]


def below_peers(curves: Sequence[Curve]) -> list[BelowPeers]:
    """Find groups whose op is much slower than the same op elsewhere, at the size that shows most.

    At least three peers have to agree, each measured often enough.
    """
    slow = []
    for curve in curves:
        if not curve.same_op:
            continue
        expected = {point.bucket: point for point in curve.peers}
        for point in curve.points:
            peers = expected.get(point.bucket)
            if peers is None or peers.count < _LEAST_PEERS or point.count < _LEAST_COUNT:
                continue
            ratio = point.busbw / peers.busbw
            if ratio < _SLOW:
                size = size_name(point.bucket)
                slow.append(
                    BelowPeers(
                        curve.op, curve.group, size, point.busbw, peers.busbw, peers.count, ratio
                    )
                )
    return sorted(slow, key=lambda slow_group: slow_group.ratio)[:3]

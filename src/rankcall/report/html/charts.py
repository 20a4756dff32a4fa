"""The charts of the page: places, ticks, bands and pictures, in the units of the SVG.

A picture has one pixel for each cell and one hue. The value is the opacity, so that one picture
serves light and dark pages; an absent value is grey. Source of the format:
https://www.w3.org/TR/png/
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankcall.analysis.details import Details, RankSplit
from rankcall.analysis.lateness import LateMap
from rankcall.analysis.summary import size_name
from rankcall.analysis.timeline import Timeline
from rankcall.printable import clean
from rankcall.report.formatting import plural, rate, size, time
from rankcall.report.headline import headline
from rankcall.report.html.curves import Curve, Point
from rankcall.report.late_scale import late_scale

Floats = npt.NDArray[np.float64]
Colour = tuple[int, int, int]

ABSENT = 255  # the level of a cell without a value
_STRONGEST = 254  # the highest level of one that has a value
_HUE = (213, 94, 0)  # vermillion of Okabe and Ito's palette, told apart by colour-blind people
_BLUE = (0, 114, 178)
_GREY, _GREY_ALPHA = (128, 128, 128), 36
_MIXES = 7  # steps of the shares of waiting and of transfer in a moment; fewer compress better
_NO_MIX = (_MIXES + 1) ** 2  # the index of a moment without a record
_COMPUTE_STRENGTH = 0.45
WIDTH = 960
_LEFT, _RIGHT = 64, 8  # of a chart: room for the axis
_MOST_COLUMNS, _WIDEST = 1024, 96  # bars, about one in each pixel; and the width of the widest
_MOST_NAMED_ROWS = 24  # more rows are named by their hosts
_NAME_PX = 16  # of height, so that names beside a picture do not touch
_MOST_CELLS = 24  # hosts whose traffic is written in figures

KINDS = ("compute", "waiting", "transfer")
_WORDS = {"compute": "compute", "waiting": "waiting for others", "transfer": "transfer"}


@dataclass(frozen=True)
class Tick:
    """A place on an axis and its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Band:
    """A host's stretch of a ranks' axis, in shares of it."""

    host: str
    begin: float
    length: float


def bands(details: Details, ranks: Sequence[int]) -> list[Band]:
    """Return stretches of neighbouring ranks of one host."""
    host_of = {row.rank: row.host for row in details.summary.ranks}
    stretches: list[list[Any]] = []
    for place, rank in enumerate(ranks):
        host = clean(host_of.get(rank, ""))
        if stretches and stretches[-1][0] == host:
            stretches[-1][2] += 1
        else:
            stretches.append([host, place, 1])
    count = max(1, len(ranks))
    return [Band(host, begin / count, length / count) for host, begin, length in stretches]


def nice_ticks(highest: float, most: int = 5) -> list[float]:
    """Return round numbers from 0 to at most ``highest``."""
    if highest <= 0:
        return [0.0]
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough), 10 * power)
    return [step * i for i in range(int(highest / step + 1e-9) + 1)]


def overall(splits: Sequence[RankSplit]) -> list[dict[str, Any]]:
    """Return the parts of all ranks' time together."""
    total = sum(split.total_ms for split in splits)
    if total <= 0:
        return []
    parts = [(kind, sum(getattr(split, f"{kind}_ms") for split in splits)) for kind in KINDS]
    return [
        {"kind": kind, "share": amount / total, "words": _WORDS[kind]} for kind, amount in parts
    ]


def columns(details: Details) -> dict[str, Any] | None:
    """Return the chart of each rank's step: stacked columns, one a rank (or some ranks' mean)."""
    splits = details.splits
    if not any(split.total_ms > 0 for split in splits):
        return None
    per_step = all(split.steps > 0 for split in splits)
    rows = [_row(split, split.steps if per_step else 1) for split in splits]
    fold = -(-len(rows) // _MOST_COLUMNS)
    shown = [_slowest(rows[at : at + fold]) for at in range(0, len(rows), fold)]
    highest = max(sum(row[1:]) for row in shown) or 1.0
    height, wide = 220, min(_WIDEST, (WIDTH - _LEFT - _RIGHT) / len(shown))
    paths = _stacked(shown, highest, height, wide)
    named = set(headline(details.summary).ranks)
    return {
        "unit": "per step" if per_step else "in all",
        "fold": fold,
        "height": height,
        "left": _LEFT,
        "wide": wide,
        "across": wide * len(shown),
        "paths": paths,
        "ticks": [Tick(height * (1 - t / highest), time(t)) for t in nice_ticks(highest, 4)],
        "bands": bands(details, [row[0] for row in shown]),
        "ranks": _rank_ticks([row[0] for row in shown], wide),
        "marks": [
            {"x": _LEFT + (at + 0.5) * wide, "rank": row[0]}
            for at, row in enumerate(shown)
            if row[0] in named
        ],
        "rows": [[row[0], *(round(part, 5) for part in row[1:])] for row in shown],
        "table": [
            [str(row[0]), *(time(part) if part else "0" for part in row[1:]), time(sum(row[1:]))]
            for row in shown
        ],
    }


def _row(split: RankSplit, parts: int) -> list[Any]:
    return [split.rank, *(getattr(split, f"{kind}_ms") / parts for kind in KINDS)]


def _slowest(rows: Sequence[list[Any]]) -> list[Any]:
    """Return the rank that computes longest, of those that share a column."""
    return max(rows, key=lambda row: row[1])


def _stacked(
    rows: Sequence[Sequence[float]], highest: float, height: float, wide: float
) -> dict[str, str]:
    gap = min(12.0, wide * 0.14) if wide > 3 else 0.0
    paths: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for at, row in enumerate(rows):
        y = height
        x = _LEFT + at * wide + gap / 2
        for kind, part in zip(KINDS, row[1:], strict=True):
            tall = height * part / highest
            y -= tall
            if tall > 0.05:
                drawn = f"M{x:.2f} {y:.2f}h{wide - gap:.2f}v{tall:.2f}h-{wide - gap:.2f}z"
                paths[kind].append(drawn)
    return {kind: "".join(parts) for kind, parts in paths.items()}


def _rank_ticks(ranks: Sequence[int], wide: float) -> list[Tick]:
    every = max(1, math.ceil(34 / wide))
    every = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1 << 30) if n >= every)
    return [
        Tick(_LEFT + (at + 0.5) * wide, str(rank))
        for at, rank in enumerate(ranks)
        if at % every == 0
    ]


def late_maps(details: Details) -> dict[str, Any] | None:
    """Return the maps of lateness as pictures, all on one scale."""
    late, scale = details.lateness, late_scale(details)
    if scale is None:
        return None
    maps = [late_map for late_map in late.maps if np.isfinite(late_map.late_ms).any()]
    bins = maps[0].late_ms.shape[1]
    folded = [late_map for late_map in late.folded if np.isfinite(late_map.late_ms).any()]
    return {
        "maps": [_late_map(details, late_map, scale.full_ms) for late_map in maps + folded],
        "folded": len(folded),
        "highest_ms": scale.full_ms,
        "quiet": scale.quiet,
        "bins": bins,
        "bin_s": late.bin_ns / 1e9,
        "ticks": _time_ticks(bins * late.bin_ns / 1e9),
    }


def _late_map(details: Details, late_map: LateMap, highest: float) -> dict[str, Any]:
    rows, names = len(late_map.late_ms), [clean(name) for name in late_map.names]
    height = _tall(rows)
    fold = late_map.fold
    ranks = range(0, rows * fold, fold)
    return {
        "title": clean(late_map.title),
        "src": picture(levels(late_map.late_ms, highest)),
        "rows": rows,
        "fold": fold,
        "names": names,
        "height": height,
        "labels": _names_of_rows(names, height)
        if names
        else _ranks_of_rows(details, ranks, height),
    }


def _tall(rows: int) -> int:
    """Return the height of a picture with so many rows."""
    return min(560, max(64, rows * max(2, min(22, 512 // rows))))


def _time_ticks(seconds: float) -> list[Tick]:
    return [Tick(t / seconds, time(t * 1e3)) for t in nice_ticks(seconds, 6)]


def _names_of_rows(names: Sequence[str], height: int) -> list[Band]:
    """Write the names of rows, and of many rows those of some."""
    step = -(-len(names) * _NAME_PX // height)
    firsts = range(0, len(names), step)
    count = len(names)
    return [Band(names[at], at / count, (min(at + step, count) - at) / count) for at in firsts]


def timeline(details: Details) -> dict[str, Any] | None:
    """Return what each rank did when, as a picture: a row for each rank."""
    drawn = details.timeline
    if drawn is None:
        return None
    rows, bins = drawn.present.shape
    height = min(320, _tall(rows))
    return {
        "src": _mixed(drawn),
        "rows": drawn.ranks,
        "bins": bins,
        "fold": drawn.fold,
        "height": height,
        "bin_s": drawn.bin_ns / 1e9,
        "labels": _ranks_of_rows(details, drawn.ranks, height),
        "ticks": _time_ticks(bins * drawn.bin_ns / 1e9),
    }


def _ranks_of_rows(details: Details, ranks: Sequence[int], height: int) -> list[Band]:
    """Name rows that are ranks: each of them if they are few, else their hosts."""
    most = height // _NAME_PX
    if len(ranks) <= min(_MOST_NAMED_ROWS, most):
        count = len(ranks)
        return [Band(f"rank {rank}", at / count, 1 / count) for at, rank in enumerate(ranks)]
    hosts = bands(details, ranks)
    step = -(-len(hosts) // most)
    some = [hosts[at : at + step] for at in range(0, len(hosts), step)]
    return [Band(part[0].host, part[0].begin, sum(b.length for b in part)) for part in some]


def _mixed(drawn: Timeline) -> str:
    """Return the picture of a timeline: each moment in the mixed colour of its parts.

    Computing is drawn at part of its strength, so that it is light on a light page and dark on a
    dark one.
    """
    parts = (drawn.waiting, drawn.transfer, drawn.present - drawn.waiting - drawn.transfer)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [np.nan_to_num(np.clip(part / drawn.present, 0, 1)) for part in parts[:2]]
    waiting, transfer = (np.rint(share * _MIXES).astype(np.intp) for share in shares)
    transfer = np.minimum(transfer, _MIXES - waiting)
    cells = np.where(drawn.present > 0, waiting * (_MIXES + 1) + transfer, _NO_MIX).astype(np.uint8)
    mixes = [divmod(number, _MIXES + 1) for number in range(_NO_MIX)]
    colours = [_mix(waiting / _MIXES, transfer / _MIXES) for waiting, transfer in mixes]
    return _png(cells, [colour for colour, _ in colours] + [_GREY], [a for _, a in colours] + [0])


def _mix(waiting: float, transfer: float) -> tuple[Colour, int]:
    """Return the colour and the opacity (of 255) of a moment with these shares."""
    compute = max(0.0, 1 - waiting - transfer) * _COMPUTE_STRENGTH
    strength = waiting + transfer + compute
    red, green, blue = (
        min(255, round((waiting * hue + transfer * other + compute * grey) / strength))
        for hue, other, grey in zip(_HUE, _BLUE, _GREY, strict=True)
    )
    return (red, green, blue), min(255, round(255 * strength))


def bandwidth(curves: Sequence[Curve]) -> dict[str, Any] | None:
    """Return the chart of busbw against size, both axes logarithmic."""
    if not curves:
        return None
    points = [point for curve in curves for point in curve.points]
    low, high = min(p.busbw for p in points), max(p.busbw for p in points)
    bottom, top = math.floor(math.log10(low)), math.ceil(math.log10(high))
    top = max(top, bottom + 1)
    first = min(p.bucket for p in points).bit_length()
    last = max(max(p.bucket for p in points).bit_length(), first + 1)
    height, wide = 300, WIDTH - _LEFT - _RIGHT

    def place(point: Point) -> tuple[float, float]:
        x = _LEFT + 12 + (wide - 24) * (point.bucket.bit_length() - first) / (last - first)
        return x, height * (top - math.log10(point.busbw)) / (top - bottom)

    every = max(1, -(-(last - first) // 12))
    return {
        "height": height,
        "left": _LEFT,
        "curves": [_curve(number, curve, place) for number, curve in enumerate(curves)],
        "x": [
            Tick(
                _LEFT + 12 + (wide - 24) * (bits - first) / (last - first),
                size_name(1 << (bits - 1)),
            )
            for bits in range(first, last + 1, every)
        ],
        "y": [
            Tick(
                height * (top - power - math.log10(times)) / (top - bottom),
                _rate_tick(power, times),
            )
            for power in range(bottom, top + 1)
            for times in ((1, 2, 5) if top - bottom < 3 and power < top else (1,))
        ],
        "ops": list(dict.fromkeys(curve.op for curve in curves)),
    }


def _rate_tick(power: int, times: int) -> str:
    """Write ``times`` 10 to the ``power`` GB/s without zeros to count."""
    units = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
    above = max(0, min(power + 9, 3 * len(units) - 1))
    return f"{times * 10 ** (above % 3)} {units[above // 3]}"


def _curve(number: int, curve: Curve, place: Any) -> dict[str, Any]:
    peers = {point.bucket: point for point in curve.peers}
    dots = []
    for point in curve.points:
        x, y = place(point)
        words = f"{curve.op}, group {clean(curve.group)}, {size_name(point.bucket)}: "
        words += f"{rate(point.busbw)} GB/s from {plural(point.count, 'time')}"
        if point.bucket in peers:
            words += f"; peers {rate(peers[point.bucket].busbw)} GB/s"
        dots.append({"x": x, "y": y, "tip": words})
    return {
        "id": number,
        "op": curve.op,
        "group": clean(curve.group),
        "dots": dots,
        "line": _line([place(point) for point in curve.points]),
        # Other ops' bandwidths are points of comparison, not one curve.
        "peers": _line([place(point) for point in curve.peers]) if curve.same_op else "",
        "peer_dots": [place(point) for point in curve.peers],
        "peers_are": clean(curve.peers_are) if curve.peers else "",
    }


def _line(places: Sequence[tuple[float, float]]) -> str:
    return "".join(f"{'L' if at else 'M'}{x:.1f} {y:.1f}" for at, (x, y) in enumerate(places))


def host_matrix(details: Details) -> dict[str, Any] | None:
    """Return the traffic between hosts: in figures for a few, as a picture for many."""
    hosts, sent = [clean(host) or "?" for host in details.traffic.hosts], details.traffic.sent
    if not sent.any() or len(hosts) < 2:
        return None
    apart = sent.copy()
    np.fill_diagonal(apart, 0.0)
    highest, between = float(apart.max()), float(apart.sum())
    matrix: dict[str, Any] = {
        "hosts": hosts,
        "between": size(between),
        "within": size(float(np.trace(sent))),
        "share": between / float(sent.sum()),
        "rows": [],
        "src": "",
        "highest": highest,
    }
    if len(hosts) <= _MOST_CELLS:
        matrix["rows"] = [
            [
                {
                    "text": size(sent[i, j]) if sent[i, j] else "",
                    "strength": 0.0 if i == j or not highest else (sent[i, j] / highest) ** 0.5,
                    "own": i == j,
                    "tip": f"{hosts[i]} → {hosts[j]}: {size(sent[i, j])}",
                }
                for j in range(len(hosts))
            ]
            for i in range(len(hosts))
        ]
    else:
        shown = np.where(sent > 0, apart, np.nan)
        matrix["src"] = picture(levels(shown, highest), blue=True)
    return matrix


def levels(values: Floats, highest: float) -> npt.NDArray[np.uint8]:
    """Return 0 to 254 by the square root of the value's share of the highest; 255: absent."""
    with np.errstate(invalid="ignore"):
        share = np.sqrt(np.clip(values / highest, 0, 1)) if highest > 0 else values * 0.0
        strengths = np.rint(share * _STRONGEST)
    return np.where(np.isnan(values), ABSENT, np.nan_to_num(strengths)).astype(np.uint8)


def picture(cells: npt.NDArray[np.uint8], *, blue: bool = False) -> str:
    """Return a data: URI of a PNG, ``[row, column]`` of levels."""
    hue = _BLUE if blue else _HUE
    alphas = [round(255 * level / _STRONGEST) for level in range(ABSENT)]
    return _png(cells, [hue] * ABSENT + [_GREY], [*alphas, _GREY_ALPHA])


def _png(cells: npt.NDArray[np.uint8], palette: Sequence[Colour], alphas: Sequence[int]) -> str:
    """Return a data: URI of a PNG, ``[row, column]`` of indexes of the palette."""
    height, width = cells.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = cells
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", b"".join(bytes(colour) for colour in palette)),
        (b"tRNS", bytes(alphas)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    raw = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )
    return "data:image/png;base64," + base64.b64encode(raw).decode()

"""The curves of the live page: waiting and bandwidth over the last minutes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rankcall.printable import clean
from rankcall.report.formatting import digits, percent
from rankcall.serve.history import KEPT_S, History, Sample
from rankcall.serve.live_run import Look

_MOST_CURVES = 3  # of bandwidth: more cannot be told apart
_CHART = 420, 90  # the width and height of a chart, in the units of its SVG
_OLD_S = 30.0  # figures of a job that hangs are not those of now


def charts(look: Look, history: History) -> dict[str, Any]:
    """Return the curves of waiting and bandwidth, with their scales; the right edge is now."""
    samples = list(history.samples)
    now = look.epoch_s
    waiting = [(sample.epoch_s, sample.waiting) for sample in samples if sample.waiting is not None]
    kinds = Counter(key for sample in samples for key in sample.busbw)
    order = [(row.op, row.group, row.bucket) for row in (look.figures.rows if look.figures else ())]
    order += [key for key, _ in kinds.most_common() if key not in order]
    known = [key for key in order if kinds[key]][:_MOST_CURVES]
    curves = {key: _points(samples, key) for key in known}
    highest = max((value for points in curves.values() for _, value in points), default=0.0)
    most_waiting = max((value for _, value in waiting), default=0.0)
    scale = next((limit for limit in (0.05, 0.1, 0.25, 0.5) if most_waiting <= limit), 1.0)
    return {
        "waiting": _path(waiting, now, scale),
        "waiting_now": percent(waiting[-1][1]) if waiting else "",
        "old": bool(samples) and now - samples[-1].epoch_s > _OLD_S,
        "waiting_scale": percent(scale),
        "curves": [
            {
                "name": f"{op}, group {clean(group)}",
                "bucket": bucket,
                "path": _path(points, now, highest),
                "now": digits(points[-1][1]),
            }
            for (op, group, bucket), points in curves.items()
        ],
        "highest": digits(highest) if highest else "",
        "wide": _CHART[0],
        "tall": _CHART[1],
        "minutes": round(KEPT_S / 60),
    }


def _points(samples: Sequence[Sample], key: tuple[str, str, int]) -> list[tuple[float, float]]:
    return [(sample.epoch_s, sample.busbw[key]) for sample in samples if key in sample.busbw]


def _path(points: Sequence[tuple[float, float]], now: float, highest: float) -> str:
    """Return a line through the points; the right edge is now, the left one minutes ago."""
    wide, tall = _CHART
    if not points or highest <= 0:
        return ""
    places = [
        (wide * (1 - (now - at) / KEPT_S), tall * (1 - min(value / highest, 1.0)))
        for at, value in points
    ]
    if len(places) == 1:
        places.insert(0, (places[0][0] - 2, places[0][1]))
    return "".join(f"{'L' if n else 'M'}{x:.1f} {y:.1f}" for n, (x, y) in enumerate(places))

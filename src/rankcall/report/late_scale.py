"""The scale of the pictures of lateness, and whether any rank stands out on it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.details import Details
from rankcall.report.formatting import time

# Lateness is drawn at full strength from this share of a step on: in a healthy job, it is noise.
_FULL_STRENGTH = 0.05


class LateScale(NamedTuple):
    """``full_ms`` is drawn at full strength. ``quiet`` says that no rank stands out; else empty."""

    full_ms: float
    quiet: str


def late_scale(details: Details) -> LateScale | None:
    """Return the scale of all maps of lateness of a run; None if there is none to draw."""
    drawn = [shown.late_ms for shown in details.lateness.maps if np.isfinite(shown.late_ms).any()]
    if not drawn:
        return None
    step_ms = _step_ms(details)
    highest, least = _strongest(drawn[0]), _FULL_STRENGTH * step_ms
    if highest >= least:
        return LateScale(highest, "")
    few = f"{time(highest)} is little in a step of {time(step_ms)} (median)"
    return LateScale(least, f"No rank stands out: {few}.")


def _step_ms(details: Details) -> float:
    """Return how long a step takes, in the middle; 0 if no steps are known."""
    lasts = sorted(step.ms for step in details.summary.steps)
    return lasts[len(lasts) // 2] if lasts else 0.0


def _strongest(late: npt.NDArray[np.float64]) -> float:
    """Return the value to draw at full strength: not that of a few outliers."""
    worst = np.fmax.reduce(late, axis=0)
    usual, highest = float(np.nanquantile(worst, 0.95)), float(np.nanmax(worst))
    return usual if usual > highest * 1e-3 else highest

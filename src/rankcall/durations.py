"""Durations that a user passes: seconds, or a ``timedelta`` as torch takes them.

All public functions check theirs here, so that they accept the same values and refuse the others
with the same texts.
"""

from __future__ import annotations

import math
from datetime import timedelta

Duration = float | timedelta
"""What public functions accept for a duration: seconds, or a ``timedelta``."""


def seconds(value: Duration, name: str, *, zero: bool = False) -> float:
    """Return a duration in seconds.

    ``math.inf`` is a duration: it stands for no limit, where a function has use for that.

    Args:
        value: The duration that the caller of a public function passed.
        name: The name of the parameter, for the error.
        zero: Whether 0 is a duration here, for example for "do not wait".

    Raises:
        TypeError: It is neither a number nor a ``timedelta``. A ``bool`` is refused as well,
            because it is a flag in the wrong place.
        ValueError: It is negative, 0 (unless ``zero``), or NaN.
    """
    if value.__class__ in (float, int) and value > 0:
        return float(value)  # first: a barrier checks two in each call
    if isinstance(value, timedelta):
        number = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise TypeError(f"{name} is in seconds, or a timedelta; got {value!r}")
    if math.isnan(number) or number < 0 or (number == 0 and not zero):
        wanted = "at least 0" if zero else "positive"
        raise ValueError(f"{name} must be {wanted} seconds; got {value}")
    return number

"""Durations: seconds and ``timedelta`` mean the same, and mistakes are told with the parameter."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from rankcall.durations import seconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, 3.0),
        (0.25, 0.25),
        (math.inf, math.inf),
        (timedelta(minutes=2), 120.0),
        (timedelta(milliseconds=5), 0.005),
    ],
)
def test_a_duration_is_a_float_in_seconds(value: Any, expected: float) -> None:
    """The result is a float, whatever was passed."""
    result = seconds(value, "timeout")
    assert (result, type(result)) == (expected, float)


@pytest.mark.parametrize("value", ["5", None, True, [1]])
def test_what_is_no_duration(value: Any) -> None:
    """The error names the parameter and the value."""
    with pytest.raises(TypeError, match=r"^timeout is in seconds, or a timedelta; got "):
        seconds(value, "timeout")


@pytest.mark.parametrize("value", [-1, math.nan, timedelta(seconds=-1)])
def test_durations_that_cannot_be_meant(value: Any) -> None:
    """Negative durations and NaN are refused everywhere."""
    with pytest.raises(ValueError, match=r"^timeout must be positive seconds; got "):
        seconds(value, "timeout")
    with pytest.raises(ValueError, match=r"^timeout must be at least 0 seconds; got "):
        seconds(value, "timeout", zero=True)


@pytest.mark.parametrize("nothing", [0, 0.0, timedelta(0)])
def test_zero_is_a_duration_if_the_function_says_so(nothing: Any) -> None:
    """By default a duration is positive."""
    assert seconds(nothing, "trace_timeout", zero=True) == 0.0
    with pytest.raises(ValueError, match="must be positive"):
        seconds(nothing, "timeout")

"""Step totals, as TensorBoard's writer and a W&B run get them."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from tracing import finished, origin, some

from rankcall.trace import StepTotals


class TensorBoard:
    """Keeps the scalars that a SummaryWriter gets."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert (tag, step) not in self.scalars, "a step was written twice"
        self.scalars[tag, step] = value


class WandbRun:
    """Keeps the values that a W&B run gets."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.metrics: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)


def test_step_totals() -> None:
    """The sums of each step, once each; a step ends when the one after the next has begun."""
    board, wandb = TensorBoard(), WandbRun()
    for writer in (board, wandb):
        sink = StepTotals(writer)
        sink.open(origin())
        for first in range(0, 100, 7):
            sink.write(some(min(7, 100 - first), first))
        sink.close()
    sums: dict[tuple[str, int], float] = defaultdict(float)
    for (name, _), fields in finished(some(100)):
        for label in (name, "all"):
            sums[f"rankcall/{label}/calls", fields["step"]] += 1
            if fields["duration_ms"] is not None:
                sums[f"rankcall/{label}/ms", fields["step"]] += fields["duration_ms"]
            sums[f"rankcall/{label}/mib", fields["step"]] += fields["message_size"] / (1 << 20)
    assert board.scalars.keys() == sums.keys()
    assert all(math.isclose(board.scalars[key], sums[key], abs_tol=1e-12) for key in sums)
    assert wandb.metrics == [("rankcall/*", "rankcall/step")]
    assert [values["rankcall/step"] for values in wandb.logged] == list(range(10))
    assert wandb.logged[3]["rankcall/all/calls"] == sums["rankcall/all/calls", 3]
    with pytest.raises(TypeError, match=r"add_scalar .* log"):
        StepTotals(object())


def test_a_time_that_is_not_known_is_not_0() -> None:
    """Without any duration, as on devices without device times, a step has calls and no time."""
    board = TensorBoard()
    sink = StepTotals(board)
    sink.open(origin())
    unknown = np.full(4, np.nan)
    sink.write(some(4, duration_ms=unknown, algbw_gbps=unknown, busbw_gbps=unknown))
    sink.close()
    assert {tag for tag, _ in board.scalars if tag.startswith("rankcall/all/")} == {
        "rankcall/all/calls",
        "rankcall/all/mib",
    }

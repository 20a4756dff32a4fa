"""Totals of each training step, written with the user's TensorBoard or W&B writer."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.protocols import Origin

# A scalar that is written cannot be corrected, so a step waits for the ops that end late.
_LATE = 2  # a step is complete once this many later steps have begun


class StepTotals:
    """Writes for each optimizer step how often each op ran, its total time and its bytes.

    ``writer`` is a TensorBoard ``SummaryWriter`` (anything with ``add_scalar(tag, value, step)``)
    or a W&B run (anything with ``log(values)``). rankcall calls it on its trace thread and does not
    close it. The tags are ``rankcall/<op>/ms``, ``/calls`` and ``/mib``, and the same for the op
    ``all``. The time leaves out ops whose duration is not known; if none is, there is no ``/ms``.
    W&B gets the step as ``rankcall/step``, because the user counts W&B's own steps.
    """

    def __init__(self, writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise TypeError(
                "a writer has add_scalar (TensorBoard) or log (W&B); "
                f"{type(writer).__name__} has neither"
            )
        self._writer = writer
        self._open: dict[int, dict[str, float]] = {}
        self._newest = -1

    def open(self, origin: Origin) -> None:
        """Make ``rankcall/step`` the step of rankcall's values in W&B."""
        if hasattr(self._writer, "define_metric"):
            self._writer.define_metric("rankcall/*", step_metric="rankcall/step")

    def write(self, descriptions: Descriptions) -> None:
        """Add the descriptions to the totals; write the steps that are complete."""
        done = descriptions.only(~descriptions.columns["in_flight"])
        if len(done):
            self._add(done)
        self._write_until(self._newest - _LATE)

    def close(self) -> None:
        """Write the remaining steps."""
        self._write_until(self._newest)

    def _add(self, done: Descriptions) -> None:
        columns = done.columns
        names = sorted({call.op for call in done.calls})
        codes = np.array([names.index(call.op) for call in done.calls])[columns["call"]]
        self._newest = max(self._newest, int(columns["step"].max()))
        # An op of a step that is written already counts in the oldest step that is still open.
        step = np.maximum(columns["step"], min(self._open, default=0))
        key = step * len(names) + codes
        values, which = np.unique(key, return_inverse=True)
        first = columns["first"].astype(float)
        timed = ~np.isnan(columns["duration_ms"])
        sums = {
            "calls": np.bincount(which, first),
            "ms": np.bincount(which, np.nan_to_num(columns["duration_ms"]) * first),
            "mib": np.bincount(which, columns["message_bytes"] / (1 << 20)),
        }
        is_timed = np.bincount(which, timed) > 0
        for at, value in enumerate(values.tolist()):
            totals = self._open.setdefault(value // len(names), defaultdict(float))
            for unit, column in sums.items():
                if unit == "ms" and not is_timed[at]:
                    continue  # an unknown time is not a time of 0
                for name in (names[value % len(names)], "all"):
                    totals[f"rankcall/{name}/{unit}"] += float(column[at])

    def _write_until(self, last: int) -> None:
        for step in sorted(step for step in self._open if step <= last):
            self._write_step(step, self._open[step])
            del self._open[step]

    def _write_step(self, step: int, totals: dict[str, float]) -> None:
        if hasattr(self._writer, "add_scalar"):
            for tag, value in totals.items():
                self._writer.add_scalar(tag, value, step)
        else:
            self._writer.log({**totals, "rankcall/step": step})

"""Totals of each training step, to the TensorBoard or W&B writer that the user has."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.base import Origin

_LATE = 2  # steps after which a step's ops are taken to have all been described


class StepTotals:
    """Writes, for each optimizer step, how often each op ran, how long, and how many bytes.

    ``writer`` is a TensorBoard ``SummaryWriter`` (anything with ``add_scalar(tag, value, step)``)
    or a W&B run (anything with ``log(values)``); it is called on rankcall's trace thread and stays
    the user's to close. Tags: ``rankcall/<op>/ms``, ``/calls`` and ``/mib``, and those of ``all``.
    To W&B the step goes as ``rankcall/step``, since its own steps are the user's.
    """

    def __init__(self, writer: Any) -> None:
        if not (hasattr(writer, "add_scalar") or hasattr(writer, "log")):
            raise TypeError(
                f"a writer has add_scalar (TensorBoard) or log (W&B); {type(writer).__name__} has "
                "neither"
            )
        self._writer = writer
        self._open: dict[int, dict[str, float]] = {}
        self._newest = -1

    def open(self, origin: Origin) -> None:
        """Tell W&B which values go by which step."""
        if hasattr(self._writer, "define_metric"):
            self._writer.define_metric("rankcall/*", step_metric="rankcall/step")

    def write(self, descriptions: Descriptions) -> None:
        """Add up; write the steps that are over."""
        done = descriptions.only(~descriptions.columns["in_flight"])
        if len(done):
            self._add(done)
        self._write_until(self._newest - _LATE)

    def close(self) -> None:
        """Write the steps that are left."""
        self._write_until(self._newest)

    def _add(self, done: Descriptions) -> None:
        columns = done.columns
        names = sorted({kind.name for kind in done.kinds})
        codes = np.array([names.index(kind.name) for kind in done.kinds])[columns["kind"]]
        self._newest = max(self._newest, int(columns["step"].max()))
        # What comes later than late counts in the oldest step that is still open.
        step = np.maximum(columns["step"], min(self._open, default=0))
        key = step * len(names) + codes
        values, which = np.unique(key, return_inverse=True)
        first = columns["first"].astype(float)
        sums = {
            "calls": np.bincount(which, first),
            "ms": np.bincount(which, np.nan_to_num(columns["duration_ms"]) * first),
            "mib": np.bincount(which, columns["message_size"] / (1 << 20)),
        }
        for at, value in enumerate(values.tolist()):
            totals = self._open.setdefault(value // len(names), defaultdict(float))
            for what, each in sums.items():
                for name in (names[value % len(names)], "all"):
                    totals[f"rankcall/{name}/{what}"] += float(each[at])

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

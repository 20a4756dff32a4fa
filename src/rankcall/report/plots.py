"""Pictures of a run, for a notebook: ``run.plot.timeline()``, ``.waiting()``, ``.late()``.

Each method draws into the axes that it is given, or into new ones, and returns them, so that a
reader can add titles and save the figure. matplotlib draws; it is imported at the first picture.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rankcall.analysis.clocks import align
from rankcall.analysis.details import Details, detail
from rankcall.errors import ExtraMissingError
from rankcall.ranks import format_ranks
from rankcall.report.late_scale import late_scale
from rankcall.run.load import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Plots"]

_MOST_ROWS = 64  # ranks of a timeline: more would be thinner than a line of text
_NEWEST = 2000  # calls of each rank in a timeline
_INCHES = 10.0  # the width of a picture
_ROW, _LEAST, _MOST = 0.22, 2.0, 12.0  # inches: the height of a row, and of a picture
_HEIGHT = 0.8  # of a bar, in rows
_ROOM = 0.04  # of the width, for a call in flight at least; in s, if nothing else is on record
_MOST_LABELS = 32  # of ranks beside a picture
# Of the page of a report, in light.
_COLOURS = {"computing": "#c9ced6", "waiting": "#d9604c", "transfer": "#4c7fd9"}


class _Spans(NamedTuple):
    """The calls of one rank, in seconds of one clock. NaN: a call that has not ended."""

    rank: int
    seen: float  # when the rank was last known to run
    ops: list[str]
    begin: npt.NDArray[np.float64]
    end: npt.NDArray[np.float64]


class Plots:
    """Draws the pictures of one run. What they rest on is measured once."""

    def __init__(self, run: Run) -> None:
        self._run = run

    @cached_property
    def _details(self) -> Details:
        return detail(self._run)

    def timeline(
        self,
        ranks: Collection[int] | None = None,
        *,
        newest: int = _NEWEST,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw when each rank was in which call, a row for a rank, on one clock for all hosts.

        A bar begins when the call was issued and ends when it ended. A call that has not ended has
        a paler bar until its rank was last known to run, and at least a short one. Calls whose end
        nobody can tell are left out.

        Args:
            ranks: The ranks to draw; by default, the first 64.
            newest: How many calls of each rank are read, the newest ones.
            ax: The axes to draw into; by default, new ones.

        Raises:
            ExtraMissingError: matplotlib is not installed.
            ValueError: None of these ranks has a record.
        """
        known = sorted(self._run.hosts)
        chosen = [rank for rank in known if ranks is None or rank in ranks][:_MOST_ROWS]
        rows = list(self._spans(chosen, newest))
        if not any(len(spans.begin) for spans in rows):
            raise ValueError(
                f"{self._run!r} has no calls of rank "
                f"{format_ranks(sorted(ranks)) if ranks is not None else 'any'} to draw"
            )
        axes = _axes(ax, len(chosen))
        first = min(spans.begin.min() for spans in rows if len(spans.begin))
        last = max(np.fmax(spans.begin, spans.end).max() for spans in rows if len(spans.begin))
        room = _ROOM * (last - first) or _ROOM
        until = [  # where each bar ends
            np.where(np.isnan(spans.end), np.maximum(spans.seen, spans.begin + room), spans.end)
            for spans in rows
        ]
        last = max(ends.max() for ends in until if len(ends))
        ops = sorted({op for spans in rows for op in spans.ops})
        for number, op in enumerate(ops):
            colour, label = f"C{number % 10}", op
            for spans, ends in zip(rows, until, strict=True):
                is_op = np.array([name == op for name in spans.ops], bool)
                begin, is_open = spans.begin[is_op] - first, np.isnan(spans.end[is_op])
                widths = ends[is_op] - first - begin
                row = chosen.index(spans.rank)
                for part, alpha in ((~is_open, 1.0), (is_open, 0.4)):
                    if part.any():
                        bars = list(zip(begin[part], widths[part], strict=True))
                        place = row - _HEIGHT / 2, _HEIGHT
                        axes.broken_barh(bars, place, facecolors=colour, alpha=alpha, label=label)
                        label = "_nolegend_"
        _name_rows(axes, chosen)
        axes.set_xlim(0, max(last - first, 1e-9))
        axes.set_xlabel("seconds, from issue to end of each call")
        left_out = len(known) - len(chosen) if ranks is None else 0
        axes.set_title(f"Calls of {len(chosen)} of {len(known)} ranks" if left_out else "Calls")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return axes

    def waiting(self, *, ax: Axes | None = None) -> Axes:
        """Draw how each rank spent its time: computing, waiting for other ranks, and in transfer.

        Raises:
            ExtraMissingError: matplotlib is not installed.
        """
        splits = self._details.splits
        axes = _axes(ax, len(splits))
        at = np.zeros(len(splits))
        for name, values in (
            ("computing", [split.compute_ms for split in splits]),
            ("waiting", [split.waiting_ms for split in splits]),
            ("transfer", [split.transfer_ms for split in splits]),
        ):
            seconds = np.array(values) / 1e3
            axes.barh(
                range(len(splits)), seconds, _HEIGHT, left=at, label=name, color=_COLOURS[name]
            )
            at += seconds
        _name_rows(axes, [split.rank for split in splits])
        axes.set_xlabel("seconds")
        axes.set_title("Where each rank's time went")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        return axes

    def late(self, *, ax: Axes | None = None) -> Axes:
        """Draw who came late to collectives, and when: the mean lateness by rank and time.

        Colours begin to be strong at a share of a step, and the title says if no rank stands out.

        Raises:
            ExtraMissingError: matplotlib is not installed.
            ValueError: The run has no collective that shows who came when.
        """
        lateness, scale = self._details.lateness, late_scale(self._details)
        if scale is None:
            raise ValueError(f"{self._run!r} has no collective that shows who came when")
        late_map = lateness.maps[0]
        rows, bins = late_map.late_ms.shape
        axes = _axes(ax, rows)
        seconds = bins * lateness.bin_ns / 1e9
        image = axes.imshow(
            late_map.late_ms,
            aspect="auto",
            interpolation="nearest",
            cmap="Reds",
            vmin=0.0,
            vmax=scale.full_ms,
            extent=(0.0, seconds, rows - 0.5, -0.5),
        )
        _name_rows(axes, [row * late_map.fold for row in range(rows)])
        axes.set_xlabel("seconds")
        axes.set_title(scale.quiet or "Who came late to collectives")
        assert axes.figure is not None, "axes are in a figure"
        axes.figure.colorbar(image, ax=axes, label="ms after the median rank")
        return axes

    def _spans(self, ranks: Collection[int], newest: int) -> Iterator[_Spans]:
        """Yield the calls of each ring of some ranks."""
        clocks = align(self._run)
        for ring in self._run.only(ranks=ranks).iter_rings(newest=newest):
            frame = self._run.frame(ring)
            frame = frame.filter(~frame["abandoned"]).tail(newest)  # a ring may give more
            ended = frame["completed_ns"].fill_null(0).to_numpy()
            seen = np.array([ring.header.last_sign_ns])
            begin = clocks.epoch_ns(ring.header, frame["enqueued_ns"].to_numpy())
            end = clocks.epoch_ns(ring.header, ended)
            # Seconds of the epoch as floats have steps of 0.2 µs; a picture's pixel is more.
            yield _Spans(
                ring.header.rank,
                float(clocks.epoch_ns(ring.header, seen)[0] / 1e9),
                frame["op"].to_list(),
                begin / 1e9,
                np.where(ended == 0, np.nan, end / 1e9),
            )


def _axes(ax: Axes | None, rows: int) -> Axes:
    """Return the axes to draw into, rank 0 at the top."""
    if ax is None:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise ExtraMissingError(
                "pictures of a run need matplotlib: pip install 'rankcall[plot]'"
            ) from error
        height = min(_MOST, max(_LEAST, 1.0 + _ROW * rows))
        _, ax = pyplot.subplots(figsize=(_INCHES, height), layout="constrained")
    ax.set_ylim(rows - 0.5, -0.5)
    return ax


def _name_rows(axes: Any, ranks: Collection[int]) -> None:
    """Write ranks beside the rows, some of them if they are many."""
    every = -(-len(ranks) // _MOST_LABELS)
    named = [(row, rank) for row, rank in enumerate(ranks) if row % max(every, 1) == 0]
    axes.set_yticks([row for row, _ in named], [f"rank {rank}" for _, rank in named])

"""From records to numbers and verdicts: pure functions over arrays. Imports no torch.

::

    timing/      figures of a run: bandwidth, waiting, skew, on clocks made comparable
    state/       where every rank stands at one moment
    hang/        what holds a job up: the wait-for graph, and who is at its end
    slowness/    what slows a job that goes on: stragglers, slow links
    diagnosis    one call from a run to its verdict: state, then hang or slowness
    details      one call from a run to all figures of the report
"""

from rankcall.analysis.timing.summary import Summary, summarise

__all__ = ["Summary", "summarise"]

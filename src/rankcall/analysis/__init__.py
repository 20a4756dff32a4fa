"""From records to numbers and verdicts: pure functions over arrays. Imports no torch.

::

    timing/      figures of a run: bandwidth, waiting, skew, on clocks made comparable
    state/       where every rank stands at one moment
    verdicts/    what holds a job up or slows it: one class for each kind of verdict
    diagnosis    one call from a run to its verdict
    details      one call from a run to all figures of the page
"""

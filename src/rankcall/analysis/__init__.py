"""From records to numbers and verdicts: pure functions over arrays. Imports no torch.

::

    collectives, waiting, lateness    figures of a run, on clocks made comparable
    run_tables, summary               one call from a run to all figures of a report or a page
    snapshot, run_snapshot            where every rank stands at one moment
    verdicts/                         one call from a run to its verdict; one class for each kind
    logs                              the verdict if there is nothing but logs
"""

from __future__ import annotations

"""From records to numbers and verdicts: pure functions over arrays. Imports no torch.

::

    clocks, collectives               the ops of each group, lined up over its members
    arrivals, waiting, charging       who came last, who waited, and who bears that
    measuring, lateness, stragglers   durations, and the rule by which ranks are called stragglers
    call_sites, dimensions            the lines that issue calls, and the parallelism of a job
    timeline                          what each rank did when
    run_tables, summary               one call from a run to all figures of a report or a page
    snapshot                          where every rank stands at one moment
    run_snapshot                      one call from a run to its snapshot, by these parts:
    last_attempt, windows             the rings that belong together, and the calls kept of each
    process_ends, rank_states         how processes ended, and the state of each at one moment
    node_snapshot                     the part of one node, sent to others and merged
    verdicts/                         one call from a run to its verdict; one class for each kind
    logs                              the verdict if there is nothing but logs
"""

from __future__ import annotations

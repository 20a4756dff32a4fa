"""Ranks of which two threads use one group: nothing keeps their calls in the others' order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankcall.analysis.snapshot import COLLECTIVE, Snapshot, failed_for_good, unfinished
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.sentences import evidence
from rankcall.record import FLAG_DEVICE


def with_shared_group(snapshot: Snapshot, finding: Finding) -> Finding:
    """Add which ranks of a finding have calls of two threads in its group at once.

    Only collectives on the host count. Those on devices are issued ahead, and the threads of
    autograd issue theirs beside the main thread's.
    """
    calls = snapshot.calls
    groups = [number for number, label in enumerate(snapshot.labels) if label == finding.group]
    open_calls = (unfinished(calls) | failed_for_good(calls)) & (calls["flags"] & FLAG_DEVICE == 0)
    there = open_calls & np.isin(calls["group"], groups) & (calls["kind"] == COLLECTIVE)
    mine = calls[there & (calls["thread"] > 0)]
    threads = np.unique(np.stack([mine["rank"].astype(np.int64), mine["thread"]]), axis=1)
    ranks, count = np.unique(threads[0], return_counts=True)
    named = {*finding.ranks, *finding.victims}
    shared = [rank for rank in ranks[count > 1].tolist() if rank in named]
    if not finding.group or not shared:
        return finding
    values = (("group", finding.group),)
    fact = Fact(Relation.TWO_THREADS, ranks_of(snapshot, shared), values=values)
    lines = evidence([fact], snapshot.live)
    return replace(finding, evidence=(*finding.evidence, *lines), facts=(*finding.facts, fact))

"""Quote what the rank that failed first wrote last to stderr, in the finding about it.

Ranks that failed later are counted, and not quoted: mostly they say that they lost the first one.
"""

from __future__ import annotations

from dataclasses import replace

from rankcall.analysis.snapshot import Snapshot
from rankcall.analysis.verdicts.ends import ended_before
from rankcall.analysis.verdicts.facts import Fact, Relation, ranks_of
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.sentences import evidence as written


def with_quotation(snapshot: Snapshot, finding: Finding) -> Finding:
    """Return a finding with the words of its first culprit that failed, if they are known."""
    states = [snapshot.ranks[rank] for rank in finding.ranks]
    quoted = [state for state in states if state.words]
    if not quoted:
        return finding
    first = max(quoted, key=lambda state: state.gone_s or 0.0)
    said = Fact(
        Relation.SAID_LAST, ranks_of(snapshot, [first.rank]), values=(("text", first.words),)
    )
    facts = [said]
    others = [
        state
        for state in snapshot.ranks
        if (state.failure or state.exit not in (None, 0))
        and not (state.ended_by_launcher or state.aborted)
        and not ended_before(state, first)
        and state.rank != first.rank
    ]
    later = [state.rank for state in others if ended_before(first, state)]
    at_once = sorted({state.rank for state in others} - set(later))
    for ranks, values in ((at_once, (("at_once", "yes"),)), (later, ())):
        if ranks:
            said_by = ranks_of(snapshot, [first.rank])
            facts.append(
                Fact(
                    Relation.FAILED_LATER, said_by, others=ranks_of(snapshot, ranks), values=values
                )
            )
    return replace(
        finding,
        evidence=(*finding.evidence, *written(facts, snapshot.live)),
        facts=(*finding.facts, *facts),
    )

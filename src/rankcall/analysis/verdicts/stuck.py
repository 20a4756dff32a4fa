"""The verdict ``stuck``: all members have issued a call on devices, and it does not end.

On the CPU, all members have come then, and ``slow_link`` says that the transfer takes long. On a
device, a call that was issued has not begun, and nothing but the job's end releases the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankcall.analysis.snapshot import COMPLETED, START_SEEN, Snapshot, not_started
from rankcall.analysis.verdicts.evidence import HangEvidence, ends_of
from rankcall.analysis.verdicts.facts import Relation
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import Kind
from rankcall.analysis.verdicts.wait import Wait
from rankcall.record import FLAG_DEVICE

_DEVICES = "each rank's device (nvidia-smi, dmesg -T | grep -i xid)"
_LOG = "the back end's log (NCCL_DEBUG=INFO)"
_ADVICE = {
    Relation.STUCK_TRANSFER: f"Look at {_DEVICES}, at the links between them, and at {_LOG}.",
    Relation.STARTED_NOWHERE: (
        f"Look at what the ranks issued before that line, at {_DEVICES}, and at {_LOG}."
    ),
    Relation.START_UNKNOWN: (
        f"Look at {_DEVICES}, and at {_LOG}. With TORCH_NCCL_ENABLE_TIMING=1 and torch 2.14 or "
        "older, the next verdict names the ranks whose devices have not started the call."
    ),
}


class Stuck(Kind):
    """No member is missing, and no device gets out."""

    kind = "stuck"
    order = 85
    predicate = Predicate(
        "does not leave a call that all have issued",
        "do not leave a call that all have issued",
        "A call that all have issued does not end",
    )

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield the longest wait on devices in which no rank is missing, if a call is overdue."""
        snapshot, wait = evidence.snapshot, evidence.stuck
        if wait is None or evidence.may_be_held_elsewhere(wait):
            return
        if not snapshot.calls["flags"][wait.rows[0]] & FLAG_DEVICE:
            return
        relation = _what_is_known(snapshot, wait)
        yield self.of_unended_call(evidence, wait, relation, _ADVICE[relation])


def _what_is_known(snapshot: Snapshot, wait: Wait) -> Relation:
    """Return what is known of the devices of the ranks that do not get out.

    A rank that has not looked since it may be over is no waiter, and may not have started it.
    """
    calls = snapshot.calls
    not_over = ends_of(calls, wait) & (calls["status"] != COMPLETED)
    if (calls["flags"][not_over] & START_SEEN != 0).all():
        return Relation.STUCK_TRANSFER
    everyone_waits = len(wait.waiters) == len(wait.present)
    if everyone_waits and bool(np.all(not_started(calls)[wait.rows])):
        return Relation.STARTED_NOWHERE
    return Relation.START_UNKNOWN

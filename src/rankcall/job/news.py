"""Which verdicts are news: when this process learned of each, and whether one says more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.process import boot_id


class Learned:
    """When this process learned of each verdict, by its own monotonic clock.

    A wall clock can step, and those of two hosts differ. So verdicts are compared by their ids, and
    their times are on our monotonic clock. For a verdict that was made on this host since it
    booted, that time is exact. For any other verdict it is the time when this process first saw it.
    The verdicts in ``first`` are older than every hang that this watcher sees.
    """

    def __init__(
        self, first: Iterable[Verdict], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._clock = clock
        self._boot_id = boot_id()
        self._seen_ns = {verdict.origin.id: 0 for verdict in first}

    def made_ns(self, verdict: Verdict) -> int:
        """Return when a verdict was made, or else first seen, on our monotonic clock."""
        origin = verdict.origin
        if origin.boot_id and origin.boot_id == self._boot_id:
            return origin.mono_ns
        return self._seen_ns.setdefault(origin.id, self._clock())


def is_news(findings: Sequence[Finding], earlier: Sequence[Verdict]) -> bool:
    """Return whether a finding names a rank that no earlier verdict names, or first is sure.

    Ranks that only stay silent may compute, until they are seen to wait for each other.
    """
    if not findings or not earlier:
        return bool(findings)
    known_ranks = {rank for verdict in earlier for rank in verdict.culprits}
    names_more = any(not known_ranks.issuperset(finding.ranks) for finding in findings)
    return names_more or (are_open(earlier) and not leaves_open(findings))


def are_open(verdicts: Sequence[Verdict]) -> bool:
    """Return whether all verdicts, of which there may be none, leave open that the job hangs."""
    return all(leaves_open(verdict.findings) for verdict in verdicts)


def leaves_open(findings: Sequence[Finding]) -> bool:
    """Return whether findings leave open that the job hangs: its ranks may compute for long."""
    return all(
        finding.kind == "no_progress" and finding.confidence != "certain" for finding in findings
    )

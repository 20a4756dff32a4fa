"""What a node's leader does when something is overdue: look, agree, say it once."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rankcall import _stacks
from rankcall._hangs import Object, decode, id_of
from rankcall.analysis.diagnosis import Diagnosis
from rankcall.analysis.state.run_snapshot import snapshot_of_run
from rankcall.analysis.state.snapshot import Snapshot, unfinished
from rankcall.analysis.verdicts import find, settles_in
from rankcall.analysis.verdicts.evidence import patience
from rankcall.analysis.verdicts.finding import Finding
from rankcall.ring.header import Header
from rankcall.run import load
from rankcall.watch import _verdict
from rankcall.watch._exchange import Exchange, Unreachable

logger = logging.getLogger("rankcall.watch")

_WINDOW = 64  # calls kept of each rank
_PAUSE_S = (1.0, 15.0)  # between looks at what is overdue and healthy, at first and at most
_TOLD_S = 60.0  # between looks at a hang that has been told, for what comes on top of it
_NO_RING = "no ring for rank"  # other nodes' are elsewhere


class Judge:
    """Looks at a whole node, from the thread of its leader. ``next_look``: monotonic s."""

    def __init__(self, run_dir: Path, hang_after: float) -> None:
        self._run_dir = run_dir
        self._hang_after = hang_after
        self._exchange = Exchange(_own_store)
        self._began_ns = time.monotonic_ns()
        self._learned = _verdict.Learned(_verdict.written(run_dir))
        self._pause = _PAUSE_S[0]
        self._unclear = 0  # the hang that was looked at again because it was not clear yet
        self._heard: list[Object] = []  # the last verdicts that all nodes agreed on
        self.next_look = 0.0

    def rest(self) -> None:
        """Note that nothing is overdue: the next look comes at once where something is."""
        self.next_look, self._pause = 0.0, _PAUSE_S[0]

    def asked(self, headers: dict[int, Header]) -> bool:
        """Tell whether another node wants a verdict; let them all know who is on this one."""
        try:
            return self._exchange.asked(
                [(rank, head.host, head.pid) for rank, head in sorted(headers.items())]
            )
        except Unreachable:
            return False

    @property
    def signed_on(self) -> bool:
        """Whether the other nodes can know who is on this one."""
        return self._exchange.signed_on

    def look(self, headers: dict[int, Header], first_ns: int, asked: bool) -> bool:
        """Judge where the ranks stand; tell whether there is a verdict that is new.

        ``headers`` are those of this node's ranks, ``first_ns`` is when the oldest overdue call
        was issued (monotonic).
        """
        mine = self._stand(headers)
        whole = not any(state.blind for state in mine.ranks)
        since = max(first_ns, self._began_ns)

        def of_this_hang(kept: Object) -> bool:
            return self._learned.made_ns(kept) >= since

        told = list(filter(of_this_hang, self._all_told()))
        self.next_look = self._again(mine, bool(told))
        if whole:
            found = self._hangs(mine)
            if not _verdict.news(found, told) or self._becomes_clear(mine, found, first_ns):
                return False
        elif not asked and not self._is_late(mine, told):
            return False
        dumped = _stacks.ask(headers.values())
        mine = _with_stacks(mine, dumped)
        raw, loud = (self._judge(mine), True) if whole else self._together(mine)
        verdict = decode(raw)
        left = _verdict.put_off_by(verdict)
        if left:
            self.next_look = time.monotonic() + left
        if not _verdict.news(_verdict.findings_of(verdict), told):
            return False
        self._heard = [*self._heard[-1:], verdict]
        self._learned.made_ns(verdict)
        self._publish(verdict, dumped, of_this_hang, loud)
        return True

    def told(self) -> list[Object]:
        """Return the verdicts on this job since this watcher began, oldest first."""
        return [
            verdict
            for verdict in self._all_told()
            if self._learned.made_ns(verdict) >= self._began_ns
        ]

    def _all_told(self) -> list[Object]:
        """Return the verdicts in the run, and those that could not be kept there."""
        kept = _verdict.written(self._run_dir)
        names = {id_of(verdict) for verdict in kept}
        return [*kept, *(verdict for verdict in self._heard if id_of(verdict) not in names)]

    # --- looking ---

    def _stand(self, headers: dict[int, Header]) -> Snapshot:
        run = load(self._run_dir)
        attempt = max(header.attempt for header in headers.values())
        run.heads = [head for head in run.heads if head.header.attempt == attempt]
        snapshot = snapshot_of_run(run, window=_WINDOW)
        snapshot.problems = [text for text in snapshot.problems if _NO_RING not in text]
        return snapshot

    def _hangs(self, snapshot: Snapshot) -> list[Finding]:
        found = find(snapshot, self._hang_after)
        return [each for each in found if each.stops]

    def _becomes_clear(self, snapshot: Snapshot, found: list[Finding], first_ns: int) -> bool:
        """Tell whether to look again in a moment, once in a hang: on a busy machine all come late.

        Who is missing has just come to some call, and may well be the next victim.
        """
        left = settles_in(snapshot, found, self._hang_after)
        if not left or self._unclear == first_ns:
            return False
        self._unclear, self.next_look = first_ns, time.monotonic() + left
        return True

    def _is_late(self, snapshot: Snapshot, told: list[Object]) -> bool:
        """Tell whether to open a round: a call's patience has run out, and nobody said so yet.

        Or one of our own ranks is the cause of it, and nobody has named that.
        """
        calls = snapshot.calls
        late = unfinished(calls) & (calls["age_s"] >= patience(snapshot, self._hang_after))
        if not late.any() or not told:
            return bool(late.any())
        found = self._hangs(snapshot)
        ours = [f for f in found if not any(snapshot.ranks[rank].blind for rank in f.ranks)]
        return _verdict.news(ours, told)

    def _again(self, snapshot: Snapshot, told: bool) -> float:
        """Return when to look again: when a call's patience runs out, and less and less often."""
        calls = snapshot.calls
        left = (patience(snapshot, self._hang_after) - calls["age_s"])[unfinished(calls)]
        soonest = float(np.min(left[left > 0], initial=math.inf))
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSE_S[1])
        return time.monotonic() + min(soonest + 0.02, _TOLD_S if told else pause)

    # --- judging ---

    def _together(self, mine: Snapshot) -> tuple[bytes, bool]:
        """Return what the nodes agree on, and whether it is ours to print."""
        try:
            return self._exchange.agree(mine, len(mine.ranks), self._judge_all)
        except Unreachable as why:
            place = _place()
            mine.problems.append(
                f"the job's store{place} cannot be reached ({why}): nothing is known of other "
                f"nodes{'. See first whether that host is up' if ' at ' in place else ''}"
            )
            return self._judge(mine), True

    def _judge_all(self, snapshot: Snapshot, before: bytes) -> bytes:
        """Judge all nodes; put it off once where it will be clearer in a moment."""
        found = self._hangs(snapshot)
        left = settles_in(snapshot, found, self._hang_after)
        if left and not (before and _verdict.put_off_by(decode(before))):
            return _verdict.put_off(left)
        return self._encoded(snapshot, found)

    def _judge(self, snapshot: Snapshot) -> bytes:
        return self._encoded(snapshot, self._hangs(snapshot))

    def _encoded(self, snapshot: Snapshot, found: list[Finding]) -> bytes:
        return _verdict.encode(Diagnosis(str(self._run_dir), snapshot, found, self._hang_after))

    def _publish(
        self,
        verdict: Object,
        dumped: dict[int, str],
        of_this_hang: _verdict.OfThisHang,
        loud: bool,
    ) -> None:
        """Keep the verdict in the run, and print it if that is ours to do.

        A rank that took itself for the leader, too, while this one was slow may have kept the
        same before.
        """
        where = ""
        try:
            place = _verdict.write(self._run_dir, verdict, dumped, of_this_hang)
            loud = loud and place is not None
            where = f"kept with all stacks in {place}\n"
        except OSError as error:
            logger.warning("the verdict cannot be kept in the run: %s", error)
        if loud:
            print(f"\n{verdict['text'].rstrip()}\n{where}", file=sys.stderr, flush=True)


def _with_stacks(snapshot: Snapshot, dumped: dict[int, str]) -> Snapshot:
    ranks = [
        replace(state, stack=dumped[state.rank]) if state.rank in dumped else state
        for state in snapshot.ranks
    ]
    return replace(snapshot, ranks=ranks)


def _place() -> str:
    """Return where the job's store is, without asking it; empty where there is none."""
    from rankcall.store._link import where  # torch comes with it

    store = _job_store()
    return f" {where(store)}" if store is not None else ""


def _own_store() -> Any:
    """Return a connection of our own to the job's store, with keys of our own; None without it."""
    import torch.distributed as dist

    store = _job_store()
    if store is None:
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rankcall/watch/{attempt}", store.clone())


def _job_store() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()

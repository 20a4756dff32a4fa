"""A node's leader decides whether to speak: it judges, alone or with the other nodes, and once.

Verdicts are kept in the run directory: one process writes each, and all ranks of the node read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import Snapshot, telling_threads, unfinished
from rankcall.analysis.verdicts import find, find_final, settles_in
from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.final import Proofs, proofs_in
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.kept import kept_in, waits_that_ended
from rankcall.analysis.verdicts.lasting import held_for, patience
from rankcall.analysis.verdicts.no_progress import silence_of
from rankcall.analysis.verdicts.over import quiet_if_over
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.analysis.verdicts.wording import duration
from rankcall.job.choice import evidence_store
from rankcall.job.evidence import EvidenceSender
from rankcall.job.keep import OfThisHang, keep_verdict, text_of
from rankcall.job.news import Learned, are_open, is_news
from rankcall.job.notices import notify, told_of
from rankcall.job.other_nodes import Exchange, Unreachable, Untrusted
from rankcall.job.sealing import job_secret
from rankcall.job.viewers import NodeViews
from rankcall.problems import Problem, ProblemKind, without
from rankcall.process import boot_id, host_name
from rankcall.ring.layout import Header
from rankcall.run.hangs import note_over
from rankcall.run.load import load
from rankcall.run.own_stacks import request_stacks
from rankcall.run.tails import keep_tails

logger = logging.getLogger("rankcall.watch")

_WINDOW_SENT = 64  # calls of each rank that other nodes are sent
_PAUSE_S = (1.0, 15.0)  # between two looks at overdue calls without a verdict; it doubles
MOST_POLL_S = 30.0  # a viewer waits for so long until the other nodes notice
_MOST_TOLD = 15  # earlier hangs whose ends are waited for
_VERDICT_PAUSE_S = 60.0  # between two looks at a hang with a verdict: a cause may be added


class Judge:
    """Judges a node, on the watcher's thread of its leader.

    ``next_look`` is when to look again, in seconds of ``time.monotonic``. ``polls_every_s`` is how
    often to poll the other nodes while this node's ranks go on. ``views`` answers pages.
    ``is_verified`` says whether the newest verdict rests on this node's rings alone, or on values
    that the job's secret seals. Any process that reaches the store may have written another one.
    ``suspects_endless`` says whether the last look for calls that never end has found a proof that
    another look must confirm.
    """

    def __init__(self, run_dir: Path, hang_after: float) -> None:
        self._run_dir = run_dir
        self._hang_after = hang_after
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"rankcall/watch/{restarts}/"
        self._exchange = Exchange(_job_store, prefix)
        self.polls_every_s = min(hang_after / 2, MOST_POLL_S)
        self.views = NodeViews(
            run_dir, self._exchange, Exchange(_job_store, retry_s=5.0), prefix, self.polls_every_s
        )
        self._sender = EvidenceSender(
            run_dir,
            f"{host_name()}.{os.getpid()}",
            Exchange(lambda: evidence_store()[0]).perform,
        )
        self._began_ns = time.monotonic_ns()
        self._learned = Learned(kept.verdict for kept in kept_in(run_dir))
        self._pause = _PAUSE_S[0]
        self._unclear = 0  # ``first_ns`` of a hang with an unclear cause, which gets a second look
        # The last two verdicts, in case they could not be kept in the run.
        self._last_verdicts: list[Verdict] = []
        self._told: list[_Told] = []  # the hangs that this rank has told of, and that last
        self._next_look_back_ns = 0
        self._proofs: Proofs = frozenset()  # of the last look for calls that never end
        self.suspects_endless = False
        self.next_look = 0.0
        self.is_verified = True

    def rest(self) -> None:
        """Note that nothing is overdue, so that the next look at an overdue call needs no pause."""
        self.next_look, self._pause = 0.0, _PAUSE_S[0]

    def look_back(self, headers: dict[int, Header]) -> None:
        """Say that a hang which this rank has told of is over, once the ranks go on."""
        now_ns = time.monotonic_ns()
        if not self._told or now_ns < self._next_look_back_ns:
            return
        self._next_look_back_ns = now_ns + int(_PAUSE_S[0] * 1e9)
        snapshot, longest_s = self._snapshot(headers), 0.0
        for hang in list(self._told):
            quiet = quiet_if_over(snapshot, hang.findings, (now_ns - hang.seen_ns) / 1e9)
            if quiet is None:
                continue
            self._told.remove(hang)
            seconds = (now_ns - hang.first_ns) / 1e9 - quiet
            longest_s = max(longest_s, seconds)
            with contextlib.suppress(OSError):
                if hang.place is not None:
                    note_over(hang.place, seconds)
        if longest_s:  # one hang may have had several verdicts
            text = f"rankcall: the hang is over after {duration(longest_s)}: the job goes on"
            print(text, file=sys.stderr, flush=True)

    def asked(self, headers: dict[int, Header]) -> bool:
        """Return whether another node wants a verdict. This node's ranks are registered as well."""
        try:
            return self._exchange.asked(
                [(rank, head.host, head.pid) for rank, head in sorted(headers.items())]
            )
        except Unreachable:
            return False

    @property
    def signed_on(self) -> bool:
        """Whether this node's ranks are registered with the other nodes."""
        return self._exchange.signed_on

    def look(
        self, headers: dict[int, Header], first_ns: int, asked: bool, again: bool = False
    ) -> bool:
        """Judge the state of the ranks; return whether there is a new verdict.

        Args:
            headers: The ring headers of this node's ranks.
            first_ns: When the oldest overdue call was issued, on the monotonic clock.
            asked: Whether another node wants a verdict.
            again: Return true for a hang with a verdict as well, if all ranks are on this node.
        """
        seen_ns, of_this_hang = time.monotonic_ns(), self._since(first_ns)
        mine = self._snapshot(headers)
        whole = _is_whole(mine)
        known = list(filter(of_this_hang, self._all_verdicts()))
        self.next_look = self._next_look(mine, bool(known))
        if whole:
            findings = self._hangs(mine)
            # Only stacks can show that ranks which are silent wait for each other.
            if not is_news(findings, known) and not (findings and are_open(known)):
                return again and bool(findings)
            if self._becomes_clear(mine, findings, first_ns):
                return False
        elif not asked and not self._opens_round(mine, known):
            return False
        stacks = request_stacks(headers.values(), telling_threads(mine))
        mine = _with_stacks(mine, stacks)
        self.is_verified = True
        verdict, prints = (self._judge(mine), True) if whole else self._together(mine)
        if verdict.again_s:
            self.next_look = time.monotonic() + verdict.again_s
        if not is_news(verdict.findings, known):
            return False
        hang = _Told(first_ns, seen_ns, verdict.findings)
        self._publish(verdict, stacks, of_this_hang, prints, hang)
        return True

    def look_for_endless(self, headers: dict[int, Header], first_ns: int) -> bool:
        """Judge calls that no time can end, however young; return whether there is a new verdict.

        Two looks must agree on the proof. Other nodes are not asked, so a job on several nodes
        waits for the threshold.

        Args:
            headers: The ring headers of this node's ranks.
            first_ns: When the oldest call in flight was issued, on the monotonic clock.
        """
        seen_ns, of_this_hang = time.monotonic_ns(), self._since(first_ns)
        mine = self._snapshot(headers)
        before, self._proofs = self._proofs, proofs_in(mine) if _is_whole(mine) else frozenset()
        proofs, self.suspects_endless = before & self._proofs, bool(self._proofs - before)
        if not proofs:
            return False
        known = list(filter(of_this_hang, self._all_verdicts()))
        if not is_news(find_final(mine, self._hang_after, proofs), known):
            return False
        stacks = request_stacks(headers.values(), telling_threads(mine))
        mine = _with_stacks(mine, stacks)
        self.is_verified = True
        verdict = self._verdict(mine, find_final(mine, self._hang_after, proofs))
        hang = _Told(first_ns, seen_ns, verdict.findings)
        self._publish(verdict, stacks, of_this_hang, True, hang)
        return True

    def keep_evidence(self, attempt: int) -> None:
        """Keep the evidence of the verdict in the run, and send it to other nodes.

        Never raises. Takes ten seconds at most, if other nodes do not answer.
        """
        verdict = self._last_verdicts[-1].origin.id if self._last_verdicts else ""
        try:
            keep_tails(self._run_dir)
            prefix = evidence_store()[1] if verdict else ""
            for problem in self._sender.send(prefix, verdict, attempt):
                logger.warning(problem)
        except Unreachable as error:
            logger.debug("the newest records are not sent to other nodes: %s", error)
        except (OSError, ValueError) as error:
            logger.warning("the newest records cannot be kept: %s", error)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts since this watcher began, oldest first."""
        return [
            verdict
            for verdict in self._all_verdicts()
            if self._learned.made_ns(verdict) >= self._began_ns
        ]

    def _since(self, first_ns: int) -> OfThisHang:
        """Return what tells whether a verdict was made since then, so of a hang that began then."""
        since = max(first_ns, self._began_ns)
        return lambda verdict: self._learned.made_ns(verdict) >= since

    def _all_verdicts(self) -> list[Verdict]:
        """Return the verdicts in the run, and those that could not be kept there."""
        kept = [kept.verdict for kept in kept_in(self._run_dir)]
        names = {verdict.origin.id for verdict in kept}
        return [*kept, *(last for last in self._last_verdicts if last.origin.id not in names)]

    def _snapshot(self, headers: dict[int, Header]) -> Snapshot:
        attempt = max(header.attempt for header in headers.values())
        run = load(self._run_dir).only(
            attempt, tails_of=()
        )  # other nodes say how their ranks stand
        # A difference that lets calls through, as NCCL does, can lie hundreds of calls back: a
        # node that judges alone looks as far back as a diagnosis from outside.
        world = max(head.header.world_size for head in run.heads)
        judges_alone = len({head.header.rank for head in run.heads}) == world
        snapshot = snapshot_of_run(run, window=None if judges_alone else _WINDOW_SENT)
        snapshot.waited_before = waits_that_ended(kept_in(self._run_dir))
        # Other nodes' rings are on those nodes.
        snapshot.problems = without(snapshot.problems, ProblemKind.MISSING_RANKS)
        return snapshot

    def _hangs(self, snapshot: Snapshot) -> list[Finding]:
        findings = find(snapshot, self._hang_after)
        return [finding for finding in findings if finding.stops]

    def _becomes_clear(self, snapshot: Snapshot, findings: list[Finding], first_ns: int) -> bool:
        """Return whether to look again soon, which is done once in a hang.

        On a busy machine, a rank that seems to be missing may have just entered another call, as a
        victim.
        """
        left = settles_in(snapshot, findings, self._hang_after)
        if not left or self._unclear == first_ns:
            return False
        self._unclear, self.next_look = first_ns, time.monotonic() + left
        return True

    def _opens_round(self, snapshot: Snapshot, known: list[Verdict]) -> bool:
        """Return whether to open a round.

        That is if a call has lasted too long and there is no verdict yet, or if one of this node's
        ranks is a cause that no verdict has named.
        """
        calls = snapshot.calls
        late = unfinished(calls) & (held_for(snapshot) >= patience(snapshot, self._hang_after))
        if not late.any():
            silence = silence_of(snapshot, self._hang_after)
            return are_open(known) and silence is not None and silence.is_long
        if not known:
            return True
        findings = self._hangs(snapshot)
        ours = [
            finding
            for finding in findings
            if not any(snapshot.ranks[rank].blind for rank in finding.ranks)
        ]
        return is_news(ours, known)

    def _next_look(self, snapshot: Snapshot, known: bool) -> float:
        """Return when to look again: when a call becomes overdue, or after a growing pause."""
        calls = snapshot.calls
        left = (patience(snapshot, self._hang_after) - held_for(snapshot))[unfinished(calls)]
        soonest = float(np.min(left[left > 0], initial=np.inf))
        pause, self._pause = self._pause, min(2 * self._pause, _PAUSE_S[1])
        return time.monotonic() + min(soonest + 0.02, _VERDICT_PAUSE_S if known else pause)

    def _together(self, mine: Snapshot) -> tuple[Verdict, bool]:
        """Return the verdict of all nodes, and whether this rank prints it."""
        place = _place()
        try:
            agreed = self._exchange.agree(mine, len(mine.ranks), self._judge_all)
            verdict = decode(agreed.verdict)
            self.is_verified = job_secret() is not None
            return verdict, agreed.by_me
        except Untrusted as why:
            text = f"the job's store{place} is not trusted ({why}): nothing is known of other nodes"
        except Unreachable as why:
            text = (
                f"the job's store{place} cannot be reached ({why}): nothing is known of other "
                f"nodes{'. See first whether that host is up' if ' at ' in place else ''}"
            )
        except ValueError as why:  # any process that reaches the store may have written it
            text = f"the verdict in the job's store{place} cannot be read ({why})"
        mine.problems.append(Problem(ProblemKind.OTHER_NODES, text))
        return self._judge(mine), True

    def _judge_all(self, snapshot: Snapshot, before: bytes) -> bytes:
        """Judge all nodes; put the verdict off once if the cause will soon be clearer."""
        snapshot = replace(snapshot, waited_before=waits_that_ended(kept_in(self._run_dir)))
        findings = self._hangs(snapshot)
        left = settles_in(snapshot, findings, self._hang_after)
        if left and not _puts_off(before):
            return encode(Verdict(str(self._run_dir), [], origin=origin_now(), again_s=left))
        return encode(self._verdict(snapshot, findings))

    def _judge(self, snapshot: Snapshot) -> Verdict:
        return self._verdict(snapshot, self._hangs(snapshot))

    def _verdict(self, snapshot: Snapshot, findings: list[Finding]) -> Verdict:
        verdict = Diagnosis.of(str(self._run_dir), snapshot, findings, self._hang_after)
        return replace(verdict, origin=origin_now())

    def _publish(
        self,
        verdict: Verdict,
        stacks: dict[int, str],
        of_this_hang: OfThisHang,
        prints: bool,
        hang: _Told,
    ) -> None:
        """Keep the verdict in the run, and print it if ``prints`` is set.

        It is not printed if another rank has led in the meantime and kept the same verdict.
        """
        self._last_verdicts = [*self._last_verdicts[-1:], verdict]
        self._learned.made_ns(verdict)
        where = ""
        try:
            hang.place = keep_verdict(self._run_dir, verdict, stacks, of_this_hang)
            prints = prints and hang.place is not None
            where = f"{_stack_text(stacks)}kept with all stacks in {hang.place}\n"
        except OSError as error:
            logger.warning("the verdict cannot be kept in the run: %s", error)
        if prints:
            print(f"\n{text_of(verdict).rstrip()}\n{where}", file=sys.stderr, flush=True)
            notify("verdict", self._run_dir, told_of(verdict))
            self._told = [*self._told[-_MOST_TOLD:], hang]


def _puts_off(before: bytes) -> bool:
    """Return whether the verdict of the round before put the matter off.

    One that is damaged counts as such, so that no process can have it put off for ever.
    """
    try:
        return bool(before) and decode(before, with_ranks=False).again_s > 0
    except ValueError:
        return True


@dataclass
class _Told:
    """A hang that this rank has told of. Times in ns of the monotonic clock."""

    first_ns: int  # when its oldest call was issued
    seen_ns: int  # when it was last seen to last
    findings: Sequence[Finding]
    place: Path | None = None  # of its verdict


def origin_now() -> Origin:
    """Return the origin of a verdict that this process gives now."""
    mono_ns, pid = time.monotonic_ns(), os.getpid()
    return Origin(f"{boot_id()}.{pid}.{mono_ns}", boot_id(), mono_ns, time.time_ns(), pid)


def _stack_text(stacks: Mapping[int, str]) -> str:
    """Return the stacks of this node's ranks for the terminal, equal ones together."""
    from rankcall.report.stack_lines import stack_lines  # here, because it imports rich

    return "\n".join(["", *stack_lines(stacks), "", ""]) if stacks else ""


def _with_stacks(snapshot: Snapshot, stacks: dict[int, str]) -> Snapshot:
    ranks = [
        replace(state, stack=stacks[state.rank]) if state.rank in stacks else state
        for state in snapshot.ranks
    ]
    return replace(snapshot, ranks=ranks)


def _is_whole(snapshot: Snapshot) -> bool:
    """Return whether this node has all ranks of the job, as far as anybody knows them."""
    blind = any(state.blind for state in snapshot.ranks)
    return _is_one_node(len(snapshot.ranks)) or not blind


def _is_one_node(world_size: int) -> bool:
    """Return whether the launcher started all ranks of the job on this node."""
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world_size)


def _place() -> str:
    """Return the address of the job's store, without a request to it; empty without a store."""
    from rankcall.c10d.location import where  # here, because it imports torch

    store = _job_store()
    return f" {where(store)}" if store is not None else ""


def store_port() -> int:
    """Return the port of the job's store; 0 if it has none."""
    from rankcall.c10d.location import port_of  # here, because it imports torch

    store = _job_store()
    return port_of(store) if store is not None else 0


def _job_store() -> Any:
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()

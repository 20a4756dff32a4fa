"""The verdict ``dead``: a process ended of a signal or an error of its own, or was lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rankcall.analysis.snapshot import PEER_CLOSED, UNKNOWN, RankState, Snapshot, failed_for_good
from rankcall.analysis.verdicts.ends import ASKED, ended_before, has_failed, is_interrupted
from rankcall.analysis.verdicts.evidence import HangEvidence
from rankcall.analysis.verdicts.facts import Fact, Relation, hosts_of, last_call, ranks_of
from rankcall.analysis.verdicts.finding import Finding, Predicate
from rankcall.analysis.verdicts.kind import CulpritKind
from rankcall.analysis.verdicts.sentences import SHOWN
from rankcall.analysis.verdicts.sentences import evidence as written
from rankcall.analysis.verdicts.suspects import Case, Suspect, Suspects

_FROM_OUTSIDE = (
    "Most likely killed from outside: look at the log of what started them (Ray, for example, "
    "catches a rank's exception and then ends all ranks), at the scheduler (a time limit, a "
    "cancelled job), at the kernel (out of memory: dmesg -T) or for a host that was lost."
)
_BEFORE_A_GROUP = (
    "Look at what the job has printed: if a rank fails before it comes to the process group, most "
    "launchers end the others, which wait for it."
)
# Signals that come from outside. Other ends come of the call that the process was in.
_SENT_FROM_OUTSIDE = (
    -signal.SIGKILL,
    -signal.SIGTERM,
    -signal.SIGINT,
    -signal.SIGHUP,
    -signal.SIGQUIT,
)


class Dead(CulpritKind):
    """A process is gone, and that is not the consequence of another one's end."""

    kind = "dead"
    order = 10
    predicate = Predicate("died", "died")

    def confidence(self, suspects: Suspects, suspect: Suspect) -> str | None:
        """Fit ranks that ended of their own signal or error, or seem to, as others saw it.

        One whose program an exception has ended may take for ever to close down.
        """
        if has_failed(suspect.state) and suspect.rank not in suspects.exits.in_hang:
            return "certain"
        if suspect.rank not in suspects.exits.own:
            if suspect.rank in suspects.exits.before and suspect.state.vanished:
                return "likely"
            # As its records are missing, this becomes "likely".
            return "certain" if _closed_its_connections(suspects.snapshot, suspect) else None
        return "certain" if suspect.state.exit is not None or suspects.snapshot.live else "likely"

    def counts(self, suspects: Suspects, case: Case) -> bool:
        """Report every death, except one that a call may have caused.

        Back ends abort a process if the members of a group do not agree.
        """
        code = case.state.exit
        aborted = code is not None and code not in _SENT_FROM_OUTSIDE
        return not (aborted and case.rank in suspects.clashing)

    def if_unexplained(self, evidence: HangEvidence) -> Iterator[Finding]:
        """Yield ranks whose ends no other kind explains.

        They ended together in the middle of their work, or before others lost their connections to
        them, without a note of how; or with an error that no rank has waited because of.
        """
        snapshot, exits = evidence.snapshot, evidence.exits
        unnoted = sorted(exits.before - exits.left)
        if unnoted:
            yield self.before_others_failed(
                evidence, unnoted, self.advice(snapshot, [snapshot.ranks[unnoted[0]]])
            )
            return
        failed = [state for state in snapshot.ranks if _failed(state)]
        if failed and not exits.own and not exits.before:
            first = max(failed, key=lambda state: state.gone_s or 0.0)
            at_first = [state for state in failed if not ended_before(first, state)]
            yield self._of_failed(at_first, snapshot)
            return
        ranks = sorted(exits.together)
        early = len(snapshot.ranks) > 1 and not any(map(_has_begun, snapshot.ranks))
        # If no call is in flight, the ranks may have ended well, unless none had made its group.
        if not ranks or evidence.stuck is not None or not (early or evidence.in_flight.any()):
            return
        copied = any(snapshot.ranks[rank].state == UNKNOWN for rank in ranks)
        marks = {"copied": copied, "early": early}
        values = tuple((name, "yes") for name, is_so in marks.items() if is_so)
        said = Fact(Relation.ENDED_TOGETHER, ranks_of(snapshot, ranks), values=values)
        absent = _without_records_here(snapshot) if early else []
        if absent:
            said = replace(said, others=ranks_of(snapshot, absent))
        yield self.finding(
            absent or ranks,
            victims=tuple(ranks) if absent else (),
            hosts=hosts_of(snapshot, ranks),
            confidence="possible" if copied or absent else "likely",
            said=[said],
            shown=[last_call(snapshot, rank) for rank in ranks[:SHOWN] if not early],
            live=snapshot.live,
            advice=_BEFORE_A_GROUP if early else _FROM_OUTSIDE,
        )

    def _of_failed(self, states: Sequence[RankState], snapshot: Snapshot) -> Finding:
        """Return a finding about the ranks that failed first, which may not be the cause."""
        ranks = [state.rank for state in states]
        return self.finding(
            ranks,
            hosts=hosts_of(snapshot, ranks),
            since_s=max(state.gone_s or 0.0 for state in states),
            confidence="possible",
            said=[self.state(snapshot, states, 0.0)],
            shown=[last_call(snapshot, rank) for rank in ranks[:SHOWN]],
            live=snapshot.live,
            advice=self.advice(snapshot, states),
        )

    def _of_cases(self, evidence: HangEvidence, cases: Sequence[Case]) -> Finding:
        snapshot, states = evidence.snapshot, [case.state for case in cases]
        unnoted = [state.rank for state in states if state.exit is None and not state.failure]
        if (
            unnoted
            and evidence.exits.before.issuperset(unnoted)
            and not any(case.waits for case in cases)
        ):
            return self.before_others_failed(evidence, unnoted, self.advice(snapshot, states))
        finding = super()._of_cases(evidence, cases)
        if all(map(has_failed, states)):
            finding = replace(finding, predicate=Predicate("failed", "failed"))
        early = [case.rank for case in cases if case.state.blind and case.state.exit is not None]
        if not early:
            return finding
        facts = [Fact(Relation.ENDED_WITHOUT_RECORDS, ranks_of(snapshot, early))]
        waiting = [state.rank for state in snapshot.ranks if not (state.groups or state.blind)]
        if waiting:
            facts.append(Fact(Relation.HAD_NO_GROUP, ranks_of(snapshot, waiting)))
        return replace(
            finding,
            victims=tuple(sorted({*finding.victims, *waiting} - set(finding.ranks))),
            evidence=(*finding.evidence, *written(facts, snapshot.live)),
            facts=(*finding.facts, *facts),
        )

    def state(self, snapshot: Snapshot, states: Sequence[RankState], held_s: float) -> Fact:
        """Return how the processes ended, and when."""
        first, ranks = states[0], ranks_of(snapshot, [state.rank for state in states])
        if first.blind and first.exit is None:
            why = "unheard" if first.unheard else "no records"
            return Fact(Relation.CONNECTIONS_CLOSED, ranks, values=(("why", why),))
        endings = {_ending(state) for state in states}
        # One sentence cannot list the ends of many ranks; the first one's advice still fits.
        relation, values = endings.pop() if len(endings) == 1 else (Relation.ENDED_BADLY, ())
        gone = first.gone_s if first.gone_s is not None else first.silent_s
        return Fact(relation, ranks, values=values, number=gone, unit="s")

    def advice(self, snapshot: Snapshot, states: Sequence[RankState]) -> str:
        """Write where to find the cause of the end."""
        first = states[0]
        on = f" on {first.host}" if first.host else ""
        if first.launcher_signal:
            return f"See who ended the launcher{on}: a preempted or cancelled node, or a Ctrl-C."
        if first.exit in (-9, 137):
            return (
                "A SIGKILL that nobody sent is mostly the kernel out of memory: "
                f"dmesg -T | grep -i 'killed process'{on}."
            )
        if first.failure:
            return f"Start from that exception: its traceback is in rank {first.rank}'s stderr."
        if first.exit is None:
            return (
                f"Nobody noted how it ended{on}: an error (look at the end of rank {first.rank}'s "
                "stderr), a signal (a core dump, dmesg -T), or the loss of its host."
            )
        if first.exit > 0:
            return f"Its own error comes first: look at the end of rank {first.rank}'s stderr."
        return f"Look for a core dump and at the end of rank {first.rank}'s stderr{on}."


def _failed(state: RankState) -> bool:
    """Tell whether a process ended with an error that nobody asked for."""
    asked = state.ended_by_launcher or state.aborted
    return state.exit not in (None, 0, *ASKED) and not asked and not is_interrupted(state)


def _without_records_here(snapshot: Snapshot) -> list[int]:
    """Return the ranks without records, if they belong to the hosts that have left some.

    Nodes have as many ranks as each other. So if a whole node were missing, it would be at least as
    many as the others have on average.
    """
    absent = [state.rank for state in snapshot.ranks if state.blind]
    hosts = {state.host for state in snapshot.ranks if not state.blind}
    return absent if len(absent) * len(hosts) < len(snapshot.ranks) - len(absent) else []


def _closed_its_connections(snapshot: Snapshot, suspect: Suspect) -> bool:
    """Tell whether the others' calls failed because this rank's connections were closed.

    A message says that of a peer, and does not say which. But a rank that runs, and answers, closes
    its connections only after its own call has failed. So it was a rank that is not heard of: if
    its node was not asked, the only one without records.
    """
    others = (state.blind and state.rank != suspect.rank for state in snapshot.ranks)
    # ``any`` ends at the first: a list of them for each of 70,000 suspects would take minutes.
    if not suspect.state.unheard and (not suspect.state.blind or any(others)):
        return False
    calls = snapshot.calls
    failed = failed_for_good(calls)
    ranks = {rank for wait in suspect.waits for rank in wait.waiters}
    return bool(
        failed.any()
        and (calls["flags"][failed] & PEER_CLOSED != 0).all()
        and ranks.issuperset(calls["rank"][failed].tolist())
    )


def _ending(state: RankState) -> tuple[Relation, tuple[tuple[str, str], ...]]:
    """Return how one process ended, with the signal, code or error."""
    if state.launcher_signal:
        name = _signal_name(state.launcher_signal)
        return Relation.ENDED_WITH_LAUNCHER, (("signal", name),)
    if has_failed(state):
        return Relation.FAILED_WITH, (("error", state.failure), ("end", "closing"))
    if state.failure and (state.exit is None or state.exit > 0):
        return Relation.FAILED_WITH, (("error", state.failure),)
    if state.exit is None:
        return Relation.GONE, ()
    if state.exit < 0:
        return Relation.KILLED_BY, (("signal", _signal_name(-state.exit)),)
    return Relation.EXITED_WITH, (("code", str(state.exit)),)


def _signal_name(number: int) -> str:
    """Return ``SIGKILL`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _has_begun(state: RankState) -> bool:
    """Tell whether a rank of a job has come out of its start, as far as is known."""
    return bool(state.groups or state.rpc or state.closed or state.exit == 0)

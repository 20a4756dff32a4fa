"""The ranks of other nodes on the page: what their leaders have answered, added to a snapshot.

A node that is late is named. Its ranks are shown as they were for a while; then nothing is known
of them, as for the job's own watcher if a node does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rankcall.analysis.node_snapshot import NodeSnapshot, decode, merge, node_snapshot_of
from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.wording import duration
from rankcall.problems import Problem, ProblemKind, without
from rankcall.ranks import format_ranks, with_noun
from rankcall.report.formatting import plural
from rankcall.run.load import Run
from rankcall.run.paths import is_tail
from rankcall.run.views import Answers, NodeAnswer, age_s, note_viewer, read_answers

LATE_S = 10.0  # an answer that is older is late: nodes answer every five seconds at least
KNOWN_S = 30.0  # and then nothing is known; at a verdict, a leader does not answer for so long
_EXCHANGE_S = 1.0  # from the snapshot of a node to its arrival
_SHOWN = 3


class OtherNodes:
    """Adds the ranks of other nodes to the snapshots of one run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._answers: Answers | None = None
        self.problem = ""  # what is missing in the last snapshot
        self._decoded: dict[bytes, NodeSnapshot] = {}

    def ask(self, run: Run) -> Run:
        """Note that somebody looks, and read the answers so far.

        Returns:
            The run without the tails of ranks that have answered: an earlier verdict left those in
            the run, so they are older than the answers.
        """
        world = max((head.header.world_size for head in run.heads), default=0)
        here = {head.header.rank for head in run.heads if not is_tail(head.path)}
        self._answers = None
        if len(here) >= world or not run.path.is_dir():
            return run
        note_viewer(run.path)
        answers = read_answers(run.path)
        attempt = max((head.header.attempt for head in run.heads), default=0)
        self._answers = answers if answers and answers.attempt == attempt else None
        fresh = {
            rank
            for node in (self._answers.nodes if self._answers else ())
            if node.data and self._age_s(node) < KNOWN_S
            for rank, _, _ in node.members
        }
        return run.only(tails_of=set(run.hosts) - fresh)

    def add_to(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot with the ranks of the other nodes, and a line for what is missing."""
        self.problem = ""
        blind = {state.rank for state in snapshot.ranks if state.blind}
        if not blind or not snapshot.live:
            return snapshot
        answers = self._answers
        if answers is None:
            return self._without_answers(snapshot, blind)
        nodes = [node_snapshot_of(snapshot)]
        silent: dict[int, RankState] = {}
        for node in answers.nodes:
            node_snapshot = self._snapshot_of(node, len(snapshot.ranks))
            if node_snapshot is not None:
                nodes.append(node_snapshot)
                continue
            unheard = bool(node.data) or node.asked_s > answers.notice_s + KNOWN_S
            for rank, host, pid in node.members:
                silent[rank] = RankState(rank, host, pid, blind=True, unheard=unheard)
        self._decoded = {
            node.data: self._decoded[node.data]
            for node in answers.nodes
            if node.data in self._decoded
        }
        merged = merge(nodes)
        ranks = [silent.get(state.rank, state) if state.blind else state for state in merged.ranks]
        missing = {state.rank for state in ranks if state.blind}
        silence = list(self._problems(answers, missing))
        self.problem = "; ".join(silence)
        return replace(
            snapshot,
            ranks=ranks,
            calls=merged.calls,
            groups=merged.groups,
            labels=merged.labels,
            sites=merged.sites,
            problems=_with_silence(silence, merged.problems),
        )

    def is_outdated(self, finding: Finding, snapshot: Snapshot) -> bool:
        """Return whether a finding is about living ranks that may have gone on since they answered.

        Their nodes answered before the wait began that the finding is about.
        """
        alive = {rank for rank in finding.ranks if snapshot.ranks[rank].state == ALIVE}
        return any(
            finding.since_s < self._age_s(node) + _EXCHANGE_S
            for node in (self._answers.nodes if self._answers else ())
            if node.data and not alive.isdisjoint(rank for rank, _, _ in node.members)
        )

    def _without_answers(self, snapshot: Snapshot, blind: set[int]) -> Snapshot:
        waited = self._clock() - self._began
        if waited < LATE_S:
            return snapshot
        text = (
            f"nothing is known of {with_noun(blind)}, on other nodes: the job's "
            f"watcher on this one has not answered for {duration(waited)}"
        )
        self.problem = text
        return replace(snapshot, problems=_with_silence([text], snapshot.problems))

    def _snapshot_of(self, node: NodeAnswer, world_size: int) -> NodeSnapshot | None:
        """Return a node's answer, unless it is too old or cannot be read."""
        if not node.data or self._age_s(node) >= KNOWN_S:
            return None
        if node.data not in self._decoded:
            try:
                self._decoded[node.data] = decode(node.data, world_size)
            except ValueError:
                return None
        return self._decoded[node.data]

    def _age_s(self, node: NodeAnswer) -> float:
        return node.age_s + (age_s(self._answers) if self._answers else 0.0)

    def _problems(self, answers: Answers, missing: set[int]) -> Iterable[str]:
        if answers.problem:
            yield f"the other nodes cannot be asked: {answers.problem}"
        elif age_s(answers) > LATE_S:
            yield (
                "the job's watcher on this node has not asked the other nodes for "
                f"{duration(age_s(answers))}"
            )
        late = [node for node in answers.nodes if node.data and self._age_s(node) > LATE_S]
        if late and not answers.problem:
            longest = max(map(self._age_s, late))
            yield f"{_named(late)} {_have(late)} not answered for {duration(longest)}"
        unheard = [node for node in answers.nodes if not node.data]
        if unheard and not answers.problem:
            longest = max(node.asked_s for node in unheard)
            yield (
                f"{_named(unheard)} {_have(unheard)} not answered yet, {duration(longest)} after "
                f"the question: a node whose ranks go on looks for viewers every "
                f"{duration(answers.notice_s)}"
            )
        unnamed = missing - {rank for node in answers.nodes for rank, _, _ in node.members}
        if unnamed and not answers.problem:
            yield (f"nothing is known of {with_noun(unnamed)}: no watcher has registered there")


def _with_silence(silence: Iterable[str], problems: Iterable[Problem]) -> list[Problem]:
    """Put the lines about silent nodes first. They say more than that ranks left no ring here."""
    ours = [Problem(ProblemKind.OTHER_NODES, text) for text in silence]
    return [*ours, *without(problems, ProblemKind.MISSING_RANKS)]


def _named(nodes: Sequence[NodeAnswer]) -> str:
    """Name nodes by their hosts and ranks, or only some if there are many."""
    texts = []
    for node in nodes[:_SHOWN]:
        ranks = format_ranks(sorted(rank for rank, _, _ in node.members))
        hosts = sorted({host for _, host, _ in node.members})
        texts.append(f"{', '.join(hosts)} (rank {ranks})")
    if len(nodes) > _SHOWN:
        texts.append(plural(len(nodes) - _SHOWN, "more node"))
    return ", ".join(texts)


def _have(nodes: Sequence[NodeAnswer]) -> str:
    return "has" if len(nodes) == 1 else "have"

"""A run as the page shows it: the result of one look, with the ranks of other nodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankcall.analysis.run_snapshot import RunReader
from rankcall.analysis.snapshot import (
    ALIVE,
    NodeSnapshot,
    RankState,
    Snapshot,
    decode,
    merge,
    node_snapshot_of,
)
from rankcall.analysis.summary import Figures, recent_figures
from rankcall.analysis.verdicts import Diagnosis, diagnose, judge, kept_verdict, with_stacks
from rankcall.analysis.verdicts.finding import Finding, duration
from rankcall.errors import RankcallError
from rankcall.record import format_ranks
from rankcall.report.formatting import plural
from rankcall.run import TAIL, find_run, ring_paths
from rankcall.run.load import Run, load
from rankcall.run.outcomes import Object, kept_hangs, kept_stacks
from rankcall.run.stacks import request_stacks, tidy
from rankcall.run.views import Answers, NodeAnswer, age_s, note_viewer, read_answers

# Waiting and bandwidth over the last minutes.


KEPT_S = 300.0


@dataclass(frozen=True)
class Sample:
    """The figures at one moment; ``busbw``: in GB/s, by op, group and size."""

    epoch_s: float
    waiting: float | None
    busbw: dict[tuple[str, str, int], float]


@dataclass
class History:
    """The samples of the last minutes, since somebody has looked. A new run begins a new one."""

    samples: deque[Sample] = field(default_factory=deque)
    _run: str = ""

    def add(self, run: str, epoch_s: float, figures: Figures | None) -> None:
        """Add a moment. Without figures, there is nothing to add."""
        if run != self._run:
            self._run = run
            self.samples.clear()
        while self.samples and not 0 <= epoch_s - self.samples[0].epoch_s <= KEPT_S:
            self.samples.popleft()
        if figures is None:
            return
        rates = {
            (row.op, row.group, row.bucket): row.busbw_gbps
            for row in figures.rows
            if row.busbw_gbps is not None and 0 < row.busbw_gbps < float("inf")
        }
        self.samples.append(Sample(epoch_s, figures.waiting, rates))


# The ranks of other nodes on the page: what their leaders have answered, added to a snapshot.
#
# A node that is late is named. Its ranks are shown as they were for a while; then nothing is known
# of them, as for the job's own watcher if a node does not answer.


LATE_S = 10.0  # an answer that is older is late: nodes answer every five seconds at least
KNOWN_S = 30.0  # and then nothing is known; at a verdict, a leader does not answer for so long
_EXCHANGE_S = 1.0  # from the snapshot of a node to its arrival
_NO_RING = "no ring for rank"
_SHOWN = 3


class OtherNodes:
    """Adds the ranks of other nodes to the snapshots of one run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._answers: Answers | None = None
        self.problem = ""  # what is missing in the last snapshot
        self._decoded: dict[bytes, NodeSnapshot] = {}

    def ask(self, run: Run) -> None:
        """Note that somebody looks, and read what has been answered so far.

        Of ranks that have answered, the tails that an earlier verdict left in the run are left out:
        they are older.
        """
        world = max((head.header.world_size for head in run.heads), default=0)
        here = {head.header.rank for head in run.heads if not head.path.name.endswith(TAIL)}
        self._answers = None
        if len(here) >= world or not run.path.is_dir():
            return
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
        run.heads = [
            head
            for head in run.heads
            if not (head.path.name.endswith(TAIL) and head.header.rank in fresh)
        ]

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
            node_snapshot = self._snapshot_of(node)
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
        problems = list(self._problems(answers, missing))
        self.problem = "; ".join(problems)
        kept = [text for text in merged.problems if _NO_RING not in text]
        return replace(
            snapshot,
            ranks=ranks,
            calls=merged.calls,
            groups=merged.groups,
            labels=merged.labels,
            sites=merged.sites,
            problems=[*problems, *kept],
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
            f"nothing is known of rank {format_ranks(sorted(blind))}, on other nodes: the job's "
            f"watcher on this one has not answered for {duration(waited)}"
        )
        self.problem = text
        kept = [problem for problem in snapshot.problems if _NO_RING not in problem]
        return replace(snapshot, problems=[text, *kept])

    def _snapshot_of(self, node: NodeAnswer) -> NodeSnapshot | None:
        """Return a node's answer, unless it is too old or cannot be read."""
        if not node.data or self._age_s(node) >= KNOWN_S:
            return None
        if node.data not in self._decoded:
            try:
                self._decoded[node.data] = decode(node.data)
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
            yield (
                f"nothing is known of rank {format_ranks(sorted(unnamed))}: no watcher has "
                "registered there"
            )


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


WAITING, LIVE, ENDED, LOST = "waiting", "live", "ended", "lost"
_NEWEST = 512  # records read from the end of each ring of a live job
_WINDOW = 1 << 16  # calls kept of all ranks together
_MOST_STACKS = 4096


@dataclass(frozen=True)
class Stacks:
    """Stacks by rank, and when they were dumped, as epoch seconds."""

    by_rank: Mapping[int, str]
    epoch_s: float
    by_watcher: bool  # the job's own watcher kept them with its verdict; else a viewer asked


@dataclass(frozen=True)
class Look:
    """The result of one look at a run.

    ``state``: ``waiting`` (no ring yet), ``live``, ``ended``, or ``lost`` (the run was there and
    cannot be read any more; ``diagnosis`` is then the last one). ``problem`` says why it cannot be
    read or, of a live run, why nodes are missing.
    """

    state: str
    epoch_s: float
    run: str = ""
    problem: str = ""
    diagnosis: Diagnosis | None = None
    figures: Figures | None = None
    stacks: Stacks | None = None
    reading_cpu_s: float = 0.0

    @property
    def hangs(self) -> bool:
        """Whether something stops the job."""
        return bool(self.diagnosis and self.diagnosis.findings and self.diagnosis.findings[0].stops)


@dataclass
class LiveRun:
    """Looks at a run again and again, on one thread at a time.

    ``path`` None is the latest run below the working directory, so the page follows a job that is
    started again.
    """

    path: Path | None = None
    hang_after: float | None = None
    clock: Callable[[], float] = time.time
    _reader: RunReader = field(default_factory=lambda: RunReader(_NEWEST), repr=False)
    _others: OtherNodes = field(default_factory=OtherNodes, repr=False)
    _seen: Look | None = field(default=None, repr=False)
    _over: tuple[object, Diagnosis] | None = field(default=None, repr=False)
    _asked: Stacks | None = field(default=None, repr=False)

    def look(self) -> Look:
        """Read the newest records of every rank and judge them. Raises nothing."""
        began = time.thread_time()
        try:
            look = self._read()
        except (RankcallError, OSError, ValueError) as error:
            look = self._unread(" ".join(str(error).split()))
        look = replace(look, reading_cpu_s=time.thread_time() - began)
        if look.state in (LIVE, ENDED):
            self._seen = look
        return look

    def place(self) -> Path:
        """Return the run's path. Raises ``RunNotFound``."""
        return find_run(self.path)

    def take_stacks(self) -> Stacks:
        """Have this host's ranks dump their stacks; raises ``RankcallError`` if there is no run."""
        headers = [head.header for head in load(self.place()).heads][:_MOST_STACKS]
        texts = {rank: tidy(text) for rank, text in request_stacks(headers).items()}
        self._asked = Stacks(texts, self.clock(), by_watcher=False)
        return self._asked

    def _unread(self, problem: str) -> Look:
        if self._seen is None:
            return Look(WAITING, self.clock(), str(self.path or ""), problem=problem)
        return replace(self._seen, state=LOST, problem=problem, epoch_s=self.clock())

    def _read(self) -> Look:
        where = self.place()
        if self._seen is not None and self._seen.run != str(where):
            self._seen = self._over = self._asked = None  # the job was started again
            self._reader, self._others = RunReader(_NEWEST), OtherNodes()
        finished = self._finished(where)
        if finished is not None:
            return self._as_look(where, ENDED, finished)
        run = self._reader.load(where)
        self._others.ask(run)
        window = max(32, min(256, _WINDOW // max(1, len(run.heads))))
        snapshot = self._others.add_to(self._reader.snapshot(run, window))
        if not snapshot.live:
            ended = diagnose(run, self.hang_after or None)
            self._over = _fingerprint(where), ended
            return self._as_look(where, ENDED, ended)
        diagnosis = judge(run, snapshot, self.hang_after or None)
        sure = [
            finding
            for finding in diagnosis.findings
            if not self._others.is_outdated(finding, snapshot)
        ]
        verdicts = kept_hangs(run.path)
        diagnosis = replace(
            diagnosis, findings=sure, kept=[kept_verdict(run, verdict) for verdict in verdicts]
        )
        look = replace(self._as_look(where, LIVE, diagnosis), problem=self._others.problem)
        return self._with_kept_stacks(run, look, verdicts)

    def _finished(self, where: Path) -> Diagnosis | None:
        """Return the diagnosis of a job that was over at the last look, if no file has changed."""
        if self._over is None or self._over[0] != _fingerprint(where):
            return None
        return self._over[1]

    def _as_look(self, where: Path, state: str, diagnosis: Diagnosis) -> Look:
        is_moving = state == LIVE and not (diagnosis.findings and diagnosis.findings[0].stops)
        return Look(
            state,
            self.clock(),
            str(where),
            diagnosis=diagnosis,
            figures=recent_figures(diagnosis.snapshot) if is_moving else None,
            stacks=self._asked
            or (_stacks_of_watcher(kept_hangs(where)) if where.is_dir() else None),
        )

    def _with_kept_stacks(self, run: Run, look: Look, verdicts: list[Object]) -> Look:
        """Add the newest stacks; those that were dumped during the hang are evidence about it."""
        diagnosis = look.diagnosis
        if diagnosis is None or not look.hangs:
            return look
        causes = (
            {str(finding.get("kind")) for finding in verdicts[-1]["findings"]}
            if verdicts
            else set()
        )
        of_watcher = None
        if not causes.isdisjoint(finding.kind for finding in diagnosis.findings):
            of_watcher = _stacks_of_watcher(verdicts)
        stacks = max(filter(None, (self._asked, of_watcher)), key=_epoch_s, default=None)
        if stacks is not None and stacks.epoch_s >= look.epoch_s - diagnosis.findings[0].since_s:
            diagnosis = with_stacks(run, diagnosis, stacks.by_rank)
        return replace(look, diagnosis=diagnosis, stacks=stacks)


def _epoch_s(stacks: Stacks) -> float:
    return stacks.epoch_s


def _fingerprint(where: Path) -> object:
    """Return what changes if anything is added to a run whose processes have ended."""
    rings = [(path.name, path.stat().st_mtime_ns) for path in ring_paths(where)]
    folders = [path.stat().st_mtime_ns for path in (where, where / "exits") if path.exists()]
    return sorted(rings), folders


def _stacks_of_watcher(verdicts: list[Object]) -> Stacks | None:
    """Return the stacks beside the newest verdict that the watcher kept, if it has any."""
    if not verdicts:
        return None
    stacks = kept_stacks(verdicts[-1], _MOST_STACKS)
    texts = {rank: tidy(text) for rank, text in stacks.items()}
    return Stacks(texts, verdicts[-1]["hang"]["epoch_ns"] / 1e9, by_watcher=True) if texts else None

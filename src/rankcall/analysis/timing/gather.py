"""A run's rings, read once and lined up: what every analysis starts from."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankcall.analysis.timing.callsites import SiteTimes
from rankcall.analysis.timing.clocks import RunClocks, align_hosts, anchored
from rankcall.analysis.timing.collectives import Lane, assemble
from rankcall.analysis.timing.commshare import RankShare, rank_share
from rankcall.analysis.timing.extract import Messages, Part, Session, extract, pull, share_agreed
from rankcall.analysis.timing.p2p import Mail, match
from rankcall.ring.reader import Ring
from rankcall.ring.tables import Group
from rankcall.run import Progress, Run


@dataclass(frozen=True)
class RankRow:
    """One ring: who wrote it and what it holds."""

    rank: int
    host: str
    pid: int
    attempt: int
    capture: str
    records: int
    dropped: int
    steps: int
    closed: bool
    comm_share: float | None


@dataclass
class Gathered:
    """What the rings held: members' records lined up, and one clock for all hosts."""

    clocks: RunClocks
    sites: SiteTimes = field(default_factory=SiteTimes)
    shares: list[RankShare] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    mail: list[Mail] = field(default_factory=list)
    first_ns: list[int] = field(default_factory=list)
    last_ns: list[int] = field(default_factory=list)
    _parts: dict[tuple[Session, Group], list[Part]] = field(default_factory=dict)
    _messages: dict[tuple[Session, Group], list[Messages]] = field(default_factory=dict)

    def add(self, ring: Ring, session: Session) -> None:
        """Take what matters from one ring; the ring itself is not kept."""
        head = ring.header
        columns = pull(ring)
        host = self.clocks.of_ring(head)
        share = rank_share(head.rank, head.attempt, columns)
        self.shares.append(share)
        self.sites.add(head.rank, columns, ring.tables)
        self.ranks.append(_rank_row(ring, share))
        if len(ring.records):
            times = columns["enqueued_ns"], columns["completed_ns"]
            base = self.clocks.hosts[host].base
            self.first_ns.append(int(times[0].min()) + base)
            self.last_ns.append(max(int(column.max()) for column in times) + base)
        found = extract(ring, columns, host)
        for group, part in found.parts.items():
            lane = self._parts.setdefault((session, group), [])
            if lane:
                share_agreed(part, lane[-1])
            lane.append(part)
        for group, messages in found.messages.items():
            self._messages.setdefault((session, group), []).append(messages)

    def line_up(self) -> None:
        """Compare the members of each group, once all rings are in."""
        self.lanes = [assemble(*key, parts) for key, parts in self._parts.items()]
        self.mail = [match(*key, messages) for key, messages in self._messages.items()]
        self._parts.clear()
        self._messages.clear()
        align_hosts(self.clocks.hosts, self.lanes)


def _rank_row(ring: Ring, share: RankShare) -> RankRow:
    head = ring.header
    return RankRow(
        head.rank,
        head.host,
        head.pid,
        head.attempt,
        head.capture,
        len(ring.records),
        ring.dropped,
        head.step,
        head.closed_ns != 0,
        share.share,
    )


def gather(run: Run, progress: Progress | None = None) -> Gathered:
    """Read all rings of a run once. ``progress``: (rings read, rings in all).

    Keeps some 24 bytes of each record; the rings themselves are not kept.
    """
    gathered = Gathered(anchored(head.header for head in run.heads))
    sessions = sessions_of(run)
    for ring in run.iter_rings(progress):
        gathered.add(ring, sessions[ring.path.name])
    gathered.line_up()
    return gathered


def align(run: Run) -> RunClocks:
    """Return one clock for all hosts of a run; only groups across hosts are looked at for it."""
    clocks, sessions = anchored(head.header for head in run.heads), sessions_of(run)
    if len(clocks.hosts) < 2:
        return clocks
    parts: dict[tuple[Session, Group], list[Part]] = {}
    for ring in run.iter_rings():
        host, session = clocks.of_ring(ring.header), sessions[ring.path.name]
        for group, part in extract(ring, pull(ring), host).parts.items():
            known = run.run_groups.get(group)
            if known is None or known.cross_host:
                parts.setdefault((session, group), []).append(part)
    align_hosts(clocks.hosts, (assemble(*key, found) for key, found in parts.items()))
    return clocks


def sessions_of(run: Run) -> dict[str, Session]:
    """Tell apart the lives of a job: each restart is one, and each re-run into the directory."""
    lives: dict[tuple[int, int], int] = {}
    sessions: dict[str, Session] = {}
    for head in sorted(run.heads, key=lambda head: head.header.anchor_epoch_ns):
        key = head.header.attempt, head.header.rank
        lives[key] = lives.get(key, 0) + 1
        sessions[head.path.name] = Session(head.header.attempt, lives[key])
    return sessions

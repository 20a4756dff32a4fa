"""One call from a run to everything that a report says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rankcall.analysis.callsites import SiteRow, SiteTimes
from rankcall.analysis.clocks import HostClock, align_hosts, anchored
from rankcall.analysis.collectives import Lane, assemble
from rankcall.analysis.commshare import RankShare, StepShare, by_step, median_share, rank_share
from rankcall.analysis.extract import Messages, Part, Session, extract, pull, share_agreed
from rankcall.analysis.measure import Blame, measure_lane, measure_mail
from rankcall.analysis.p2p import Mail, match
from rankcall.analysis.table import Row, Source, rows
from rankcall.ring.reader import Group, Ring
from rankcall.run import Progress, Run, RunGroup, label_groups


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


@dataclass(frozen=True)
class Straggler:
    """What one rank's coming late cost the others."""

    rank: int
    host: str
    caused_wait_ms: float
    share: float  # of all waiting
    suffered_wait_ms: float
    came_last: int
    collectives: int  # that it took part in and that have a last one
    late_by_ms: float | None  # mean lead of the second-latest where it came last


@dataclass(frozen=True)
class Summary:
    """Everything a report says. Lists are ordered: what matters most comes first."""

    path: str
    about: dict[str, Any]
    world_size: int
    started_epoch_ns: int | None
    duration_ms: float
    ranks: list[RankRow]
    missing_ranks: list[int]
    groups: list[RunGroup]
    hosts: list[HostClock]
    collectives: list[Row]
    stragglers: list[Straggler]
    waiting_ms: float  # of all ranks together
    spent_ms: float  # by all ranks together, in collectives and messages
    call_sites: list[SiteRow]
    comm_share: float | None
    steps: list[StepShare]
    problems: list[str]

    @property
    def records(self) -> int:
        """How many records were read."""
        return sum(row.records for row in self.ranks)

    @property
    def dropped(self) -> int:
        """How many records were overwritten or lost before they could be read."""
        return sum(row.dropped for row in self.ranks)


@dataclass
class _Gathered:
    """What the rings held, before anything is compared."""

    clock_of: dict[tuple[str, str], int]
    clocks: list[HostClock]
    sites: SiteTimes = field(default_factory=SiteTimes)
    shares: list[RankShare] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    parts: dict[tuple[Session, Group], list[Part]] = field(default_factory=dict)
    mail: dict[tuple[Session, Group], list[Messages]] = field(default_factory=dict)
    first_ns: list[int] = field(default_factory=list)
    last_ns: list[int] = field(default_factory=list)

    def add(self, ring: Ring, session: Session) -> None:
        """Take what matters from one ring; the ring itself is not kept."""
        head = ring.header
        columns = pull(ring)
        host = self.clock_of[head.host, head.boot_id]
        share = rank_share(head.rank, head.attempt, columns)
        self.shares.append(share)
        self.sites.add(head.rank, columns, ring.tables)
        self.ranks.append(_rank_row(ring, share))
        if len(ring.records):
            times = columns["enqueued_ns"], columns["completed_ns"]
            base = self.clocks[host].base
            self.first_ns.append(int(times[0].min()) + base)
            self.last_ns.append(max(int(column.max()) for column in times) + base)
        found = extract(ring, columns, host)
        for group, part in found.parts.items():
            lane = self.parts.setdefault((session, group), [])
            if lane:
                share_agreed(part, lane[-1])
            lane.append(part)
        for group, messages in found.messages.items():
            self.mail.setdefault((session, group), []).append(messages)


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


def summarise(run: Run, progress: Progress | None = None) -> Summary:
    """Read all rings of a run once and analyse them. ``progress``: (rings read, rings in all)."""
    clocks, clock_of = anchored(head.header for head in run.heads)
    gathered = _Gathered(clock_of, clocks)
    sessions = _sessions(run)
    for ring in run.iter_rings(progress):
        gathered.add(ring, sessions[ring.path.name])
    lanes = [assemble(*key, parts) for key, parts in gathered.parts.items()]
    mail = [match(*key, messages) for key, messages in gathered.mail.items()]
    align_hosts(clocks, lanes)
    return _conclude(run, gathered, lanes, mail)


def _sessions(run: Run) -> dict[str, Session]:
    """Tell apart the lives of a job: each restart is one, and each re-run into the directory."""
    lives: dict[tuple[int, int], int] = {}
    sessions: dict[str, Session] = {}
    for head in sorted(run.heads, key=lambda head: head.header.anchor_epoch_ns):
        key = head.header.attempt, head.header.rank
        lives[key] = lives.get(key, 0) + 1
        sessions[head.path.name] = Session(head.header.attempt, lives[key])
    return sessions


def _conclude(run: Run, gathered: _Gathered, lanes: list[Lane], mail: list[Mail]) -> Summary:
    used = {lane.group for lane in lanes} | {each.group for each in mail}
    groups = label_groups(used, run.hosts)
    highest = max((row.rank for row in gathered.ranks), default=-1)
    blame = Blame(highest + 1)
    sources = [
        Source(groups[lane.group].label, lane.members, measure_lane(lane, gathered.clocks, blame))
        for lane in lanes
    ]
    sources += [
        Source(
            groups[each.group].label,
            len(each.group.ranks),
            measure_mail(each, gathered.clocks, blame),
        )
        for each in mail
    ]
    started, duration = _when(run, gathered)
    return Summary(
        path=str(run.path),
        about=run.about,
        world_size=run.world_size,
        started_epoch_ns=started,
        duration_ms=duration,
        ranks=sorted(gathered.ranks, key=lambda row: (row.rank, row.attempt, row.pid)),
        missing_ranks=run.missing_ranks,
        groups=list(groups.values()),
        hosts=gathered.clocks,
        collectives=rows(sources),
        stragglers=_stragglers(blame, run.hosts),
        waiting_ms=float(blame.caused.sum()) / 1e6,
        spent_ms=sum(float(source.measured.spent.sum()) for source in sources) / 1e6,
        call_sites=gathered.sites.rows(),
        comm_share=median_share(gathered.shares),
        steps=by_step(gathered.shares),
        problems=list(run.problems),
    )


def _when(run: Run, gathered: _Gathered) -> tuple[int | None, float]:
    """Return when the first op was issued (epoch ns) and how long it was to the last end (ms)."""
    if not gathered.first_ns:
        return None, 0.0
    first = min(gathered.first_ns)
    head = run.heads[0].header
    base = gathered.clocks[gathered.clock_of[head.host, head.boot_id]].base
    epoch = first - base + head.anchor_epoch_ns - head.anchor_mono_ns
    return epoch, (max(gathered.last_ns) - first) / 1e6


def _stragglers(blame: Blame, hosts: dict[int, str]) -> list[Straggler]:
    """List the ranks that anybody waited for, or that came last at all, worst first."""
    total = float(blame.caused.sum())
    found = [
        Straggler(
            rank,
            hosts.get(rank, ""),
            float(blame.caused[rank]) / 1e6,
            float(blame.caused[rank]) / total if total else 0.0,
            float(blame.suffered[rank]) / 1e6,
            int(blame.came_last[rank]),
            int(blame.took_part[rank]),
            float(blame.late_by[rank]) / int(blame.came_last[rank]) / 1e6
            if blame.came_last[rank]
            else None,
        )
        for rank in sorted(hosts)
        if 0 <= rank < blame.ranks  # a ring that went away since it was found has no records
    ]
    return sorted(found, key=lambda each: (-each.caused_wait_ms, each.rank))


__all__ = ["RankRow", "RunGroup", "Straggler", "Summary", "summarise"]

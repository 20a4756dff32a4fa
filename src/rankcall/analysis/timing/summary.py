"""One call from a run to everything that a report says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankcall._joins import JoinSummary
from rankcall.analysis.timing.callsites import SiteRow
from rankcall.analysis.timing.clocks import HostClock
from rankcall.analysis.timing.commshare import StepShare, by_step, median_share
from rankcall.analysis.timing.gather import Gathered, RankRow, gather
from rankcall.analysis.timing.measure import Blame, measure_lane, measure_mail
from rankcall.analysis.timing.table import Row, Source, rows
from rankcall.run import Progress, Run, RunGroup, label_groups


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
    joins: list[JoinSummary]
    problems: list[str]

    @property
    def records(self) -> int:
        """How many records were read."""
        return sum(row.records for row in self.ranks)

    @property
    def dropped(self) -> int:
        """How many records were overwritten or lost before they could be read."""
        return sum(row.dropped for row in self.ranks)


def summarise(run: Run, progress: Progress | None = None) -> Summary:
    """Read all rings of a run once and analyse them. ``progress``: (rings read, rings in all)."""
    return conclude(run, gather(run, progress))


def conclude(run: Run, gathered: Gathered) -> Summary:
    """Analyse what was read of a run."""
    lanes, mail, clocks = gathered.lanes, gathered.mail, gathered.clocks.hosts
    used = {lane.group for lane in lanes} | {each.group for each in mail}
    groups = label_groups(used, run.hosts)
    highest = max((row.rank for row in gathered.ranks), default=-1)
    blame = Blame(highest + 1)
    sources = [
        Source(groups[lane.group].label, lane.members, measure_lane(lane, clocks, blame))
        for lane in lanes
    ]
    sources += [
        Source(
            groups[each.group].label,
            len(each.group.ranks),
            measure_mail(each, clocks, blame),
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
        hosts=clocks,
        collectives=rows(sources),
        stragglers=_stragglers(blame, run.hosts),
        waiting_ms=float(blame.caused.sum()) / 1e6,
        spent_ms=sum(float(source.measured.spent.sum()) for source in sources) / 1e6,
        call_sites=gathered.sites.rows(),
        comm_share=median_share(gathered.shares),
        steps=by_step(gathered.shares),
        joins=run.joins,
        problems=list(run.problems),
    )


def _when(run: Run, gathered: Gathered) -> tuple[int | None, float]:
    """Return when the first op was issued (epoch ns) and how long it was to the last end (ms)."""
    if not gathered.first_ns:
        return None, 0.0
    first = min(gathered.first_ns)
    head = run.heads[0].header
    base = gathered.clocks.hosts[gathered.clocks.of_ring(head)].base
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


__all__ = ["RankRow", "RunGroup", "Straggler", "Summary", "conclude", "summarise"]

"""How late each rank came, and the one rule by which ranks are called stragglers.

A rank is as late to a collective as it came after the median member (the lower one of the two, if
their number is even), and not late if it came before. Only ops that no member leaves before the
last has come count, because in the others the members need not meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from rankcall.analysis.collectives import UNKNOWN_SITE, CollectiveTable, present, sessions_of
from rankcall.analysis.run_tables import RunTables
from rankcall.analysis.waiting import SYNC, Block, Bools, Floats, Ints, WaitTotals, blocks
from rankcall.record import KINDS, OPS
from rankcall.ring import CallSite
from rankcall.ring.reader import Ring
from rankcall.run.load import Run

# The one rule by which ranks are called stragglers, in every report and verdict.
#
# A straggler makes the others wait: step after step, for a good part of their time, while it waits
# little itself. A rank that is late because it waited for another one is not a straggler, and
# neither are the ranks of a pipeline that wait for each other in turn.
#
# The rule looks at parts of a run: its steps, or runs of steps if they are many, or equal slices of
# time if the job has no steps. Parts at the beginning that take far longer than the others are left
# out: start-up and compilation say nothing about the rest.


_SHARE = 0.4  # of all waiting, by the stragglers together
_TIMES_OTHERS = 4.0  # waiting caused by each straggler, over the median of the others
_COST = 0.1  # of the time of the others: they wait for the stragglers so long
_WAITS_LITTLE = 0.5  # a straggler waits at most this part of what the ranks wait on average
_ALONG = 0.6  # of the newer half of the parts: the stragglers cause most of the waiting there
_MOST = 0.25  # of the ranks; if more come late, they are the rule. A whole host may come late.
_MOST_PARTS, _SLICES, _FEWEST = 48, 16, 4
_SLOW_START = 3.0  # times the median part
_MOST_OF_START = 0.25  # of all parts


@dataclass(frozen=True)
class Parts:
    """A run's time, cut at ``edges`` (aligned ns). ``steps``: the step that begins at each edge."""

    begin: int
    end: int
    edges: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    steps: Ints | None = None

    @property
    def lengths(self) -> Floats:
        """The length of each part, ns."""
        ends = np.array([self.begin, *self.edges.tolist(), max(self.end, self.begin)], np.float64)
        lengths: Floats = np.maximum(np.diff(ends), 0.0)
        return lengths


@dataclass(frozen=True)
class Stragglers:
    """Ranks that make the others wait.

    Attributes:
        ranks: The ranks.
        host: Their host, if all its ranks come late together.
        share: Their part of all waiting.
        cost: The part of its time that each other rank waited for them, on average.
        along: The part of the steps (or slices) in which they caused most of the waiting.
        since_step: The step since which they do; None if they always did, or without steps.
        span_s: The time that this is about.
        slow_start_s: The time before it that is left out.
    """

    ranks: tuple[int, ...]
    host: str
    share: float
    cost: float
    along: float
    since_step: int | None
    span_s: float
    slow_start_s: float


def parts_of(step_begins: Iterable[Ints], begin: int, end: int) -> Parts:
    """Cut a run between two moments; ``step_begins``: when each rank began each of its steps."""
    begins = max(step_begins, key=len, default=np.zeros(0, np.int64))
    begins = np.sort(begins)
    inside = np.flatnonzero((begins > begin) & (begins < end))
    if len(inside) + 1 >= _FEWEST:
        every = np.unique(np.linspace(0, len(inside) - 1, _MOST_PARTS - 1).round().astype(np.intp))
        chosen = inside[every] if len(inside) >= _MOST_PARTS else inside
        return Parts(begin, end, begins[chosen], chosen)
    edges = np.linspace(begin, end, _SLICES + 1)[1:-1].astype(np.int64)
    return Parts(begin, end, edges)


def slow_start(parts: Parts) -> int:
    """Return how many parts at the beginning take far longer than the others."""
    lengths = parts.lengths
    limit = _SLOW_START * float(np.median(lengths))
    count = 0
    while count < len(lengths) * _MOST_OF_START and lengths[count] > limit:
        count += 1
    return count


def find_stragglers(
    totals: WaitTotals, parts: Parts, host_of: Sequence[str] = ()
) -> Stragglers | None:
    """Return the ranks that make the others wait, or None if no rank stands out.

    Args:
        totals: The waiting of all ranks, by the same parts.
        parts: The parts of the run's time.
        host_of: The host of each rank, to find a host that is late as a whole.
    """
    skipped, lengths = slow_start(parts), parts.lengths
    caused, suffered = totals.by_part[skipped:], totals.suffered_by_part[skipped:]
    left_out, lengths = lengths[:skipped], lengths[skipped:]
    span = float(lengths.sum())
    if parts.steps is None:
        # Slices in which no rank waits show nothing: the job may issue nothing there.
        busy = caused.sum(axis=1) > 0
        caused, suffered, lengths = caused[busy], suffered[busy], lengths[busy]
    if totals.ranks < 2 or len(lengths) < _FEWEST or not caused.sum() or not span:
        return None
    waits_little = suffered.sum(axis=0) <= _WAITS_LITTLE * suffered.sum(axis=0).mean()
    for ranks in _candidates(caused.sum(axis=0), waits_little, host_of):
        share = float(caused[:, ranks].sum() / caused.sum())
        others = totals.ranks - len(ranks)
        cost = float(caused[:, ranks].sum() / others / span)
        leading = _leading(caused, ranks, others, lengths)
        newer = leading[len(leading) // 2 :]
        if share >= _SHARE and cost >= _COST and newer.mean() >= _ALONG:
            since = _since(leading, parts, skipped)
            late_ranks = tuple(sorted(ranks.tolist()))
            whole = _whole_host(late_ranks, host_of)
            return Stragglers(
                late_ranks,
                whole,
                share,
                min(cost, 1.0),
                float(leading.mean()),
                since,
                span / 1e9,
                float(left_out.sum()) / 1e9,
            )
    return None


def _candidates(
    caused: Floats, waits_little: Bools, host_of: Sequence[str]
) -> Iterable[npt.NDArray[np.intp]]:
    """Yield the ranks that stand out; or else each host whose ranks may be late together."""
    order = np.argsort(-np.where(waits_little, caused, -1.0), kind="stable")
    most = min(max(1, int(len(order) * _MOST)), int(np.count_nonzero(waits_little)))
    for count in range(1, most + 1):
        ranks, rest = order[:count], order[count:]
        fair = float(np.median(caused[rest])) if len(rest) else 0.0
        least = float(caused[ranks].min())
        next_one = float(np.max(caused[rest], where=waits_little[rest], initial=0.0))
        if least > _TIMES_OTHERS * fair and next_one < least / 2:
            yield ranks
            return
    hosts = np.array(host_of, object)
    for host in dict.fromkeys(host_of):
        ranks = np.flatnonzero(hosts == host)
        if host and 1 < len(ranks) < len(caused) and waits_little[ranks].all():
            yield ranks


def _whole_host(ranks: tuple[int, ...], host_of: Sequence[str]) -> str:
    """Return the host that has just these ranks, if they are several."""
    host = host_of[ranks[0]] if host_of else ""
    members = tuple(rank for rank, rank_host in enumerate(host_of) if rank_host == host)
    return host if len(ranks) > 1 and members == ranks else ""


def _leading(
    caused: Floats, ranks: npt.NDArray[np.intp], others: int, lengths: Floats
) -> npt.NDArray[np.bool_]:
    """Return in which parts some ranks cause most of the waiting, and enough of it to matter."""
    theirs = caused[:, ranks].sum(axis=1)
    enough = theirs >= _COST / 2 * others * lengths
    leading: npt.NDArray[np.bool_] = enough & (theirs > 0) & (theirs >= 0.5 * caused.sum(axis=1))
    return leading


def _since(leading: npt.NDArray[np.bool_], parts: Parts, skipped: int) -> int | None:
    """Return the step at which they begin to lead, if they did not from the beginning."""
    first = int(np.argmax(leading))
    if first < 2 or parts.steps is None or leading[first:].mean() < _ALONG:
        return None
    return int(parts.steps[first + skipped - 1])


MOST_ROWS = 512
_MOST_CELLS = 1 << 20
_MOST_BINS, _LEAST_BINS = 480, 60
_MOST_FAMILIES = 12


@dataclass
class LateMap:
    """Mean lateness in ms, ``[row, bin]``; NaN if no such collective began in a bin.

    A row stands for the ``fold`` ranks from ``row * fold`` on, and shows the latest of them.
    """

    title: str
    late_ms: Floats
    fold: int


@dataclass
class LastSeen:
    """The rank that came last to each of a group's collectives, and what that cost the others."""

    table: CollectiveTable
    last: npt.NDArray[np.intp]  # rank; -1: no rank came last
    cost_ns: Floats  # waiting of the others for that rank alone


@dataclass
class Lateness:
    """The maps (all groups first), the width of their bins, and the ranks that came last."""

    bin_ns: float
    maps: list[LateMap]
    lasts: list[LastSeen]


@dataclass
class _Sums:
    """Lateness and number of collectives, by rank and bin."""

    late: Floats
    count: Floats


def lateness(run_tables: RunTables) -> Lateness:
    """Draw the maps of a run: one of all groups, and one for each set of groups of one purpose."""
    ranks = 1 + max((row.rank for row in run_tables.ranks), default=-1)
    families = _families(run_tables.tables)
    rows = max(1, ranks) * (len(families) + 1)
    most = max((len(table.seq) for table in run_tables.tables), default=0)
    bins = int(np.clip(min(_MOST_CELLS // rows, most // 2), _LEAST_BINS, _MOST_BINS))
    begin, end = _span(run_tables)
    width = max(1.0, (end - begin) / bins)
    every = _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins)))
    sums = {name: _Sums(np.zeros((ranks, bins)), np.zeros((ranks, bins))) for name in families}
    lasts = []
    for table in run_tables.tables:
        mine = [every, *(sums[name] for name in [_family(table)] if name in sums)]
        lasts.append(_add_table(table, run_tables, mine, begin, width))
    maps = [_map("all groups", every)]
    maps += [_map(name, sums[name]) for name in families] if len(families) > 1 else []
    return Lateness(width, maps, lasts)


def _span(run_tables: RunTables) -> tuple[int, int]:
    """Return the first and the last arrival at any collective, aligned ns."""
    first, last = [], []
    for table in run_tables.tables:
        for row, host in enumerate(table.hosts):
            here = table.arrival[row][present(table.arrival[row])]
            if len(here):
                ends = np.array([here.min(), here.max()])
                aligned = run_tables.clocks.hosts[host].align(ends)
                first.append(int(aligned[0]))
                last.append(int(aligned[1]))
    return (min(first), max(last)) if first else (0, 0)


def _family(table: CollectiveTable) -> str:
    """Name the purpose of a group: its description, or else its size."""
    purpose = table.group.description
    if not purpose or purpose == "undefined":
        purpose = "groups"
    return f"{purpose} ({len(table.group.ranks)} ranks)"


def _families(tables: list[CollectiveTable]) -> list[str]:
    """Return the purposes of all groups in which members meet, the most used first."""
    used: dict[str, int] = {}
    for table in tables:
        if SYNC[table.op].any() and len(table.ranks) > 1:
            used[_family(table)] = used.get(_family(table), 0) + table.arrival.size
    return sorted(used, key=lambda name: -used[name])[:_MOST_FAMILIES]


def _add_table(
    table: CollectiveTable, run_tables: RunTables, sums: list[_Sums], begin: int, width: float
) -> LastSeen:
    last_seen = LastSeen(
        table, np.full(len(table.seq), -1, np.intp), np.zeros(len(table.seq), np.float64)
    )
    if len(table.ranks) < 2:
        return last_seen
    for block in blocks(table, np.flatnonzero(SYNC[table.op]), run_tables.clocks.hosts):
        came = block.came
        members = came.times.shape[1] - came.absent
        together = members > 1
        last_seen.last[block.columns] = np.where(together, table.ranks[came.last_member], -1)
        last_seen.cost_ns[block.columns] = np.where(together, came.behind * (members - 1), 0.0)
        late, middle = _late(block)
        rows = np.flatnonzero(together)
        bins = np.clip((middle[rows] - begin) / width, 0, sums[0].late.shape[1] - 1).astype(np.intp)
        _accumulate(late[rows], came.here[rows], bins, table.ranks, sums)
    return last_seen


def _late(block: Block) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return each member's lateness (ns, ``[collective, member]``) and when the median came."""
    came = block.came
    members = came.times.shape[1] - came.absent
    at = np.minimum(came.absent + np.maximum(members - 1, 0) // 2, came.times.shape[1] - 1)
    middle = np.take_along_axis(came.sorted, at[:, None], axis=1)
    late = np.maximum(came.times, middle) - middle
    return np.where(came.here, late, 0).astype(np.float64), middle[:, 0]


def _accumulate(
    late: Floats,
    here: npt.NDArray[np.bool_],
    bins: npt.NDArray[np.intp],
    ranks: npt.NDArray[np.intp],
    sums: list[_Sums],
) -> None:
    """Add rows to the bins they fall in."""
    if not len(bins):
        return
    order = np.argsort(bins, kind="stable")
    first = np.concatenate([[0], np.flatnonzero(np.diff(bins[order])) + 1])
    which = bins[order][first]
    added = np.add.reduceat(late[order], first, axis=0).T
    counted = np.add.reduceat(here[order].astype(np.float64), first, axis=0).T
    for map_sums in sums:
        map_sums.late[np.ix_(ranks, which)] += added
        map_sums.count[np.ix_(ranks, which)] += counted


def _map(title: str, sums: _Sums) -> LateMap:
    with np.errstate(invalid="ignore", divide="ignore"):
        late = np.where(sums.count > 0, sums.late / sums.count / 1e6, np.nan)
    ranks = len(late)
    fold = max(1, -(-ranks // MOST_ROWS))
    if fold > 1:
        padded = np.full((-(-ranks // fold) * fold, late.shape[1]), np.nan)
        padded[:ranks] = late
        late = np.fmax.reduce(padded.reshape(-1, fold, late.shape[1]), axis=1)
    return LateMap(title, late, fold)


# By line and op: the cost of each time (ns), and the line of the op before.
Costs = dict[tuple[CallSite, str], list[tuple[float, CallSite | None]]]

_COLLECTIVE = KINDS.index("collective")


@dataclass(frozen=True)
class LateLine:
    """One line at which a rank came last, and what that cost the others.

    The cause lies before that line: after ``since``, the line of the op that the rank issued
    before (None: it differs, or there is none).
    """

    rank: int
    site: CallSite
    op: str
    since: CallSite | None
    times: int
    cost_ms: float
    share: float  # of all that this rank cost by coming last


def late_lines(run: Run, lasts: Iterable[LastSeen], ranks: Iterable[int]) -> list[LateLine]:
    """Find the lines at which some ranks came last, the most costly first; read their rings."""
    lasts, sessions, all_lines = list(lasts), sessions_of(run), []
    for rank in ranks:
        costs: Costs = {}
        for head in run.heads:
            if head.header.rank == rank:
                ring = run.read(head)
                mine = [seen for seen in lasts if seen.table.session == sessions[head.path.name]]
                if ring is not None:
                    _add_ring(ring, mine, costs)
        lines = [_line(rank, *key, occasions) for key, occasions in costs.items()]
        total = sum(line.cost_ms for line in lines)
        lines = [replace(line, share=line.cost_ms / total) for line in lines if total]
        all_lines += sorted(lines, key=lambda line: (-line.cost_ms, str(line.site), line.op))
    return all_lines


def _line(
    rank: int, site: CallSite, op: str, occasions: list[tuple[float, CallSite | None]]
) -> LateLine:
    since, times = Counter(before for _, before in occasions).most_common(1)[0]
    usual = since if 2 * times > len(occasions) else None
    return LateLine(
        rank, site, op, usual, len(occasions), sum(cost for cost, _ in occasions) / 1e6, 0.0
    )


def _add_ring(ring: Ring, lasts: list[LastSeen], costs: Costs) -> None:
    records = ring.records
    sites, before = records["call_site"], np.roll(records["call_site"], 1)
    before[:1] = 0
    for key, group in ring.tables.groups.items():
        rows = np.flatnonzero((records["group"] == key) & (records["kind"] == _COLLECTIVE))
        for seen in lasts:
            if seen.table.group != group or not len(rows):
                continue
            cost = _cost(seen, ring.header.rank, records["seq"][rows].astype(np.int64))
            for row, cost_ns in zip(rows[cost > 0].tolist(), cost[cost > 0].tolist(), strict=True):
                since = ring.tables.sites.get(int(before[row]))
                site = ring.tables.sites.get(int(sites[row]), UNKNOWN_SITE)
                costs.setdefault((site, OPS[records["op"][row]]), []).append((cost_ns, since))


def _cost(seen: LastSeen, rank: int, seq: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return what a rank cost the others by coming last to each collective; 0 if it did not."""
    table = seen.table
    at = np.minimum(np.searchsorted(table.seq, seq), len(table.seq) - 1)
    came_last = (table.seq[at] == seq) & (seen.last[at] == rank)
    cost: npt.NDArray[np.float64] = np.where(came_last, seen.cost_ns[at], 0.0)
    return cost

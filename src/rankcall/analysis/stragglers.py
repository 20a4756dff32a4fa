"""The one rule by which ranks are called stragglers, in every report and verdict.

A straggler makes the others wait: step after step, for a good part of their time, while it waits
little itself. A rank that is late because it waited for another one is not a straggler, and
neither are the ranks of a pipeline that wait for each other in turn.

The rule looks at parts of a run: its steps, or runs of steps if they are many, or runs of equally
many calls if the job has no steps. Parts at the beginning that take far longer than the others are
left out: start-up and compilation say nothing about the rest.

A job of a few ms, or of a few steps, shows noise: in each part some rank comes last. So the time
must be long enough, the waiting too, and the straggler must lead in more parts than by chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rankcall.analysis.arrivals import Bools, Floats, Ints
from rankcall.analysis.charging import WaitTotals

_SHARE = 0.4  # of all waiting, by the stragglers together
_TIMES_OTHERS = 4.0  # waiting caused by each straggler, over the median of the others
_COST = 0.1  # of the time of the others: they wait for the stragglers so long
_WAITS_LITTLE = 0.5  # a straggler waits at most this part of what the ranks wait on average
_ALONG = 0.6  # of the newer half of the parts: the stragglers cause most of the waiting there
_MOST = 0.25  # of the ranks; if more come late, they are the rule. A whole host may come late.
# A run is cut at its steps, into so many parts at most; without steps, into slices. With fewer
# parts than four, the newer half is one or two, which a single pause can fill.
_MOST_PARTS, _SLICES, _FEWEST = 48, 16, 4
# A shorter time, or less waiting of each other rank in it, shows what the scheduler did, and no
# habit. On a machine with ten times as many threads as cores, it keeps one rank back for most of a
# second: of 6,000 healthy jobs of 8 to 60 steps there, half of this names a rank in 34, and this in
# none (tests/unit/analysis/test_stragglers.py).
_LEAST_SPAN_NS, _LEAST_WAITING_NS = 1e9, 200e6
_CHANCE = 0.01  # that any ranks lead as often in a job whose ranks are alike
_SLOW_START = 3.0  # times the median part
_MOST_OF_START = 0.25  # of all parts


@dataclass(frozen=True)
class Parts:
    """A run's time, cut at ``edges`` (aligned ns). ``steps``: the step that begins at each edge.

    ``ahead``: each part has several steps of devices, which no scheduler keeps back by chance.
    """

    begin: int
    end: int
    edges: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    steps: Ints | None = None
    ahead: bool = False

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
        caused_s: The waiting that each of them caused.
        share: Their part of all waiting.
        cost: The part of its time that each other rank waited for them, on average.
        along: The part of the steps (or slices) in which they caused most of the waiting.
        since_step: The step since which they do; None if they always did, or without steps.
        begin: The first moment that this is about, in aligned ns.
        span_s: The time that this is about.
        slow_start_s: The time before it that is left out.
    """

    ranks: tuple[int, ...]
    host: str
    caused_s: tuple[float, ...]
    share: float
    cost: float
    along: float
    since_step: int | None
    begin: int
    span_s: float
    slow_start_s: float


def turns_of(issued: Ints) -> Ints:
    """Return when a rank issued some of its calls, so that equally many lie between each two."""
    if np.any(issued[1:] < issued[:-1]):
        issued = np.sort(issued)
    at = np.arange(1, _SLICES) * len(issued) // _SLICES
    turns: Ints = issued[at if len(issued) >= _SLICES else np.unique(at)] if len(issued) else issued
    return turns


def parts_of(
    step_begins: Iterable[Ints],
    turns: Iterable[Ints],
    begin: int,
    end: int,
    *,
    ahead: bool = False,
) -> Parts:
    """Cut a run between two moments.

    Args:
        step_begins: When each rank began each of its steps.
        turns: Of each rank, ``turns_of`` its calls. They cut a job without steps, and not equal
            times: one long wait at the start would be many of them.
        begin: The first moment.
        end: The last moment.
        ahead: The ops run on devices. A host issues several steps at once there, and waits for all
            of them in the last one, so each part must be long enough for several.
    """
    # Of ranks with equally many steps, the one that began first: a rank that is late in the first
    # step begins it when the others have waited for it already.
    begins = max(
        (np.sort(of_rank) for of_rank in step_begins if len(of_rank)),
        key=lambda of_rank: (len(of_rank), -int(of_rank[0])),
        default=np.zeros(0, np.int64),
    )
    inside = np.flatnonzero((begins > begin) & (begins < end))
    if ahead:
        apart = np.linspace(begin, end, _SLICES + 1)[1:-1].astype(np.int64)
        at = np.unique(np.searchsorted(begins[inside], apart))
        inside = inside[at[at < len(inside)]]
    if len(inside) + 1 >= _FEWEST:
        every = np.unique(np.linspace(0, len(inside) - 1, _MOST_PARTS - 1).round().astype(np.intp))
        chosen = inside[every] if len(inside) >= _MOST_PARTS else inside
        return Parts(begin, end, begins[chosen], chosen, ahead)
    edges = np.linspace(begin, end, _SLICES + 1)[1:-1].astype(np.int64)
    calls = np.unique(max(turns, key=len, default=edges[:0]))
    if not ahead and len(calls) + 1 >= _FEWEST:
        edges = calls[(calls > begin) & (calls < end)]
    return Parts(begin, end, edges, ahead=ahead)


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
    if totals.ranks < 2 or len(lengths) < _FEWEST or span < _LEAST_SPAN_NS:
        return None
    waits_little = suffered.sum(axis=0) <= _WAITS_LITTLE * suffered.sum(axis=0).mean()
    for ranks in _candidates(caused.sum(axis=0), waits_little, host_of):
        others = totals.ranks - len(ranks)
        theirs = float(caused[:, ranks].sum())
        if theirs < _LEAST_WAITING_NS * others:
            continue
        share, cost = theirs / float(caused.sum()), theirs / others / span
        leading = _leading(caused, ranks, others, lengths)
        newer = leading[len(leading) // 2 :]
        is_habit = (
            parts.ahead
            or totals.ranks
            * min(_chance_of(some, len(ranks) / totals.ranks) for some in (leading, newer))
            <= _CHANCE
        )
        if share >= _SHARE and cost >= _COST and newer.mean() >= _ALONG and is_habit:
            since = _since(leading, parts, skipped)
            late_ranks = tuple(sorted(ranks.tolist()))
            whole = _whole_host(late_ranks, host_of)
            return Stragglers(
                late_ranks,
                whole,
                tuple((caused[:, list(late_ranks)].sum(axis=0) / 1e9).tolist()),
                share,
                min(cost, 1.0),
                float(leading.mean()),
                since,
                parts.begin if not skipped else int(parts.edges[skipped - 1]),
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


def _chance_of(leading: npt.NDArray[np.bool_], share: float) -> float:
    """Return how likely it is to lead in so many parts or more, by chance in ``share`` of them."""
    parts, led = len(leading), int(np.count_nonzero(leading))
    return sum(
        math.comb(parts, count) * share**count * (1 - share) ** (parts - count)
        for count in range(led, parts + 1)
    )


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

"""Where the ranks of a job stand: rows of ranks in one place, and ranks named in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankcall.analysis.snapshot import END_UNKNOWN, FAILED_IN, IN, LEFT, RankPosition
from rankcall.analysis.verdicts.verdict import Verdict
from rankcall.analysis.verdicts.wording import numbered
from rankcall.ranks import format_ranks
from rankcall.report.formatting import line_names, plural, time

_RANKS_WIDE = 22  # columns of 80 for a list of ranks; a longer one is a count


@dataclass(frozen=True)
class Row:
    """Ranks that stand in the same place."""

    ranks: tuple[int, ...]
    state: str
    where: str
    line: str
    least_s: float
    most_s: float
    named: bool  # a culprit
    waiting: bool


def rows(verdict: Verdict) -> list[Row]:
    """Group the ranks by their position: culprits first, then the ranks that wait longest.

    Groups of the same size count as one position: 128 tensor-parallel groups that all do the same
    take one row.
    """
    culprits = verdict.culprits
    alike: dict[tuple[object, ...], list[RankPosition]] = {}
    for place in verdict.ranks:
        key = (
            place.rank in culprits,
            place.shown_state,
            place.how,
            place.op,
            place.seq,
            place.call_site,
            place.user_line,
            place.group_size,
            verdict.stands_at(place),
        )
        alike.setdefault(key, []).append(place)
    table_rows = [_row(verdict, places, culprits) for places in alike.values()]
    return sorted(
        table_rows,
        key=lambda row: (
            not row.named,
            row.ranks if row.named else (),
            not row.waiting,
            -row.most_s,
            row.ranks,
        ),
    )


def line_cell(verdict: Verdict, position: RankPosition) -> str:
    """Name the line at which a rank stands, or else that of its call."""
    return line_names(
        verdict.stands_at(position) or position.call_site,
        "" if verdict.stands_at(position) else position.user_line,
    )


def _row(verdict: Verdict, alike: Sequence[RankPosition], culprits: set[int]) -> Row:
    first = alike[0]
    labels = {place.group for place in alike}
    where = no_call(first)
    if first.op:
        group = f"group {first.group}" if len(labels) == 1 else f"{len(labels):,} groups"
        where = with_verb(first.how, f"{numbered(first.op, first.seq)}, {group}")
    ages = [place.age_s for place in alike]
    return Row(
        tuple(place.rank for place in alike),
        first.shown_state,
        where,
        line_cell(verdict, first),
        min(ages),
        max(ages),
        first.rank in culprits,
        first.in_call,
    )


def with_verb(how: str, call: str) -> str:
    """Write how a rank stands with a call: ``left all_reduce #7``."""
    return _VERBS[how].format(call)


_VERBS = {
    IN: "in {}",
    LEFT: "left {}",
    FAILED_IN: "failed in {}",
    END_UNKNOWN: "issued {}, end unknown",
}


def no_call(position: RankPosition) -> str:
    """Write where a rank stands that has no call on record."""
    return "no records" if position.blind else "nothing yet"


def since_cell(row: Row) -> str:
    """Write how long ranks have been in (or out of) their call."""
    if row.where in ("nothing yet", "no records"):
        return "-"
    least, most = time(row.least_s * 1e3), time(row.most_s * 1e3)
    if least == most or row.most_s < 10 * max(row.least_s, 0.01):
        return most
    return f"{least}–{most}"


def ranks_cell(ranks: Sequence[int]) -> str:
    """Write ranks, or their number if they do not fit."""
    text = format_ranks(ranks)
    return text if len(text) <= _RANKS_WIDE else plural(len(ranks), "rank")


def named(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: ``rank 2``, ``ranks 1,3``, ``1,023 ranks``."""
    text = ranks_cell(ranks)
    return text if text.endswith("s") else f"rank{'' if len(ranks) == 1 else 's'} {text}"


def shortened_ranks(ranks: Sequence[int]) -> str:
    """Write ranks, the last ones left out if there are too many."""
    text = format_ranks(ranks)
    return (
        text if len(text) <= 2 * _RANKS_WIDE else text[: 2 * _RANKS_WIDE].rpartition(",")[0] + ",…"
    )


def world(verdict: Verdict) -> str:
    """Name the size of a job: ``8 ranks on 2 hosts``."""
    hosts = {position.process.host for position in verdict.ranks if position.process.host}
    where = f" on {plural(len(hosts), 'host')}" if hosts else ""
    return f"{plural(len(verdict.ranks), 'rank')}{where}"

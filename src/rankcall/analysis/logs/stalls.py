"""Ranks that Horovod waits for: it compares which ops each rank has submitted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from rankcall.analysis.logs.case import SAME, Case, minority, ranks_text, subject
from rankcall.analysis.verdicts.facts import Fact, Relation
from rankcall.analysis.verdicts.finding import Finding
from rankcall.imports.logs.facts import Stall, Stalled

_SHOWN, _LONGEST = 3, 120  # ops that a sentence has; characters of a name


def not_submitted(case: Case) -> list[Finding]:
    """Return the ranks that others wait for, by the last report of Horovod.

    A rank that has submitted another op of the report waits itself. If each rank of the report
    does, they wait for each other: they have submitted different ops.
    """
    report, rows = _last_report(case)
    ops_of: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        for rank in row.ranks:
            ops_of[rank].update(row.ops)
    if report is None or not ops_of:
        return []
    cut = {rank for row in rows if row.more for rank in row.ranks}
    waiting = _submitted_one(ops_of, cut)
    missing = set(ops_of) - waiting
    kind, named, confidence = "missing", tuple(missing), "likely"
    if not missing:
        # Which ranks the job has is not known. So of ranks that are not in the report, nothing is.
        is_whole = set(ops_of) == set(range(max(ops_of) + 1))
        sides = [set(ranks) for ranks in _by_ops(ops_of, ops_of).values()]
        kind, confidence = "desync", "possible"
        named = minority(sides) if is_whole else tuple(ops_of)
    return [
        case.finding(
            kind,
            named,
            tuple(sorted(set(ops_of) - set(named))) if named else (),
            [
                Fact(
                    Relation.NOT_SUBMITTED,
                    subject(ranks),
                    values=_values(ops, more=bool(cut & set(ranks))),
                    number=report.seconds,
                    unit="s",
                )
                for ops, ranks in _by_ops(ops_of, missing or ops_of).items()
            ],
            [report.line, *(row.line for row in rows)],
            f"Look at what {ranks_text(named)} did then." if missing else SAME,
            confidence,
            since=report.seconds,
        )
    ]


def _last_report(case: Case) -> tuple[Stall | None, list[Stalled]]:
    """Return the last report and its rows; one log has it, that of rank 0 or of the launcher."""
    reports = case.facts(Stall)
    if not reports:
        return None, []
    log = reports[-1].line.writer.file
    return reports[-1], [
        row
        for row in case.facts(Stalled)
        if row.line.writer.file == log and row.line.number >= reports[-1].line.number
    ]


def _submitted_one(ops_of: dict[int, set[str]], cut: set[int]) -> set[int]:
    """Return the ranks that have submitted an op that others have not.

    Horovod writes the first of a rank's ops by name, so one behind them may have been left out.
    """
    all_ops = sorted(set().union(*ops_of.values()))
    ranks = set()
    for rank, own in ops_of.items():
        first = next((op for op in all_ops if op not in own), None)
        if first is not None and (rank not in cut or first < max(own)):
            ranks.add(rank)
    return ranks


def _by_ops(ops_of: dict[int, set[str]], ranks: Iterable[int]) -> dict[tuple[str, ...], list[int]]:
    """Return ranks by the ops that they have not submitted, the fewest ranks first."""
    by_ops: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank in sorted(ranks):
        by_ops[tuple(sorted(ops_of[rank]))].append(rank)
    return dict(sorted(by_ops.items(), key=lambda item: (len(item[1]), item[1])))


def _values(ops: tuple[str, ...], *, more: bool) -> tuple[tuple[str, str], ...]:
    shown = ", ".join(op[:_LONGEST] for op in ops[:_SHOWN])
    return ("ops", shown), *([("more", "yes")] if more or len(ops) > _SHOWN else [])

"""Which rings of a run belong together: those of the last attempt of one job, one for each rank.

A run directory can hold rings of several attempts, of jobs that followed each other, and of files
that somebody mixed up. A verdict on two jobs at once would blame ranks that never met.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankcall.problems import Problem, ProblemKind
from rankcall.ranks import format_ranks
from rankcall.ring.layout import Header
from rankcall.ring.reader import Head

# Processes of one job live at the same time, but their hosts' clocks may differ by so much.
APART_S = 60.0


def select_rings(heads: Iterable[Head], problems: list[Problem]) -> list[Head]:
    """Choose one ring for each rank: in the last attempt of one job, the one that began last."""
    by_start = sorted(heads, key=lambda head: head.header.anchor_epoch_ns)
    attempt = max((head.header.attempt for head in by_start), default=0)
    by_start = [head for head in by_start if head.header.attempt == attempt]
    ranked = [head for head in by_start if head.header.rank >= 0]
    if len(ranked) < len(by_start):
        left = len(by_start) - len(ranked)
        text = f"{left} processes left a ring without a rank: they are left out"
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    newest: dict[int, Head] = {}
    copies = set()
    for head in _of_one_size(ranked, problems):
        known = newest.get(head.header.rank)
        if known is not None and _process(known.header) != _process(head.header):
            copies.add(head.header.rank)
        newest[head.header.rank] = head
    if copies:
        text = (
            f"several processes left a ring as rank {format_ranks(sorted(copies))}: "
            "the one that started last counts"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    return list(newest.values())


def _of_one_size(heads: Sequence[Head], problems: list[Problem]) -> list[Head]:
    """Keep the rings of the job that started last, if others are of a job of another size.

    An elastic job that grew or shrank leaves such rings. So do files that were mixed up.
    """
    size = next(
        (head.header.world_size for head in reversed(heads) if head.header.world_size > 0), 0
    )
    others = [head for head in heads if head.header.world_size not in (size, 0, -1)]
    if others:
        sizes = format_ranks(sorted({head.header.world_size for head in others}))
        ranks = format_ranks(sorted({head.header.rank for head in others}))
        text = (
            f"rings of a job of {sizes} ranks (rank {ranks}) lie beside those of one of {size}, "
            "which started last: they are left out"
        )
        problems.append(Problem(ProblemKind.LEFT_OUT, text))
    return [head for head in heads if head not in others]


def lived_apart(heads: Sequence[Head], problems: list[Problem]) -> bool:
    """Tell whether some rings are of different jobs, most likely: their processes never met."""
    if not heads:
        return False
    began = max(head.header.anchor_epoch_ns for head in heads)
    gone = [
        head.header.rank for head in heads if (began - _last_seen_ns(head.header)) / 1e9 > APART_S
    ]
    if gone:
        text = (
            f"rank {format_ranks(sorted(gone))} was last seen before others began: these files "
            "may be of several jobs, mixed up"
        )
        problems.append(Problem(ProblemKind.MIXED_JOBS, text))
    return bool(gone)


def _process(header: Header) -> tuple[object, ...]:
    return header.host, header.boot_id, header.pid, header.process_start


def _last_seen_ns(header: Header) -> int:
    """Return when a process last gave a sign of life, as epoch ns of its host."""
    return header.anchor_epoch_ns + max(0, header.last_sign_ns - header.anchor_mono_ns)

"""Which of a run's rings to believe, where there is more than one of a rank, or of a job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rankcall.ring.header import Header
from rankcall.ring.reader import Head
from rankcall.run import format_ranks

_APART_S = 60.0  # hosts' clocks may differ by that; processes of one job live at the same time


def choose(heads: Iterable[Head], problems: list[str]) -> list[Head]:
    """Choose one ring a rank: of the last attempt of one job, the one that began last."""
    found = sorted(heads, key=lambda head: head.header.anchor_epoch_ns)
    attempt = max((head.header.attempt for head in found), default=0)
    found = [head for head in found if head.header.attempt == attempt]
    ranked = [head for head in found if head.header.rank >= 0]
    if len(ranked) < len(found):
        left = len(found) - len(ranked)
        problems.append(f"{left} processes left a ring without a rank: they are left out")
    newest: dict[int, Head] = {}
    copies = set()
    for head in _of_one_size(ranked, problems):
        known = newest.get(head.header.rank)
        if known is not None and _process(known.header) != _process(head.header):
            copies.add(head.header.rank)
        newest[head.header.rank] = head
    if copies:
        problems.append(
            f"several processes left a ring as rank {format_ranks(sorted(copies))}: "
            "the one that started last counts"
        )
    return list(newest.values())


def _of_one_size(heads: Sequence[Head], problems: list[str]) -> list[Head]:
    """Keep the rings of the job that started last, where some are of a job of another size.

    An elastic job that grew or shrank leaves such, and files that were mixed up.
    """
    size = next((h.header.world_size for h in reversed(heads) if h.header.world_size > 0), 0)
    others = [head for head in heads if head.header.world_size not in (size, 0, -1)]
    if others:
        sizes = format_ranks(sorted({head.header.world_size for head in others}))
        ranks = format_ranks(sorted({head.header.rank for head in others}))
        problems.append(
            f"rings of a job of {sizes} ranks (rank {ranks}) lie beside those of one of {size}, "
            "which started last: they are left out"
        )
    return [head for head in heads if head not in others]


def strangers(heads: Sequence[Head], problems: list[str]) -> bool:
    """Tell whether some rings can hardly be of the same job: their processes never met."""
    if not heads:
        return False
    began = max(head.header.anchor_epoch_ns for head in heads)
    gone = [
        head.header.rank for head in heads if (began - _last_seen_ns(head.header)) / 1e9 > _APART_S
    ]
    if gone:
        problems.append(
            f"rank {format_ranks(sorted(gone))} was last seen before others began: these files "
            "may be of several jobs, mixed up"
        )
    return bool(gone)


def _process(header: Header) -> tuple[object, ...]:
    return header.host, header.boot_id, header.pid, header.process_start


def _last_seen_ns(header: Header) -> int:
    """Return when a process last gave a sign of life, as epoch ns of its host."""
    beats = header.native_heartbeat_ns, header.python_heartbeat_ns, header.closed_ns
    return header.anchor_epoch_ns + max(0, max(beats) - header.anchor_mono_ns)

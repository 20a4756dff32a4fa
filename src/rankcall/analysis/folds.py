"""Ranks that belong together: those of a host, and of a place or a group of a parallel dimension.

A page folds its rows by them: a job of thousands of ranks has few hosts, and fewer places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankcall.analysis.dimensions import dimensions_of
from rankcall.ranks import with_noun
from rankcall.ring.tables import Group

HOSTS = "hosts"
_LONGEST_NAME = 40  # of a row


@dataclass(frozen=True)
class Fold:
    """Rows of ranks, with their names. A rank that a dimension does not have is in no row."""

    title: str
    names: list[str]
    row_of: Mapping[int, int]  # by rank, the index of its row


def folds_of(host_of: Mapping[int, str], groups: Iterable[Group]) -> list[Fold]:
    """Return the folds of a job: by host, then by place and by group of each dimension.

    Args:
        host_of: The hosts by rank; rows are in the order in which they come.
        groups: The process groups, of which some may make dimensions.
    """
    hosts = list(dict.fromkeys(host_of.values()))
    number_of = {host: number for number, host in enumerate(hosts)}
    folds = [Fold(HOSTS, hosts, {rank: number_of[host] for rank, host in host_of.items()})]
    dimensions = dimensions_of(groups)
    sizes = Counter(dimension.name for dimension in dimensions)
    for dimension in dimensions:
        several = f" of {dimension.size}" if sizes[dimension.name] > 1 else ""
        title = f"{dimension.name}{several}"  # a reader chooses a fold by its title
        places = [f"{dimension.name} {place}" for place in range(dimension.size)]
        folds.append(Fold(f"{title}: places in the groups", places, dimension.place_of))
        names = [_short(ranks) for ranks in dimension.groups]
        folds.append(Fold(f"{title}: groups", names, dimension.group_of))
    return folds


def _short(ranks: Sequence[int]) -> str:
    """Name the ranks of a group; of a group across the job, the first and the last one."""
    name = with_noun(ranks)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"ranks {min(ranks)} … {max(ranks)} ({len(ranks)})"

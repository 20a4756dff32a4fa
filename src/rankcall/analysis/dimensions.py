"""The parallel dimensions of a job: groups of one purpose that divide the ranks between them.

``DeviceMesh`` describes the groups of its dimension ``tp`` as ``mesh_tp``, and other frameworks
describe theirs as well. A rank's place in its group of a dimension is its coordinate there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rankcall.ring.tables import Group

_MESH = "mesh_"  # torch puts it before the name of a mesh's dimension
_NO_PURPOSE = ("", "undefined")  # torch describes a group so if its maker has not


def purpose_of(group: Group) -> str:
    """Return what a group is for, in its maker's words; empty if these are not known."""
    return "" if group.description in _NO_PURPOSE else group.description


@dataclass(frozen=True)
class Dimension:
    """Two or more groups of one purpose and size, of which no two share a rank."""

    name: str
    groups: list[tuple[int, ...]]  # their ranks in group order, by the lowest rank
    place_of: dict[int, int] = field(repr=False)  # by rank, its place in its group
    group_of: dict[int, int] = field(repr=False)  # by rank, the index of its group

    @property
    def size(self) -> int:
        """The number of ranks of each group."""
        return len(self.groups[0])


def dimensions_of(groups: Iterable[Group]) -> list[Dimension]:
    """Return the dimensions that some groups make, in the order of their names and sizes."""
    by_purpose: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for group in groups:
        if len(group.ranks) > 1 and (purpose := purpose_of(group)):
            by_purpose.setdefault((purpose, len(group.ranks)), set()).add(group.ranks)
    return [
        _dimension(purpose.removeprefix(_MESH) or purpose, sorted(members, key=min))
        for (purpose, _), members in sorted(by_purpose.items())
        if len(members) > 1 and _are_disjoint(members)
    ]


def _are_disjoint(members: set[tuple[int, ...]]) -> bool:
    return len({rank for ranks in members for rank in ranks}) == sum(map(len, members))


def _dimension(name: str, groups: list[tuple[int, ...]]) -> Dimension:
    places = {rank: place for ranks in groups for place, rank in enumerate(ranks)}
    numbers = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    return Dimension(name, groups, places, numbers)

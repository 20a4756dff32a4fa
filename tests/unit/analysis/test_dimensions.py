"""The parallel dimensions of a job, by hand, and of a mesh that torch itself makes."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rankcall.analysis.dimensions import dimensions_of
from rankcall.analysis.folds import folds_of
from rankcall.ring.tables import Group


def group(description: str, *ranks: int) -> Group:
    """A group of Gloo with a description."""
    return Group(f"{description}-{ranks}", 0, "gloo", description, ranks)


def test_two_dimensions_and_the_whole_job() -> None:
    """Each rank has a place in each dimension; a group of all ranks divides nothing."""
    groups = [
        group("default_pg", 0, 1, 2, 3),
        group("mesh_tp", 2, 3),
        group("mesh_tp", 0, 1),
        group("DP", 1, 3),
        group("DP", 0, 2),
    ]
    first, second = dimensions_of(groups)
    assert (first.name, first.groups, first.size) == ("DP", [(0, 2), (1, 3)], 2)
    assert (first.place_of, first.group_of) == ({0: 0, 2: 1, 1: 0, 3: 1}, {0: 0, 2: 0, 1: 1, 3: 1})
    assert (second.name, second.groups) == ("tp", [(0, 1), (2, 3)])
    assert second.place_of == {0: 0, 1: 1, 2: 0, 3: 1}


def test_what_is_no_dimension() -> None:
    """Groups that share a rank, that nobody described, of one rank, or that stand alone."""
    assert dimensions_of([group("window", 0, 1), group("window", 1, 2)]) == []
    assert dimensions_of([group("", 0, 1), group("", 2, 3)]) == []
    assert dimensions_of([group("undefined", 0, 1), group("undefined", 2, 3)]) == []
    assert dimensions_of([group("mesh_tp", 0), group("mesh_tp", 1)]) == []
    assert dimensions_of([group("mesh_tp", 0, 1), group("mesh_tp", 0, 1)]) == []


def test_groups_of_different_sizes_are_different_dimensions() -> None:
    """A place among two says nothing of a place among three."""
    groups = [group("ep", 0, 1), group("ep", 2, 3), group("ep", 4, 5, 6), group("ep", 7, 8, 9)]
    assert [(each.name, each.size) for each in dimensions_of(groups)] == [("ep", 2), ("ep", 3)]


def test_folds_of_a_job() -> None:
    """Rows of hosts, of places and of groups; a dimension of two sizes has two titles."""
    hosts = {rank: f"node-{rank // 5}" for rank in range(10)}
    groups = [group("ep", 0, 1), group("ep", 2, 3), group("ep", 4, 5, 6), group("ep", 7, 8, 9)]
    by_host, *folds = folds_of(hosts, [*groups, group("tp", 0, 1), group("tp", 3, 2)])
    assert (by_host.title, by_host.names) == ("hosts", ["node-0", "node-1"])
    assert [by_host.row_of[rank] for rank in range(10)] == [0] * 5 + [1] * 5
    assert [fold.title for fold in folds] == [
        "ep of 2: places in the groups",
        "ep of 2: groups",
        "ep of 3: places in the groups",
        "ep of 3: groups",
        "tp: places in the groups",
        "tp: groups",
    ]
    assert (folds[0].names, dict(folds[0].row_of)) == (["ep 0", "ep 1"], {0: 0, 1: 1, 2: 0, 3: 1})
    assert (folds[4].names, dict(folds[4].row_of)) == (["tp 0", "tp 1"], {0: 0, 1: 1, 3: 0, 2: 1})
    assert folds[3].names == ["ranks 4-6", "ranks 7-9"]


def test_torchs_own_mesh() -> None:
    """``DeviceMesh`` describes its groups as ``dimensions_of`` expects."""
    for rank in (0, 5):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
            for name in ("dp", "tp"):
                mine = mesh.get_group(name)
                ranks = tuple(dist.get_process_group_ranks(mine))
                others = tuple(range(8, 8 + len(ranks)))
                description = str(mine.group_desc)
                (found,) = dimensions_of([group(description, *ranks), group(description, *others)])
                assert found.name == name
                assert found.place_of[rank] == mesh.get_local_rank(name)
        finally:
            dist.destroy_process_group()

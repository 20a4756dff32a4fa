"""The tree of call sites, compared with sums over the records themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rankcall.analysis.call_sites import SiteBranch, SiteRow
from rankcall.analysis.details import detail
from rankcall.run.load import load
from rankcall.testing.model import Op
from rankcall.testing.synthetic import synthetic_run

PROGRAM = (
    Op(message_bytes=1 << 20, line=41),
    Op("all_gather", 1 << 16, line=57),
    Op("broadcast", 4096, line=57, root=1),
    Op("reduce_scatter", 1 << 12, line=61),
)


def leaves(branches: list[SiteBranch]) -> Iterator[SiteRow]:
    """All lines below some branches."""
    for branch in branches:
        yield from branch.rows
        yield from leaves(branch.functions)


def test_each_site_once_and_sums_over_records(tmp_path: Path) -> None:
    """The leaves are the rows of the table; a branch is the busiest rank's sum below it."""
    synthetic_run(tmp_path / "run", 4, 40, program=PROGRAM, straggler=2)
    run = load(tmp_path / "run")
    details = detail(run)
    tree = details.site_tree
    assert sorted(map(str, leaves(tree))) == sorted(map(str, details.summary.call_sites))
    assert [branch.total_ms for branch in tree] == sorted(
        (branch.total_ms for branch in tree), key=lambda ms: -(ms or 0.0)
    )
    spent: dict[tuple[str, str], dict[int, float]] = {}
    calls: dict[tuple[str, str], int] = {}
    for ring in run.rings:
        records = ring.records
        sites = [ring.tables.sites[int(number)].own for number in records["call_site"]]
        lasts = records["completed_ns"].astype(np.int64) - records["started_ns"].astype(np.int64)
        for site, ns in zip(sites, lasts.tolist(), strict=True):
            key = site.file, site.function
            mine = spent.setdefault(key, {})
            mine[ring.header.rank] = mine.get(ring.header.rank, 0.0) + ns
            calls[key] = calls.get(key, 0) + 1
    found = {(file.name, each.name): each for file in tree for each in file.functions}
    assert set(found) == set(spent)
    for key, branch in found.items():
        assert branch.count == calls[key]
        assert branch.ranks == 4
        assert branch.total_ms is not None
        assert abs(branch.total_ms - max(spent[key].values()) / 1e6) < 1e-3
    for file in tree:
        assert file.count == sum(branch.count for branch in file.functions)
        assert file.rows == []

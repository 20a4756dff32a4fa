"""Figures add up, on any run: waiting, time, shares, totals and steps."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from figures import check
from worlds import Call, write_world

from rankcall.record import OPS
from rankcall.ring.tables import Group
from rankcall.run.load import Run, load
from rankcall.testing.model import Op, Pace
from rankcall.testing.synthetic import synthetic_run

ROOTED = ("broadcast", "scatter", "reduce", "gather")
COLLECTIVES = [op for op in OPS if op not in ("unknown", "send", "recv")]


def random_world(folder: Path, rng: np.random.Generator) -> Run:
    """Write records that need not make sense: overlaps, gaps, lost ends, several groups."""
    size = int(rng.integers(2, 6))
    groups = [Group("0", 0, "gloo", "default_pg", tuple(range(size)))]
    for number in range(int(rng.integers(0, 3))):
        members = rng.choice(size, int(rng.integers(2, size + 1)), replace=False)
        groups.append(Group(str(number + 1), 0, "gloo", "", tuple(sorted(members.tolist()))))
    calls: list[Call] = []
    seqs: dict[object, int] = defaultdict(int)
    for turn in range(int(rng.integers(1, 40))):
        group = groups[int(rng.integers(len(groups)))]
        start = turn * int(rng.integers(1, 3000))
        step = turn // 4
        if rng.random() < 0.4:
            source, target = rng.choice(len(group.ranks), 2, replace=False).tolist()
            seqs[group, source, target] += 1
            ends = ((source, target, "send"), (target, source, "recv"))
            seq = seqs[group, source, target]
            rows = [(group.ranks[a], {"op": op, "peer": b}) for a, b, op in ends]
        else:
            op = str(rng.choice(COLLECTIVES))
            root = int(rng.integers(len(group.ranks))) if op in ROOTED else -1
            seqs[group] += 1
            seq = seqs[group]
            rows = [(rank, {"op": op, "root": root}) for rank in group.ranks]
        for rank, fields in rows:
            if rng.random() < 0.05:
                continue
            at = start + int(rng.integers(1, 5000))
            end = None if rng.random() < 0.05 else at + int(rng.integers(1, 9000))
            calls.append(
                Call(rank, seq, at, end, group=group, step=step, line=turn % 5 + 1, **fields)  # type: ignore[arg-type]
            )
    calls.sort(key=lambda call: call.at)
    return load(write_world(folder, calls, world_size=size, ranks=range(size)))


def random_job(folder: Path, rng: np.random.Generator) -> Run:
    """Write a run that could be: a program that all ranks repeat, some of them late."""
    ranks = int(rng.integers(2, 9))
    families = {"pairs": [[n, n + 1] for n in range(0, ranks - 1, 2)]}
    program = []
    for line in range(int(rng.integers(1, 6))):
        name = str(rng.choice([*COLLECTIVES, "exchange"]))
        family = "pairs" if rng.random() < 0.3 and ranks % 2 == 0 else "world"
        program.append(Op(name, int(rng.integers(1, 1 << 20)), family, line=line + 1))
    synthetic_run(
        folder,
        ranks,
        int(rng.integers(4, 80)),
        hosts=int(rng.integers(1, 3)),
        groups=families,
        straggler=int(rng.integers(ranks)),
        straggler_ms=float(rng.choice([0.0, 1.0, 30.0])),
        program=program,
        per_step=int(rng.integers(0, 9)),
        pace=Pace(jitter_ms=float(rng.choice([0.01, 1.0]))),
        seed=int(rng.integers(1 << 30)),
    )
    return load(folder)


def check_seed(seed: int) -> None:
    """Check a random world and a random job."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        check(random_world(Path(folder) / "world", rng))
        check(random_job(Path(folder) / "job", rng))


@pytest.mark.parametrize("seed", range(12))
def test_figures_add_up(seed: int) -> None:
    """Waiting caused is waiting suffered; the parts are the whole; nothing is above 100 %."""
    check_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_figures_add_up_on_a_thousand_runs(block: int) -> None:
    """The same on 1,000 random runs: 500 random worlds and 500 random jobs."""
    for seed in range(100 + 50 * block, 150 + 50 * block):
        check_seed(seed)

"""Runs of live jobs that a test writes: the rings are synthetic, one real process owns them all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankcall.process import boot_id, process_start
from rankcall.ring.layout import offset_of
from rankcall.run.paths import make_live_dir
from rankcall.testing.model import Op, Planted
from rankcall.testing.synthetic import BOOT_NS, PROGRAM, synthetic_run

HUNG_S = 120


def live_run(
    folder: Path,
    ranks: int,
    pid: int,
    hosts: int = 1,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Path:
    """Write a run of ranks that hang for two minutes, and run: all in one process.

    Each family of ``groups`` issues collectives of its own.
    """
    offset = time.monotonic_ns() - BOOT_NS - HUNG_S * 10**9
    families = [Op("all_gather", 1 << 16, family=name, line=20) for name in groups or ()]
    synthetic_run(
        folder / "run",
        ranks,
        60,
        planted=Planted("missing", (ranks // 3,), 41),
        hung_s=HUNG_S,
        hosts=hosts,
        groups=groups,
        program=(*families, *PROGRAM),
        clock_offsets_ns=[offset] * hosts,
    )
    give_to(folder / "run", pid)
    return folder / "run"


def into_shared_memory(run: Path) -> Path:
    """Move the rings of a run into shared memory, and have them name the run; return it."""
    memory = make_live_dir(run)
    for ring in (run / "rings").iterdir():
        with ring.open("r+b") as file:
            file.seek(offset_of("run_dir"))
            file.write(str(run).encode().ljust(1024, b"\0"))
        ring.rename(memory / ring.name)
    return run


def give_to(run: Path, pid: int, rank: int | None = None) -> None:
    """Make a live process of this host the owner of all rings of a run, or of that of one rank."""
    theirs = {
        "pid": pid.to_bytes(4, "little"),
        "process_start": (process_start(pid) or 0).to_bytes(8, "little"),
        "boot_id": boot_id().encode().ljust(40, b"\0"),
    }
    for path in (run / "rings").glob("*" if rank is None else f"rank-{rank:05d}.*"):
        with path.open("r+b") as file:
            for name, value in theirs.items():
                file.seek(offset_of(name))
                file.write(value)

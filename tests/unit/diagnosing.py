"""What tests of verdicts share: worlds of calls that are diagnosed, and kept verdicts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from worlds import MS, START, Call, group_of, together, write_world

from rankcall.analysis.snapshot import ALIVE, RankState, Snapshot, no_calls
from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.decoding import decode
from rankcall.analysis.verdicts.diagnosis import Diagnosis
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.ring.layout import Header
from rankcall.ring.tables import Group
from rankcall.run.exits import Exit, note_exit
from rankcall.run.load import load
from rankcall.testing.model import Op, Planted
from rankcall.testing.synthetic import synthetic_run

SECOND = 1000 * MS
START_EPOCH_NS = 10**18  # the wall clock at START, as worlds.write_world anchors it


def unfinished(
    group: Group, seq: int, ranks: tuple[int, ...], at: int, **fields: object
) -> list[Call]:
    """Return one collective that ``ranks`` have entered and none of them has left."""
    return [Call(rank, seq, at, None, group=group, **fields) for rank in ranks]  # type: ignore[arg-type]


WORLD = group_of(4)
# Three collectives that all four ranks complete; then a fourth that rank 2 does not enter.
THREE_ENDED = [
    call for seq in (1, 2, 3) for call in together(seq, [0] * 4, seq * MS, WORLD, line=7)
]
RANK_2_MISSING = [*THREE_ENDED, *unfinished(WORLD, 4, (0, 1, 3), 5 * MS, line=7)]


def diagnose_calls(
    folder: Path,
    calls: list[Call],
    *,
    seconds: int = 70,
    states: dict[int, str] | None = None,
    beats: dict[int, float] | None = None,
    exits: dict[int, tuple[int, float]] | None = None,
    hang_after: float = 60,
    closed: Collection[int] = (),
    **options: object,
) -> Diagnosis:
    """Write a run with these calls, and diagnose it as of ``seconds`` after its start.

    Args:
        folder: The run is written to ``folder / "run"``.
        calls: The records of all ranks.
        seconds: When the diagnosis is made.
        states: The state of each rank's process; a rank that is not in it is alive. Without
            ``states``, every state is unknown.
        beats: When each rank's last heartbeat was, in seconds; by default, now.
        exits: Each rank's exit code and when it exited, in seconds.
        hang_after: After how many seconds a call counts as hung.
        closed: The ranks that have stopped recording.
        **options: Passed to ``worlds.write_world``.
    """
    ranks = {call.rank for call in calls} | set(options.get("ranks", ()))  # type: ignore[call-overload]
    last_beats = {rank: round((beats or {}).get(rank, seconds) * SECOND) for rank in ranks}
    run = write_world(
        folder / "run",
        calls,
        closed=lambda rank: rank in closed,
        beats={rank: (at, at) for rank, at in last_beats.items()},
        **options,  # type: ignore[arg-type]
    )
    for rank, (code, at) in (exits or {}).items():
        ended_ns = START_EPOCH_NS + round(at * SECOND)
        note_exit(run, Exit(rank, 0, "node-a", 1000 + rank, code, ended_ns))

    def state_of(header: Header) -> str:
        return "unknown" if states is None else states.get(header.rank, "alive")

    return diagnose(
        load(run), hang_after, state_of=state_of, now_ns=lambda: START + seconds * SECOND
    )


def diagnose_parallel_job(
    folder: Path, *planted: Planted, ranks: int = 1024, **options: object
) -> Diagnosis:
    """Diagnose a synthetic job of tensor- and data-parallel groups with these faults in it."""
    families = {
        "tp": [list(range(first, first + 8)) for first in range(0, ranks, 8)],
        "dp": [list(range(first, ranks, 8)) for first in range(8)],
    }
    program = (
        Op("all_reduce", 1 << 20, "tp", line=5),
        Op("all_gather", 1 << 20, "tp", line=6),
        Op("reduce_scatter", 1 << 20, "dp", line=7),
        Op("all_reduce", 8, line=8),
    )
    synthetic_run(
        folder / "run",
        ranks,
        80,
        hosts=ranks // 8,
        groups=families,
        program=program,
        planted=planted,
        **options,  # type: ignore[arg-type]
    )
    return diagnose(load(folder / "run"))


def causes(diagnosis: Diagnosis) -> list[tuple[str, tuple[int, ...]]]:
    """Return the kind and the culprits of each finding."""
    return [(finding.kind, finding.ranks) for finding in diagnosis.findings]


MISSING_AND_DESYNC = [
    Finding("missing", (2,), (0, 1, 3), ("node-a",), "0", 17, "all_reduce", "train.py:10", 61.0),
    Finding("desync", (), (0, 1), evidence=("one", "two")),
]


def received_verdict(findings: list[Finding], epoch_ns: int = 1) -> Verdict:
    """Return a verdict as one node receives it from another, a version 0.1 of rankcall."""
    ranks = [RankState(rank, "node-a", 10 + rank, state=ALIVE) for rank in range(4)]
    diagnosis = Diagnosis.of("run", Snapshot(ranks, no_calls()), findings, 60.0)
    origin = Origin(f"0@{epoch_ns}", epoch_ns=epoch_ns)
    return decode(encode(replace(diagnosis, origin=origin)))


def any_verdict(kept: Verdict) -> bool:
    """Say of every kept verdict that it is about the hang in question."""
    return True

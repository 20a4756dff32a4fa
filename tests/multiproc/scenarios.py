"""Scenarios: a sound program, the faults planted in it, and what a diagnosis has to say.

The expectations are written down from what is planted, never from what is found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import scenario_programs as programs
from scenario_programs import HANG_AFTER_S

from rankcall.testing import FaultPlan

Cause = tuple[str, tuple[int, ...]]  # kind, culprits
SLOW_KINDS = ("straggler", "slow_link")
P = FaultPlan()
# Those in `make test`: one or more of each verdict, within its time.
FAST = (
    "python-hang",
    "two-culprits",
    "three-deep",
    "stop-ddp",
    "data-run-out",
    "killed",
    "fails-in-turn",
    "skipped-and-seen-late",
    "wrong-shape",
    "both-receive",
    "opposite-order",
    "healthy",
    "checkpoint",
    "slow-first-step",
    "two-nodes-hang",
    "straggler-clocks-apart",
    "killed-clocks-apart",
)


@dataclass(frozen=True)
class Scenario:
    """One run. ``ends``: the job ends without being killed, and is also diagnosed afterwards."""

    name: str
    program: Callable[..., Any]
    plan: FaultPlan
    causes: tuple[Cause, ...] = ()
    world_size: int = 4
    ends: bool = False
    nodes: int = 1  # ranks are spread over them in blocks; each has a /dev/shm of its own
    init: bool = True
    hang_after: float = HANG_AFTER_S
    args: tuple[Any, ...] = field(default=())
    ahead: float = 0.0  # s that the clocks of the second half of the ranks are set ahead afterwards

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to find."""
        return not self.causes

    @property
    def slow(self) -> bool:
        """Whether it goes on all the same: the watcher has nothing to say."""
        return any(kind in SLOW_KINDS for kind, _ in self.causes)


Ends = partial(Scenario, ends=True)


def one(kind: str, *ranks: int) -> tuple[Cause, ...]:
    """Return a single cause."""
    return ((kind, ranks),)


MISSING = [
    Scenario("python-hang", programs.plain, P.hang(2, seq=20), one("missing", 2)),
    Scenario("rank-0-hangs", programs.plain, P.hang(0, seq=20), one("missing", 0)),
    Scenario("last-rank-of-8", programs.plain, P.hang(7, seq=25), one("missing", 7), 8),
    Scenario("ddp-hang", programs.ddp, P.hang(1, "all_reduce", 20), one("missing", 1)),
    Scenario("fsdp2-hang", programs.fsdp2, P.hang(3, "all_gather", 30), one("missing", 3)),
    Scenario(
        "fsdp2-hangs-in-backward",
        programs.fsdp2,
        P.hang(0, "reduce_scatter", 30),
        one("missing", 0),
    ),
    Scenario("tp-hang", programs.tensor_parallel, P.hang(2, "all_reduce", 8), one("missing", 2)),
    Scenario("pipeline-first", programs.pipeline, P.hang(0, "send", 9), one("missing", 0)),
    Scenario("pipeline-middle", programs.pipeline, P.hang(2, "send", 9), one("missing", 2)),
    Scenario(
        "two-culprits",
        programs.halves,
        P.hang(1, seq=5, group="left") + P.hang(2, seq=5, group="right"),
        (("missing", (1,)), ("missing", (2,))),
    ),
    Scenario(
        "two-in-one-collective",
        programs.plain,
        P.hang(1, seq=20) + P.hang(3, seq=20),
        one("missing", 1, 3),
    ),
    Scenario(
        "victims-elsewhere",
        programs.halves,
        P.hang(0, seq=6, group="left"),
        one("missing", 0),
    ),
    Scenario("three-deep", programs.chain, P.hang(0, seq=6, group="pair0"), one("missing", 0)),
    Scenario("seven-deep", programs.chain, P.hang(0, seq=6, group="pair0"), one("missing", 0), 8),
    Scenario("mesh-hang", programs.mesh, P.hang(5, seq=6, group="mesh_tp"), one("missing", 5), 8),
    Scenario("line-hang", programs.lines, P.hang(3, "send", 5), one("missing", 3)),
    Scenario("overdue-checkpoint", programs.overdue_checkpoint, P, one("missing", 0)),
]

STOPPED = [
    Scenario("stop", programs.plain, P.stop(2, seq=20), one("stopped", 2)),
    Scenario("stop-rank-0", programs.plain, P.stop(0, seq=20), one("stopped", 0)),
    Scenario("stop-ddp", programs.ddp, P.stop(3, "all_reduce", 17), one("stopped", 3)),
    Scenario("stop-pipeline", programs.pipeline, P.stop(1, "send", 7), one("stopped", 1)),
    Scenario(
        "gil-held",
        programs.plain,
        P.hang(1, seq=20, hold_gil=True),
        one("stopped", 1),
        hang_after=4.0,
    ),
    Scenario(
        "gil-held-mesh",
        programs.mesh,
        P.hang(2, seq=8, hold_gil=True),
        one("stopped", 2),
        hang_after=4.0,
    ),
    Scenario(
        "stop-and-hang",
        programs.halves,
        P.stop(0, seq=5, group="left") + P.hang(3, seq=5, group="right"),
        (("stopped", (0,)), ("missing", (3,))),
    ),
]

EXHAUSTED = [
    Ends("data-run-out", programs.plain, P.exhaust(1, after=6), one("exhausted", 1)),
    Ends("data-run-out-rank-0", programs.plain, P.exhaust(0, after=6), one("exhausted", 0)),
    Ends("data-run-out-ddp", programs.ddp, P.exhaust(2, after=6), one("exhausted", 2)),
    Ends("data-run-out-fsdp2", programs.fsdp2, P.exhaust(2, after=6), one("exhausted", 2)),
    Ends(
        "two-run-out",
        programs.plain,
        P.exhaust(1, after=6).exhaust(2, after=6),
        one("exhausted", 1, 2),
    ),
    Ends("leaves-with-0", programs.uniform, P.exit(3, seq=9), one("exhausted", 3)),
]

DEAD = [
    Ends("killed", programs.plain, P.kill(2, seq=20), one("dead", 2)),
    Ends("killed-rank-0", programs.plain, P.kill(0, seq=20), one("dead", 0)),
    Ends("segfault", programs.ddp, P.kill(1, "all_reduce", 17, signal=11), one("dead", 1)),
    Ends("exception", programs.plain, P.fail(3, seq=20), one("dead", 3)),
    Ends("exits-with-3", programs.plain, P.exit(1, seq=20, code=3), one("dead", 1)),
    Ends("fails-in-turn", programs.fails_in_turn, P.kill(2, seq=20), one("dead", 2)),
    Ends("killed-fsdp2", programs.fsdp2, P.kill(0, "reduce_scatter", 30), one("dead", 0)),
    Ends("killed-in-a-chain", programs.chain, P.kill(0, seq=6, group="pair0"), one("dead", 0)),
]

DESYNC = [
    Scenario("skipped-op", programs.plain, P.skip(1, "broadcast", 20), one("desync", 1)),
    Scenario("skipped-by-rank-0", programs.plain, P.skip(0, "all_gather", 20), one("desync", 0)),
    Scenario("skipped-and-seen-late", programs.uniform, P.skip(2, seq=5), one("desync", 2)),
    Scenario("swapped", programs.plain, P.swap(3, "all_reduce", 20), one("desync", 3)),
    Ends("counts-first", programs.evaluates, P.exhaust(2, after=6), one("mismatch", 2)),
]

MISMATCH = [
    Ends("wrong-shape", programs.plain, P.change(1, "shape", "all_gather", 20), one("mismatch", 1)),
    Ends(
        "wrong-dtype-ddp", programs.ddp, P.change(2, "dtype", "all_reduce", 20), one("mismatch", 2)
    ),
    Ends("wrong-dtype", programs.plain, P.change(3, "dtype", "all_reduce", 20), one("mismatch", 3)),
    Scenario(
        "wrong-root", programs.plain, P.change(2, "root", "broadcast", 20), one("mismatch", 2)
    ),
    Ends(
        "wrong-shape-fsdp2",
        programs.fsdp2,
        P.change(0, "shape", "reduce_scatter", 30),
        one("mismatch", 0),
    ),
]

DEADLOCK = [
    Scenario("both-receive", programs.both_receive, P, one("deadlock", 0, 1)),
    Scenario(
        "opposite-order",
        programs.twins,
        P.swap(1, seq=6, group="left"),
        one("deadlock", 0, 1, 2, 3),
    ),
    Scenario("wrong-tag", programs.lines, P.change(1, "tag", "send", 6), one("deadlock", 1, 2)),
    Scenario("send-left-out", programs.lines, P.skip(1, "send", 6), one("deadlock", 1, 2)),
]

HEALTHY = [
    Scenario("healthy", programs.plain, P),
    Scenario("healthy-ddp", programs.ddp, P, world_size=8),
    Scenario("healthy-fsdp2", programs.fsdp2, P),
    Scenario("healthy-pipeline", programs.pipeline, P),
    Scenario("healthy-mesh", programs.mesh, P, world_size=8),
    Scenario("checkpoint", programs.checkpoint, P),
    Scenario("compiles", programs.compiles, P),
    Scenario("slow-first-step", programs.slow_start, P),
    Scenario("long-compute", programs.long_compute, P),
    Scenario("lopsided", programs.lopsided, P),
    Scenario("late-joiner", programs.late_joiner, P, init=False),
    Scenario("unwaited-sends", programs.unwaited, P),
]

NODES = [
    Scenario("two-nodes-hang", programs.plain, P.hang(3, seq=20), one("missing", 3), nodes=2),
    Scenario(
        "two-nodes-stop",
        programs.chain,
        P.stop(0, seq=6, group="pair0"),
        one("stopped", 0),
        nodes=2,
    ),
    Scenario(
        "four-nodes-desync",
        programs.plain,
        P.skip(5, "broadcast", 20),
        one("desync", 5),
        8,
        nodes=4,
    ),
    Scenario("two-nodes-checkpoint", programs.checkpoint, P, nodes=2),
]

ALWAYS = 1 << 30
SLOW = [
    Scenario(
        "straggler",
        programs.plain,
        P.delay(2, seconds=0.1, times=ALWAYS),
        one("straggler", 2),
    ),
    Scenario(
        "straggler-rank-0-ddp",
        programs.ddp,
        P.delay(0, "all_reduce", seconds=0.1, times=ALWAYS),
        one("straggler", 0),
    ),
    Scenario(
        "straggler-clocks-apart",
        programs.plain,
        P.delay(2, seconds=0.1, times=ALWAYS),
        one("straggler", 2),
        ahead=1.0,
    ),
    Scenario("slow-link", programs.ring, P.slow_link(1, 2, seconds=0.2), one("slow_link", 1, 2)),
]

APART = [
    Ends("killed-clocks-apart", programs.plain, P.kill(2, seq=20), one("dead", 2), ahead=1.0),
    Ends(
        "data-run-out-clocks-apart",
        programs.plain,
        P.exhaust(1, after=6),
        one("exhausted", 1),
        ahead=-1.0,
    ),
    Ends(
        "wrong-shape-clocks-apart",
        programs.plain,
        P.change(1, "shape", "all_gather", 20),
        one("mismatch", 1),
        ahead=1.0,
    ),
    Scenario("healthy-clocks-apart", programs.plain, P, ahead=1.0),
]

ALL = [
    *MISSING,
    *STOPPED,
    *EXHAUSTED,
    *DEAD,
    *DESYNC,
    *MISMATCH,
    *DEADLOCK,
    *HEALTHY,
    *NODES,
    *SLOW,
    *APART,
]

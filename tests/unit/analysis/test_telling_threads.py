"""Which threads of a rank are asked for their stacks besides the one that trains."""

from __future__ import annotations

from pathlib import Path

from worlds import MS, PAIR, Call, Group, write_world

from rankcall.analysis.run_snapshot import snapshot_of_run
from rankcall.analysis.snapshot import telling_threads
from rankcall.record import FLAG_DEVICE
from rankcall.run.load import load
from rankcall.run.stack_text import AWAITED, IN_CALL

WORLD = PAIR
SAVERS = Group("1", 1, "gloo", "savers", (0, 1))
TRAINS, SAVES, THIRD = 10, 20, 30
DONE = [
    Call(rank, 1, at, at + MS, group=group, thread=thread)
    for rank in (0, 1)
    for at, group, thread in ((0, WORLD, TRAINS), (2 * MS, SAVERS, SAVES))
]


def telling(folder: Path, *calls: Call) -> dict[int, dict[int, str]]:
    """Return what is asked of the ranks of a world with these calls, besides those that ended."""
    write_world(folder, [*DONE, *calls], left=(0, 1))
    return telling_threads(snapshot_of_run(load(folder)))


def test_the_thread_of_the_group_that_waits(tmp_path: Path) -> None:
    """Rank 1's thread that saves has not come, though the one that trains went on since."""
    waits = Call(0, 2, 5 * MS, None, group=SAVERS, thread=SAVES)
    goes_on = [Call(rank, 2, 8 * MS, 9 * MS, group=WORLD, thread=TRAINS) for rank in (0, 1)]
    assert telling(tmp_path, waits, *goes_on) == {0: {SAVES: IN_CALL}, 1: {SAVES: AWAITED}}


def test_several_threads_that_are_waited_for(tmp_path: Path) -> None:
    """Which of them the verdict is about is not known, so none is marked."""
    waits = [
        Call(0, 2, 5 * MS, None, group=SAVERS, thread=SAVES),
        Call(0, 2, 6 * MS, None, group=WORLD, thread=THIRD),
    ]
    assert telling(tmp_path, *waits) == {0: {SAVES: IN_CALL, THIRD: IN_CALL}}


def test_a_call_on_a_device_blocks_no_thread(tmp_path: Path) -> None:
    """Its thread goes on as soon as it has issued; the missing rank's is asked all the same."""
    waits = Call(0, 2, 5 * MS, None, group=SAVERS, thread=SAVES, flags=FLAG_DEVICE)
    assert telling(tmp_path, waits) == {1: {SAVES: AWAITED}}


def test_nobody_is_behind(tmp_path: Path) -> None:
    """No thread is asked without a reason: each request is a signal."""
    assert telling(tmp_path) == {}
    unknown = Call(0, 2, 5 * MS, None, group=SAVERS, thread=0)
    assert telling(tmp_path / "unknown", unknown) == {}

"""Every fault of a plan, planted in real ranks: the rank does it, and the records show it."""

from __future__ import annotations

import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ranks import try_ranks
from world import wait_until

from rankcall import RankcallError, load
from rankcall.run.exits import read_exits
from rankcall.testing import FaultPlan, spawn_ranks, start_ranks

pytestmark = pytest.mark.multiproc
OPS = ("op", "seq", "dtype", "shape", "root", "reduce_op", "tag", "status")


def _few(rank: int, world_size: int) -> Any:
    """Issue three all_reduces, a broadcast and a message; return the results of the all_reduces."""
    import torch
    import torch.distributed as dist

    sums = []
    for value in (1.0, 2.0, 3.0):
        tensor = torch.full((3,), value)
        dist.all_reduce(tensor)
        sums.append(float(tensor[0]))
    dist.broadcast(torch.zeros(2), 0)
    if rank == 0:
        dist.isend(torch.ones(4), 1, tag=5).wait()
    elif rank == 1:
        dist.recv(torch.ones(4), 0, tag=5)
    return sums


def _rows(run_dir: Path, rank: int) -> list[tuple[Any, ...]]:
    records = load(run_dir).records
    return [tuple(row[name] for name in OPS) for row in records.to_dicts() if row["rank"] == rank]


def _settled(run_dir: Path, plan: FaultPlan, rank: int, count: int, fn: Any = _few) -> Any:
    """Run the plan until the rank has ``count`` records; return them while other ranks hang."""
    with start_ranks(fn, 2, faults=plan, run_dir=run_dir) as ranks:
        deadline = time.monotonic() + 20
        rows: list[tuple[Any, ...]] = []
        while len(rows) < count:
            assert time.monotonic() < deadline, rows
            assert ranks.pids
            if any(run_dir.glob("run.json")):
                try:
                    rows = _rows(run_dir, rank)
                except ValueError:
                    rows = []
    return rows[:count]


def test_nothing_happens_to_the_others(tmp_path: Path) -> None:
    """An empty plan and a plan for an absent rank change nothing."""
    for plan in (FaultPlan(), FaultPlan().stop(rank=7)):
        results = spawn_ranks(_few, 2, faults=plan, run_dir=tmp_path / str(bool(plan)))
        assert [result.value for result in results] == [[2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
def test_kill(tmp_path: Path, sig: signal.Signals) -> None:
    """The signal kills the rank before it issues the op, and the run has its exit code."""
    plan = FaultPlan().kill(rank=1, at="all_reduce", seq=2, signal=sig)
    results = spawn_ranks(_few, 2, faults=plan, run_dir=tmp_path / "run", check=False)
    assert results[1].exitcode == -sig
    assert [row[:2] for row in _rows(tmp_path / "run", 1)] == [("all_reduce", 1)]
    ends = {ended.rank: (ended.code, ended.by_launcher) for ended in read_exits(tmp_path / "run")}
    assert ends[1] == (-sig, False)


def test_stop(tmp_path: Path) -> None:
    """The rank stops before it issues the op."""
    plan = FaultPlan().stop(rank=1, at="broadcast")
    with start_ranks(_few, 2, faults=plan, run_dir=tmp_path / "run") as ranks:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{ranks.pids[1]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        # Afterwards it is continued to be ended, and may get to the op first.
        assert len(_rows(tmp_path / "run", 1)) == 3


def test_exit_and_fail(tmp_path: Path) -> None:
    """The call that would have issued the op raises SystemExit or the injected exception."""
    plan = FaultPlan().exit(rank=1, at="broadcast").fail(rank=0, at="broadcast", message="oh no")
    first, second = try_ranks(_few, 2, faults=plan, run_dir=tmp_path / "run")
    assert (second.exitcode, second.error) == (0, None)
    assert first.exitcode == 1
    assert first.error is not None
    assert "InjectedFault: oh no" in first.error
    assert "dist.broadcast(torch.zeros(2), 0)" in first.error
    ends = {(ended.rank, ended.pid): ended.code for ended in read_exits(tmp_path / "run")}
    assert ends == {(0, first.pid): 1, (1, second.pid): 0}


def _hung(run_dir: Path, gil_held: bool) -> bool:
    """Return whether rank 0 waits in its second op; if it does, check that rank 1 lacks the GIL."""
    try:
        rings = {head.header.rank: head.header for head in load(run_dir).heads}
    except RankcallError:
        return False  # there is no run yet
    if len(rings) < 2 or rings[0].head < 2:
        return False
    return not gil_held or time.monotonic_ns() - rings[1].python_heartbeat_ns > 2 * 10**9


@pytest.mark.parametrize("hold_gil", [False, True])
def test_hang(tmp_path: Path, hold_gil: bool) -> None:
    """The rank hangs in user code; if it holds the GIL, no Python thread runs."""
    plan = FaultPlan().hang(rank=1, at="all_reduce", seq=2, hold_gil=hold_gil)
    with start_ranks(_few, 2, faults=plan, run_dir=tmp_path / "run") as ranks:
        wait_until(lambda: _hung(tmp_path / "run", hold_gil))
        assert not ranks.wait(0.5)
    (ring,) = [ring for ring in load(tmp_path / "run").rings if ring.header.rank == 1]
    assert len(ring.records) == 1
    assert ring.header.closed_ns == 0


def test_delay(tmp_path: Path) -> None:
    """The rank sleeps for ``seconds`` before each of ``times`` ops."""
    plan = FaultPlan().delay(rank=1, at="all_reduce", seconds=1.0, times=2)
    spawn_ranks(_few, 2, faults=plan, run_dir=tmp_path / "run")
    rows = [row for row in load(tmp_path / "run").records.to_dicts() if row["rank"] == 1][:3]
    between = [(b["enqueued_ns"] - a["completed_ns"]) / 1e9 for a, b in pairwise(rows)]
    assert between[0] >= 1.0
    assert between[1] < 1.0


def test_skip(tmp_path: Path) -> None:
    """The op is not issued, the program goes on, and its sequence numbers are one too low."""
    rows = _settled(tmp_path / "run", FaultPlan().skip(rank=1, at="all_reduce", seq=2), 1, 3)
    assert [row[:2] for row in rows] == [("all_reduce", 1), ("all_reduce", 2), ("broadcast", 3)]


def _two_ways(rank: int, world_size: int) -> None:
    """Overlap an asynchronous all_reduce and a broadcast, as data parallel code does."""
    import torch
    import torch.distributed as dist

    first = dist.all_reduce(torch.ones(3), async_op=True)
    second = dist.broadcast(torch.ones(5), 0, async_op=True)
    assert first is not None
    assert second is not None
    first.wait()
    second.wait()


def test_swap(tmp_path: Path) -> None:
    """The rank issues the two ops in the opposite order."""
    plan = FaultPlan().swap(rank=1, at="all_reduce")
    rows = _settled(tmp_path / "run", plan, 1, 2, _two_ways)
    assert [row[:2] for row in rows] == [("broadcast", 1), ("all_reduce", 2)]


@pytest.mark.parametrize(
    ("what", "at", "column", "value"),
    [
        ("shape", "all_reduce", "shape", "[6]"),
        ("dtype", "all_reduce", "dtype", "float64"),
        ("reduce_op", "all_reduce", "reduce_op", "max"),
        ("root", "broadcast", "root", 1),
        ("tag", "recv", "tag", 6),
    ],
)
def test_change(tmp_path: Path, what: str, at: str, column: str, value: Any) -> None:
    """The op is issued and recorded with exactly one argument changed."""
    plan = FaultPlan().change(rank=1, what=what, at=at)
    count = {"all_reduce": 1, "broadcast": 4, "recv": 5}[at]
    (row,) = _settled(tmp_path / "run", plan, 1, count)[-1:]
    assert row[0] == at
    assert row[OPS.index(column)] == value


def test_exhaust() -> None:
    """One rank's data end early; those of other ranks and other plans do not."""
    plan = FaultPlan().exhaust(rank=1, after=2).exhaust(rank=2, after=0)
    assert [list(plan.batches("abcd", rank)) for rank in range(4)] == [
        list("abcd"),
        ["a", "b"],
        [],
        list("abcd"),
    ]


def _send_slowly(rank: int, world_size: int) -> None:
    import torch
    import torch.distributed as dist

    for _ in range(2):
        dist.barrier()
        if rank == 0:
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)


def test_slow_link(tmp_path: Path) -> None:
    """Receives from that rank take longer, also in the records."""
    plan = FaultPlan().slow_link(0, 1, seconds=0.2)
    spawn_ranks(_send_slowly, 2, faults=plan, run_dir=tmp_path / "run")
    rows = [row for row in load(tmp_path / "run").records.to_dicts() if row["op"] == "recv"]
    assert len(rows) == 2
    assert all(row["completed_ns"] - row["enqueued_ns"] > 0.19e9 for row in rows)


def _armed_late(rank: int, world_size: int, run_dir: str) -> list[str]:
    import rankcall
    from rankcall.capture import session

    messages = []
    with rankcall.enable(run_dir, capture="native"):
        try:
            FaultPlan().arm()
        except rankcall.errors.CaptureUnavailableError as error:
            messages.append(str(error))
    with FaultPlan().arm():
        try:
            FaultPlan().arm()
        except rankcall.errors.CaptureUnavailableError as error:
            messages.append(str(error))
    assert session.current() is None
    return messages


def test_what_cannot_be_armed(tmp_path: Path) -> None:
    """Under the native capture or a second plan, ``arm`` raises and leaves nothing behind."""
    (result,) = spawn_ranks(_armed_late, 1, str(tmp_path / "run"))
    native, second = result.value
    assert native == (
        "faults cannot be planted: the native capture is recording: set RANKCALL_CAPTURE=python"
    )
    assert second == "faults cannot be planted: another plan is armed"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FaultPlan().stop(rank=-1), "a fault needs a rank from 0 on; got -1"),
        (lambda: FaultPlan().stop(rank=0, at="allreduce"), "unknown op 'allreduce'"),
        (lambda: FaultPlan().stop(rank=0, seq=0), "count from 1; got 0"),
        (lambda: FaultPlan().delay(rank=0, seconds=-1), "must be at least 0 seconds; got -1"),
        (lambda: FaultPlan().delay(rank=0, seconds=1, times=0), "times must be 1 or more; got 0"),
        (lambda: FaultPlan().change(0, "size"), "cannot change 'size'; choose one of shape"),
        (lambda: FaultPlan().exhaust(0, after=-1), "after must be 0 or more batches; got -1"),
    ],
)
def test_plans_that_make_no_sense(make: Any, message: str) -> None:
    """A plan refuses wrong values when they are given."""
    with pytest.raises(ValueError, match=message):
        make()

"""Killed and stopped ranks, full and read-only places, no compiler: records can still be read."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks import Result, run_ranks, try_ranks
from world import here, plain, wait_until

from rankcall import load
from rankcall.run.paths import live_dir
from rankcall.run.settle import settle

pytestmark = pytest.mark.multiproc
CAPTURES = ("native", "python")


@pytest.fixture(params=CAPTURES)
def env(request: pytest.FixtureRequest) -> dict[str, str | None]:
    """Run on both captures."""
    return {"RANKCALL_CAPTURE": request.param}


def _rows(run_dir: str | Path, rank: int) -> list[dict[str, Any]]:
    rows = [plain(row) for row in load(run_dir).records.to_dicts()]
    return [row for row in rows if row["rank"] == rank]


def _ended(recording: Any, count: int) -> None:
    wait_until(lambda: recording.capture.counts()[1] >= count)


# --- ranks that have ended or do not run ---


def _stand_still(rank: int, world_size: int, run_dir: str, how: int) -> Any:
    """Rank 1 stops or kills itself with an op in flight; rank 0 reads a stopped one's ring."""
    import torch
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir)
    store = dist.distributed_c10d._get_default_store()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    if rank == 1:
        line = here()
        work = dist.irecv(torch.zeros(5), 0)
        _ended(recording, 3)
        store.set("standing", f"{os.getpid()} {line}")
        os.kill(os.getpid(), how)
        work.wait()
        return None
    pid, line = map(int, store.get("standing").split())
    wait_until(lambda: _state(pid) in "TZX")
    rows = _rows(run_dir, 1)
    if how == signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
        dist.send(torch.ones(5), 1)
    rankcall.disable()
    return {"rows": rows, "line": line}


def _state(pid: int) -> str:
    """Return a process's state as proc(5) has it, or X if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_the_last_op_of_a_rank_that_stands_still(
    tmp_path: Path, env: dict[str, str | None], how: signal.Signals
) -> None:
    """Another process reads all it did, and what it was in the middle of."""
    run_dir = tmp_path / "run"
    reader, subject = try_ranks(_stand_still, 2, str(run_dir), int(how), env=env)
    assert reader.value is not None, (reader.error, reader.stderr, subject.error)
    assert subject.exitcode == (-signal.SIGKILL if how == signal.SIGKILL else 0)
    settle(run_dir)
    left = _rows(run_dir, 1)
    for rows in (reader.value["rows"], left):
        *done, last = rows
        assert [(row["op"], row["seq"], row["status"]) for row in done] == [
            ("all_reduce", seq, "completed") for seq in (1, 2, 3)
        ]
        assert (last["op"], last["peer"], last["out_bytes"]) == ("recv", 0, 20)
        assert last["call_site"] == f"{__file__}:{reader.value['line']}"
    assert reader.value["rows"][-1]["status"] == "started"
    assert reader.value["rows"][-1]["completed_ns"] is None
    assert left[-1]["status"] == ("completed" if how == signal.SIGSTOP else "started")


def _lap(rank: int, world_size: int, run_dir: str) -> Any:
    """Rank 0 has a receive in flight while its ring of 64 goes round three times."""
    import torch
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir, capacity=64)
    take = torch.zeros(5)
    work = dist.irecv(take, 1, tag=4) if rank == 0 else None
    for _ in range(200):
        dist.all_reduce(torch.ones(1))
    if work is None:
        dist.barrier()
        dist.send(torch.ones(5), 0, tag=4)
        rankcall.disable()
        return None
    _ended(recording, 200)
    before = load(run_dir)
    during = [plain(row) for row in before.records.to_dicts() if row["rank"] == 0]
    dist.barrier()
    work.wait()
    _ended(recording, 202)
    rankcall.disable()
    return {"during": during, "dropped": before.dropped[0]}


def test_lapping_an_op_in_flight(tmp_path: Path, env: dict[str, str | None]) -> None:
    """It moves to the in-flight table, is found there, and gets its end there."""
    observed, _ = run_ranks(_lap, 2, str(tmp_path / "run"), env=env)
    first, *others = observed["during"]
    assert (first["index"], first["op"], first["status"]) == (0, "recv", "started")
    assert (first["peer"], first["tag"], first["completed_ns"]) == (1, 4, None)
    assert [row["index"] for row in others] == list(range(137, 201))
    assert [row["seq"] for row in others] == list(range(137, 201))
    assert observed["dropped"] == 201 - 65
    ended, *_ = _rows(tmp_path / "run", 0)
    assert (ended["index"], ended["status"]) == (0, "completed")
    assert ended["completed_ns"] > first["enqueued_ns"]


# --- places that are full or read-only ---


def _few_ops(rank: int, world_size: int, run_dir: str) -> Any:
    import torch
    import torch.distributed as dist

    import rankcall

    recording = rankcall.enable(run_dir)
    for _ in range(5):
        dist.all_reduce(torch.ones(2))
    issued, capacity = recording.capture.counts()[0], recording.geometry.capacity
    name, path = recording.capture.name, str(recording.path)
    dist.destroy_process_group()
    rankcall.disable()
    return {"issued": issued, "capacity": capacity, "capture": name, "path": path}


def _said(results: list[Result]) -> list[str]:
    """Return what rankcall said on any rank; every rank must have done its work."""
    for result in results:
        assert result.ok, result.error
        assert result.value["issued"] == 5
    lines = [line for result in results for line in result.stderr.splitlines()]
    return [line for line in lines if line.startswith("rankcall: ")]


def test_no_room_for_a_ring(tmp_path: Path, env: dict[str, str | None], mounted: Any) -> None:
    """The ring is a file of the run directory. One warning says what gives more room."""
    full = {**env, "RANKCALL_SHM": str(mounted("size=64k"))}
    (warning,) = _said(try_ranks(_few_ops, 2, str(tmp_path / "run"), env=full))
    assert "No space left on device" in warning
    assert "--shm-size" in warning
    assert "RANKCALL_SHM" in warning
    assert warning.endswith(f": the ring is kept in {tmp_path / 'run' / 'rings'}")
    assert [len(_rows(tmp_path / "run", rank)) for rank in (0, 1)] == [5, 5]


def test_no_room_anywhere(env: dict[str, str | None], mounted: Any) -> None:
    """The job goes on, recorded in memory only, and learns that its records cannot be kept."""
    full, run_dir = {**env, "RANKCALL_SHM": str(mounted("size=64k"))}, mounted("size=96k") / "run"
    memory_only, lost = _said(try_ranks(_few_ops, 1, str(run_dir), env=full))
    assert memory_only.count("No space left on device") == 2  # in both places
    assert "recording goes on in memory only" in memory_only
    assert "the records of this rank cannot be kept" in lost


@pytest.mark.parametrize("ranks", [2, 6])
def test_little_room_for_a_ring(
    tmp_path: Path, env: dict[str, str | None], mounted: Any, ranks: int
) -> None:
    """The ranks share the room: each has a smaller ring, with one warning, and records it all."""
    place = mounted("size=1m")
    tight = {**env, "RANKCALL_SHM": str(place), "LOCAL_WORLD_SIZE": str(ranks)}
    results = try_ranks(_few_ops, ranks, str(tmp_path / "run"), env=tight)
    (warning,) = _said(results)
    assert "each ring holds" in warning
    assert "--shm-size" in warning
    assert all(result.value["capacity"] < 1 << 14 for result in results)
    assert all(Path(result.value["path"]).is_relative_to(place) for result in results)
    assert all(len(_rows(tmp_path / "run", rank)) == 5 for rank in range(ranks))


def test_read_only_tmpfs(tmp_path: Path, env: dict[str, str | None], mounted: Any) -> None:
    """Without a place in memory, the ring is a file of the run directory, with one warning."""
    ro = {**env, "RANKCALL_SHM": str(mounted("ro"))}
    (warning,) = _said(try_ranks(_few_ops, 2, str(tmp_path / "run"), env=ro))
    assert warning.endswith(
        f"Read-only file system: the ring is kept in {tmp_path / 'run' / 'rings'}"
    )
    assert [len(_rows(tmp_path / "run", rank)) for rank in (0, 1)] == [5, 5]


def test_read_only_run_directory(tmp_path: Path, env: dict[str, str | None], mounted: Any) -> None:
    """Records that cannot be moved stay readable in their place, which one warning names."""
    run_dir = mounted("ro") / "run"
    (warning,) = _said(try_ranks(_few_ops, 2, str(run_dir), env=env))
    place = live_dir(run_dir)
    assert warning.endswith(f"records stay in {place}")
    assert [len(_rows(place, rank)) for rank in (0, 1)] == [5, 5]
    shutil.rmtree(place)


# --- no native recorder ---


def _without_compiler(tmp_path: Path, **more: str) -> dict[str, str | None]:
    return {"RANKCALL_CACHE": str(tmp_path / "cache"), "PATH": str(tmp_path), "CXX": None, **more}


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({}, "there is no C++ compiler"),
        ({"CXX": "false"}, "failed"),
        ({"RANKCALL_CACHE": "/proc/nowhere"}, "cannot be written"),
    ],
    ids=["no compiler", "a compiler that fails", "unwritable cache"],
)
def test_python_records_instead(tmp_path: Path, broken: dict[str, str], reason: str) -> None:
    """One line says why, and everything is recorded."""
    broken = {key: shutil.which(value) or value for key, value in broken.items()}
    env = _without_compiler(tmp_path, **broken)
    results = try_ranks(_few_ops, 2, str(tmp_path / "run"), env=env)
    (warning,) = _said(results)
    assert warning.startswith(
        "rankcall: the native recorder is not available, recording in Python: "
    )
    assert reason in warning
    assert {result.value["capture"] for result in results} == {"python"}
    assert [len(_rows(tmp_path / "run", rank)) for rank in (0, 1)] == [5, 5]
    assert load(tmp_path / "run").ranks["capture"].to_list() == ["python", "python"]


def _refused(rank: int, world_size: int, run_dir: str) -> Any:
    import torch
    import torch.distributed as dist

    import rankcall
    from rankcall.capture import session

    try:
        rankcall.enable(run_dir)
    except (rankcall.errors.CaptureUnavailableError, ValueError) as error:
        dist.all_reduce(torch.ones(1))
        assert session.current() is None
        return [type(error).__name__, str(error)]
    return None


def _leftovers(run_dir: Path) -> list[Path]:
    return sorted(live_dir(run_dir).glob("*")) + sorted(run_dir.glob("rings/*"))


def test_native_by_name_without_a_compiler(tmp_path: Path) -> None:
    """The user named this capture, so its absence is an error, and no other capture takes over."""
    env = _without_compiler(tmp_path, RANKCALL_CAPTURE="native")
    ((kind, text),) = run_ranks(_refused, 1, str(tmp_path / "run"), env=env)
    assert kind == "CaptureUnavailableError"
    assert text.startswith("there is no C++ compiler (tried $CXX, c++, g++, clang++); install")
    assert text.endswith("compiled libraries")  # why none of a wheel is taken
    left = _leftovers(tmp_path / "run")
    shutil.rmtree(live_dir(tmp_path / "run"), ignore_errors=True)
    assert left == []


def test_an_unknown_capture(tmp_path: Path) -> None:
    """The error names what there is."""
    env = {"RANKCALL_CAPTURE": "rust"}
    ((kind, text),) = run_ranks(_refused, 1, str(tmp_path / "run"), env=env)
    assert kind == "ValueError"
    assert text == "capture must be one of auto, native, python; got 'rust'"
    assert not (tmp_path / "run").exists()

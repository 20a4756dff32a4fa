"""The watcher in real jobs: what it does with a verdict, what it survives, what it leaves alone."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import try_ranks
from scenario_programs import HANG_AFTER_S, own_store, plain
from world import wait_until

from rankcall.analysis.diagnosis import diagnose
from rankcall.run import load
from rankcall.rundir import settle
from rankcall.testing import FaultPlan, Ranks, spawn_ranks, start_ranks
from rankcall.watch import ABORT_STATUS

pytestmark = pytest.mark.multiproc
HANG = FaultPlan().hang(rank=1, seq=20)


def _verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(each.read_text()) for each in sorted(run_dir.glob("hangs/*/verdict.json"))]


def _causes(verdict: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(each["kind"], each["ranks"]) for each in verdict["findings"]]


def test_report(tmp_path: Path) -> None:
    """One verdict on one rank's stderr, kept with everybody's stacks; the job hangs on."""
    run = tmp_path / "run"
    with start_ranks(
        plain, 3, HANG, faults=HANG, run_dir=run, watch={"hang_after": HANG_AFTER_S}
    ) as ranks:
        wait_until(lambda: _verdicts(run))
        time.sleep(2.0)  # in which it looks again; it must have nothing new to say
        assert all(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [1])]
    told = [each.stderr.count("kept with all stacks in") for each in ranks.results]
    assert sorted(told) == [0, 0, 1]
    stacks = {each.name: each.read_text() for each in run.glob("hangs/0001/stacks/*")}
    assert sorted(stacks) == [f"rank-0000{rank}.txt" for rank in range(3)]
    assert "in _carry_out" in stacks["rank-00001.txt"]
    assert "in plain" in stacks["rank-00000.txt"]
    (text,) = [each.stderr for each in ranks.results if "kept with" in each.stderr]
    assert "missing: Rank 1 (" in text
    assert "scenario_programs.py" in text


def test_abort(tmp_path: Path) -> None:
    """Every rank ends: with the status that says so, or because another one did."""
    watch = {"hang_after": HANG_AFTER_S, "on_hang": "abort"}
    results = try_ranks(plain, 3, HANG, faults=HANG, run_dir=tmp_path / "run", watch=watch)
    codes = [each.exitcode for each in results]
    assert ABORT_STATUS in codes
    assert set(codes) <= {ABORT_STATUS, 1}
    for each in results:
        assert (each.exitcode == ABORT_STATUS) == ("ends because the job hangs" in each.stderr)
    found = diagnose(load(tmp_path / "run"), HANG_AFTER_S).findings
    assert [(each.kind, each.ranks) for each in found] == [("missing", (1,))]


def _called_back(rank: int, world_size: int, folder: str) -> None:
    """Write down the findings, and raise: the watcher takes that, and logs it."""
    import logging

    from rankcall import watch

    logged = logging.FileHandler(Path(folder) / f"log.{rank}", delay=True)
    logging.getLogger("rankcall.watch").addHandler(logged)

    def told(findings: list[Any]) -> None:
        found = [(each.kind, each.ranks) for each in findings]
        (Path(folder) / f"told.{rank}").write_text(repr(found))
        raise ValueError("from on_hang")

    watch.start(hang_after=HANG_AFTER_S, on_hang=told)
    plain(rank, world_size, FaultPlan())


def test_a_function_where_the_run_cannot_be_written(tmp_path: Path) -> None:
    """It is called all the same, and the verdict is found: a full disk hangs jobs, too."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "hangs").write_text("in the way")
    told = [tmp_path / f"told.{rank}" for rank in range(3)]
    with start_ranks(_called_back, 3, str(tmp_path), faults=HANG, run_dir=run):
        wait_until(lambda: all(_text(file) for file in told))
    assert {file.read_text() for file in told} == {"[('missing', (1,))]"}
    (kept,) = diagnose(load(run), HANG_AFTER_S).kept
    assert kept.causes == (("missing", (1,)),)
    assert kept.stacks == 3
    (run / "hangs").unlink()
    settle(run)
    (moved,) = diagnose(load(run), HANG_AFTER_S).kept
    assert moved == replace(kept, place=str(run / "hangs/0001"))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_function(tmp_path: Path) -> None:
    """It is called on every rank with the findings; what it raises goes to the log."""
    files, logs = ([tmp_path / f"{name}.{rank}" for rank in range(3)] for name in ("told", "log"))
    with start_ranks(_called_back, 3, str(tmp_path), faults=HANG, run_dir=tmp_path / "run"):
        wait_until(lambda: all("ValueError" in _text(log) for log in logs))
    assert {file.read_text() for file in files} == {"[('missing', (1,))]"}
    assert all("on_hang failed; the watcher goes on" in _text(log) for log in logs)


def _starts_and_stops(rank: int, world_size: int, run_dir: str) -> Any:
    import os
    import threading

    from rankcall import watch
    from rankcall.capture import session

    def names() -> list[str]:
        return sorted(each.name for each in threading.enumerate())

    before, seen = names(), []
    first = watch.start(hang_after=5, run_dir=run_dir)
    second = watch.start(hang_after=6)
    seen.append(names().count("rankcall-watch"))
    first.stop()
    seen.append(names().count("rankcall-watch"))
    pid = os.fork()
    if pid == 0:
        os._exit(names().count("rankcall-watch"))
    seen.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    second.stop()
    with watch.start(run_dir=run_dir):
        pass
    return {"seen": seen, "left": sorted(set(names()) - set(before)), "on": bool(session.current())}


def test_start_and_stop(tmp_path: Path) -> None:
    """The second takes the place of the first; a fork has none; nothing is left in the end."""
    (result,) = spawn_ranks(_starts_and_stops, 1, str(tmp_path / "run"))
    assert result.value == {"seen": [1, 1, 0], "left": [], "on": False}


def _bad_arguments(rank: int, world_size: int) -> list[str]:
    import os

    from rankcall import watch

    said = []
    bad: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"hang_after": 0}, {}),
        ({"hang_after": float("nan")}, {}),
        ({"on_hang": "explode"}, {}),
        ({"on_hang": 7}, {}),
        ({}, {"RANKCALL_HANG_AFTER": "soon"}),
        ({}, {"RANKCALL_ON_HANG": "explode"}),
    ]
    for arguments, env in bad:
        os.environ.update(env)
        try:
            watch.start(**arguments)
        except (ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        for name in env:
            del os.environ[name]
    return said


def test_bad_arguments() -> None:
    """Each is refused with what it should be."""
    (result,) = spawn_ranks(_bad_arguments, 1)
    assert result.value == [
        "ValueError: hang_after must be a number of seconds above 0; got 0",
        "ValueError: hang_after must be a number of seconds above 0; got nan",
        "ValueError: on_hang must be report, abort or a function; got 'explode'",
        "TypeError: on_hang must be a word or a function; got int",
        "ValueError: RANKCALL_HANG_AFTER must be a number of seconds, 0 for off; got 'soon'",
        "ValueError: on_hang must be report, abort or a function; got 'explode'",
    ]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Any]:
    """Give ranks 0-1 and ranks 2-3 a host name and a place for live rings each."""
    import os

    base = Path(os.environ["RANKCALL_SHM"])
    places = [base / f"{tmp_path.name}-{number}" for number in range(2)]
    for place in places:
        place.mkdir()
    yield lambda rank: {
        "RANKCALL_HOST": f"node-{rank // 2}",
        "RANKCALL_SHM": str(places[rank // 2]),
    }
    for place in places:
        shutil.rmtree(place)


def _told_with_stacks(ranks: Ranks, run: Path) -> bool:
    """Tell whether a verdict was printed and all four ranks' stacks are kept."""
    said = [_text(each) for each in ranks.folder.glob("stderr.*")]
    printed = any("kept with all stacks in" in text for text in said)
    return printed and len(list(run.glob("hangs/0001/stacks/*"))) == 4


def test_two_nodes_speak_with_one_voice(tmp_path: Path, two_nodes: Any) -> None:
    """One verdict in the run, with the stacks of both nodes, printed by one rank."""
    plan, run = FaultPlan().hang(rank=3, seq=20), tmp_path / "run"
    with start_ranks(
        plain, 4, plan, faults=plan, run_dir=run, watch={"hang_after": HANG_AFTER_S},
        env=two_nodes,
    ) as ranks:  # fmt: skip
        wait_until(lambda: _told_with_stacks(ranks, run))
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [3])]
    assert sum(each.stderr.count("kept with all stacks in") for each in ranks.results) == 1


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "stopped"])
def test_the_host_of_the_store(tmp_path: Path, two_nodes: Any, how: str) -> None:
    """Rank 0 hosts the store and is gone: the other node says what it knows, and that it is so."""
    plan = FaultPlan().hang(rank=3, seq=5, group="right")
    doomed = {"killed": plan.kill, "stopped": plan.stop}[how](rank=0, seq=5, group="left")
    run = tmp_path / "run"
    with start_ranks(
        own_store, 4, doomed, str(tmp_path / "port"), "halves", faults=doomed, run_dir=run,
        watch={"hang_after": HANG_AFTER_S}, env=two_nodes, init=False,
    ):  # fmt: skip
        wait_until(lambda: any("missing" in repr(_causes(each)) for each in _verdicts(run)))
    verdict, *_ = [each for each in _verdicts(run) if "missing" in repr(_causes(each))]
    # Rank 0 may be named beside it, as one that nothing is known of.
    assert _causes(verdict)[0] == ("missing", [3])
    assert {rank for _, ranks in _causes(verdict) for rank in ranks} <= {0, 3}
    port = (tmp_path / "port").read_text()
    assert any(f":{port} cannot be reached" in text for text in verdict["problems"])


def _once_signed_on(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Begin when every node has told the others who is on it."""
    from rankcall.watch._judge import _own_store

    store = _own_store()

    def signed() -> set[int]:
        keys = [f"node/{number}" for number in range(1, int(store.add("nodes", 0)) + 1)]
        parts = [json.loads(store.get(key)) for key in keys if store.check([key])]
        return {rank for part in parts for rank, _, _ in part}

    wait_until(lambda: len(signed()) == world_size)
    plain(rank, world_size, plan)


def test_a_node_that_stands_still(tmp_path: Path, two_nodes: Any) -> None:
    """A host that is frozen with all its ranks is named by the others, with its ranks' pids."""
    still = FaultPlan().stop(rank=2, seq=20).stop(rank=3, seq=20)
    run = tmp_path / "run"
    with start_ranks(
        _once_signed_on, 4, still, faults=still, run_dir=run, watch={"hang_after": HANG_AFTER_S},
        env=two_nodes,
    ) as ranks:  # fmt: skip
        wait_until(lambda: _verdicts(run))
        pids = ranks.pids
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [2, 3])]
    (found,) = verdict["findings"]
    assert found["hosts"] == ["node-1"]
    assert found["confidence"] == "likely"
    assert "Ranks 2-3 (node-1) do not answer" in found["summary"]
    assert "See whether node-1 is up" in found["advice"]
    assert [each["pid"] for each in verdict["ranks"]] == pids


def _in_another_time(rank: int, world_size: int, run_dir: str) -> None:
    """Hang for rank 3, on a node whose clock is an hour behind the first one's."""
    import torch
    import torch.distributed as dist

    from rankcall import watch

    if rank >= 2:
        epoch_ns, epoch = time.time_ns, time.time
        time.time_ns, time.time = lambda: epoch_ns() - 3600 * 10**9, lambda: epoch() - 3600
    watch.start(hang_after=HANG_AFTER_S, run_dir=run_dir)
    for _ in range(10):
        dist.all_reduce(torch.ones(1))
    if rank == 3:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def test_clocks_an_hour_apart(tmp_path: Path, two_nodes: Any) -> None:
    """Two nodes whose clocks do not agree do, and say it once."""
    run = tmp_path / "run"
    with start_ranks(_in_another_time, 4, str(run), env=two_nodes) as ranks:
        wait_until(lambda: _told_with_stacks(ranks, run))
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [3])]
    assert sum(each.stderr.count("kept with all stacks in") for each in ranks.results) == 1

"""The watcher in real jobs: reports, aborts, callbacks, failures around it, and several nodes."""

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

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.encoding import encode
from rankcall.analysis.verdicts.finding import Finding
from rankcall.analysis.verdicts.verdict import Origin, Verdict
from rankcall.job.watcher import ABORT_STATUS
from rankcall.packed_json import pack
from rankcall.run.load import load
from rankcall.run.settle import settle
from rankcall.testing import FaultPlan, Ranks, spawn_ranks, start_ranks

pytestmark = pytest.mark.multiproc
HANG = FaultPlan().hang(rank=1, seq=20)


def _verdicts(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(run_dir.glob("hangs/*/verdict.json"))]


def _causes(verdict: dict[str, Any]) -> list[tuple[str, list[int]]]:
    return [(finding["kind"], finding["ranks"]) for finding in verdict["findings"]]


def test_report(tmp_path: Path) -> None:
    """One rank prints one verdict, which is kept with all ranks' stacks; the job stays as it is."""
    run = tmp_path / "run"
    with start_ranks(
        plain, 3, HANG, faults=HANG, run_dir=run, watch={"hang_after": HANG_AFTER_S}
    ) as ranks:
        wait_until(lambda: _verdicts(run))
        time.sleep(2.0)  # the watcher judges again in this time, and must not repeat itself
        assert all(Path(f"/proc/{pid}").exists() for pid in ranks.pids)
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [1])]
    printed = [rank.stderr.count("kept with all stacks in") for rank in ranks.results]
    assert sorted(printed) == [0, 0, 1]
    stacks = {file.name: file.read_text() for file in run.glob("hangs/0001/stacks/*")}
    assert sorted(stacks) == [f"rank-0000{rank}.txt" for rank in range(3)]
    assert "in _carry_out" in stacks["rank-00001.txt"]
    assert "in plain" in stacks["rank-00000.txt"]
    (text,) = [rank.stderr for rank in ranks.results if "kept with" in rank.stderr]
    assert "missing: Rank 1 (" in text
    assert "scenario_programs.py" in text


def _serves(rank: int, world_size: int, folder: str) -> None:
    """Rank 0 waits for a request (a file) before each round that all take part in."""
    import torch
    import torch.distributed as dist

    for number in range(3):
        request = Path(folder) / f"request.{number}"
        if rank == 0:
            wait_until(request.exists, seconds=120)
        dist.broadcast(torch.ones(1), 0)
    (Path(folder) / f"served.{rank}").touch()


def test_a_server_between_requests(tmp_path: Path) -> None:
    """The watcher says that a hang is over; the next wait at that line is no hang."""
    run, over = tmp_path / "run", tmp_path / "run/hangs/0001/over.json"

    def verdict_now() -> str:
        return diagnose(load(run)).kind

    with start_ranks(
        _serves, 2, str(tmp_path), run_dir=run, watch={"hang_after": HANG_AFTER_S}, timeout=200
    ) as ranks:
        (tmp_path / "request.0").touch()  # the first step has more patience
        wait_until(lambda: _verdicts(run))
        (tmp_path / "request.1").touch()
        wait_until(over.exists)
        wait_until(lambda: verdict_now() == "idle")
        time.sleep(2.0)  # the watcher looks again in this time, and must not call it a hang
        (tmp_path / "request.2").touch()
        wait_until(lambda: all((tmp_path / f"served.{rank}").exists() for rank in range(2)))
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [0])]
    printed = [rank.stderr.count("the hang is over after") for rank in ranks.results]
    assert sorted(printed) == [0, 1]
    (kept,) = diagnose(load(run)).kept
    assert kept.over_s is not None
    assert kept.over_s >= HANG_AFTER_S


@pytest.mark.parametrize("size", ["64k", pytest.param("300k", marks=pytest.mark.slow)])
def test_little_shared_memory(tmp_path: Path, mounted: Any, size: str) -> None:
    """Rings without room there are in the run, all or one. The verdict names the same rank."""
    run, env = tmp_path / "run", {"RANKCALL_SHM": str(mounted(f"size={size}"))}
    with start_ranks(
        _serves, 2, str(tmp_path), run_dir=run, watch={"hang_after": HANG_AFTER_S}, env=env
    ) as ranks:
        (tmp_path / "request.0").touch()  # the first step has more patience
        wait_until(lambda: len(list(run.glob("hangs/0001/stacks/*"))) == 2)
        assert len(list(run.glob("rings/*[0-9].ring"))) == (2 if size == "64k" else 1)
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [0])]
    assert all(rank.stderr.count("--shm-size") <= 1 for rank in ranks.results)
    assert "--shm-size" in ranks.results[0].stderr


def test_abort(tmp_path: Path) -> None:
    """With on_hang=abort every rank ends, by its watcher or because another rank ended."""
    watch = {"hang_after": HANG_AFTER_S, "on_hang": "abort"}
    results = try_ranks(plain, 3, HANG, faults=HANG, run_dir=tmp_path / "run", watch=watch)
    codes = [rank.exitcode for rank in results]
    assert ABORT_STATUS in codes
    assert set(codes) <= {ABORT_STATUS, 1}
    for rank in results:
        assert (rank.exitcode == ABORT_STATUS) == ("ends because the job hangs" in rank.stderr)
    findings = diagnose(load(tmp_path / "run"), HANG_AFTER_S).findings
    assert [(finding.kind, finding.ranks) for finding in findings] == [("missing", (1,))]


def _called_back(rank: int, world_size: int, folder: str) -> None:
    """Write down the findings, and raise; the watcher must catch and log that."""
    import logging

    from rankcall import watch

    logged = logging.FileHandler(Path(folder) / f"log.{rank}", delay=True)
    logging.getLogger("rankcall.watch").addHandler(logged)

    def on_hang(findings: list[Any]) -> None:
        named = [(finding.kind, finding.ranks) for finding in findings]
        (Path(folder) / f"findings.{rank}").write_text(repr(named))
        raise ValueError("from on_hang")

    watch.start(hang_after=HANG_AFTER_S, on_hang=on_hang)
    plain(rank, world_size, FaultPlan())


def test_a_function_if_the_run_cannot_be_written(tmp_path: Path) -> None:
    """on_hang is called and the verdict is kept even if the run directory is not writable."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "hangs").write_text("in the way")
    files = [tmp_path / f"findings.{rank}" for rank in range(3)]
    with start_ranks(_called_back, 3, str(tmp_path), faults=HANG, run_dir=run):
        wait_until(lambda: all(_text(file) for file in files))
    assert {file.read_text() for file in files} == {"[('missing', (1,))]"}
    (kept,) = diagnose(load(run), HANG_AFTER_S).kept
    (finding,) = kept.verdict.findings
    assert (finding.kind, finding.ranks) == ("missing", (1,))
    assert kept.stacks == 3
    (run / "hangs").unlink()
    settle(run)
    (moved,) = diagnose(load(run), HANG_AFTER_S).kept
    place = run / "hangs/0001"
    assert moved == replace(kept, folder=place, place=str(place))


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def test_a_function(tmp_path: Path) -> None:
    """on_hang is called on every rank with the findings, and its exceptions are logged."""
    files, logs = (
        [tmp_path / f"{name}.{rank}" for rank in range(3)] for name in ("findings", "log")
    )
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
        return sorted(thread.name for thread in threading.enumerate())

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
    """A second watcher replaces the first, a forked child has none, and stop() leaves no thread."""
    (result,) = spawn_ranks(_starts_and_stops, 1, str(tmp_path / "run"))
    assert result.value == {"seen": [1, 1, 0], "left": [], "on": False}


def _bad_arguments(rank: int, world_size: int) -> list[str]:
    import os

    from rankcall import watch

    errors = []
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
            errors.append(f"{type(error).__name__}: {error}")
        for name in env:
            del os.environ[name]
    return errors


def test_bad_arguments() -> None:
    """A bad argument is refused with a message that says what is allowed."""
    (result,) = spawn_ranks(_bad_arguments, 1)
    assert result.value == [
        "ValueError: hang_after must be positive seconds; got 0",
        "ValueError: hang_after must be positive seconds; got nan",
        "ValueError: on_hang must be report, abort, recover or a function; got 'explode'",
        "TypeError: on_hang must be a word or a function; got int",
        "ValueError: RANKCALL_HANG_AFTER must be a number of seconds, 0 for off; got 'soon'",
        "ValueError: on_hang must be report, abort, recover or a function; got 'explode'",
    ]


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[Any]:
    """Return an environment for each rank: two hosts, each with two ranks and its live rings."""
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


def _printed_with_stacks(ranks: Ranks, run: Path) -> bool:
    """Return whether a verdict was printed and all four ranks' stacks are kept."""
    texts = [_text(file) for file in ranks.folder.glob("stderr.*")]
    printed = any("kept with all stacks in" in text for text in texts)
    return printed and len(list(run.glob("hangs/0001/stacks/*"))) == 4


def test_two_nodes_give_one_verdict(tmp_path: Path, two_nodes: Any) -> None:
    """The run has one verdict, with the stacks of both nodes, and one rank prints it."""
    plan, run = FaultPlan().hang(rank=3, seq=20), tmp_path / "run"
    with start_ranks(
        plain,
        4,
        plan,
        faults=plan,
        run_dir=run,
        watch={"hang_after": HANG_AFTER_S},
        env=two_nodes,
    ) as ranks:
        wait_until(lambda: _printed_with_stacks(ranks, run))
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [3])]
    assert sum(rank.stderr.count("kept with all stacks in") for rank in ranks.results) == 1


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.slow), "stopped"])
def test_the_host_of_the_store(tmp_path: Path, two_nodes: Any, how: str) -> None:
    """If rank 0, which hosts the store, is gone, the other node reports its own ranks and why."""
    plan = FaultPlan().hang(rank=3, seq=5, group="right")
    doomed = {"killed": plan.kill, "stopped": plan.stop}[how](rank=0, seq=5, group="left")
    run = tmp_path / "run"
    with start_ranks(
        own_store,
        4,
        doomed,
        str(tmp_path / "port"),
        "halves",
        faults=doomed,
        run_dir=run,
        watch={"hang_after": HANG_AFTER_S},
        env=two_nodes,
        init=False,
    ):
        wait_until(lambda: any("missing" in repr(_causes(verdict)) for verdict in _verdicts(run)))
    verdict, *_ = [kept for kept in _verdicts(run) if "missing" in repr(_causes(kept))]
    # Rank 0 may be named as well, because nothing is known about it.
    assert _causes(verdict)[0] == ("missing", [3])
    assert {rank for _, ranks in _causes(verdict) for rank in ranks} <= {0, 3}
    port = (tmp_path / "port").read_text()
    assert any(f":{port} cannot be reached" in text for text in verdict["problems"])


def _once_signed_on(rank: int, world_size: int, plan: FaultPlan) -> None:
    """Begin when every node has registered its ranks with the others."""
    from torch.distributed import PrefixStore, distributed_c10d

    job_store = distributed_c10d._get_default_store()
    store: Any = PrefixStore("rankcall/watch/0", job_store.clone())

    def signed() -> set[int]:
        keys = [f"node/{number}" for number in range(1, int(store.add("nodes", 0)) + 1)]
        parts = [json.loads(store.get(key)) for key in keys if store.check([key])]
        return {rank for part in parts for rank, _, _ in part}

    wait_until(lambda: len(signed()) == world_size)
    plain(rank, world_size, plan)


def test_a_node_that_stands_still(tmp_path: Path, two_nodes: Any) -> None:
    """If a host is frozen with all its ranks, the other names it, with its ranks' pids."""
    still = FaultPlan().stop(rank=2, seq=20).stop(rank=3, seq=20)
    run = tmp_path / "run"
    with start_ranks(
        _once_signed_on,
        4,
        still,
        faults=still,
        run_dir=run,
        watch={"hang_after": HANG_AFTER_S},
        env=two_nodes,
    ) as ranks:
        wait_until(lambda: _verdicts(run))
        pids = ranks.pids
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [2, 3])]
    (finding,) = verdict["findings"]
    assert finding["hosts"] == ["node-1"]
    assert finding["confidence"] == "likely"
    assert "Ranks 2-3 (node-1) do not answer" in finding["summary"]
    assert "See whether node-1 is up" in finding["advice"]
    assert [rank["pid"] for rank in verdict["ranks"]] == pids


def _in_another_time(rank: int, world_size: int, run_dir: str) -> None:
    """Hang because of rank 3, on a node whose clock is an hour behind the first one's."""
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
    """Two nodes whose clocks are an hour apart agree on one verdict, and print it once."""
    run = tmp_path / "run"
    with start_ranks(_in_another_time, 4, str(run), env=two_nodes) as ranks:
        wait_until(lambda: _printed_with_stacks(ranks, run))
    (verdict,) = _verdicts(run)
    assert _causes(verdict) == [("missing", [3])]
    assert sum(rank.stderr.count("kept with all stacks in") for rank in ranks.results) == 1


NODE_1_HANGS = FaultPlan().hang(rank=2, seq=20).hang(rank=3, seq=20)


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_node_that_the_others_wait_for(tmp_path: Path, two_nodes: Any, has_secret: bool) -> None:
    """With a secret, on_hang=abort also ends a node whose ranks are the cause; else it says why.

    No rank of that node waits in a call, so only the other node's verdict says that there is a
    hang. Each node ends its ranks first or has its calls broken by the other.
    """
    secret = {"RANKCALL_SECRET": "a secret of the tests" if has_secret else None}
    with start_ranks(
        plain,
        4,
        NODE_1_HANGS,
        faults=NODE_1_HANGS,
        run_dir=tmp_path / "run",
        watch={"hang_after": HANG_AFTER_S, "on_hang": "abort"},
        env=lambda rank: {**two_nodes(rank), **secret},
    ) as ranks:
        if has_secret:
            assert ranks.wait(120.0, grace=110.0)
        else:
            wait_until(lambda: "are not ended" in _text(ranks.folder / "stderr.2"))
            assert all(Path(f"/proc/{pid}").exists() for pid in ranks.pids[2:])
    assert {rank.exitcode for rank in ranks.results[:2]} <= {ABORT_STATUS, 1}
    for rank in ranks.results[2:]:
        assert (rank.exitcode == ABORT_STATUS) == has_secret
        assert ("ends because the job hangs" in rank.stderr) == has_secret
    if not has_secret:
        assert "the verdict of the nodes is not verified" in ranks.results[2].stderr
        assert "RANKCALL_SECRET_FILE" in ranks.results[2].stderr


def _until_told(rank: int, world_size: int, folder: str) -> int:
    """Issue one call after the other until rank 0 sees the file; return how many."""
    import torch
    import torch.distributed as dist

    stop, steps = torch.zeros(1), 0
    while not stop:
        stop.fill_(float(rank == 0 and (Path(folder) / "stop").exists()))
        dist.all_reduce(stop)
        steps += 1
        time.sleep(0.01)
    return steps


def _store_of_watchers(port: int) -> Any:
    """Connect to the job's store as any process can; None until a watcher has used it."""
    from torch.distributed import PrefixStore, TCPStore

    client = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    keys = [str(key) for key in client.list_keys() if "rankcall/watch/0/" in str(key)]
    if not keys:
        return None
    return PrefixStore(keys[0].partition("rankcall/watch/0/")[0] + "rankcall/watch/0", client)


def _forge_a_verdict(store: Any) -> None:
    """Write that rank 1 is missing."""
    finding = Finding("missing", (1,), victims=(0, 2, 3), confidence="certain", stops=True)
    verdict = Verdict("run", [finding], origin=Origin("x", "b", 1, time.time_ns(), 1))
    store.set("1/verdict", pack(encode(verdict)))
    store.set("1/posts", "1")
    store.add("bell", 1)


@pytest.mark.slow
@pytest.mark.parametrize("has_secret", [True, False])
def test_a_forged_verdict_ends_no_rank(tmp_path: Path, two_nodes: Any, has_secret: bool) -> None:
    """A job whose calls all end goes on with on_hang=abort, whatever is written to its store.

    The threshold is long, because a call that a busy machine holds up for as long is a hang. With
    the secret, the verdict is refused; without, its node says that it does not act on it.
    """
    secret = {"RANKCALL_SECRET": "a secret of the tests" if has_secret else None}
    run = tmp_path / "run"
    with start_ranks(
        _until_told,
        4,
        str(tmp_path),
        run_dir=run,
        watch={"hang_after": 10.0, "on_hang": "abort"},
        env=lambda rank: {**two_nodes(rank), **secret},
    ) as ranks:
        wait_until(lambda: _store_of_watchers(ranks.port))
        store = _store_of_watchers(ranks.port)
        _forge_a_verdict(store)
        if has_secret:
            wait_until(lambda: int(store.get("1/posts")) >= 3)  # both nodes have come to the round
        else:
            # The first node to read it ends the round, so the other one may never be asked.
            texts = [ranks.folder / f"stderr.{rank}" for rank in range(4)]
            wait_until(lambda: any("are not ended" in _text(text) for text in texts))
        (tmp_path / "stop").touch()
        assert ranks.wait(120.0)
    assert [rank.exitcode for rank in ranks.results] == [0] * 4
    assert bool(_verdicts(run)) != has_secret

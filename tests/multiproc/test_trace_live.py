"""Tracing while a job runs: ops that hang, ranks on other hosts, sinks that fail, and the end."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import nvtx_tool
import pytest
from launch import Launch, launch
from ports import free_port
from ranks import run_ranks, try_ranks

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(300)]  # for what hangs, not what is slow
WAIT_S = 120.0
NEVER_NS = 1 << 62
CAPTURES = ("native", "python")


def until(condition: Any) -> None:
    """Wait for what the trace thread is about to do."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# --- an op that does not end, sinks that fail, a forked child; all in one set of ranks ---


def _overdue(rank: int) -> list[Any]:
    import torch
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.trace import order

    normally, order.OVERDUE_NS = (
        order.OVERDUE_NS,
        50_000_000 if rank == 0 else NEVER_NS,
    )
    sink, peer = trace.MemorySink(), 1 - rank
    with trace.enable("ALL", sinks=[sink]) as handle:
        work = dist.irecv(torch.ones(2), peer) if rank == 0 else None
        if rank == 0:
            until(lambda: len(sink.descriptions) == 1)
            order.OVERDUE_NS = NEVER_NS
        dist.all_reduce(torch.ones(1))
        if rank == 0:
            until(lambda: len(sink.descriptions) == 2)
            flying = [(op["name"], op["peer_rank"]) for op in handle.in_flight()]
            assert flying == [("recv", 1)]
        dist.barrier()
        if rank == 1:
            dist.send(torch.ones(2), peer)
        elif work is not None:
            work.wait()
        assert handle.flush(WAIT_S)
    order.OVERDUE_NS = normally
    return [(op["name"], op["duration_ms"] is None) for op in sink.descriptions]


class Raises:
    """A sink that fails in every way."""

    def __init__(self) -> None:
        self.calls = 0

    def open(self, origin: Any) -> None:
        pass

    def write(self, descriptions: Any) -> None:
        self.calls += 1
        raise SystemExit("not today")

    def close(self) -> None:
        raise ValueError("nor tomorrow")


def _a_sink_that_raises(rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.trace.sinks import guard

    guard.RETRY_SECONDS = (0.01, 0.01)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    guard.logger.addHandler(handler)
    sink, bad = trace.MemorySink(), Raises()
    with trace.enable("ALL", sinks=[bad, sink]) as handle:
        for _ in range(5):
            dist.all_reduce(torch.ones(1))
        until(lambda: handle.sinks == (sink,))
        for _ in range(5):
            dist.all_reduce(torch.ones(1))
        assert handle.flush(WAIT_S)
        assert len(sink.descriptions) == 10
    guard.logger.removeHandler(handler)
    return [bad.calls, len(messages), "Raises failed 3 times and is dropped" in messages[0]]


def _forked(rank: int, folder: str) -> Any:
    import torch
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.trace.tracing import live

    sink, file = trace.MemorySink(), trace.JsonLines(f"{folder}/{{rank}}.jsonl")
    with trace.enable("ALL", sinks=[sink, file]) as handle:
        dist.all_reduce(torch.ones(1))
        assert handle.flush(WAIT_S)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            handle.stop()
            os.write(write, f"{len(live())} {len(sink.descriptions)} {sink.closed}".encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            child_text = pipe.read()
        os.waitpid(child, 0)
        dist.all_reduce(torch.ones(1))
        assert handle.flush(WAIT_S)
    lines = Path(folder, f"{rank}.jsonl").read_text().splitlines()
    return [child_text, len(sink.descriptions), [json.loads(line)["seq"] for line in lines]]


def _put_back(rank: int) -> Any:
    """Return what is different after two traces, one of them within the other."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from rankcall import trace
    from rankcall.capture import session

    def state() -> Any:
        overridden = torch._C._dispatch_has_kernel_for_dispatch_key(
            "c10d::allreduce_", "BackendSelect"
        )
        threads = sorted(thread.name for thread in threading.enumerate())
        return [type(c10d._pg_group_ranks).__name__, overridden, threads, session.current()]

    before = state()
    outer, inner = trace.MemorySink(), trace.MemorySink()
    handle = trace.shunt_torch_communication("crossnode", sinks=[outer])
    with trace.enable("ALL", sinks=[inner]):
        dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))
    assert handle.stop()
    with pytest.warns(DeprecationWarning, match="use Trace.stop"):
        assert handle.remove()
    dist.all_reduce(torch.ones(1))
    assert (len(inner.descriptions), len(outer.descriptions)) == (1, 0)  # one host: none cross it
    assert outer.closed
    return [before, state()]


def _off(rank: int) -> Any:
    import torch
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.capture import session

    os.environ["TORCH_DISTRIBUTED_TRACING"] = "none"
    sink = trace.MemorySink()
    with trace.enable(sinks=[sink]) as handle:
        dist.all_reduce(torch.ones(1))
        assert handle.flush(WAIT_S)
        recording = session.current()
    with pytest.raises(ValueError, match="no trace sink 'csv': one of jsonl, nvtx, otel"):
        trace.enable("ALL", sinks=["csv"])
    for wrong in ([print], [trace.MemorySink], "jsonl", trace.MemorySink()):
        with pytest.raises(TypeError, match="sink"):
            trace.enable("ALL", sinks=wrong)
    return [handle.mode.value, recording is None, sink.descriptions]


def _everything(rank: int, world_size: int, folder: str) -> Any:
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.trace import order

    # On a busy machine an op may be in flight for long, and then be described twice.
    order.OVERDUE_NS = NEVER_NS
    dist.barrier()
    before = trace.enable(
        "ALL"
    ).stop()  # makes the objects that are made once, such as dicts of torch's
    outcomes = [_put_back(rank), _off(rank), _overdue(rank), _a_sink_that_raises(rank)]
    return [before, *outcomes, _forked(rank, folder)]


@pytest.mark.parametrize("capture", CAPTURES)
def test_tracing_on_two_ranks(capture: str, tmp_path: Path) -> None:
    """All of the above, one after the other."""
    env = {"RANKCALL_CAPTURE": capture}
    results = try_ranks(_everything, 2, str(tmp_path), env=env, timeout=240)
    assert all(end.ok for end in results), [end.error for end in results]
    for rank, result in enumerate(results):
        _, (before, after), off, overdue, raised, forked = result.value
        assert before == after
        assert off == ["NONE", True, []]
        if rank == 0:  # the receive as issued, then what came later; in the end its end
            assert overdue[:2] == [["recv", True], ["all_reduce", False]]
            assert sorted(overdue[2:]) == [["barrier", False], ["recv", False]]
        else:
            assert overdue == [["all_reduce", False], ["barrier", False], ["send", False]]
        assert raised == [3, 1, True]
        assert forked == ["0 1 False", 2, forked[2]]
        assert len(forked[2]) == 2
    messages = [
        line for line in results[0].stderr.splitlines() if line.startswith("rankcall: trac")
    ]
    assert messages == [
        "rankcall: tracing ALL to no sink",
        "rankcall: tracing CROSSNODE to MemorySink",
        "rankcall: tracing ALL to MemorySink",
        "rankcall: tracing is off (NONE)",
        "rankcall: tracing ALL to Raises, MemorySink",
        "rankcall: tracing ALL to MemorySink, JsonLines",
    ]
    assert "rankcall: trac" not in results[1].stderr


# --- hosts ---

HOSTS = ("a", "a", "a", "b")  # uneven
GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1, 2], "2": [2, 3]}


def _cross_host(rank: int, world_size: int) -> Any:
    """Issue on groups within and across hosts; each op's tag or length tells which it was."""
    import torch
    import torch.distributed as dist

    from rankcall import trace
    from rankcall.trace import order

    order.OVERDUE_NS = NEVER_NS
    os.environ["RANKCALL_HOST"] = HOSTS[rank]
    sink = trace.MemorySink()
    with trace.enable("crossnode", sinks=[sink]) as handle:
        groups = {name: dist.new_group(ranks) for name, ranks in list(GROUPS.items())[1:]}
        dist.all_reduce(torch.ones(1))
        for name, ranks in list(GROUPS.items())[1:]:
            if rank in ranks:
                dist.all_reduce(torch.ones(int(name) + 1), group=groups[name])
        for source, target in ((0, 1), (2, 3), (1, 2)):
            if rank == source:
                dist.send(torch.ones(10), target)
            elif rank == target:  # on a group that spans hosts: from any rank, or from one
                dist.recv(torch.ones(10), None if target == 2 else source)
        dist.barrier()
        assert handle.flush(WAIT_S)
    return [[op["name"], op["message_size"]] for op in sink.descriptions]


@pytest.mark.parametrize("capture", CAPTURES)
def test_hosts_are_exchanged_over_the_store(capture: str) -> None:
    """Without torchrun's variables; p2p by its peer, a receive from any source by its group."""
    ops_by_rank = run_ranks(_cross_host, 4, env={"RANKCALL_CAPTURE": capture}, timeout=240)
    all_reduce, barrier = ["all_reduce", 4], ["barrier", 1]
    across, send, recv = ["all_reduce", 12], ["send", 40], ["recv", 40]
    assert [sorted(ops) for ops in ops_by_rank] == [
        [all_reduce, barrier],
        [all_reduce, barrier],
        sorted([all_reduce, across, send, recv, barrier]),
        sorted([all_reduce, across, recv, barrier]),
    ]


SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = {tuple(ranks): dist.new_group(ranks) for ranks in ([0], [1])}
dist.all_reduce(torch.ones(3), group=groups[(rank,)])
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(1, 4)).sum().backward()  # here
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_agents_cross_nodes_without_code(tmp_path: Path) -> None:
    """Two torchrun agents: CROSSNODE in files and as NVTX marks, DDP's own ops as well."""
    (tmp_path / "job.py").write_text(SCRIPT)
    line = SCRIPT.splitlines().index("model(torch.ones(1, 4)).sum().backward()  # here") + 1
    port = str(free_port())
    env = {
        "NVTX_INJECTION64_PATH": str(nvtx_tool.built(tmp_path)),
        "NVTX_COLLECTED": str(tmp_path / "nvtx"),
    }
    agents = [
        Launch(
            "run",
            "--run-dir",
            tmp_path / "run",
            "--trace",
            "CrossNode",
            "--history",
            "--nnodes",
            "2",
            "--nproc-per-node",
            "1",
            "--node-rank",
            str(node),
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            "job.py",
            cwd=tmp_path,
            env=env,
        )
        for node in range(2)
    ]
    ended = [agent.finish(240) for agent in agents]
    assert [end.status for end in ended] == [0, 0], "\n".join(end.err for end in ended)
    assert sum("tracing CROSSNODE to JsonLines, Nvtx" in end.err for end in ended) == 1
    heard = nvtx_tool.heard(tmp_path / "nvtx")
    for rank in range(2):
        file = tmp_path / f"run/trace/rank-{rank:05d}.attempt-0.jsonl"
        lines = [json.loads(text) for text in file.read_text().splitlines()]
        lines = [op for op in lines if op["duration_ms"] is not None]  # told when over
        assert all(op["group_ranks"] == [0, 1] for op in lines)
        reduced = [op for op in lines if op["name"] == "all_reduce"]
        assert reduced[-1]["source_line"] == f"{tmp_path}/job.py:{line}"
        assert reduced[-1]["message_size"] == 4 * (4 * 2 + 2)
        (marks,) = [
            [mark for _, mark in process.marks]
            for process in heard.values()
            if process.marks and process.marks[0][1]["rank"] == rank
        ]
        assert [mark["name"] for mark in marks] == [op["name"] for op in lines]
        history = list((tmp_path / "run/history").glob(f"rank-{rank:05d}.*.parquet"))
        assert len(history) == 1
    import polars as pl

    table = pl.read_parquet(tmp_path / "run/history/*.parquet")
    assert table.filter(pl.col("group_ranks").cast(pl.String).is_in(["0", "1"])).height == 2


FULL = """
import resource
import torch
import torch.distributed as dist
from rankcall import trace
from rankcall.trace.tracing import live

dist.init_process_group("gloo")
for number in range(300):
    dist.all_reduce(torch.ones(10))
    if number == 150:
        assert all(each.flush(60) for each in live())
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
dist.destroy_process_group()
"""


def test_a_disk_that_fills_in_a_job(tmp_path: Path) -> None:
    """Files, history: each sink says so once on each rank; the job ends well, its run is read."""
    (tmp_path / "job.py").write_text(FULL)
    ended = launch(
        "run",
        "--run-dir",
        "run",
        "--trace",
        "all",
        "--history",
        "--nproc-per-node",
        "2",
        "job.py",
        cwd=tmp_path,
        timeout=240,
    )
    assert ended.status == 0, ended.err
    for rank in range(2):
        file = tmp_path / f"run/trace/rank-{rank:05d}.attempt-0.jsonl"
        assert ended.err.count("JsonLines failed") == 2, ended.err
        assert f"File too large: '{file}'" in ended.err
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        assert [op["seq"] for op in lines if op["name"] == "all_reduce"][:1] == [1]
    assert "Traceback" not in ended.err
    report = launch("report", "run", cwd=tmp_path)
    assert report.status == 0, report.err
    exported = launch("export", "run", "--to", "jsonl", "-o", "all.jsonl", cwd=tmp_path)
    assert exported.status == 0, exported.err
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) >= 2 * 300


def test_a_wrong_mode_is_refused_by_the_launcher(tmp_path: Path) -> None:
    """Before anything is started, with the right ones."""
    ended = launch("run", "--trace", "SOME", "job.py", cwd=tmp_path)
    assert ended.status == 2
    for mode in ("ALL", "CROSSNODE", "NONE"):
        assert f"'{mode.lower()}'" in ended.err.lower()


@pytest.mark.slow
def test_the_example_feeds_every_sink(tmp_path: Path) -> None:
    """Files of every kind, both ranks' lines whole, and the sink of its own has printed."""
    import polars as pl

    example = Path(__file__).parents[2] / "examples/trace_sinks.py"
    ended = launch(
        "run", "--nproc-per-node", "2", example, "--folder", "out", "--port", "0", cwd=tmp_path
    )
    assert ended.status == 0, ended.err
    assert "all_reduce at " in ended.out
    described = 0
    for rank in range(2):
        lines = (tmp_path / f"out/rank-{rank}.jsonl").read_text().splitlines()
        over = [op for op in map(json.loads, lines) if op["duration_ms"] is not None]
        names = [op["name"] for op in over]
        assert names.count("all_gather_object") == 3
        assert (tmp_path / f"out/scalars-{rank}.tsv").read_text().count("rankcall/all/calls") > 20
        described += len(names)
    assert pl.read_parquet(tmp_path / "out/history/*.parquet").height > described

"""Bundles of a node's newest records, and the protocol by which they go to other nodes."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from stores import kind, stores_of

from rankcall.analysis.verdicts import diagnose
from rankcall.analysis.verdicts.kept import kept_in
from rankcall.c10d.client import perform
from rankcall.c10d.requests import Steps
from rankcall.errors import RankcallError
from rankcall.job import bundles as bundle_module
from rankcall.job import departure, evidence
from rankcall.job import posts as posts_module
from rankcall.job.bundles import is_shared, keep_bundles, make_bundle, node_rings
from rankcall.job.departure import Departure, Place
from rankcall.job.evidence import COLLECT_TO, MOST_S, EvidenceSender
from rankcall.job.posts import ENDED, Posts
from rankcall.job.uploads import check_url, upload
from rankcall.process import host_name
from rankcall.ring.layout import read_header
from rankcall.run.exits import Exit, note_exit, read_exits, read_states
from rankcall.run.hangs import kept_stacks
from rankcall.run.load import load
from rankcall.run.paths import ring_paths
from rankcall.testing.model import Planted
from rankcall.testing.simulated_store import Mark, Process, Simulation, World
from rankcall.testing.synthetic import synthetic_run

__all__ = ["kind"]  # fixture


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return the run directories of two nodes of four ranks each. Rank 5 hangs."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path / "shm"))
    first, second = tmp_path / "first", tmp_path / "second"
    synthetic_run(first, 8, 900, planted=Planted("missing", (5,), 700), hung_s=120)
    (first / "hangs").mkdir()
    shutil.copytree(first, second)
    for run, ranks in ((first, range(4, 8)), (second, range(4))):
        for rank in ranks:
            for ring in (run / "rings").glob(f"rank-{rank:05d}.*"):
                ring.unlink()
    return first, second


def verdict_in(run: Path, ident: str, ranks: range) -> None:
    """Keep a verdict with the stacks of some ranks."""
    place = run / "hangs/0001"
    (place / "stacks").mkdir(parents=True)
    (place / "verdict.json").write_text(
        json.dumps({"findings": [], "hang": {"id": ident, "epoch_ns": 1}})
    )
    for rank in ranks:
        (place / f"stacks/rank-{rank:05d}.txt").write_text(f"stack of {rank}\n")


def bundle_of(run: Path) -> bytes:
    """Return the bundle of a whole node."""
    return make_bundle(run, node_rings(run, 0), 8)


def test_one_node_has_the_verdict_of_all(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    """With the bundle of the other node, a node's directory gives the verdict of the whole run."""
    first, second = nodes
    synthetic_run(tmp_path / "all", 8, 900, planted=Planted("missing", (5,), 700), hung_s=120)
    (expected,) = diagnose(load(tmp_path / "all")).findings
    assert diagnose(load(first)).findings[0].confidence != "certain"
    assert keep_bundles(first, [bundle_of(second)]) == []
    (finding,) = diagnose(load(first)).findings
    assert (finding.kind, finding.ranks) == ("missing", (5,))
    assert (finding.kind, finding.ranks, finding.confidence) == (
        expected.kind,
        expected.ranks,
        expected.confidence,
    )


def test_what_a_bundle_brings(nodes: tuple[Path, Path]) -> None:
    """Tails, exits, and the stacks of the node's own ranks under the same verdict."""
    first, second = nodes
    verdict_in(first, "same", range(4))
    verdict_in(second, "same", range(2, 8))  # 2 and 3 came from the first node earlier
    note_exit(second, Exit(6, 0, "h", 7, -9, 1))
    assert keep_bundles(first, [bundle_of(second)] * 2) == []
    assert sum(path.name.endswith(".tail.ring") for path in ring_paths(first)) == 4
    (kept,) = kept_in(first)
    assert kept_stacks(kept.folder, 10) == {rank: f"stack of {rank}\n" for rank in range(8)}
    assert [(ended.rank, ended.code) for ended in read_exits(first)] == [(6, -9)]


def test_a_verdict_that_only_the_other_node_kept(nodes: tuple[Path, Path]) -> None:
    """It comes with the bundle, under the next free number."""
    first, second = nodes
    verdict_in(first, "mine", range(0))
    verdict_in(second, "theirs", range(4, 8))
    assert keep_bundles(first, [bundle_of(second)]) == []
    assert [kept.verdict.origin.id for kept in kept_in(first)] == ["mine", "theirs"]


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir()
    or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev,
    reason="this machine has one file system for both",
)
def test_a_run_on_another_file_system(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle is unpacked among the temporary files, which the run is seldom among."""
    first, second = nodes
    verdict_in(second, "theirs", range(4, 8))
    data = bundle_of(second)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        monkeypatch.setattr(tempfile, "tempdir", elsewhere)
        assert keep_bundles(first, [data]) == []
        monkeypatch.undo()
    (kept,) = kept_in(first)
    assert kept_stacks(kept.folder, 10) == {rank: f"stack of {rank}\n" for rank in range(4, 8)}


def test_a_tail_never_hides_a_whole_ring(nodes: tuple[Path, Path]) -> None:
    """On a shared disk, a bundle that was sent anyway changes no report."""
    first, _ = nodes
    before = load(first).records.height
    assert keep_bundles(first, [bundle_of(first)]) == []
    assert load(first).records.height == before


def test_states_are_those_of_all_processes(nodes: tuple[Path, Path]) -> None:
    """A rank that ends also sends the states of its neighbours."""
    first, second = nodes
    rings = node_rings(second, 0)
    for path in rings:
        give_to_this_process(path)
    rings = node_rings(second, 0)
    some = dict(list(rings.items())[:1])
    assert keep_bundles(first, [make_bundle(second, some, 8, rings)]) == []
    assert sum(path.name.endswith(".tail.ring") for path in ring_paths(first)) == 1
    assert {noted.state for noted in read_states(first).values()} == {"alive"}


def give_to_this_process(path: Path) -> None:
    """Make this process the writer of a ring."""
    from rankcall.process import Process
    from rankcall.ring.layout import offset_of

    me = Process.current()
    with path.open("r+b") as file:
        for name, value in (
            ("pid", me.pid.to_bytes(4, "little")),
            ("process_start", me.start.to_bytes(8, "little")),
            ("boot_id", me.boot_id.encode().ljust(40, b"\0")),
        ):
            file.seek(offset_of(name))
            file.write(value)


def test_a_bundle_has_a_limit(nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large world a bundle has fewer records, and if there is no room at all, none."""
    _, second = nodes
    rings = node_rings(second, 0)
    full = len(make_bundle(second, rings, 8))
    shorter = make_bundle(second, rings, 4 * bundle_module.MOST_OF_ALL // full + 4)
    assert 0 < len(shorter) < full
    assert make_bundle(second, rings, 1 << 26) == b""


@pytest.mark.parametrize("data", [b"", b"x" * 100, b"\x28\xb5\x2f\xfd" + b"\0" * 50])
def test_what_is_no_bundle(nodes: tuple[Path, Path], data: bytes) -> None:
    """It is one line, and the rest is kept."""
    first, second = nodes
    (problem,) = keep_bundles(first, [data, bundle_of(second)])
    assert "the records of another node cannot be kept" in problem
    assert len(ring_paths(first)) == 8


def test_a_hostile_bundle(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    """Names that lead elsewhere, damaged rings and whole rings are not kept."""
    import io
    import tarfile

    import zstandard

    first, _ = nodes
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in ("run/../../evil", "run/rings/a.tail.ring", "run/rings/whole.ring"):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
    before = sorted(tmp_path.rglob("*"))
    keep_bundles(first, [zstandard.compress(raw.getvalue())])
    assert sorted(tmp_path.rglob("*")) == before


def test_who_made_the_directory(tmp_path: Path) -> None:
    """If another host reserved the attempt or made the directory, all nodes share the disk."""
    run = tmp_path / "run"
    run.mkdir()
    assert not is_shared(run, 0)
    for host, shared in ((host_name(), False), ("another", True)):
        (run / "run.json").write_text(json.dumps({"host": host}))
        assert is_shared(run, 0) is shared
    (run / "run.json").unlink()
    (run / "attempts").mkdir()
    (run / "attempts/00002.json").write_text('{"host": "another"}')
    (run / "attempts/00005.json").write_text(json.dumps({"host": host_name()}))
    assert [is_shared(run, attempt) for attempt in (0, 2, 4, 5, 6)] == [
        False,
        True,
        True,
        False,
        False,
    ]


# --- the protocol ---


def _node(number: int, count: int) -> Process:
    def start() -> Steps[None]:
        posts = Posts("p", count, settle_s=1)
        bundles = yield from posts.exchange([number], b"b%d" % number, f"n{number}")
        yield Mark("kept", tuple(sorted(bundles)))

    return Process(f"node{number}", start)


def _check(world: World, name: str, mark: Mark, earlier: tuple[Mark, ...]) -> None:
    bundles = mark.value
    assert b"b%d" % int(name[-1]) not in bundles
    assert len(set(bundles)) == len(bundles)


@pytest.mark.parametrize("deaths", [pytest.param(0, marks=pytest.mark.slow), 1])  # 1: or none
def test_two_nodes_in_every_order(deaths: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No node keeps a bundle twice or its own, also if one of them dies; each call ends."""
    monkeypatch.setattr(posts_module, "_POLL_S", 1)  # a step of the simulation's clock
    nodes = [_node(number, 2) for number in range(2)]
    assert Simulation(nodes, on_mark=_check, deaths=deaths, ticks=3).explore().ends


def _run_nodes(
    kind: str, tmp_path: Path, alive: list[int], count: int, settle_s: float = 15.0
) -> Mapping[int, Any]:
    stores = stores_of(kind, len(alive), tmp_path)
    results: dict[int, Any] = {}

    def run(store: Any, number: int) -> None:
        posts = Posts("p", count, settle_s)
        steps = posts.exchange([number], b"x" * 600_000 + b"%d" % number, f"n{number}")
        results[number] = [part[-1:] for part in perform(store, 20.0, steps)]

    threads = [
        threading.Thread(target=run, args=(store, number))
        for store, number in zip(stores, alive, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_real_stores(kind: str, tmp_path: Path) -> None:
    """Rank 0's node and one other have the bundles of all; bundles of several parts are whole."""
    results = _run_nodes(kind, tmp_path, [0, 1, 2], 3)
    assert sorted(results[0]) == [b"1", b"2"]
    other_bundles = sorted((results[1], results[2]), key=len)
    assert other_bundles[0] == []
    assert sorted(other_bundles[1]) in ([b"0", b"1"], [b"0", b"2"])


def test_rank_0s_node_is_gone(tmp_path: Path) -> None:
    """The first other node that answers takes its place."""
    results = _run_nodes("hash", tmp_path, [1, 2], 3, settle_s=1.0)
    assert sorted(map(len, results.values())) == [0, 1]


def test_nothing_is_left_in_the_store() -> None:
    """Once rank 0 has read the bundles of ranks that ended, they are gone."""
    store = dist.HashStore()
    for _ in range(3):
        perform(store, 5.0, Posts(f"e/{ENDED}", 2).post([1], b"x" * 300_000))
    got = perform(store, 5.0, Posts(f"e/{ENDED}", 2).collect([0], 0.0))
    assert [len(bundle) for bundle in got] == [300_000] * 3
    assert perform(store, 5.0, Posts(f"e/{ENDED}", 2).collect([0], 0.0)) == []
    left = [key for key in store.list_keys() if len(store.get(key)) > 100]
    assert left == []


# --- the end of a rank ---


def test_a_rank_that_ends(nodes: tuple[Path, Path]) -> None:
    """A rank's bundle is in the store when ``leave`` returns, and rank 0 collects it."""
    first, second = nodes
    store = dist.HashStore()
    find = lambda: (store, "e")  # noqa: E731
    for run, rank in ((second, 5), (first, 0)):
        Departure(Place(run, 0, rank, 8), find).leave(failed=False)
    assert len(ring_paths(first)) == 8


def test_a_store_that_never_answers(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a rank is held up for a bounded time."""
    monkeypatch.setattr(departure, "LEAVE_S", 0.2)
    blocked, gone = threading.Event(), threading.Event()

    def find() -> Any:
        blocked.set()
        gone.wait(60)

    leaving = Departure(Place(nodes[1], 0, 5, 8), find)
    began = time.monotonic()
    leaving.leave(failed=True)
    assert time.monotonic() - began < 30
    assert blocked.wait(30)
    gone.set()


def test_no_store_and_one_node(nodes: tuple[Path, Path]) -> None:
    """Without a store, and if all ranks are on this node, nothing is sent and nothing raises."""
    asked: list[int] = []

    def find() -> tuple[None, str]:
        asked.append(1)
        return None, ""

    Departure(Place(nodes[1], 0, 5, 8), find).leave(failed=False)
    assert asked == [1]
    Departure(Place(nodes[1], 0, 5, 4), find).leave(failed=False)
    assert asked == [1]


# --- URLs ---


def test_a_url(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    """The files that both nodes write to a URL are a run with the verdict of all."""
    url = f"file://{tmp_path}/bucket/run"
    for run in nodes:
        rings = node_rings(run, 0)
        assert upload(url, run, rings, rings)
    run = load(tmp_path / "bucket/run")
    assert sorted(head.header.rank for head in run.heads) == list(range(8))
    (finding,) = diagnose(run).findings
    assert (finding.kind, finding.ranks) == ("missing", (5,))


def test_an_object_store(nodes: tuple[Path, Path]) -> None:
    """A file system in fsspec's own memory, as an example of one without a disk, works as well."""
    import fsspec

    rings = node_rings(nodes[0], 0)
    assert upload("memory://bucket/run", nodes[0], rings, rings)
    names = fsspec.filesystem("memory").ls("/bucket/run/rings", detail=False)
    assert len(names) == 4


def test_urls_that_cannot_be_written(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is an error at the start; later it is one line, and nothing raises."""
    with pytest.raises(RankcallError, match="nonsense"):
        check_url("nonsense://x")
    with pytest.raises(RankcallError) as refused:
        check_url("nonsense://user:hush@host/x")
    assert "hush" not in str(refused.value)
    assert "host/x" in str(refused.value)
    assert not upload("file:///proc/nothing/run", nodes[0], {}, {})
    assert "cannot be written to file:///proc/nothing/run" in capsys.readouterr().err
    importing = builtins.__import__

    def without(name: str, *args: Any) -> Any:
        if name == "fsspec":
            raise ImportError(name)
        return importing(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(RankcallError, match=r"rankcall\[remote\]"):
        check_url(f"file://{os.getcwd()}")


def test_which_rings_are_this_nodes(nodes: tuple[Path, Path]) -> None:
    """Rings of other attempts, and tails of other nodes, are not this node's to send."""
    first, second = nodes
    keep_bundles(first, [bundle_of(second)])
    mine = node_rings(first, 0)
    assert sorted(header.rank for header in mine.values()) == [0, 1, 2, 3]
    assert node_rings(first, 1) == {}
    assert all(read_header(path) is not None for path in mine)


def test_a_url_that_takes_nothing_does_not_hold_a_verdict_up(
    nodes: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The upload goes on in the background; the verdict may have to end the job now."""
    over = threading.Event()
    monkeypatch.setattr(evidence, "upload", lambda *arguments: over.wait(100))
    monkeypatch.setattr(evidence, "MOST_S", 0.2)
    monkeypatch.setenv(COLLECT_TO, "memory://a-url-that-takes-nothing")
    try:
        sender = EvidenceSender(nodes[0], "node-a", pytest.fail)
        assert sender.send("", "a-verdict", 0) == []
        assert "the URL of RANKCALL_COLLECT_TO has not taken" in capsys.readouterr().err
    finally:
        over.set()


def test_all_exchanges_of_a_verdict_have_one_deadline(
    nodes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that uses up the time of each request gets no more than that of one verdict."""
    now, limits = [1000.0], []
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow(seconds: float, steps: Any) -> list[bytes]:
        limits.append(seconds)
        now[0] += seconds * 0.9
        return []

    sender = EvidenceSender(nodes[0], "node-a", slow)
    for verdict in ("first", "second"):
        limits.clear()
        assert sender.send("job", verdict, 0) == []
        assert len(limits) > 1 or verdict == "first"
        assert sum(limits) * 0.9 <= MOST_S

"""What a process measures of itself: collections, the run queue, throttling and stalls."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankcall.capture import cgroup, sampler
from rankcall.capture.moments import Look
from rankcall.ring.layout import SAMPLE_COUNTERS, Geometry
from rankcall.ring.reader import read_ring
from rankcall.ring.writer import Identity, create

SHAPE = Geometry(64, 8, 4096, sample_capacity=8)


class Sampled:
    """A sampler with its ring."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "x.ring"
        self.ring = create(self._path, Identity(rank=0, world_size=1, host="h"), SHAPE)
        self.sampler = sampler.Sampler(self.ring, SHAPE, lambda thread: Look())

    def newest(self, thread: int = 0) -> dict[str, int]:
        """Take a sample; return the counters that it knows."""
        self.sampler.sample(thread)
        row = read_ring(self._path).samples[-1]
        known = int(row["known"])
        names = [name for bit, name in enumerate(SAMPLE_COUNTERS) if known >> bit & 1]
        return {name: int(row[name]) for name in names}

    def collects_since(self) -> int:
        """Return since when a full collection runs, as the ring says."""
        return read_ring(self._path).header.gc_since_ns


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Sampled]:
    """Return a sampler that runs, with collections only where a test makes them."""
    made = Sampled(tmp_path)
    gc.disable()
    made.sampler.start()
    yield made
    made.sampler.stop()
    gc.enable()


def test_collections_are_counted(sampled: Sampled) -> None:
    """Young and full ones apart, each no longer than a clock around it says."""
    before = sampled.newest()
    began = time.monotonic_ns()
    gc.collect(2)
    full_ns = time.monotonic_ns() - began
    after = sampled.newest()
    assert 0 < after["full_gc_ns"] - before["full_gc_ns"] <= full_ns
    assert after["gc_ns"] == before["gc_ns"]
    began = time.monotonic_ns()
    gc.collect(1)
    young_ns = time.monotonic_ns() - began
    last = sampled.newest()
    assert 0 < last["gc_ns"] - after["gc_ns"] <= young_ns
    assert last["full_gc_ns"] == after["full_gc_ns"]


def test_a_full_collection_shows_while_it_runs(sampled: Sampled) -> None:
    """The ring says since when, and nothing when it is over or young."""
    seen: list[int] = []

    def look(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(sampled.collects_since())

    gc.callbacks.append(look)  # behind the sampler's own
    try:
        before = time.monotonic_ns()
        gc.collect(2)
        gc.collect(0)
    finally:
        gc.callbacks.remove(look)
    assert before <= seen[0] <= time.monotonic_ns()
    assert seen[1:] == [0]
    assert sampled.collects_since() == 0


def test_stop_leaves_nothing(tmp_path: Path) -> None:
    """No callback, also if it is stopped twice, or was removed by somebody else."""
    callbacks = list(gc.callbacks)
    made = Sampled(tmp_path)
    made.sampler.start()
    assert len(gc.callbacks) == len(callbacks) + 1
    made.sampler.stop()
    made.sampler.stop()
    assert gc.callbacks == callbacks
    made.sampler.start()
    gc.callbacks[:] = callbacks
    made.sampler.stop()
    assert gc.callbacks == callbacks


def test_the_training_thread_is_measured(sampled: Sampled) -> None:
    """With its id its time in the run queue is known; without, or of no thread here, it is not."""
    assert "runnable_ns" in sampled.newest(threading.get_native_id())
    assert "runnable_ns" not in sampled.newest(0)
    assert not {"runnable_ns", "disk_wait_ns"} & sampled.newest(os.getppid()).keys()


@pytest.mark.parametrize(("setting", "is_known"), [("0\n", False), ("1\n", True), (None, True)])
def test_waits_for_disks_that_the_kernel_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None, is_known: bool
) -> None:
    """Then they are not known, and not zero. Old kernels without the setting count them."""
    file = tmp_path / "task_delayacct"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(sampler, "_COUNTS_DELAYS", str(file))
    made = Sampled(tmp_path)
    made.sampler.start()
    try:
        assert ("disk_wait_ns" in made.newest(threading.get_native_id())) == is_known
    finally:
        made.sampler.stop()


def test_a_look_and_its_sample_read_the_times_once(
    sampled: Sampled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat does both at once. A sample that follows no look reads them itself."""
    asked: list[int] = []
    times_of = sampler._times_of
    monkeypatch.setattr(
        sampler, "_times_of", lambda thread: asked.append(thread) or times_of(thread)
    )
    stopping = threading.Event()
    thread = threading.Thread(target=stopping.wait, args=(60,))
    thread.start()
    training = thread.native_id or 0
    sampled.sampler.look(training, time.monotonic_ns())
    assert "running_ns" in sampled.newest(training)
    assert asked.count(training) == 1
    assert "running_ns" in sampled.newest(training)
    assert asked.count(training) == 2
    stopping.set()
    thread.join()


@pytest.mark.parametrize(
    ("parse", "text", "counters"),
    [
        (sampler._running_and_queued, "12 345 6\n", {"running_ns": 12, "queued_ns": 345}),
        (sampler._running_and_queued, "0 0 0\n", {}),  # this kernel does not count
        (
            sampler._switches,
            "Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t7\n",
            {"slept": 5, "preempted": 7},
        ),
        (sampler._switches, "Name:\tx\n", {}),
        (sampler._throttled, "usage_usec 9\nthrottled_usec 4\n", {"throttled_ns": 4000}),
        (sampler._throttled, "nr_periods 1\nthrottled_time 77\n", {"throttled_ns": 77}),
        (sampler._throttled, "usage_usec 9\n", {}),
        (sampler._disk, "5 (a ) b) S " + " ".join(map(str, range(1, 60))), 39),
    ],
)
def test_files_of_the_kernel(parse: sampler.Parse, text: str, counters: Any) -> None:
    """As proc(5) and the kernel's cgroup documents describe them.

    In stat, field 42 is the wait for disks in clock ticks; the state is field 3.
    """
    if isinstance(counters, int):
        counters = {"disk_wait_ns": counters * sampler._TICK_NS}
    assert parse(text.encode()) == counters


def test_pressure() -> None:
    """The time in which some task waited, in microseconds."""
    text = "some avg10=0.00 avg60=0.00 avg300=0.00 total=123\nfull avg10=0.00 total=45\n"
    assert sampler._stall(text.encode(), "io_stall_ns") == {"io_stall_ns": 123_000}
    assert sampler._stall(b"", "io_stall_ns") == {}


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    """No file, an empty one, a folder, another format."""
    (tmp_path / "empty").touch()
    (tmp_path / "other").write_text("a b c\n")
    for path in (tmp_path / "none", tmp_path / "empty", tmp_path, tmp_path / "other"):
        assert sampler._read(str(path), sampler._running_and_queued) == {}


class Cgroups:
    """A tree of cgroups, and which one this process is said to be in."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "cgroup"
        self.root.mkdir()
        self._lines: list[str] = []
        monkeypatch.setattr(cgroup, "_ROOT", self.root)
        text = cgroup._text
        monkeypatch.setattr(
            cgroup,
            "_text",
            lambda path: (
                "\n".join(self._lines) if path == Path("/proc/self/cgroup") else text(path)
            ),
        )

    def add(self, path: str, **files: str) -> Path:
        """Make a cgroup with some files."""
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    def be_in(self, line: str) -> None:
        """Add a line to what the kernel says of this process."""
        self._lines.append(line)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cgroups:
    """Return an empty tree."""
    return Cgroups(tmp_path, monkeypatch)


def test_the_limit_may_be_above(cgroups: Cgroups) -> None:
    """Version 2: the pod has the limit, and counts the throttling of its containers."""
    cgroups.add("", cgroup__procs="")
    pod = cgroups.add("pod", cgroup__procs="", cpu__max="50000 100000")
    mine = cgroups.add("pod/main", cgroup__procs="", cpu__max="max 100000")
    cgroups.be_in("0::/pod/main")
    assert (cgroup.own_cgroup(), cgroup.limited_cgroup()) == (mine, pod)


def test_no_limit(cgroups: Cgroups) -> None:
    """Nothing throttles, so nothing is counted."""
    root = cgroups.add("", cgroup__procs="")
    cgroups.be_in("0::/outside/this/container")
    assert (cgroup.own_cgroup(), cgroup.limited_cgroup()) == (root, None)


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_version_1(cgroups: Cgroups, mount: str) -> None:
    """The quota is in the controller's own tree; -1 stands for none."""
    limited = cgroups.add(f"{mount}/docker/a", cpu__cfs_quota_us="50000")
    cgroups.be_in("4:memory:/else")
    cgroups.be_in("3:cpu,cpuacct:/docker/a")
    assert cgroup.limited_cgroup() == limited
    (limited / "cpu.cfs_quota_us").write_text("-1")
    assert cgroup.limited_cgroup() is None


def test_nothing_to_see(cgroups: Cgroups) -> None:
    """A sandbox without /sys/fs/cgroup, and a kernel without cgroups."""
    assert (cgroup.own_cgroup(), cgroup.limited_cgroup()) == (None, None)
    cgroups.be_in("0::/")
    assert (cgroup.own_cgroup(), cgroup.limited_cgroup()) == (None, None)

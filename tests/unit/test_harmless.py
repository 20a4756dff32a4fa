"""Recording does no harm to the process that it watches: see docs/design/safety.md."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import polars  # noqa: F401  # sets an environment variable, which must not look like ours
import pytest
import torch
import torch.distributed as dist
from hooking import WAIT_S, all_reduce, group
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import rankcall
from rankcall import hooks
from rankcall.ring.layout import UNLISTED_GROUPS
from rankcall.ring.reader import read_head, read_ring
from rankcall.run.paths import live_base

__all__ = ["group"]


@pytest.fixture(params=["native", "python"])
def capture(request: pytest.FixtureRequest) -> str:
    """Run with both captures."""
    return str(request.param)


@pytest.fixture
def fake() -> Iterator[None]:
    """A default group of four ranks on torch's fake back end: its ops are over at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# --- nothing of the user's is kept alive ---


def test_a_destroyed_group_and_its_store_are_let_go(tmp_path: Path, capture: str) -> None:
    """A store that is kept alive keeps its port, and the next init on that port would fail."""
    with rankcall.enable(tmp_path / "run", capture=capture):
        store = dist.HashStore()
        dist.init_process_group("gloo", rank=0, world_size=1, store=store)
        all_reduce()
        references = weakref.ref(store), weakref.ref(dist.group.WORLD)
        del store
        dist.destroy_process_group()
        gc.collect()
        assert [reference() for reference in references] == [None, None]


@pytest.mark.usefixtures("fake")
def test_groups_made_in_a_loop_are_let_go(tmp_path: Path, capture: str) -> None:
    """Sub-groups come and go; only an entry in the ring remains of each."""
    with rankcall.enable(tmp_path / "run", capture=capture):
        references = []
        for _ in range(20):
            made = dist.new_group([0, 1])
            dist.all_reduce(torch.ones(1), group=made)
            references.append(weakref.ref(made))
            dist.destroy_process_group(made)
            del made
        gc.collect()
        assert [reference() for reference in references] == [None] * 20


def mapped_rings() -> int:
    """Return how many rings this process has mapped, by the folder of live ones.

    The kernel does not show the names that they were given once they were made.
    """
    return Path("/proc/self/maps").read_text().count(f" {live_base()}")


@pytest.mark.usefixtures("fake")
def test_a_recording_that_is_over_leaves_no_ring_mapped(tmp_path: Path, capture: str) -> None:
    """Its memory is free at once, not when the garbage collector runs next."""
    with rankcall.enable(tmp_path / "run", capture=capture):
        all_reduce()
        recording = mapped_rings()
    gc.collect()
    before = mapped_rings()
    assert recording > before
    gc.disable()
    try:
        for _ in range(5):
            with rankcall.enable(tmp_path / "run", capture=capture):
                all_reduce()
        assert mapped_rings() == before
    finally:
        gc.enable()


# --- switched on and off while others issue ---


@pytest.mark.usefixtures("fake")
def test_switching_on_and_off_disturbs_no_other_thread(tmp_path: Path, capture: str) -> None:
    """Threads issue collectives meanwhile; none of them ever fails."""
    errors: list[BaseException] = []
    over = threading.Event()
    process_group, options = dist.group.WORLD, dist.AllreduceOptions()
    # The test before this one may have used the other capture: this one has to install its kernels
    # once more. That is not safe beside threads that issue ops; a program keeps to one capture.
    with rankcall.enable(tmp_path / "run", capture=capture):
        pass

    def issue() -> None:
        tensor = torch.ones(1)
        while not over.is_set():
            try:
                process_group.allreduce([tensor], options).wait()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=issue) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            with rankcall.enable(tmp_path / "run", capture=capture, capacity=64, call_sites=False):
                pass
    finally:
        over.set()
        for thread in threads:
            thread.join(WAIT_S)
    assert errors == []


SWITCH_OFF_WHILE_ISSUING = """
import sys, threading, torch, torch.distributed as dist, rankcall
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
folder, capture = sys.argv[1:]
with rankcall.enable(folder, capture=capture):
    pass
over, options = threading.Event(), dist.AllreduceCoalescedOptions()

def issue():
    tensors = [torch.ones(1)] * 300_000
    while not over.is_set():
        dist.group.WORLD.allreduce_coalesced(tensors, options).wait()

threads = [threading.Thread(target=issue) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(30):
    with rankcall.enable(folder, capture=capture, capacity=64, call_sites=False):
        pass
over.set()
for thread in threads:
    thread.join()
print("alive")
"""


def test_switching_off_waits_for_an_op_that_is_being_issued(tmp_path: Path, capture: str) -> None:
    """Ops take milliseconds to issue, because they have many tensors; the ring stays until then."""
    arguments = [sys.executable, "-c", SWITCH_OFF_WHILE_ISSUING, str(tmp_path / "run"), capture]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


@pytest.mark.usefixtures("fake")
def test_the_table_of_groups_stays_in_place(tmp_path: Path, capture: str) -> None:
    """It is put there once: another thread may be adding a group when recording ends."""
    with rankcall.enable(tmp_path / "run", capture=capture):
        table = c10d._pg_group_ranks
    assert c10d._pg_group_ranks is table
    seen: list[str] = []
    made = dist.new_group([0, 1])  # without an observer
    with hooks.register_process_group_hook(lambda group, name: seen.append(name)):
        assert len(seen) == 2
    dist.destroy_process_group(made)


# --- forks ---


@pytest.mark.usefixtures("group")
def test_a_forked_child_ends_nothing_of_its_parent(tmp_path: Path, capture: str) -> None:
    """A child drops its copy of a Work before it was waited for: the op is still in flight."""
    recording = rankcall.enable(tmp_path / "run", capture=capture)
    try:
        work = dist.irecv(torch.zeros(2))
        assert [status.operation for status in hooks.pending()] == ["recv"]
        child = os.fork()
        if child == 0:
            del work
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0) == (child, 0)
        assert [status.operation for status in hooks.pending()] == ["recv"]
        assert recording.path is not None
        (record,) = read_ring(recording.path).records
        assert record["completed_ns"] == 0
        assert record["flags"] & 1 == 0  # not abandoned either
        del work
    finally:
        rankcall.disable()


# --- nothing grows without bound ---


@pytest.mark.usefixtures("fake")
def test_error_texts_do_not_crowd_out_groups(tmp_path: Path, capture: str) -> None:
    """A retry loop fails with ever new texts; groups made after it are still known by name."""
    recording = rankcall.enable(tmp_path / "run", capture=capture)
    try:
        assert recording.path is not None
        ring = recording.path
        text = "e" * 3000
        for number in range(500):
            if capture == "native":
                native = recording.capture
                native._native.error(native._recorder, f"{number} {text}")  # type: ignore[attr-defined]
            else:
                recording.capture._ring.error(f"{number} {text}")  # type: ignore[attr-defined]
        assert read_head(ring).header.tables_lost > 0
        made = dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1), group=made)
        read = read_ring(ring)
        assert read.tables.groups[int(read.records["group"][-1])].ranks == (0, 1)
        dist.destroy_process_group(made)
    finally:
        rankcall.disable()


@pytest.mark.usefixtures("fake")
def test_groups_without_room_are_kept_apart(tmp_path: Path, capture: str) -> None:
    """When the table is full, records of two more groups must not look like those of one."""
    recording = rankcall.enable(tmp_path / "run", capture=capture)
    try:
        assert recording.path is not None
        made = []
        while read_head(recording.path).header.tables_lost == 0:
            for _ in range(500):
                recording.capture.add_group(_some_group(len(made)), 0)
                made.append(None)
        left, right = dist.new_group([0, 1]), dist.new_group([0, 2])
        for pair in (left, right, left):
            dist.all_reduce(torch.ones(1), group=pair)
        records = read_ring(recording.path).records[-3:]
        first, second, third = records["group"].tolist()
        assert first == third
        assert first != second
        assert min(first, second) >= UNLISTED_GROUPS
        assert records["seq"].tolist() == [1, 1, 2]
        for pair in (left, right):
            dist.destroy_process_group(pair)
    finally:
        rankcall.disable()


def _some_group(number: int) -> object:
    from rankcall.ring.tables import Group

    return Group(f"made-up-{number}", 0, "fake", "", (0, 1, 2, 3))


def resident_bytes() -> int:
    """Return how much memory this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.usefixtures("fake")
def test_new_tags_do_not_take_ever_more_memory(tmp_path: Path) -> None:
    """A program may use a new tag for each message."""
    with rankcall.enable(tmp_path / "run", capture="native", capacity=64):
        tensor, process_group = torch.ones(1), dist.group.WORLD
        for tag in range(20_000):
            process_group.send([tensor], 1, tag)
        before = resident_bytes()
        for tag in range(20_000, 120_000):
            process_group.send([tensor], 1, tag)
        grown = resident_bytes() - before
    assert grown < 2_000_000, grown  # 71 bytes a tag were 7 MB


@pytest.mark.usefixtures("fake")
def test_numbers_of_tags_in_use_go_on(tmp_path: Path, capture: str) -> None:
    """The counters that are dropped are of tags that were not used for long."""
    with rankcall.enable(tmp_path / "run", capture=capture) as recording:
        tensor, process_group = torch.ones(1), dist.group.WORLD
        for tag in range(1, 20_000):
            process_group.send([tensor], 1, tag)
            if tag % 4000 == 0:
                process_group.send([tensor], 1, 0)
        assert recording.path is not None
        records = read_ring(recording.path).records
        seqs = records["seq"][records["tag"] == 0].tolist()
    assert seqs == list(range(5 - len(seqs), 5))


def test_nothing_is_left_of_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that cannot be made leaves the table of groups and the process as they were."""
    monkeypatch.setitem(sys.modules, "rankcall.capture.native", None)
    with pytest.raises(ImportError):
        rankcall.enable(tmp_path / "run", capture="native")
    assert not list(tmp_path.glob("run/rings/*"))

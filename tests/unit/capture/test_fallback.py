"""The Python capture leaves the job as it is: Works, tensors, threads and forked children."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rankcall
from rankcall import errors, trace
from rankcall.capture.device_ops import NO_NUMBER, DeviceOp
from rankcall.capture.fallback import call_sites, completion
from rankcall.capture.fallback.completion import Completion, Issued, Waker
from rankcall.capture.fallback.numbering import GroupState
from rankcall.capture.fallback.schema import c10d_ops
from rankcall.capture.marks import Functions
from rankcall.capture.recording import Recording
from rankcall.record import FLAG_ABANDONED, FLAG_DEVICE, OPS, STATUSES
from rankcall.ring.layout import Geometry
from rankcall.ring.reader import read_ring
from rankcall.ring.tables import CallSite, Group
from rankcall.ring.writer import Identity, PythonRing, create


@pytest.fixture
def gloo() -> Iterator[None]:
    """A Gloo group of one: its reduce_scatter has a Work without a future."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def recording(gloo: None, tmp_path: Path) -> Iterator[Recording]:
    """A recording with the Python capture."""
    with rankcall.enable(tmp_path / "run", capture="python") as recording:
        yield recording
    assert not completion.work_proxies


def reduce_scatter(output: torch.Tensor) -> Any:
    """Issue an op whose Work has no future; return the Work."""
    return dist.reduce_scatter_tensor(output, torch.ones(output.numel()), async_op=True)


def records(recording: Recording) -> list[tuple[str, bool, int]]:
    """Return the status of each reduce_scatter, whether it is abandoned, and when it ended."""
    assert recording.path is not None
    rows = read_ring(recording.path).records
    return [
        (STATUSES[row["status"]], bool(row["flags"] & FLAG_ABANDONED), int(row["completed_ns"]))
        for row in rows
        if OPS[row["op"]] == "reduce_scatter"
    ]


def statuses(recording: Recording) -> list[str]:
    """Return the status of each reduce_scatter."""
    return [status for status, _, _ in records(recording)]


# --- Works without a future ---


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_dropped_work_dies_with_its_tensors(recording: Recording) -> None:
    """By the next op a dropped Work is gone, and its record closed as abandoned."""
    dead = []
    for _ in range(100):
        output = torch.zeros(4)
        dead.append(weakref.ref(output))
        reduce_scatter(output)
        del output
    dist.all_reduce(torch.ones(1))
    assert [reference() for reference in dead] == [None] * 100
    assert not completion.work_proxies
    assert records(recording) == [("started", True, 0)] * 100


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_dropped_work_dies_without_another_op(recording: Recording) -> None:
    """The last Work of a program goes within a second or two: the recording's thread looks."""
    output = torch.zeros(4)
    dead = weakref.ref(output)
    reduce_scatter(output)
    del output
    recording.capture.take_device_ops()  # type: ignore[attr-defined]
    assert dead() is None


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_work_that_is_kept_can_be_waited_for(recording: Recording) -> None:
    """However many ops come between; and its record says that it completed."""
    output = torch.zeros(4)
    works = [reduce_scatter(output) for _ in range(20)]
    for _ in range(50):
        dist.all_reduce(torch.ones(1))
    assert all(work.wait() for work in works)
    assert works[0].is_success()
    assert not works[0].is_completed()  # as Gloo answers for a reduce_scatter
    assert statuses(recording) == ["completed"] * 20
    with pytest.raises(RuntimeError, match=r"getFuture|not implemented"):
        works[0].get_future()
    works.clear()


def test_a_work_that_only_c_plus_plus_refers_to(recording: Recording) -> None:
    """wait() reaches the op's own Work: torch's registry of functional works is such a holder."""
    functional = torch.ops._c10d_functional
    before = torch._C._distributed_c10d._get_work_registry_size()
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    output = functional.reduce_scatter_tensor(torch.ones(4), "sum", 1, name)
    assert torch._C._distributed_c10d._get_work_registry_size() == before + 1
    for _ in range(20):
        dist.all_reduce(torch.ones(1))
    gc.collect()
    assert len(completion.work_proxies) == 1
    functional.wait_tensor(output)
    assert output.tolist() == [1.0] * 4
    assert statuses(recording) == ["completed"]
    dist.all_reduce(torch.ones(1))
    assert not completion.work_proxies


@pytest.mark.usefixtures("gloo")
def test_a_work_outlives_the_recording(tmp_path: Path) -> None:
    """After disable() a stand-in still waits for its op, and goes once it is dropped."""
    functional = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    with rankcall.enable(tmp_path / "run", capture="python"):
        output = functional.reduce_scatter_tensor(torch.ones(4), "sum", 1, name)
    gc.collect()
    functional.wait_tensor(output)
    assert output.tolist() == [1.0] * 4
    dist.all_reduce(torch.ones(1))
    assert not completion.work_proxies
    with rankcall.enable(tmp_path / "next", capture="python"):
        pass  # which closes the first ring, as its last op has ended


@pytest.mark.usefixtures("gloo")
def test_without_counts_there_are_no_work_proxies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If C++ references cannot be counted, the caller gets the back end's Work."""
    monkeypatch.setattr(completion, "_can_tell_dropped", lambda: False)
    with rankcall.enable(tmp_path / "run", capture="python") as recording:
        output = torch.ops._c10d_functional.reduce_scatter_tensor(
            torch.ones(4),
            "sum",
            1,
            dist.group.WORLD.group_name,  # type: ignore[union-attr]
        )
        torch.ops._c10d_functional.wait_tensor(output)
        assert records(recording) == [("started", True, 0)]


# --- Works that were made in Python ---


class PythonWork(dist.Work):
    """A Work of a back end that is written in Python."""

    def __init__(self, future: Any = None) -> None:
        super().__init__()
        self.future = future

    def get_future(self) -> Any:
        """Return its future, if it has one."""
        if self.future is None:
            raise RuntimeError("no future here")
        return self.future


@pytest.fixture
def following() -> tuple[Callable[[Any], Any], Callable[[], dict[str, Any]]]:
    """What follows a Work, and the record that it ends."""
    ring = PythonRing(create(None, Identity(rank=0), Geometry(64)), Geometry(64))
    op = next(op for op in c10d_ops() if op.name == "allreduce_")
    group = GroupState(Group("0", 0, "mine", "", (0,)), 0, 0, 1, lambda: None)
    ended: dict[str, Any] = {}

    class Noting(PythonRing):
        def finish(self, index: int, status: int, completed_ns: int, **fields: float) -> bool:
            ended.update(index=index, status=status, completed_ns=completed_ns, **fields)
            return True

    ring.__class__ = Noting
    following = Completion(ring, Waker())
    return (
        lambda work: following.arrange(
            op, Issued(7, group, 0, 0, False, False, 1), ([], work.boxed())
        ),
        lambda: ended,
    )


def test_a_python_work_is_handed_on_as_it_is(following: Any) -> None:
    """Its caller gets the very object; without a future its record is abandoned at once."""
    follow, ended = following
    work = PythonWork()
    _, boxed = follow(work)
    assert dist.Work.unbox(boxed) is work
    assert ended()["flags"] == FLAG_ABANDONED
    assert ended()["completed_ns"] == 0


def test_the_future_of_a_python_work_is_followed(following: Any) -> None:
    """One that is pending now and one that is done; errors are the op's, and the caller's alone."""
    follow, ended = following
    future: Any = torch.futures.Future()
    work = PythonWork(future)
    _, boxed = follow(work)
    assert dist.Work.unbox(boxed) is work
    assert not ended()
    future.set_result(None)
    assert ended()["status"] == completion._COMPLETED
    failed: Any = torch.futures.Future()
    failed.set_exception(ValueError("broken"))
    follow(PythonWork(failed))
    assert ended()["status"] == completion._FAILED


def test_a_note_is_not_lost_while_notes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes the notes of ops on devices while one is being made."""
    ring = PythonRing(create(None, Identity(rank=0), Geometry(64)), Geometry(64))
    op = next(op for op in c10d_ops() if op.name == "send")
    group = GroupState(Group("0", 0, "mine", "", (0,)), 0, 0, 1, lambda: None)
    noting = Completion(ring, Waker())
    taken: list[DeviceOp] = []

    def number_while_notes_are_taken(work: Any, issued: Issued) -> int:
        taken.extend(noting.take_device_ops())
        return NO_NUMBER

    monkeypatch.setattr(completion, "_callers_stream", lambda: (0, False))
    monkeypatch.setattr(completion, "_number_of", number_while_notes_are_taken)
    for record in range(3):
        noting.arrange(op, Issued(record, group, 0, FLAG_DEVICE, True, False, 1), None)
    taken += noting.take_device_ops()
    assert [note.record for note in taken] == [0, 1, 2]


# --- a defect of the recorder is not the job's ---


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("broken", ["issue", "finish"])
def test_a_ring_that_fails(
    recording: Recording, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's op goes on, and waits, whatever the ring raises."""
    works = getattr(PythonRing, broken)

    def fail(*args: Any, **kwargs: Any) -> Any:
        if broken == "finish":  # so that the ring is found complete in the end
            works(*args, **kwargs)
        raise OSError("the ring is gone")

    monkeypatch.setattr(PythonRing, broken, fail)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    assert reduce_scatter(torch.zeros(4)).wait()
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(tensor.to_sparse(), op=dist.ReduceOp.PRODUCT)
    assert tensor.tolist() == [1.0] * 4


def test_a_follower_that_fails(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure after the op was issued closes its record, and does not reach the caller."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a defect")

    monkeypatch.setattr(Completion, "_await_future", fail)
    tensor = torch.ones(4)
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    assert work.wait()


# --- what it leaves to the native recorder ---


class Marker:
    """A sink that asks for marks at the issue of each op."""

    def functions(self) -> Functions:
        """Return addresses that nothing may call."""
        return Functions(1, 1, 1)

    def open(self, origin: Any) -> None: ...
    def write(self, descriptions: Any) -> None: ...
    def close(self) -> None: ...


def test_marks_need_the_native_recorder(
    recording: Recording, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool is not called; one line says so, and whom to ask why, however many traces want it."""
    monkeypatch.setattr(errors, "_warnings", set())
    for _ in range(2):
        with trace.enable("ALL", sinks=[Marker()]):
            dist.all_reduce(torch.ones(1))
    said = [line for line in capsys.readouterr().err.splitlines() if "NVTX" in line]
    assert said == [
        "rankcall: no NVTX marks: they need the native recorder, and this job is recorded in "
        "Python; rankcall doctor says why, and what to do"
    ]


# --- on, off, forks and the end ---


@pytest.mark.usefixtures("gloo")
def test_toggling_beside_other_threads(tmp_path: Path) -> None:
    """Threads that issue ops while recording is switched on and off get no error."""
    over = threading.Event()
    errors: list[BaseException] = []
    issued = [0, 0]
    groups = [dist.new_group([0]) for _ in issued]

    def issue(at: int) -> None:
        while not over.is_set():
            try:
                dist.all_reduce(torch.ones(1), group=groups[at])
                issued[at] += 1
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=issue, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
    for number in range(30):
        with rankcall.enable(tmp_path / f"run-{number}", capture="python", capacity=64):
            dist.all_reduce(torch.ones(1))
    over.set()
    for thread in threads:
        thread.join(timeout=30)
    assert not errors
    assert min(issued) > 0


def test_captures_take_turns(gloo: None, tmp_path: Path) -> None:
    """Each capture records, whichever was used before it."""
    for number, capture in enumerate(["python", "native", "python", "native"]):
        with rankcall.enable(tmp_path / f"run-{number}", capture=capture) as recording:
            dist.all_reduce(torch.ones(1))
        table = rankcall.load(tmp_path / f"run-{number}").records
        assert table["op"].to_list() == ["all_reduce"], (number, capture)
        assert recording.capture.name == capture


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_a_forked_child_ends_nothing(recording: Recording) -> None:
    """It may wait for what it inherited, and drop it; its parent's records stay open."""
    waits, drops = reduce_scatter(torch.zeros(4)), reduce_scatter(torch.zeros(4))
    assert recording.path is not None
    child = os.fork()
    if child == 0:
        try:
            # Not dist: Gloo's threads are not in the child.
            waits._ended(None)
            del drops
            completion.release_dropped(10)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert records(recording) == [("started", False, 0)] * 2
    assert waits.wait()
    assert drops.wait()
    assert statuses(recording) == ["completed"] * 2


AT_EXIT = """
import atexit

def check():
    import torch
    there = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")
    print("kernels at exit:", there)

atexit.register(check)  # runs last, because it is registered first
import sys, tempfile
import torch, torch.distributed as dist
import rankcall
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
with tempfile.TemporaryDirectory() as folder, rankcall.enable(folder, capture="python"):
    dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_kernels_stay_to_the_end_of_the_process() -> None:
    """A daemon thread may issue an op as the interpreter exits: nothing is taken out before it."""
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "kernels at exit: True\n", "")


# --- call sites ---


def numbered() -> tuple[call_sites.CallSites, list[CallSite]]:
    """Return a finder of call sites, and those that it has found."""
    found_sites: list[CallSite] = []

    def add(site: CallSite) -> int:
        found_sites.append(site)
        return len(found_sites)

    return call_sites.CallSites(add), found_sites


def test_equal_code_of_two_files_is_two_sites() -> None:
    """Code objects compare equal whatever file they are from."""
    sites, found_sites = numbered()
    for name in ("one.py", "two.py"):
        space: dict[str, Any] = {"look": lambda frame: sites.find(frame, 0), "sys": sys}
        exec(compile("look(sys._getframe())", name, "exec"), space)
    assert [site.file for site in found_sites] == ["one.py", "two.py"]


def test_code_is_not_kept_alive() -> None:
    """A code object that was met dies with its owner, and what is known of it goes, too."""
    sites, found_sites = numbered()
    dead = []
    for number in range(200):
        space: dict[str, Any] = {"look": lambda frame: sites.find(frame, 0), "sys": sys}
        code = compile("\n" * number + "look(sys._getframe())", "made.py", "exec")
        dead.append(weakref.ref(code))
        exec(code, space)
        del code
    assert [reference() for reference in dead] == [None] * 200
    assert [site.line for site in found_sites] == list(range(1, 201))
    assert len(sites._codes) < 10
    assert len(sites._references) == len(sites._codes)


def test_a_thread_that_comes_late_leaves_no_open_record(
    gloo: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen that recording is on, and writes its record once recording was switched off."""
    recording = rankcall.enable(tmp_path / "run", capture="python")
    capture: Any = recording.capture
    issue = capture._ring.issue

    def late(body: tuple[float, ...]) -> int:
        rankcall.disable()
        number: int = issue(body)
        return number

    monkeypatch.setattr(capture._ring, "issue", late)
    dist.all_reduce(torch.ones(1))
    assert rankcall.load(tmp_path / "run").records.is_empty()

"""``--on-hang recover`` in real jobs: hangs and crashes, and attempts that know why they exist."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest
from launch import Ended, Launch, launch
from ports import free_port
from receiving import Receiver
from world import wait_until

from rankcall.job.notices import NOTIFY
from rankcall.run.bars import read_bars
from rankcall.run.exits import read_exits
from rankcall.run.load import load
from rankcall.run.recoveries import AttemptEnd, read_recoveries

pytestmark = pytest.mark.multiproc
HANG_AFTER_S = 3  # on a busy machine, the start of a process takes many seconds, which are no hang

JOB = """
import ctypes, datetime, glob, os, signal, sys, threading, time
import torch
import torch.distributed as dist
import rankcall

how, rank = sys.argv[1], int(os.environ["RANK"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
previous = rankcall.previous_attempt()
first = previous is None
if not first:
    words = previous.verdict, previous.culprits, previous.step, previous.downtime_s > 0
    os.write(1, f"previous {rank} {words}\\n".encode())
if how == "import":
    raise ImportError("no such module")
if how == "init" and first and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)  # before it has a group, and so a ring
if how == "reinit" and attempt == 1 and rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
if how == "outlive" and not first and rank == 0:
    pid = int(open("pid").read())
    os.write(1, f"alone {not os.path.exists(f'/proc/{pid}')}\\n".encode())
dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    if step == 5 and first and how == "saves" and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            dist.all_reduce(torch.ones(2))
        except RuntimeError:  # its peer was ended
            time.sleep(8)
            os.write(1, b"saved\\n")
            raise
    if step == 5 and rank == 1:
        if how in ("stop", "saves") and first:
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "half" and first:  # killed while torch writes its error down
            open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").close()
        if how == "half_pickle" and first:  # torchrun --start-method has two files
            frame = sys._getframe()
            while "error_file" not in frame.f_locals:
                frame = frame.f_back
            open(frame.f_locals["error_file"], "w").close()
        if how in ("kill", "half", "half_pickle", "reinit") and first:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "outlive" and first:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            with open("pid", "w") as file:
                file.write(str(os.getpid()))
            dist.barrier()
            time.sleep(1000)
        if how == "raise":
            raise ValueError(f"bad batch at {time.time()}")
    if step == 5 and first and how == "leader" and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    if step == 5 and first and rank == 0:
        if how in ("half", "half_pickle"):
            time.sleep(1000)  # or it might be the first to fail
        if how == "stop_leader":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "gil":
            ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it keeps the GIL
        if how == "outlive":
            dist.barrier()
            raise ValueError("bad batch")
    if step == 5 and first and how in ("store", "in_store"):
        if rank == 0 or how == "in_store":
            store = dist.distributed_c10d._get_default_store()
            store.wait([f"never {rank}"], datetime.timedelta(seconds=1000))
        threading.Event().wait(1000)
    if step == 5 and how == "busy":
        store = dist.distributed_c10d._get_default_store()
        while rank == 1 and not glob.glob("run/hangs/*/verdict.json"):
            sum(range(10_000))
        ends = time.monotonic() + 8  # longer than it takes to end a rank after a verdict
        while rank == 1 and time.monotonic() < ends:
            sum(range(10_000))
        store.set("evaluated", "1") if rank == 1 else store.get("evaluated")
    if step == 7 and not first and how == "stop":  # the watcher notes that the job is at work again
        ends, noted = time.monotonic() + 120, os.environ["RANKCALL_RECOVERIES"]
        while '"step_ns": 1' not in open(noted).read() and time.monotonic() < ends:
            time.sleep(0.05)
    if step == 5 and first and how == "deadlock":
        dist.recv(torch.ones(1), 1 - rank)
    dist.all_reduce(torch.ones(2))
    optimizer.step()
os.write(1, f"done {rank}\\n".encode())
dist.destroy_process_group()
"""


def job(folder: Path, how: str, *options: str | Path) -> Ended:
    """Run the script on two ranks, with the Python capture, which needs no compiler."""
    (folder / "job.py").write_text(JOB)
    recovers = ("--capture", "python", "--on-hang", "recover", "--hang-after", str(HANG_AFTER_S))
    where = ("--run-dir", folder / "run")
    nproc = () if options else ("--nproc-per-node=2",)
    command = ("exec" if options else "run", *recovers, *where, *options, *nproc)
    return launch(*command, folder / "job.py", how, cwd=folder)


def ends(folder: Path) -> list[AttemptEnd]:
    """Return how the attempts ended that failed."""
    return [end for agent in read_recoveries(folder / "run") for end in agent.ends]


def assert_noted_as_in_the_rings(run_dir: Path) -> None:
    """Rank 0 has noted when it was at work again: at the moments that stand in its ring."""
    (agent,) = read_recoveries(run_dir)
    noted = agent.resumed[-1]
    rings = [ring for ring in load(run_dir).iter_rings() if ring.header.rank == 0]
    ring = max(rings, key=lambda ring: ring.header.anchor_epoch_ns)
    calls = ring.records["enqueued_ns"].astype(int) + (
        ring.header.anchor_epoch_ns - ring.header.anchor_mono_ns
    )
    after_step = calls[ring.records["step"] > 0]
    assert (noted.restart, noted.call_ns, noted.step_ns) == (1, calls[0], after_step[0])


def test_a_stopped_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stopped rank is ended, the job is restarted once and finishes, and all are told why."""
    with Receiver().serving() as receiver:
        monkeypatch.setenv(NOTIFY, receiver.url)
        ended = job(tmp_path, "stop")
    told = {(said := json.loads(body))["type"]: said["data"] for _, body in receiver.got}
    assert set(told) == {"rankcall.verdict", "rankcall.restart", "rankcall.ended"}
    for name in ("rankcall.verdict", "rankcall.restart"):
        assert (told[name]["failure"]["kind"], told[name]["failure"]["ranks"]) == ("stopped", [1])
    assert told["rankcall.ended"]["outcome"] == "done"
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    previous = [line for line in lines if line.startswith("previous")]
    assert "previous 0 ('stopped', (1,), 5, True)" in previous
    assert {"done 0", "done 1"} <= set(lines)
    first = ends(tmp_path)[0]
    assert (first.signature.kind, first.culprits, first.family) == ("stopped", (1,), "machine")
    assert (first.decision, first.step) == ("restart", 5)
    moments = first.fault_ns, first.verdict_ns, first.ended_ns, first.noticed_ns, first.stopped_ns
    assert list(moments) == sorted(moments)
    assert (tmp_path / "run/hangs" / first.verdict / "stacks/rank-00000.txt").exists()
    assert (1, -9, True) in {
        (note.rank, note.code, note.by_launcher) for note in read_exits(tmp_path / "run")
    }
    assert_noted_as_in_the_rings(tmp_path / "run")


@pytest.mark.slow
def test_an_exception_that_comes_back(tmp_path: Path) -> None:
    """It is tried again once; then the job ends with 65, and says at which step and why."""
    ended = job(tmp_path, "raise")
    assert ended.status == 65, ended.err
    assert "this failure repeats at step 5: restarting will not help" in ended.err
    assert "ValueError: bad batch" in ended.err
    first, second = ends(tmp_path)
    assert first.signature == second.signature
    assert (first.family, first.decision, second.decision) == ("program", "restart", "stop")
    assert (second.culprits, second.step) == ((1,), 5)


@pytest.mark.slow
def test_the_last_words_are_those_of_the_verdict(tmp_path: Path) -> None:
    """If a hang ends the job, no other verdict about processes that have ended stands below it."""
    (tmp_path / "job.py").write_text(JOB)
    options = ("--capture", "python", "--on-hang", "recover", "--hang-after", str(HANG_AFTER_S))
    command = (*options, "--max-recoveries", "0", "--run-dir", "run", "--nproc-per-node=2")
    ended = launch("run", *command, "job.py", "stop", cwd=tmp_path)
    assert ended.status == 65, ended.err
    assert "the job was restarted 0 times, which is the limit (--max-recoveries)" in ended.err
    assert ended.err.count("is stopped (SIGSTOP)") == 2  # when it was found, and at the end
    assert "no sign of life" not in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "kind", "culprits"),
    [
        ("kill", "dead", (1,)),
        ("leader", "missing", (0,)),  # its watcher leads, and its program ignores SIGTERM
        ("stop_leader", "stopped", (0,)),  # another watcher has to lead
        ("gil", "stopped", (0,)),
        ("deadlock", "deadlock", (0, 1)),
        ("init", "no_progress", ()),
        ("store", "no_progress", (1,)),  # rank 0 waits in the store, rank 1 in a lock
        ("in_store", "no_progress", ()),  # both wait in the store
    ],
)
def test_other_faults(how: str, kind: str, culprits: tuple[int, ...], tmp_path: Path) -> None:
    """The job is restarted and finishes."""
    ended = job(tmp_path, how)
    assert ended.status == 0, ended.err
    assert {"done 0", "done 1"} <= set(ended.out.splitlines())
    first = ends(tmp_path)[0]
    assert first.signature.kind == kind
    assert not culprits or first.culprits == culprits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "options", "error"),
    [
        ("half", (), "JSONDecodeError"),
        ("half", ("--start-method=fork", "--run-path"), "JSONDecodeError"),
        ("half_pickle", ("--start-method=fork", "--run-path"), ""),
    ],
)
def test_a_rank_that_is_killed_while_it_writes_its_error(
    how: str, options: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    """torch cannot read the part of the file that is there, and the job carries on all the same."""
    (tmp_path / "job.py").write_text(JOB)
    recovers = ("--capture", "python", "--on-hang", "recover", "--run-dir", tmp_path / "run")
    command = (*recovers, *options, "--nproc-per-node=2", tmp_path / "job.py", how)
    ended = launch("run", *command, cwd=tmp_path)
    assert ended.status == 0, ended.err
    assert error in ended.err  # torch says so
    assert {"done 0", "done 1"} <= set(ended.out.splitlines())
    (end,) = ends(tmp_path)
    assert (end.signature.kind, end.culprits, end.family) == ("dead", (1,), "machine")


@pytest.mark.slow
def test_a_rank_that_saves_its_state_after_the_verdict(tmp_path: Path) -> None:
    """It waits for no call any more, so it is not ended before torchrun's own time is over."""
    ended = job(tmp_path, "saves")
    assert ended.status == 0, ended.err
    assert "saved" in ended.out.splitlines()
    (first,) = ends(tmp_path)
    assert (first.signature.kind, first.culprits) == ("stopped", (1,))


@pytest.mark.slow
def test_a_rank_that_works_while_others_wait_in_the_store(tmp_path: Path) -> None:
    """It is reported and not ended: the job goes on by itself."""
    ended = job(tmp_path, "busy")
    assert ended.status == 0, ended.err
    assert "waits for a key of the job's store" in ended.err
    assert {"done 0", "done 1"} <= set(ended.out.splitlines())
    assert ends(tmp_path) == []


@pytest.mark.slow
def test_a_hang_while_the_next_attempt_starts(tmp_path: Path) -> None:
    """Rank 1 is killed, and then hangs before it has its group. The third attempt finishes."""
    ended = job(tmp_path, "reinit")
    assert ended.status == 0, ended.err
    assert [end.signature.kind for end in ends(tmp_path)] == ["dead", "no_progress"]
    assert "previous 0 ('no_progress'" in ended.out


@pytest.mark.slow
def test_a_rank_that_outlives_its_launcher(tmp_path: Path) -> None:
    """A rank below a shell script ignores SIGTERM; it is gone before the next attempt starts."""
    script = tmp_path / "worker.sh"
    script.write_text(f"{sys.executable} job.py outlive & wait $!\n")
    (tmp_path / "job.py").write_text(JOB)
    recovers = ("--capture", "python", "--on-hang", "recover", "--run-dir", tmp_path / "run")
    ended = launch(
        *("run", *recovers, "--nproc-per-node=2", "--no-python", "sh", script), cwd=tmp_path
    )
    assert ended.status == 0, ended.err
    assert "alone True" in ended.out
    assert "ended rank 1 before the next attempt" in ended.err


KILLED = """
import os, signal, sys, time
import torch
import torch.distributed as dist

rank, is_first = os.environ["RANK"], not os.path.exists("again")
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if is_first:
    with open(f"new.{rank}", "w") as file:
        file.write(str(os.getpid()))
    os.replace(f"new.{rank}", f"pid.{rank}")
    if rank == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("below_shell", [False, True])
def test_a_launcher_that_is_killed(below_shell: bool, tmp_path: Path) -> None:
    """Its workers end with it, or before the next launcher starts some, if a script hides them."""
    (tmp_path / "job.py").write_text(KILLED)
    (tmp_path / "worker.sh").write_text(f"{sys.executable} job.py & wait $!\n")
    script = ("--no-python", "sh", tmp_path / "worker.sh") if below_shell else ("job.py",)
    command = ("run", "--capture", "python", "--on-hang", "recover", "--hang-after", "1000")
    job = *command, "--run-dir", tmp_path / "run", "--nproc-per-node=2", *script
    first = Launch(*job, cwd=tmp_path)
    for rank in (0, 1):
        first.wait_for(tmp_path / f"pid.{rank}")
    pids = [int((tmp_path / f"pid.{rank}").read_text()) for rank in (0, 1)]
    first.process.kill()
    first.process.wait()
    if not below_shell:
        wait_until(lambda: not any(map(_runs, pids)), 60)
    (tmp_path / "again").touch()
    second = launch(*job, cwd=tmp_path)
    assert second.status == 0, second.err
    assert not any(map(_runs, pids))
    assert ("ended ranks 0-1 before" in second.err) == below_shell
    first.finish(linger=60)  # a script ends after its rank


def _runs(pid: int) -> bool:
    """Return whether a process runs or is stopped: in a container, nobody may reap it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


@pytest.mark.slow
def test_a_crash_loop_before_the_first_group(tmp_path: Path) -> None:
    """Workers that leave no records are told apart by their exit statuses."""
    ended = job(tmp_path, "import")
    assert ended.status == 65, ended.err
    assert "this failure repeats before an optimizer step was seen" in ended.err
    assert len(ends(tmp_path)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("stop", 0), ("raise", 65)])
def test_below_a_torchrun(how: str, status: int, tmp_path: Path) -> None:
    """``rankcall exec`` does the same below a torchrun of the user's, and keeps its status."""
    torchrun = Path(sys.executable).with_name("torchrun")
    launcher = ("--", str(torchrun), "--standalone", "--nproc-per-node=2", "--max-restarts=9")
    with Receiver().serving() as receiver:
        ended = job(tmp_path, how, "--notify", receiver.url, *launcher)
    assert ended.status == status, ended.err
    told = [json.loads(body) for _, body in receiver.got]
    [(kind, data)] = [(said["type"], said["data"]) for said in told if "status" in said["data"]]
    assert (kind, data["status"]) == ("rankcall.ended", status)
    assert "rankcall.restart" in {said["type"] for said in told}
    assert [end.decision for end in ends(tmp_path)][:1] == ["restart"]


@pytest.mark.slow
def test_two_nodes(tmp_path: Path) -> None:
    """A node without an answer is named; both restart, and number the attempts alike."""
    (tmp_path / "job.py").write_text(JOB)
    address = f"localhost:{free_port()}"
    recovers = ("--capture", "python", "--on-hang", "recover", "--hang-after", str(HANG_AFTER_S))
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=one")
    nodes = [
        Launch(
            *("run", *recovers, "--run-dir", tmp_path / f"node{number}", *rendezvous),
            *("--nnodes=2", "--nproc-per-node=1", "--local-addr=localhost"),
            *(tmp_path / "job.py", "stop"),
            cwd=tmp_path,
            env={"RANKCALL_HOST": f"node-{number}"},
        )
        for number in (0, 1)
    ]
    ended = [node.finish() for node in nodes]
    assert [node.status for node in ended] == [0, 0], [node.err for node in ended]
    told = [read_recoveries(tmp_path / f"node{number}")[0] for number in (0, 1)]
    assert (told[0].ends[0].signature.kind, told[0].ends[0].culprits) == ("missing", (1,))
    assert [start.restart for start in told[0].starts] == [
        start.restart for start in told[1].starts
    ]
    stacks = list(tmp_path.glob("node*/hangs/*/stacks/*"))
    assert stacks


SPARE = """
import os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    dist.all_reduce(torch.ones(2))
    optimizer.step()
is_bad = os.environ["RANKCALL_HOST"] == "node-1"
if dist.get_world_size() == 2 and is_bad:
    os.kill(os.getpid(), signal.SIGKILL)
while not is_bad and not os.path.exists("run/bars.jsonl"):
    time.sleep(0.05)  # the job goes on until the other node has left it; torchrun ends this attempt
    if dist.get_world_size() == 2:
        dist.all_reduce(torch.ones(2))
os.write(1, f"done {dist.get_world_size()}\\n".encode())
dist.destroy_process_group()
"""


class Cluster:
    """Launchers of one job with two nodes at most, each as a node of its own on this machine."""

    def __init__(self, folder: Path, script: str, *options: str) -> None:
        self._folder, self._options, self._port = folder, options, free_port()
        (folder / "job.py").write_text(script)

    def start(self, number: int) -> Launch:
        """Start a node."""
        recovers = ("--capture", "python", "--on-hang", "recover", *self._options)
        where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._port}", "--rdzv-id=one")
        return Launch(
            *("run", *recovers, "--run-dir", self._folder / "run", *where, "--nnodes=1:2"),
            *("--rdzv-conf=last_call_timeout=2", "--nproc-per-node=1", "--local-addr=localhost"),
            self._folder / "job.py",
            cwd=self._folder,
            env={"RANKCALL_HOST": f"node-{number}"},
        )

    def start_host(self) -> Launch:
        """Start node 0, and wait until it hosts the store."""
        node, deadline = self.start(0), time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("localhost", self._port)):
                break
            time.sleep(0.05)
        return node


@pytest.mark.slow
def test_a_bad_node_leaves(tmp_path: Path) -> None:
    """Its rank is killed twice. It leaves with 69, is refused, and the other node finishes."""
    cluster = Cluster(tmp_path, SPARE)
    good = cluster.start_host()
    bad = cluster.start(1).finish()
    assert bad.status == 69, bad.err
    assert "node-1 leaves the job, and is barred until" in bad.err
    ended = good.finish()
    assert ended.status == 0, ended.err
    assert "done 1" in ended.out
    (bar,) = read_bars(tmp_path / "run")
    assert (bar.node, bar.barred) == ("node-1", True)


REPLACED = """
import os, signal, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
hosts = [None] * dist.get_world_size()
dist.all_gather_object(hosts, os.environ["RANKCALL_HOST"])
if "node-1" in hosts and len(hosts) == 2:
    open("both", "w").close()
    while not os.path.exists("strike"):
        dist.all_reduce(torch.ones(2))
        time.sleep(0.05)
    if os.environ["RANKCALL_HOST"] == "node-1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(2))
while len(hosts) < 2 or not os.path.exists("refused"):
    time.sleep(0.05)  # torchrun ends this attempt when a node comes
os.write(1, f"done {sorted(hosts)}\\n".encode())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_bad_node(tmp_path: Path) -> None:
    """A third node comes; the bad one leaves, and is refused when it comes back."""
    cluster = Cluster(tmp_path, REPLACED, "--bar-after", "1", "--hang-after", "1000")
    good = cluster.start_host()
    bad = cluster.start(1)
    good.wait_for(tmp_path / "both")
    spare = cluster.start(2)
    (tmp_path / "strike").touch()
    left = bad.finish()
    assert left.status == 69, left.err
    again = cluster.start(1).finish()
    assert again.status == 69, again.err
    assert "node-1 leaves the job, and is barred until" in again.err
    (tmp_path / "refused").touch()
    for ended in (good.finish(), spare.finish()):
        assert ended.status == 0, ended.err
        assert "done ['node-0', 'node-2']" in ended.out

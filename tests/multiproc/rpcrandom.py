"""Workers that call each other at random, and a model that says which of the calls may have run.

Each worker keeps a log of one line for each thing that happens, written at once, so that a killed
worker's log lacks the last line at most. The content of every tensor follows from its call, so that
whoever holds one can tell whether a byte of it has changed.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rankcall.testing import spawn

HEARTBEAT_S = 1.0
CALL_S = 15.0
LATE_S = 20.0  # on a busy machine
JOIN_S = 150.0
# Numbers of 8 bytes, and how often; 8192 is 64 KiB, from which on shared memory is used.
SIZES = {8: 20, 1000: 10, 8191: 4, 8192: 4, 8193: 4, 20_000: 3, 100_000: 2, 600_000: 1}
MOST_KEPT, MOST_IN_FLIGHT = 60, 6


def content(call: int, size: int) -> Any:
    """Return the tensor that belongs to a call."""
    import torch

    return torch.arange(size) * 2_654_435_761 + call * 40_503


class Worker:
    """One life of a worker process; it may join the group several times."""

    def __init__(self, name: str, rank: int, port: int, folder: str, seed: int) -> None:
        self.name, self.rank, self.port, self.folder = name, rank, port, folder
        self.choose = random.Random(seed)
        path = Path(folder) / f"{name}-{os.getpid()}.log"
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.kept: list[tuple[Any, int]] = []  # tensors and their calls
        self._kept_lock = threading.Lock()  # several threads serve calls
        self.calls = 0
        self.must_rejoin = False

    def note(self, what: str, call: int = 0, text: str = "") -> None:
        """Add a line to the log."""
        line = f"{what} {call} {time.monotonic():.3f} {' '.join(text.split())[:300]}\n"
        os.write(self._log, line.encode())

    def keep(self, tensor: Any, call: int) -> None:
        """Keep a tensor, and drop others; each is checked when it comes and when it goes."""
        self.check(tensor, call)
        dropped = []
        with self._kept_lock:
            self.kept.append((tensor, call))
            while len(self.kept) > MOST_KEPT * self.choose.random():
                dropped.append(self.kept.pop(self.choose.randrange(len(self.kept))))
        for entry in dropped:
            self.check(*entry)

    def check(self, tensor: Any, call: int) -> None:
        """Note if a tensor is not what it was when it was sent."""
        import torch

        if not torch.equal(tensor, content(call, tensor.numel())):
            self.note("wrong", call, str(tensor[:4].tolist()))

    def join(self) -> None:
        """Join the group, again and again until it works."""
        from rankcall import rpc

        options = rpc.construct_rpc_backend_options(
            rpc.BackendType.ZMQ,
            rpc_timeout=CALL_S,
            init_method=f"tcp://127.0.0.1:{self.port}",
            heartbeat_timeout=HEARTBEAT_S,
            num_worker_threads=4,
            arena_bytes=64 << 20,
        )
        until = time.monotonic() + JOIN_S
        while time.monotonic() < until:
            try:
                rpc.init_rpc(self.name, "ZMQ", rank=self.rank, rpc_backend_options=options)
                self.note("joined")
                return
            except RuntimeError as error:
                self.note("not joined", 0, str(error))
        raise AssertionError(f"{self.name} cannot join")

    def leave(self, graceful: bool) -> None:
        """Leave the group."""
        from rankcall import rpc

        with suppress(RuntimeError):
            rpc.shutdown(graceful=graceful, timeout=10)
        self.note("left")

    def start_call(self) -> tuple[int, int, float, Any] | None:
        """Begin a call of a worker that is in the group; return what finish_call() takes."""
        from torch.distributed.rpc import api

        from rankcall import rpc

        names = sorted(info.name for info in api._get_current_rpc_agent().get_worker_infos())
        self.calls += 1
        call = (os.getpid() << 24) + self.calls
        sent, wanted = self.choose.choices([*SIZES], [*SIZES.values()], k=2)
        wanted *= self.choose.random() < 0.7  # 0: the argument itself
        self.note("called", call)
        began = time.monotonic()
        try:
            args = (content(call, sent), call, wanted)
            answer = rpc.rpc_async(self.choose.choice(names), serve, args=args)
            return call, -call if wanted else call, began, answer
        except (RuntimeError, ValueError) as error:  # it has just left
            self.note("failed", call, str(error))
            return None

    def finish_call(self, call: int, holds: int, began: float, answer: Any) -> None:
        """Wait for the answer, which holds the content of ``holds``, or the error."""
        try:
            self.keep(answer.wait(), holds)
            self.note("answered", call)
        except RuntimeError as error:
            self.note("failed", call, str(error))
        late = time.monotonic() - began - CALL_S
        if late > LATE_S and not self.must_rejoin:
            self.note("late", call, f"{late:.1f}")

    def uses(self) -> dict[str, int]:
        """Return how many descriptors, threads and mappings of shared memory this process has."""
        maps = Path("/proc/self/maps").read_text()
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "mappings": maps.count(os.environ["RANKCALL_SHM"]),
        }


_worker: Worker


def serve(tensor: Any, call: int, wanted: int) -> Any:
    """Note that a call runs; return a tensor of its own, or the argument, which it may keep."""
    _worker.note("ran", call)
    if wanted or call % 2:
        _worker.keep(tensor, call)
    return content(-call, wanted) if wanted else tensor


def work(name: str, rank: int, port: int, folder: str, seed: int) -> None:
    """Be a worker until the store says that it is over."""
    global _worker
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["RANKCALL_SHM"] = f"{folder}/shm"
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    _worker = worker = Worker(name, rank, port, folder, seed)

    def rejoin(*_: Any) -> None:
        worker.must_rejoin = True

    signal.signal(signal.SIGUSR1, rejoin)
    worker.join()
    worker.leave(graceful=True)
    first = worker.uses()
    worker.join()
    in_flight: list[tuple[int, int, float, Any]] = []
    while not store.check(["over"]):
        if worker.must_rejoin or worker.choose.random() < 0.0005:
            while in_flight:
                worker.finish_call(*in_flight.pop())
            worker.leave(graceful=not worker.must_rejoin)
            worker.must_rejoin = False
            worker.join()
        for _ in range(20):
            if started := worker.start_call():
                in_flight.append(started)
            while len(in_flight) > MOST_IN_FLIGHT * worker.choose.random():
                worker.finish_call(*in_flight.pop(0))
    while in_flight:
        worker.finish_call(*in_flight.pop())
    store.add("done", 1)
    with suppress(RuntimeError):
        store.wait(["all done"], timedelta(seconds=60))
    started = None
    while worker.kept:
        worker.check(*worker.kept.pop())
    worker.leave(graceful=True)
    deadline = time.monotonic() + 15
    while (last := worker.uses()) != first and time.monotonic() < deadline:
        time.sleep(0.05)
    if any(last[key] > first[key] for key in first):
        worker.note("leaked", 0, f"{first} {last}")
    worker.note("ended")


@dataclass
class Outcome:
    """The events in the logs, counted, and the rules that they break."""

    counts: Counter[str]
    problems: list[str]


def judge(folder: Path) -> Outcome:
    """Compare the logs with the rules."""
    lines: dict[str, list[list[str]]] = {
        path.name: [line.split(" ", 3) for line in _whole_lines(path)]
        for path in sorted(folder.glob("*.log"))
    }
    events: dict[int, list[str]] = defaultdict(list)
    counts: Counter[str] = Counter()
    problems = []
    for name, entries in lines.items():
        for what, call, when, text in entries:
            counts[what] += 1
            if what in ("wrong", "late", "leaked"):
                problems.append(f"{name} at {when}: {what} {call} {text}")
            if what in ("called", "ran", "answered", "failed"):
                events[int(call)].append(what)
        has_ended = bool(entries) and entries[-1][0] == "ended"  # a log may be empty
        for what, call, when, _ in entries:
            if what != "called" or not has_ended:
                continue  # a killed worker's last calls have no end
            ends = [event for event in events[int(call)] if event in ("answered", "failed")]
            if len(ends) != 1:
                problems.append(f"{name}: call {call} of {when} ended {len(ends)} times")
    for call, happened in events.items():
        ran, answered = happened.count("ran"), happened.count("answered")
        if ran > 1 or answered > ran or "called" not in happened:
            problems.append(f"call {call}: {happened}")
    return Outcome(counts, problems)


def _whole_lines(path: Path) -> list[str]:
    """Return a log's lines, without one that a SIGKILL cut at the end of a page."""
    return path.read_text().rpartition("\n")[0].splitlines()


class Group:
    """The workers, and what the test does to them. Leaves no process behind."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        from torch.distributed import TCPStore

        self.folder, self.choose = folder, random.Random(seed)
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.context = spawn.fork_server()  # has imported torch
        self.processes: dict[int, Any] = {}
        self.ended: list[str] = []  # workers that were not killed
        (folder / "shm").mkdir(mode=0o700)
        for rank in range(size):
            self.start(rank)

    def start(self, rank: int) -> None:
        """Start a worker."""
        args = (f"w{rank}", rank, self.store.port, str(self.folder), self.choose.getrandbits(30))
        self.processes[rank] = self.context.Process(target=work, args=args, daemon=True)
        self.processes[rank].start()

    def choose_rank(self) -> int:
        """Choose a worker; start it again if it has ended, which it must not."""
        rank = self.choose.choice(sorted(self.processes))
        process = self.processes[rank]
        if process.exitcode is not None:
            self.ended.append(f"w{rank} (pid {process.pid}): exit code {process.exitcode}")
            self.start(rank)
        return rank

    def kill_one(self) -> None:
        """Kill a worker and start another of its name."""
        rank = self.choose_rank()
        self.processes[rank].kill()
        self.processes[rank].join(30)
        self.start(rank)

    def stop_one(self) -> None:
        """Stop a worker for longer than its peers wait for it; it joins again afterwards."""
        process = self.processes[self.choose_rank()]
        if not list(self.folder.glob(f"*-{process.pid}.log")):
            return  # it has not begun
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5 * HEARTBEAT_S)
        os.kill(process.pid, signal.SIGUSR1)
        os.kill(process.pid, signal.SIGCONT)

    def joined(self) -> int:
        """Return how many of the workers that are running have joined."""
        logs = [list(self.folder.glob(f"*-{p.pid}.log")) for p in self.processes.values()]
        return sum(bool(log) and log[0].read_text().count("joined 0") >= 2 for log in logs)

    def end(self, seconds: float) -> list[str]:
        """Have the workers end; return those that did not in time."""
        self.store.set("over", "")
        deadline = time.monotonic() + seconds
        while int(self.store.add("done", 0)) < len(self.processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        self.store.set("all done", "")
        late = list(self.ended)
        for rank, process in self.processes.items():
            process.join(max(0.1, deadline - time.monotonic()))
            if process.exitcode != 0:
                late.append(f"w{rank} (pid {process.pid}): exit code {process.exitcode}")
        return late

    def close(self) -> None:
        """Kill what is still there."""
        for process in self.processes.values():
            if process.is_alive():
                process.kill()
            process.join(10)


def play(folder: Path, size: int, seconds: float, seed: int) -> Iterator[str]:
    """Run a group for a while and harm its workers; yield what went wrong."""
    group = Group(folder, size, seed)
    try:
        began = time.monotonic()
        while group.joined() < size and time.monotonic() < began + 60:
            time.sleep(0.05)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(seconds / 4, 2.0))
            group.choose.choice((group.kill_one, group.stop_one))()
        yield from group.end(120)
    finally:
        group.close()

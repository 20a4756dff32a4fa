"""Run a function on several real ranks, each in a process of its own, under a hard timeout.

The processes are forked from a server that has imported torch already. So a rank starts in tens of
milliseconds, without importing torch. It shares nothing with the caller or with other ranks. At the
deadline, every rank that still runs dumps the stacks of its threads. Each process is reaped by its
pid.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from rankcall.durations import Duration, seconds
from rankcall.errors import warn_renamed
from rankcall.handles import Handle
from rankcall.process import host_name
from rankcall.run.exits import Exit, note_exit
from rankcall.run.settle import settle
from rankcall.testing.faults import FaultPlan
from rankcall.testing.rank import Job, be_rank, read_output

GRACE_S = 5.0  # how long the other ranks may still run after one has failed, by default
Environment = Mapping[str, str | None]
Target = Callable[..., Any] | Path


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. ``exitcode`` is negative for a signal, and None if it never began."""

    rank: int
    pid: int
    value: Any
    error: str | None
    exitcode: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it ended without an error or a signal."""
        return self.error is None and self.exitcode == 0


class RanksFailed(AssertionError):
    """Raised if a rank failed or missed the deadline; the message holds every rank's output."""

    def __init__(self, reason: str, results: Sequence[RankResult]) -> None:
        self.results = list(results)
        parts = [reason]
        for result in results:
            parts.append(f"--- rank {result.rank} (pid {result.pid}, exit code {result.exitcode})")
            texts = (result.stdout, result.stderr[-6000:], result.error)
            parts += [text for text in texts if text]
        super().__init__("\n".join(parts))


def spawn_ranks(
    target: Target,
    world_size: int,
    *args: Any,
    timeout: Duration = 60.0,
    env: Environment | Callable[[int], Environment] | None = None,
    init: bool = True,
    check: bool = True,
    grace: Duration = GRACE_S,
    faults: FaultPlan | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    watch: Mapping[str, Any] | None = None,
) -> list[RankResult]:
    """Run ``target`` on every rank and return how each rank ended.

    Args:
        target: A module-level function, called as ``fn(rank, world_size, *args)`` in a process of
            its own, with a Gloo default group over ``env://``. It may return any value that JSON
            can represent. Or the path of a script, which runs as ``__main__``.
        world_size: The number of ranks.
        *args: Further arguments of the function, or the script's arguments.
        timeout: After this time, in seconds or as a ``timedelta``, the ranks that still run dump
            their stacks to stderr and are killed. It is also the timeout of the default group.
        env: Environment variables to add (None removes one), for all ranks or by rank.
        init: False leaves it to the function to create the process group.
        check: False returns results even if a rank failed.
        grace: If a rank fails, the deadline of the others is this much later.
        faults: Faults to plant in the ranks.
        run_dir: A run directory. The ranks record into it, and it notes how each of them ended.
        watch: Arguments of ``rankcall.watch.start``. The ranks start the watcher with them.

    Returns:
        One result per rank, in rank order.

    Raises:
        RanksFailed: The time was up, or a rank failed and ``check`` is true.
    """
    options: dict[str, Any] = {"faults": faults, "run_dir": run_dir, "watch": watch}
    with start_ranks(
        target, world_size, *args, timeout=timeout, env=env, init=init, **options
    ) as ranks:
        late = not ranks.wait(timeout, grace)
    if late:
        raise RanksFailed(f"not done after {seconds(timeout, 'timeout'):g} s", ranks.results)
    failed = [result.rank for result in ranks.results if not result.ok]
    if failed and check:
        raise RanksFailed(f"failed on rank {', '.join(map(str, failed))}", ranks.results)
    return ranks.results


def start_ranks(
    target: Target,
    world_size: int,
    *args: Any,
    timeout: Duration = 60.0,
    env: Environment | Callable[[int], Environment] | None = None,
    init: bool = True,
    faults: FaultPlan | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    watch: Mapping[str, Any] | None = None,
) -> Ranks:
    """Start ranks as ``spawn_ranks`` does, and return while they run.

    Use it in a ``with`` statement. At its end, ranks that still run are killed, and the results are
    gathered.

    Args:
        target: A function or a script, as for ``spawn_ranks``.
        world_size: The number of ranks.
        *args: Further arguments of the function, or the script's arguments.
        timeout: The timeout of the default process group.
        env: Environment variables to add, for all ranks or by rank.
        init: False leaves it to the function to create the process group.
        faults: Faults to plant in the ranks.
        run_dir: A run directory to record into.
        watch: Arguments of ``rankcall.watch.start``.

    Returns:
        The running ranks.
    """
    absolute = Path(run_dir).absolute() if run_dir is not None else None
    ranks = Ranks(absolute)
    job = Job(
        target,
        args,
        init,
        seconds(timeout, "timeout"),
        folder=str(ranks.folder),
        run_dir=str(absolute or ""),
        faults=faults,
        watch=dict(watch) if watch is not None else None,
    )
    by_rank = env if callable(env) else lambda rank: env or {}
    ranks.start(job, [{**_base(ranks.port), **by_rank(rank)} for rank in range(world_size)])
    return ranks


class Ranks(Handle):
    """Ranks that run, until ``stop()`` or the end of a ``with`` block, which fills ``results``."""

    def __init__(self, run_dir: Path | None) -> None:
        from torch.distributed import TCPStore

        # The kernel chooses the port and the store binds it at once. So no other process can take
        # it before the ranks connect.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = int(self._store.port)
        self._folder = tempfile.TemporaryDirectory(prefix="rankcall-ranks-")
        self.folder = Path(self._folder.name)
        self.run_dir = run_dir
        self.results: list[RankResult] = []
        self._processes: list[BaseProcess] = []
        self._noted: set[int] = set()

    def start(self, job: Job, env: Sequence[Environment]) -> None:
        """Start one process per environment."""
        self._processes = [
            fork_server().Process(
                target=be_rank,
                args=(job, rank, len(env), dict(variables), tuple(sys.path)),
                daemon=True,
            )
            for rank, variables in enumerate(env)
        ]
        try:
            for process in self._processes:
                process.start()
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in rank order."""
        return [process.pid or 0 for process in self._processes]

    def wait(self, timeout: Duration, grace: Duration = GRACE_S) -> bool:
        """Wait for all ranks to end; return False at the deadline.

        The deadline is ``timeout`` from now, or ``grace`` after a rank has failed; both are in
        seconds, or a ``timedelta``. In the latter case the result is True.
        """
        grace_s = seconds(grace, "grace", zero=True)
        deadline, failed = time.monotonic() + seconds(timeout, "timeout", zero=True), False
        while any(process.is_alive() for process in self._processes):
            self.note_exits()
            if not failed and any(process.exitcode for process in self._processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace_s)
            if time.monotonic() > deadline:
                return failed
            multiprocessing.connection.wait(
                [process.sentinel for process in self._processes if process.is_alive()], timeout=0.2
            )
        return True

    def note_exits(self, by_us: bool = False) -> None:
        """Write into the run which ranks ended since the last call, and how.

        ``wait`` calls this. With ``by_us`` the exits are noted as caused by this process.
        """
        for rank, process in enumerate(self._processes):
            code, pid = process.exitcode, process.pid
            if code is None or pid is None or rank in self._noted:
                continue
            self._noted.add(rank)
            if self.run_dir is not None and self.run_dir.is_dir():
                note_exit(
                    self.run_dir, Exit(rank, 0, host_name(), pid, code, time.time_ns(), by_us)
                )

    def stop(self) -> None:
        """Kill the ranks that still run and gather the results. A second call does nothing."""
        if self.results:
            return
        self.note_exits()
        _reap(self._processes)
        self.note_exits(by_us=True)
        self.results = [self._result(rank, process) for rank, process in enumerate(self._processes)]
        if self.run_dir is not None and self.run_dir.is_dir():
            settle(self.run_dir)
        self._folder.cleanup()

    def end(self) -> None:
        """Call ``stop()``, by its name of version 0.1."""
        warn_renamed("Ranks.end()", "Ranks.stop()")
        self.stop()

    def _result(self, rank: int, process: BaseProcess) -> RankResult:
        output = read_output(self.folder, rank)
        result = RankResult(
            rank=rank,
            pid=process.pid or 0,
            value=output.value,
            error=output.error,
            exitcode=process.exitcode,
            stdout=output.stdout,
            stderr=output.stderr,
        )
        if process.pid:
            process.close()
        return result


def _base(port: int) -> dict[str, str | None]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is the parent's: else rank 0 would host one itself, at a port that is taken.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        # Else Gloo takes the interface that the host's name leads to, which may lead nowhere.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",  # as torchrun sets it: many ranks share the cores
        **{key: value for key, value in os.environ.items() if key.startswith("RANKCALL_")},
    }


# DDP, FSDP, DTensor and pipelines import dynamo, which takes as long to import as torch itself.
_PRELOADED = (
    "numpy",
    "torch.distributed",
    "torch._dynamo",
    "rankcall.testing.spawn",
    "rankcall.watch",
)
# Each rank imports the caller's test file, and with it these, if the caller has them.
_TEST_TOOLS = ("pytest", "hypothesis")
_context: Any = None


def fork_server() -> Any:
    """Return the context of the fork server, which imports once what every rank needs."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        tools = [name for name in _TEST_TOOLS if name in sys.modules]
        _context.set_forkserver_preload([*_PRELOADED, *tools])
    return _context


def _reap(ranks: Sequence[BaseProcess]) -> None:
    """Kill the ranks that still run, with SIGABRT for faulthandler's dump, then with SIGKILL."""
    for sig, wait_s in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0)):
        alive = [process for process in ranks if process.pid and process.is_alive()]
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, sig)
                os.kill(process.pid or 0, signal.SIGCONT)  # a stopped process takes no SIGABRT
        deadline = time.monotonic() + wait_s
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))

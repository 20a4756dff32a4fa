"""Run a function on several real ranks, each a process of its own, under a hard timeout.

The processes are forked from a server that has imported torch already, so that a test pays tens of
milliseconds and not torch's import on every rank; they share nothing with the caller or with each
other. When time is up, every rank still there dumps its threads' stacks, and all are reaped by
their own pid.
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

from rankcall._handle import Scoped
from rankcall.processes import Exit, note_exit
from rankcall.rundir import host_name, settle
from rankcall.testing._child import Job, be_rank, read_told
from rankcall.testing.faults import FaultPlan

GRACE_S = 5.0  # what the other ranks get, unless told, to end by themselves once one has failed
Environment = Mapping[str, str | None]
Target = Callable[..., Any] | Path


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. ``exitcode`` is negative for a signal, None where it never began."""

    rank: int
    pid: int
    value: Any
    error: str | None
    exitcode: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and well."""
        return self.error is None and self.exitcode == 0


class RanksFailed(AssertionError):
    """Raised when a rank failed or time was up; the message holds every rank's output."""

    def __init__(self, reason: str, results: Sequence[RankResult]) -> None:
        self.results = list(results)
        parts = [reason]
        for each in results:
            parts.append(f"--- rank {each.rank} (pid {each.pid}, exit code {each.exitcode})")
            parts += [text for text in (each.stdout, each.stderr[-6000:], each.error) if text]
        super().__init__("\n".join(parts))


def spawn_ranks(
    target: Target,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Environment | Callable[[int], Environment] | None = None,
    init: bool = True,
    check: bool = True,
    grace: float = GRACE_S,
    faults: FaultPlan | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    watch: Mapping[str, Any] | None = None,
) -> list[RankResult]:
    """Run ``target`` on every rank and return how each ended, in rank order.

    ``target`` is a module-level function, called as ``fn(rank, world_size, *args)`` in a process
    of its own with a Gloo default group over ``env://``; or the path of a script that is run as
    ``__main__`` with ``args`` as its arguments. What the function returns (anything JSON can
    carry) is the result's ``value``. ``init=False`` leaves creating the process group to it.
    ``env`` is laid over the environment (None removes a variable), for all ranks or by rank.
    ``faults`` are planted in the ranks. With ``run_dir`` the ranks record into it, and how each
    ended is noted there; with ``watch`` they are watched, and it holds ``rankcall.watch.start``'s
    arguments.

    After ``timeout`` seconds, and ``grace`` seconds after a rank has failed, the ranks still there
    dump their stacks to stderr and are killed. Raises ``RanksFailed`` where time was up, and,
    unless ``check`` is false, where any rank failed.
    """
    with start_ranks(
        target, world_size, *args, timeout=timeout, env=env, init=init, faults=faults,
        run_dir=run_dir, watch=watch,
    ) as ranks:  # fmt: skip
        late = not ranks.wait(timeout, grace)
    if late:
        raise RanksFailed(f"not done after {timeout:g} s", ranks.results)
    failed = [each.rank for each in ranks.results if not each.ok]
    if failed and check:
        raise RanksFailed(f"failed on rank {', '.join(map(str, failed))}", ranks.results)
    return ranks.results


def start_ranks(
    target: Target,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Environment | Callable[[int], Environment] | None = None,
    init: bool = True,
    faults: FaultPlan | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    watch: Mapping[str, Any] | None = None,
) -> Ranks:
    """Start ranks as ``spawn_ranks`` does and return while they run.

    Use it in a ``with`` statement: at its end whatever still runs is killed and ``results`` are
    there. ``timeout`` is that of the default process group.
    """
    where = Path(run_dir).absolute() if run_dir is not None else None
    ranks = Ranks(where)
    job = Job(
        target, args, init, timeout, str(ranks.folder), str(where or ""), faults,
        dict(watch) if watch is not None else None,
    )  # fmt: skip
    by_rank = env if callable(env) else lambda rank: env or {}
    ranks.start(job, [{**_base(ranks.port), **by_rank(rank)} for rank in range(world_size)])
    return ranks


class Ranks(Scoped):
    """Ranks that run. ``results`` are there once the ``with`` statement has been left."""

    def __init__(self, run_dir: Path | None) -> None:
        from torch.distributed import TCPStore

        # Bound here on a port the kernel chose: nothing can take it between choosing and using it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.port = int(self._store.port)
        self._folder = tempfile.TemporaryDirectory(prefix="rankcall-ranks-")
        self.folder = Path(self._folder.name)
        self.run_dir = run_dir
        self.results: list[RankResult] = []
        self._processes: list[BaseProcess] = []
        self._noted: set[int] = set()

    def start(self, job: Job, env: Sequence[Environment]) -> None:
        """Start a process for each rank's environment."""
        self._processes = [
            _server().Process(
                target=be_rank, args=(job, rank, len(env), dict(each), tuple(sys.path)), daemon=True
            )
            for rank, each in enumerate(env)
        ]
        try:
            for process in self._processes:
                process.start()
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """The processes' ids, in rank order."""
        return [process.pid or 0 for process in self._processes]

    def wait(self, timeout: float, grace: float = GRACE_S) -> bool:
        """Wait for all to end, once one has failed ``grace`` at most; False where time is up."""
        deadline, failed = time.monotonic() + timeout, False
        while any(process.is_alive() for process in self._processes):
            self.note_exits()
            if not failed and any(process.exitcode for process in self._processes):
                failed, deadline = True, min(deadline, time.monotonic() + grace)
            if time.monotonic() > deadline:
                return failed
            multiprocessing.connection.wait(
                [process.sentinel for process in self._processes if process.is_alive()], timeout=0.2
            )
        return True

    def note_exits(self, by_us: bool = False) -> None:
        """Write into the run who has ended since the last time, and how; ``wait`` does it too."""
        for rank, process in enumerate(self._processes):
            code, pid = process.exitcode, process.pid
            if code is None or pid is None or rank in self._noted:
                continue
            self._noted.add(rank)
            if self.run_dir is not None and self.run_dir.is_dir():
                note_exit(
                    self.run_dir, Exit(rank, 0, host_name(), pid, code, time.time_ns(), by_us)
                )

    def end(self) -> None:
        """End what is left and gather the results; a second time it does nothing."""
        if self.results:
            return
        self.note_exits()
        _reap(self._processes)
        self.note_exits(by_us=True)
        self.results = [self._result(rank, each) for rank, each in enumerate(self._processes)]
        if self.run_dir is not None and self.run_dir.is_dir():
            settle(self.run_dir)
        self._folder.cleanup()

    def _result(self, rank: int, process: BaseProcess) -> RankResult:
        told = read_told(self.folder, rank)
        result = RankResult(
            rank, process.pid or 0, told.value, told.error, process.exitcode, told.stdout,
            told.stderr,
        )  # fmt: skip
        if process.pid:
            process.close()
        return result

    def _end(self) -> None:
        self.end()


def _base(port: int) -> dict[str, str | None]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **{key: value for key, value in os.environ.items() if key.startswith("RANKCALL_")},
    }


# DDP, FSDP, DTensor and pipelines all import dynamo, which takes as long as torch itself.
_PRELOADED = ("numpy", "torch.distributed", "torch._dynamo", "rankcall.testing._child")
_context: Any = None


def _server() -> Any:
    """Return the fork server's context; started once, with what ranks would import each."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(list(_PRELOADED))
    return _context


def _reap(ranks: Sequence[BaseProcess]) -> None:
    """End what is left: SIGABRT makes faulthandler dump all stacks, SIGKILL ends the rest."""
    for sig, wait_s in ((signal.SIGABRT, 3.0), (signal.SIGKILL, 10.0)):
        alive = [process for process in ranks if process.pid and process.is_alive()]
        for process in alive:
            with suppress(ProcessLookupError):
                os.kill(process.pid or 0, sig)
                os.kill(process.pid or 0, signal.SIGCONT)  # a stopped one takes no SIGABRT
        deadline = time.monotonic() + wait_s
        for process in alive:
            process.join(max(0.0, deadline - time.monotonic()))

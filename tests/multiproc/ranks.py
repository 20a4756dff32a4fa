"""Run a function on several real ranks, each a process of its own, under a hard timeout.

``run_ranks(fn, 4)`` starts four processes, calls ``fn(rank, world_size, *args)`` in each with a
Gloo default group over ``env://``, and returns the four results (anything JSON can carry) in rank
order. The processes are forked from a server that has imported torch already, so that a test pays
tens of milliseconds and not torch's import on every rank; they share nothing with pytest or with
each other.

When a rank fails, or time is up, every rank still there dumps its threads' stacks, all are
reaped by their own pid, and ``RanksFailed`` carries what each wrote.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

GRACE_S = 5.0  # what the other ranks get to end by themselves once one has failed
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Result:
    """How one rank ended. ``exitcode`` is negative for a signal."""

    rank: int
    pid: int
    value: Any
    error: str | None
    exitcode: int | None
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.error is None and self.exitcode == 0


class RanksFailed(AssertionError):
    """Raised when a rank failed or time was up; the message holds every rank's output."""

    def __init__(self, reason: str, results: Sequence[Result]) -> None:
        self.results = list(results)
        parts = [reason]
        for each in results:
            parts.append(f"--- rank {each.rank} (pid {each.pid}, exit code {each.exitcode})")
            parts += [text for text in (each.stdout, each.stderr[-6000:], each.error) if text]
        super().__init__("\n".join(parts))


@dataclass(frozen=True)
class _Job:
    """What a rank's process is told."""

    file: str  # of the function, or the script
    name: str  # of the function within it; "" for a script
    args: tuple[Any, ...]
    init: bool
    timeout: float
    folder: str
    env: dict[str, str | None]
    path: tuple[str, ...]


def run_ranks(
    target: Callable[..., Any] | Path,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    init: bool = True,
) -> list[Any]:
    """Run ``target`` on every rank and return its results in rank order.

    ``target`` is a module-level function called as ``fn(rank, world_size, *args)``, or the path of
    a script that is run as ``__main__`` with ``args`` as its arguments. ``init=False`` leaves
    creating the process group to it. ``env`` is laid over the environment (None removes one).
    Raises ``RanksFailed`` where any rank fails.
    """
    results, late = _run(target, world_size, args, timeout, env, init)
    if late:
        raise RanksFailed(f"not done after {timeout:g} s", results)
    failed = [each.rank for each in results if not each.ok]
    if failed:
        raise RanksFailed(f"failed on rank {', '.join(map(str, failed))}", results)
    return [each.value for each in results]


def try_ranks(
    target: Callable[..., Any] | Path,
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    init: bool = True,
) -> list[Result]:
    """Do as ``run_ranks``, for ranks that are meant to fail: return how each one ended.

    Raises ``RanksFailed`` only where time was up.
    """
    results, late = _run(target, world_size, args, timeout, env, init)
    if late:
        raise RanksFailed(f"not done after {timeout:g} s", results)
    return results


def _run(
    target: Callable[..., Any] | Path,
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    env: Mapping[str, str | None] | None,
    init: bool,
) -> tuple[list[Result], bool]:
    from torch.distributed import TCPStore

    # Bound here on a port the kernel chose: nothing can take it between choosing and using it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="rankcall-ranks-") as folder:
        file, name = _place(target)
        base = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            **{key: value for key, value in os.environ.items() if key.startswith("RANKCALL_")},
            **(env or {}),
        }
        job = _Job(file, name, args, init, timeout, folder, base, tuple(sys.path))
        ranks = [
            _server().Process(target=_rank, args=(job, rank, world_size), daemon=True)
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            late = _wait(ranks, time.monotonic() + timeout)
        finally:
            _reap(ranks)
        return [_result(Path(folder), rank, each) for rank, each in enumerate(ranks)], late


def _place(target: Callable[..., Any] | Path) -> tuple[str, str]:
    if isinstance(target, Path):
        return str(target), ""
    assert "." not in target.__qualname__, f"{target.__qualname__} is not a module-level function"
    return target.__code__.co_filename, target.__name__


_context: Any = None


def _server() -> Any:
    """Return the fork server's context; started once, with torch imported and nothing else."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(["numpy", "torch.distributed"])
    return _context


def _wait(ranks: Sequence[BaseProcess], deadline: float) -> bool:
    """Wait until all have ended; once one has failed the others have ``GRACE_S``. True: time up."""
    failed = False
    while any(process.is_alive() for process in ranks):
        if not failed and any(process.exitcode for process in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE_S)
        if time.monotonic() > deadline:
            return not failed
        multiprocessing.connection.wait(
            [process.sentinel for process in ranks if process.is_alive()], timeout=0.2
        )
    return False


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


def _result(folder: Path, rank: int, process: BaseProcess) -> Result:
    def read(name: str) -> str:
        file = folder / f"{name}.{rank}"
        return file.read_text(errors="replace") if file.exists() else ""

    told = json.loads(read("result") or '{"error": null, "value": null}')
    result = Result(
        rank, process.pid or 0, told["value"], told["error"], process.exitcode,
        read("stdout"), read("stderr"),
    )  # fmt: skip
    process.close()
    return result


def _rank(job: _Job, rank: int, world_size: int) -> None:
    """Be one rank (in its own process)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # do not outlive the tests
    folder = Path(job.folder)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / f"{name}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, fd)
        os.close(file)
    faulthandler.enable(file=2, all_threads=True)
    ours = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    for key, value in {**{k: str(v) for k, v in ours.items()}, **job.env}.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value
    sys.path[:] = job.path
    told: dict[str, Any] = {"value": None, "error": None}
    try:
        told["value"] = _call(job, rank, world_size)
        text = json.dumps(told)
    except BaseException:
        told = {"value": None, "error": traceback.format_exc()}
        text = json.dumps(told)
        raise
    finally:
        (folder / f"result.{rank}").write_text(text)


def _call(job: _Job, rank: int, world_size: int) -> Any:
    if not job.name:
        sys.argv = [job.file, *map(str, job.args)]
        runpy.run_path(job.file, run_name="__main__")
        return None
    function = getattr(_module(job.file), job.name)
    if not job.init:
        return function(rank, world_size, *job.args)
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout))
    value = function(rank, world_size, *job.args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return value


def _module(file: str) -> Any:
    """Import the file a function stands in, by its path: test files are not importable by name."""
    name = Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module

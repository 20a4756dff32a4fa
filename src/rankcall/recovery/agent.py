"""torchrun's agent, which asks a ``Supervisor`` before it starts workers again.

All supervision and the rendezvous are torch's: this class adds what happens between the end of the
workers of one attempt and the start of those of the next.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from rankcall.files import open_file
from rankcall.recovery.rendezvous import Rendezvous, is_signal
from rankcall.recovery.supervisor import Supervisor, settings_from_environment


def install() -> bool:
    """Have torchrun use our agent in this process, if the job is to carry on; return whether.

    torchrun looks the class up in the module of its launcher. Call this before it starts an agent.
    """
    settings = settings_from_environment()
    if settings is None:
        return False
    from torch.distributed.launcher import api

    # Through setattr, because a type checker does not let a class be replaced.
    setattr(api, "LocalElasticAgent", _agent_class(Supervisor(settings, _say)))  # noqa: B010
    return True


def _say(text: str) -> None:
    print(f"rankcall: {text}", file=sys.stderr, flush=True)


def _agent_class(supervisor: Supervisor) -> type:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class CarryingAgent(LocalElasticAgent):
        """The agent of one node. The methods are those that torch's own agent calls, in order."""

        _has_failed = _has_started = False
        _nodes: frozenset[Any] = frozenset()  # of the attempt that runs

        def __init__(self, spec: Any, *args: Any, **keywords: Any) -> None:
            # launch_agent closes the rendezvous by this attribute, too.
            self._rendezvous_of_job = spec.rdzv_handler = Rendezvous(spec.rdzv_handler)
            self._rendezvous_of_job.before = lambda: supervisor.admit(spec.rdzv_handler)
            super().__init__(spec, *args, **keywords)

        def run(self, *args: Any, **keywords: Any) -> Any:
            try:
                result = super().run(*args, **keywords)
                if self._has_failed:  # and no restart followed
                    supervisor.gave_up()
                return result
            finally:
                supervisor.close()

        def _monitor_workers(self, worker_group: Any) -> Any:
            try:
                result = super()._monitor_workers(worker_group)
            except Exception as error:
                failures = {} if is_signal(error) else _failures(self._pcontext, worker_group)
                if not failures:
                    raise
                result = RunResult(WorkerState.FAILED, failures=failures)
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                failures = result.failures or {}
                supervisor.failed({rank: end.exitcode for rank, end in failures.items()})
                self._has_failed = True
            return result

        def _stop_workers(self, worker_group: Any) -> None:
            # A stopped process cannot handle SIGTERM, and torch waits 30 s for it.
            for worker in worker_group.workers:
                if _is_stopped_child(worker.id):
                    os.kill(worker.id, signal.SIGKILL)
            super()._stop_workers(worker_group)

        def _initialize_workers(self, worker_group: Any) -> None:
            if self._has_failed:
                supervisor.may_restart()
            elif self._has_started and self._nodes and self._nodes <= self._rendezvous_of_job.nodes:
                supervisor.joined()  # all nodes still take part: a new one waits to be let in
            elif self._has_started:
                supervisor.follows()
            self._has_failed, self._has_started = False, True
            super()._initialize_workers(worker_group)

        def _start_workers(self, worker_group: Any) -> Any:
            spec = worker_group.spec
            self._nodes = self._rendezvous_of_job.nodes
            budget = self._remaining_restarts
            number = self._rendezvous_of_job.round(default=spec.max_restarts - budget)
            supervisor.before_start(number, self._rendezvous_of_job)
            # torch numbers an attempt by the restarts that this node has caused itself. Nodes would
            # then number it differently, and the workers, who look for each other below that
            # number in the store ("/worker/attempt_3"), would never meet.
            self._remaining_restarts = spec.max_restarts - number
            try:
                pids = super()._start_workers(worker_group)
            finally:
                self._remaining_restarts = budget
            workers = worker_group.workers
            ranks = {worker.global_rank: pids[worker.local_rank] for worker in workers}
            supervisor.started(ranks, workers[0].world_size if workers else 0)
            return pids

    return CarryingAgent


def _failures(context: Any, worker_group: Any) -> dict[int, Any]:
    """Return how workers ended of which one was killed while it wrote down its error, by rank.

    torch reads the files in which its handlers note an exception. A worker that is killed
    meanwhile, by the watcher or another program, leaves a part of one. torch's agent would end by
    that, and the job with it.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    codes, broken = _ends(context)
    failed = {local_rank: code for local_rank, code in codes.items() if code}
    # torchrun may have ended the others since, by a signal that they handled in their own way.
    first = {local_rank: code for local_rank, code in failed.items() if local_rank in broken}
    pids = context.pids()
    return {
        worker_group.workers[local_rank].global_rank: ProcessFailure(
            local_rank, pids[local_rank], code, error_file="<N/A>"
        )
        for local_rank, code in (first or failed).items()
    }


def _ends(context: Any) -> tuple[dict[int, int | None], set[int]]:
    """Return the exit codes of workers, and which of them left a part of a file of errors."""
    errors = context.error_files
    broken = {rank for rank in errors if not _ends_with(errors[rank], b"}")}  # JSON
    handlers = getattr(context, "subprocess_handlers", None)
    if handlers is not None:
        return {rank: handler.proc.poll() for rank, handler in handlers.items()}, broken
    started = context._pc  # torchrun --start-method: its workers have another file, too
    pickles = dict(enumerate(started.error_files))
    broken |= {rank for rank in pickles if not _ends_with(pickles[rank], b".")}
    return dict(enumerate(process.exitcode for process in started.processes)), broken


def _ends_with(error_file: str, end: bytes) -> bool:
    """Return whether a file ends as a whole one does; true if there is none."""
    try:
        with open_file(Path(error_file)) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 1))
            return file.read(1) == end
    except OSError:
        return True


def _is_stopped_child(pid: Any) -> bool:
    """Return whether a process is stopped, and a child of this one.

    torch may have reaped a worker that failed, and its pid can be another program's by now.
    """
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_bytes()
    except (OSError, ValueError, TypeError):
        return False
    return stat.rpartition(b")")[2].split()[:2] == [b"T", b"%d" % os.getpid()]

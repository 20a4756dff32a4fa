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
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class CarryingAgent(LocalElasticAgent):
        """The agent of one node. The methods are those that torch's own agent calls, in order."""

        _has_failed = _has_started = False

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
                failures = result.failures or {}
                supervisor.failed({rank: end.exitcode for rank, end in failures.items()})
                self._has_failed = True
            return result

        def _stop_workers(self, worker_group: Any) -> None:
            # A stopped process cannot handle SIGTERM, and torch waits 30 s for it.
            for worker in worker_group.workers:
                if _is_stopped(worker.id):
                    os.kill(worker.id, signal.SIGKILL)
            super()._stop_workers(worker_group)

        def _initialize_workers(self, worker_group: Any) -> None:
            if self._has_failed:
                supervisor.may_restart()
            elif self._has_started:
                # Another node has failed, and decides. torch counts such a restart on that node
                # alone, and the nodes would number the attempts differently from then on.
                supervisor.follows()
                self._remaining_restarts -= 1
            self._has_failed, self._has_started = False, True
            _forget_store(worker_group.spec.rdzv_handler)
            super()._initialize_workers(worker_group)

        def _start_workers(self, worker_group: Any) -> Any:
            supervisor.before_start(worker_group.spec.max_restarts - self._remaining_restarts)
            pids = super()._start_workers(worker_group)
            workers = worker_group.workers
            ranks = {worker.global_rank: pids[worker.local_rank] for worker in workers}
            supervisor.started(ranks, workers[0].world_size if workers else 0)
            return pids

    return CarryingAgent


def _is_stopped(pid: Any) -> bool:
    try:
        stat = Path(f"/proc/{int(pid)}/stat").read_bytes()
    except (OSError, ValueError, TypeError):
        return False
    return stat.rpartition(b")")[2].split()[:1] == [b"T"]


def _forget_store(handler: Any) -> None:
    """Have the rendezvous make a new store for the workers of the next attempt.

    torch says that it does ("We create a new TCPStore for every retry", rendezvous.py), and keeps
    the first one (DynamicRendezvousHandler, 2.13). The keys of the attempt before are then still in
    it, and a new worker connects to the address of one that has ended.
    """
    for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
        if getattr(handler, name, None) is not None:
            setattr(handler, name, None)

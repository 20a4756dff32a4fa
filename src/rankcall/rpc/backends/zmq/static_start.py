"""How a ZMQ worker comes up in a static group, and how the group finds out that it is idle."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.rpc import api

from rankcall.errors import AuthenticationError, RpcTimeout
from rankcall.rpc.backends.zmq.worker import ZmqWorker, check_descriptors
from rankcall.rpc.current_group import set_group, undone_on_error
from rankcall.rpc.deadlines import seconds_left
from rankcall.rpc.device_maps import WorkerDevices, device_list, reverse_maps, validate
from rankcall.rpc.static_group import StaticGroup, StaticMembership

_FOREVER_S = 1e9  # not infinity, of which no timedelta can be made
_COUNTS_POLL_S = 0.001  # between two looks at the agent's own counters


def join_static(worker: ZmqWorker, membership: StaticMembership, deadline: float) -> None:
    """Bring the worker's agent up; on return all workers of the group can call each other."""
    check_descriptors(worker.name, membership.world_size - 1)
    records = membership.introduce(worker.record(), deadline)
    nodes = [WorkerDevices.from_json(record["node"]) for record in records]
    validate(nodes, static=True)
    reverse = reverse_maps(worker.name, nodes)
    devices = device_list(nodes[worker.rank], reverse)
    if torch.cuda.is_available() and devices:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    agent = worker.agent
    agent.set_devices(0, worker.options.device_maps, reverse, devices)
    for record in records:
        worker.meet(record)
    membership.gone = agent.gone
    agent.on_join(Quiescence(agent, membership).wait)
    agent.on_control(lambda payload: "")  # nobody joins later; _reach only asks for an answer
    with undone_on_error():
        api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
        # First, so that a worker that died meanwhile is named as missing.
        membership.exchange("started", None, deadline)
        # Workers of this host use no secret, about which they could disagree.
        _reach([peer for peer in records if not worker.shares_memory_with(peer)], agent, deadline)
        membership.exchange("ready", None, deadline)
    set_group(StaticGroup(agent, membership, membership.store))


def _reach(records: Sequence[Mapping[str, Any]], agent: Any, deadline: float) -> None:
    """Hear from every worker on another host. Raises ``AuthenticationError``.

    Without this, a wrong secret or a firewall would fail the user's first call, with less to say.
    """
    names = [record["node"]["name"] for record in records]
    answers = [agent.control(name, "", seconds_left(deadline)) for name in names]
    for name, answer in zip(names, answers, strict=True):
        try:
            answer.wait()
        except RuntimeError as error:
            raise AuthenticationError(
                f"worker {name!r} on another host cannot be reached, or refuses this worker; "
                f"is RANKCALL_RPC_SECRET_FILE's content the same there? ({error})"
            ) from error


class Quiescence:
    """Waits until no call is in flight anywhere in a static group."""

    def __init__(self, agent: Any, membership: StaticMembership) -> None:
        self._counts, self._membership = agent.counts, membership

    def wait(self, shutdown: bool, timeout: float) -> None:
        """Return on all workers at once; ``timeout`` in seconds, 0 for none.

        One round of counts is not enough: the workers count at different times, and a call may
        start another one in between. Two rounds in a row must find as many calls ended as started,
        and the same number as in the round before (Mattern's method of four counters, 1987).
        """
        deadline = time.monotonic() + (timeout or _FOREVER_S)
        before = None
        while True:
            self._wait_for_own(deadline)
            counts = self._membership.exchange("join", self._counts(), deadline)
            started, ended = map(sum, zip(*counts, strict=True))
            if started == ended == before:
                return
            before = started if started == ended else None

    def _wait_for_own(self, deadline: float) -> None:
        while True:
            started, ended = self._counts()
            if started == ended:
                return
            if time.monotonic() > deadline:
                raise RpcTimeout(f"{started - ended} calls of this worker were not answered")
            time.sleep(_COUNTS_POLL_S)

"""ZMQ: rankcall's agent over ZeroMQ, shared memory within a host, CURVE between hosts."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rpc import (
    _delete_all_user_and_unforked_owner_rrefs,
    _is_current_rpc_agent_set,
    api,
)

from rankcall import background
from rankcall.background import EXIT_S, exit_budget
from rankcall.errors import AuthenticationError, RpcTimeout
from rankcall.process import UNKNOWN, Process
from rankcall.rpc.backends.zmq_worker import (
    Worker,
    ZmqRpcBackendOptions,
    agent_module,
    check_descriptors,
    zmq_library,
)
from rankcall.rpc.device_maps import Node, device_list, reverse_maps, validate
from rankcall.rpc.group import (
    check_arguments,
    init_deadline,
    seconds_left,
    set_group,
    undone_on_error,
    wait_idle,
)
from rankcall.rpc.member_log import MemberLog, WorkerRecord, check_unique, find_conflict, is_dead
from rankcall.rpc.static_membership import StaticGroup, StaticMembership, form_group

__all__ = [
    "ZmqRpcBackendOptions",
    "construct_rpc_backend_options_handler",
    "init_backend_handler",
]

_FOREVER_S = 1e9
_CONFLICT_POLL_S = 0.2


def construct_rpc_backend_options_handler(
    rpc_timeout: float, init_method: str, **kwargs: Any
) -> ZmqRpcBackendOptions:
    """Return the options. An unknown keyword is a ``TypeError``."""
    return ZmqRpcBackendOptions(rpc_timeout=rpc_timeout, init_method=init_method, **kwargs)


def init_backend_handler(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: ZmqRpcBackendOptions,
) -> Any:
    """Bring this worker's agent up and return it, in use; see TENSORPIPE's for the contract.

    Also raises ``BackendUnavailableError`` if pyzmq, a compiler, file descriptors or a usable
    address is
    missing, and ``AuthenticationError`` if workers of several hosts have no common secret.
    """
    check_arguments(store, rpc_backend_options, ZmqRpcBackendOptions)
    library = zmq_library()
    agent_module()  # built before the deadline counts
    deadline = init_deadline(rpc_backend_options.rpc_timeout)

    def join_static(membership: StaticMembership) -> Any:
        with _new_worker(name, membership.rank, library, rpc_backend_options) as worker:
            _join_static(worker, membership, deadline)
        return worker.agent

    if world_size:
        agent = form_group(join_static, store, name, rank, world_size, deadline)
    else:
        with _new_worker(name, rank, library, rpc_backend_options) as worker:
            group = DynamicGroup(worker, MemberLog(dist.PrefixStore("dynamic", store)))
            group.join(deadline)
        set_group(group)
        agent = worker.agent
    _end_at_exit()
    return agent


@contextmanager
def _new_worker(
    name: str, rank: int, library: str, options: ZmqRpcBackendOptions
) -> Iterator[Worker]:
    worker = Worker(name, rank, library, options)
    try:
        yield worker
    except BaseException:
        worker.dir.close()
        raise


# --- static groups


def _join_static(worker: Worker, membership: StaticMembership, deadline: float) -> None:
    check_descriptors(worker.name, membership.world_size - 1)
    records = membership.introduce(worker.record(), deadline)
    nodes = [Node.from_json(record["node"]) for record in records]
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
    agent.on_control(lambda payload: "")
    with undone_on_error():
        api._init_rpc_states(agent)  # type: ignore[no-untyped-call]
        membership.exchange("started", None, deadline)
        _reach([peer for peer in records if not worker.shares_memory_with(peer)], agent, deadline)
        membership.exchange("ready", None, deadline)
    set_group(StaticGroup(agent, membership, membership.store))


def _reach(records: Sequence[Mapping[str, Any]], agent: Any, deadline: float) -> None:
    """Hear from every worker on another host. Raises ``AuthenticationError``."""
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

        Two rounds in a row must find as many calls ended as started, and the same number
        (Mattern's four counters, 1987): a call that starts another is then in neither round.
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
            time.sleep(0.001)


# --- dynamic groups


class DynamicGroup:
    """This worker's view of a group whose workers join and leave, and are lost, at any time.

    A newcomer adds itself to the log, and introduces itself to all members in it at once. The
    agent's threads call ``_on_control`` and ``_on_lost``. No call of the agent or the store is made
    with the lock held.
    """

    def __init__(self, worker: Worker, log: MemberLog) -> None:
        self._worker, self._agent, self._log = worker, worker.agent, log
        self._members: dict[str, tuple[int, Node]] = {}  # session and devices, by name
        self._version = 0
        self._lock = threading.Lock()

    def join(self, deadline: float) -> None:
        """Become a member; on return every other member can call this one, and it them."""
        record = self._worker.record()
        before = self._log.enter(record, deadline)
        try:
            self._start(record, self._living(record, before, deadline), deadline)
        except BaseException:
            with suppress(RuntimeError):
                self._log.leave(record["session"])
            raise

    def leave(self, deadline: float) -> None:
        """Finish the calls in flight and leave; the others learn it from the last message."""
        _delete_all_user_and_unforked_owner_rrefs(timedelta(seconds=seconds_left(deadline)))
        wait_idle(self._agent, deadline)
        with suppress(RuntimeError):  # the store's host may have left first
            self._log.leave(self._worker.session, deadline)

    def _living(
        self, record: WorkerRecord, before: Iterable[WorkerRecord], deadline: float
    ) -> list[WorkerRecord]:
        """Return the members that are not known to be dead, and take the others off the log.

        A member with the newcomer's name may have died on another host: its peers find out within
        their heartbeat timeouts, so wait for that.
        """
        while True:
            living = []
            for other in before:
                if is_dead(other):
                    self._log.leave(other["session"], by=record["session"])
                else:
                    living.append(other)
            conflict = find_conflict(record, living)
            if conflict is None:
                check_descriptors(self._worker.name, len(living))
                return living
            is_unknown = Process(**conflict["process"]).liveness() == UNKNOWN
            if not is_unknown or time.monotonic() >= deadline:
                check_unique(record, living)
            time.sleep(_CONFLICT_POLL_S)
            present = {member["session"] for member in self._log.members(deadline)}
            before = [other for other in living if other["session"] in present]

    def _start(self, record: WorkerRecord, others: Sequence[WorkerRecord], deadline: float) -> None:
        nodes = [Node.from_json(member["node"]) for member in (record, *others)]
        validate(nodes, static=False)
        self._agent.on_control(self._on_control)
        self._agent.on_lost(self._on_lost)
        for member in (record, *others):
            self._meet(member)
        if torch.cuda.is_available() and device_list(nodes[0], reverse_maps(nodes[0].name, nodes)):
            torch.cuda.init()  # type: ignore[no-untyped-call]
        with undone_on_error():
            api._init_rpc_states(self._agent)  # type: ignore[no-untyped-call]
            self._introduce(
                json.dumps(record), [other["node"]["name"] for other in others], deadline
            )

    def _introduce(self, text: str, names: Sequence[str], deadline: float) -> None:
        left = seconds_left(deadline)
        answers = [self._agent.control(name, text, left) for name in names]
        for name, answer in zip(names, answers, strict=True):
            try:
                answer.wait()
            except RuntimeError as error:
                if name in self._agent.gone() or name not in self._members:
                    continue  # it has left, or was lost, since
                if time.monotonic() < deadline:
                    raise
                raise RpcTimeout(
                    f"worker {self._worker.name!r} could not join in time: "
                    f"member {name!r} did not answer"
                ) from error

    def _on_control(self, payload: bytes) -> str:
        """Take note of a newcomer. Its ``init_rpc`` raises what is raised here."""
        self._meet(json.loads(payload))  # first, as only a peer is sent an answer
        check_descriptors(self._worker.name, 1)
        return ""

    def _on_lost(self, name: str, session: int, must_be_logged: bool) -> None:
        """Take note of a member that has left or was lost."""
        with self._lock:
            if self._members.get(name, (None,))[0] == session:
                del self._members[name]
        self._agent.remove_peer(name, session)
        self._update_devices()
        if must_be_logged:
            with suppress(RuntimeError):
                self._log.leave(session, by=self._worker.session)

    def _meet(self, record: WorkerRecord) -> None:
        node = Node.from_json(record["node"])
        self._worker.meet(record)
        with self._lock:
            self._members[node.name] = record["session"], node
        self._update_devices()

    def _update_devices(self) -> None:
        with self._lock:
            self._version += 1
            version = self._version
            nodes = {name: node for name, (_, node) in self._members.items()}
        own = nodes.get(self._worker.name)
        if own is not None:
            reverse = reverse_maps(own.name, nodes.values())
            self._agent.set_devices(version, own.maps, reverse, device_list(own, reverse))


# --- the end of the process

_close: Callable[[], None] | None = None


def _end_at_exit() -> None:
    """Close the agent at exit, before what the program has registered until now."""
    global _close
    if _close is not None:
        atexit.unregister(_close)
    owner = os.getpid()
    _close = background.at_exit(lambda: _at_exit(owner))


def _at_exit(owner: int) -> None:
    """Take down what a program that ends without ``shutdown`` left running.

    A forked child has the agent but none of its threads, and leaves it alone.
    """
    if os.getpid() != owner or not _is_current_rpc_agent_set():
        return
    if isinstance(api._get_current_rpc_agent(), agent_module().ZmqAgent):
        # The agent bounds its own wait; the time that it takes is not there for other waits.
        exit_budget.spend(lambda _: api._finalize_shutdown(), EXIT_S)  # type: ignore[no-untyped-call]

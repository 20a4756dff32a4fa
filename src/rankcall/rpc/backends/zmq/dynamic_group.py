"""A dynamic group, as one ZMQ worker sees it: how it joins, and learns who comes and goes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch.distributed.rpc import _delete_all_user_and_unforked_owner_rrefs, api

from rankcall.errors import RpcTimeout
from rankcall.process import UNKNOWN, Process
from rankcall.rpc.backends.zmq.member_log import (
    MemberLog,
    WorkerRecord,
    check_unique,
    find_conflict,
    is_dead,
)
from rankcall.rpc.backends.zmq.worker import ZmqWorker, check_descriptors
from rankcall.rpc.current_group import undone_on_error
from rankcall.rpc.deadlines import seconds_left, wait_idle
from rankcall.rpc.device_maps import WorkerDevices, device_list, reverse_maps, validate

_CONFLICT_POLL_S = 0.2  # each look is a request to the store


class DynamicGroup:
    """This worker's view of a group whose workers join and leave, and are lost, at any time.

    A newcomer first adds itself to the log, and then introduces itself to all members that were in
    it before, at once. So of two workers that join at the same time, the one that is later in the
    log introduces itself to the other one.

    The agent's threads call ``_on_control`` and ``_on_lost``. No call of the agent or the store is
    made with the lock held: both may wait for a thread that needs the lock.
    """

    def __init__(self, worker: ZmqWorker, log: MemberLog) -> None:
        self._worker, self._agent, self._log = worker, worker.agent, log
        self._members: dict[str, tuple[int, WorkerDevices]] = {}  # session and devices, by name
        # Counts the changes of the members. Threads may pass their lists of devices to the agent in
        # another order than they made them; the agent ignores those that are older than its own.
        self._version = 0
        self._lock = threading.Lock()

    def join(self, deadline: float) -> None:
        """Become a member; on return every other member can call this one, and it them."""
        record = self._worker.record()
        before = self._log.enter(record, deadline)
        try:
            self._start(record, self._living(record, before, deadline), deadline)
        except BaseException:
            # Else later newcomers would try to reach this worker.
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
        nodes = [WorkerDevices.from_json(member["node"]) for member in (record, *others)]
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
        # The order matters: only a peer is sent an answer, and the error below is one.
        self._meet(json.loads(payload))
        check_descriptors(self._worker.name, 1)
        return ""

    def _on_lost(self, name: str, session: int, must_be_logged: bool) -> None:
        """Take note of a member that has left or was lost.

        A member that leaves takes itself off the log; one that was lost cannot, so
        ``must_be_logged``. The others do the same, which is harmless.
        """
        with self._lock:
            if self._members.get(name, (None,))[0] == session:
                del self._members[name]
        self._agent.remove_peer(name, session)
        self._update_devices()
        if must_be_logged:
            with suppress(RuntimeError):
                self._log.leave(session, by=self._worker.session)

    def _meet(self, record: WorkerRecord) -> None:
        node = WorkerDevices.from_json(record["node"])
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

"""Dynamic groups of the ZMQ back end: workers join and leave, and are lost, at any time."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.rpc import _delete_all_user_and_unforked_owner_rrefs, api

from rankcall.errors import RpcTimeout
from rankcall.rpc._group import undone_on_error, wait_idle
from rankcall.rpc._members import Card, MemberLog, check_unique, is_dead
from rankcall.rpc.devices import Node, device_list, reverse_maps, validate

if TYPE_CHECKING:
    from rankcall.rpc.backends.zmq import Worker


class DynamicGroup:
    """This worker's view of a group that changes.

    A newcomer adds itself to the log and tells, all at once, those who were there before it. Its
    methods run on the agent's threads as well as on the caller's.
    """

    def __init__(self, worker: Worker, log: MemberLog) -> None:
        self._worker, self._agent, self._log = worker, worker.agent, log
        self._nodes: dict[str, Node] = {}
        self._lock = threading.Lock()

    def join(self, deadline: float) -> None:
        """Become a member; on return every other member can call this one, and it them."""
        card = self._worker.card()
        before = self._log.enter(card, deadline)
        try:
            self._start(card, self._living(card, before), deadline)
        except BaseException:
            with suppress(RuntimeError):
                self._log.leave(card["session"])
            raise

    def leave(self, deadline: float) -> None:
        """Finish what is under way and go; the others learn it from this worker's last message."""
        _delete_all_user_and_unforked_owner_rrefs(
            timedelta(seconds=max(0.1, deadline - time.monotonic()))
        )
        wait_idle(self._agent, deadline)
        with suppress(RuntimeError):  # the store's host may have left first
            self._log.leave(self._worker.session, deadline)

    def _living(self, card: Card, before: list[Card]) -> list[Card]:
        living = []
        for other in before:
            if is_dead(other, card["host"]):
                self._log.leave(other["session"])
            else:
                living.append(other)
        check_unique(card, living)
        return living

    def _start(self, card: Card, others: list[Card], deadline: float) -> None:
        nodes = [Node.from_json(each["node"]) for each in (card, *others)]
        validate(nodes, static=False)
        self._agent.on_control(self._on_control)
        self._agent.on_lost(self._on_lost)
        for each in (card, *others):
            self._meet(each)
        if torch.cuda.is_available() and self._agent_devices():
            torch.cuda.init()  # type: ignore[no-untyped-call]
        with undone_on_error():
            api._init_rpc_states(self._agent)  # type: ignore[no-untyped-call]
            self._tell(card, others, deadline)

    def _tell(self, card: Card, others: list[Card], deadline: float) -> None:
        text = json.dumps(card)
        left = max(0.1, deadline - time.monotonic())
        told = {
            other["node"]["name"]: self._agent.control(other["node"]["name"], text, left)
            for other in others
        }
        for name, answer in told.items():
            try:
                answer.wait()
            except RuntimeError as error:
                if name not in self._nodes:
                    continue  # it has left, or died, since
                if time.monotonic() >= deadline:
                    raise RpcTimeout(
                        f"worker {self._worker.name!r} could not join in time: "
                        f"member {name!r} did not answer"
                    ) from error
                raise

    def _on_control(self, sender: int, payload: bytes) -> str:
        """A newcomer tells of itself."""
        self._meet(json.loads(payload))
        return ""

    def _on_lost(self, name: str, session: int, why: str) -> None:
        """A member has left, or was lost; the latter nobody has written down yet."""
        with self._lock:
            self._nodes.pop(name, None)
            self._agent.remove_peer(name, session)
            self._update_devices()
        if "has left" not in why:
            with suppress(RuntimeError):
                self._log.leave(session)

    def _meet(self, card: Card) -> None:
        node = Node.from_json(card["node"])
        with self._lock:
            self._worker.meet(card)
            self._nodes[node.name] = node
            self._update_devices()

    def _update_devices(self) -> None:
        mine = self._nodes.get(self._worker.name)
        if mine is not None:
            reverse = reverse_maps(mine.name, self._nodes.values())
            self._agent.set_devices(mine.maps, reverse, device_list(mine, reverse))

    def _agent_devices(self) -> list[Any]:
        mine = self._nodes[self._worker.name]
        return device_list(mine, reverse_maps(mine.name, self._nodes.values()))

"""Dynamic groups of the TENSORPIPE back end.

torch's agent reads and rewrites one list of names in the store when it comes up, so coming and
going takes turns, under a lease. The members themselves are told all at once.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rpc import TensorPipeAgent, TensorPipeRpcBackendOptions, WorkerInfo, api

from rankcall.ring.writer import boot_id
from rankcall.rpc._bounded import bounded
from rankcall.rpc._group import current_group, set_group, undone_on_error, wait_idle
from rankcall.rpc._members import Card, Lease, MemberLog, check_unique, is_dead, life
from rankcall.rpc.devices import Node, device_list, reverse_maps, validate
from rankcall.rundir import host_name

_NAMES = "names/_ALL_WORKER_INFOS"  # where torch's agents keep "name-id," of every member
_STRIKE_S = 5.0
_TELL_S = 10.0  # how long a member may take to take note; it is taken for dead after that
_TELLING = 0.4  # of shutdown's time: kept to tell the others, when it is nobody's turn


class DynamicGroup:
    """This worker's view of a group that changes; torch's agent is kept up to date with it."""

    def __init__(
        self, store: dist.Store, name: str, rank: int, options: TensorPipeRpcBackendOptions
    ) -> None:
        self._store = store
        self._log = MemberLog(dist.PrefixStore("dynamic", store))
        self._lease = Lease(dist.PrefixStore("dynamic", store), name)
        node = Node(name, torch.cuda.device_count(), options.device_maps, options.devices)
        self._card: Card = {
            "node": node.to_json(),
            "rank": rank,
            "session": secrets.randbits(63),
            "host": f"{host_name()} {boot_id()}",
            **life(),
        }
        self._options = options
        self._cards: dict[str, Card] = {name: self._card}
        self._lock = threading.Lock()
        self._agent: Any = None

    @property
    def _name(self) -> str:
        return str(self._card["node"]["name"])

    def join(self, deadline: float) -> Any:
        """Become a member and return the agent."""
        with self._lease.held(deadline):
            others = self._living(deadline)
            check_unique(self._card, others)
            nodes = [Node.from_json(each["node"]) for each in (self._card, *others)]
            validate(nodes, static=False)
            self._cards.update({each["node"]["name"]: each for each in others})
            try:
                self._start(nodes, others, deadline)
            except BaseException:
                self._strike(self._card)
                raise
            self._log.enter(self._card, deadline)
        return self._agent

    def leave(self, deadline: float) -> None:
        """Finish what is under way, tell the others and go."""
        wait_idle(self._agent, deadline)
        turn_until = deadline - _TELLING * max(0.0, deadline - time.monotonic())
        try:
            with self._lease.held(turn_until):
                self._depart(deadline)
                self._log.leave(self._card["session"], deadline)
                left = max(0.1, deadline - time.monotonic())
                bounded(lambda: self._agent.join(shutdown=True, timeout=left), deadline, "shutdown")
        except (dist.DistNetworkError, dist.DistStoreError):
            self._depart(deadline)  # the store is gone: there is nothing to take turns over

    def _start(self, nodes: list[Node], others: list[Card], deadline: float) -> None:
        reverse = reverse_maps(self._name, nodes)
        devices = device_list(nodes[0], reverse)
        if torch.cuda.is_available() and devices:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        self._agent = bounded(
            lambda: TensorPipeAgent(
                self._store, self._name, self._card["rank"], None, self._options, reverse, devices
            ),
            deadline,
            f"init of {self._name!r}",
        )
        with undone_on_error():
            api._init_rpc_states(self._agent)  # type: ignore[no-untyped-call]
            set_group(self)
            text = json.dumps(self._card)
            for silent in self._tell(others, _member_joined, text):
                self._remove(silent)

    def _depart(self, deadline: float) -> None:
        others = [card for card in self._cards.values() if card is not self._card]
        left = max(0.5, deadline - time.monotonic())
        self._tell(others, _member_left, self._card["session"], min(left, _TELL_S))

    def _tell(
        self, others: Iterable[Card], what: Callable[..., None], told: Any, within: float = _TELL_S
    ) -> list[Card]:
        """Call a function on all of them at once; return those who did not answer."""
        calls = {}
        silent = []
        for card in others:
            try:
                name = card["node"]["name"]
                calls[name] = card, api.rpc_async(name, what, args=(told,), timeout=within)
            except RuntimeError:
                silent.append(card)
        for card, answer in calls.values():
            try:
                answer.wait()
            except RuntimeError:
                silent.append(card)
        return silent

    def _living(self, deadline: float) -> list[Card]:
        living = []
        for card in self._log.members(deadline):
            if is_dead(card, self._card["host"]):
                self._strike(card)
            else:
                living.append(card)
        return living

    def _remove(self, card: Card) -> None:
        """Take a member that does not answer out of the group, here and everywhere."""
        self._strike(card)
        self.forget(card["session"])
        others = [each for each in self._cards.values() if each is not self._card]
        self._tell(others, _member_left, card["session"])

    def _strike(self, card: Card) -> None:
        """Take a member off the store's lists, torch's own included."""
        until = time.monotonic() + _STRIKE_S
        bounded(lambda: self._strike_name(card), until, "join or leave")
        self._log.leave(card["session"])

    def _strike_name(self, card: Card) -> None:
        name, rank = card["node"]["name"], card["rank"]
        if self._store.check([_NAMES]):
            names = self._store.get(_NAMES).decode().split(",")
            kept = [each for each in names if each and each != f"{name}-{rank}"]
            self._store.set(_NAMES, "".join(f"{each}," for each in kept))
        for key in (f"names/{rank}", f"addrs/{name}"):
            with suppress(RuntimeError):
                self._store.delete_key(key)

    def meet(self, card: Card) -> None:
        """Take note of a newcomer."""
        self._update(card, joins=True)

    def forget(self, session: int) -> None:
        """Take note that a member has left, or is no more."""
        for card in list(self._cards.values()):
            if card["session"] == session:
                self._update(card, joins=False)

    def _update(self, card: Card, joins: bool) -> None:
        name = card["node"]["name"]
        with self._lock:
            if joins:
                self._cards[name] = card
            else:
                self._cards.pop(name, None)
            nodes = [Node.from_json(each["node"]) for each in self._cards.values()]
            mine = next(node for node in nodes if node.name == self._name)
            reverse = reverse_maps(mine.name, nodes)
            self._agent._update_group_membership(
                WorkerInfo(name, card["rank"]), device_list(mine, reverse), reverse, joins
            )


def _member_joined(text: str) -> None:
    """Run on every member: a newcomer tells of itself."""
    group = current_group()
    assert isinstance(group, DynamicGroup)
    group.meet(json.loads(text))


def _member_left(session: int) -> None:
    """Run on every member: one has left, or is no more."""
    group = current_group()
    if isinstance(group, DynamicGroup):
        group.forget(session)

"""torch's rendezvous, with a door: a node that is barred is refused, and can leave it open.

torch's handler does the whole rendezvous. This one asks before a node joins, and it does not close
the rendezvous if its node leaves while the job goes on: torch closes it for all nodes whenever an
agent ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rankcall.run.bars import Bar, decode_bar, encode_bar
from rankcall.whole_numbers import whole_number

# How long a barred node waits for the others before it is let in because the job needs it. The
# others may be between two attempts. torch waits as long for late nodes (``last_call_timeout``).
_OTHERS_COME_S = 30.0
_POLL_S = 1.0
_EXIT_S = 10.0  # to tell the others that this node leaves; without that, they notice after 15 s
_LISTENS = "0A"  # the state of a socket in /proc/net/tcp


def is_signal(error: Exception) -> bool:
    """Return whether torch raised an error in the agent's thread because the agent got a signal.

    torch does so wherever the thread is (``SignalException``), and the agent must end then. Each
    ``except Exception`` between torch and here asks this first.
    """
    return hasattr(error, "sigval")


class Rendezvous:
    """torch's handler, which it wraps, and the job's store.

    Only torch's dynamic rendezvous (``c10d``, the default) can lose nodes. For another kind,
    ``is_dynamic`` is false, and all nodes are let in.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._is_left = self._has_joined = False
        # Called before each rendezvous; an exception of it keeps the node out.
        self.before: Callable[[], object] = lambda: None

    def __getattr__(self, name: str) -> Any:
        """Return what torch's handler has; all that is not defined here is as it was."""
        return getattr(self._handler, name)

    @property
    def is_dynamic(self) -> bool:
        """Whether nodes can leave and join."""
        return self._state is not None

    @property
    def _state(self) -> Any:
        return getattr(getattr(self._handler, "_state_holder", None), "state", None)

    @property
    def nodes(self) -> frozenset[Any]:
        """The nodes that take part, as of the last look; none if it does not tell."""
        return frozenset(getattr(self._state, "participants", ()))

    def round(self, default: int) -> int:
        """Return the number of the rendezvous, from 0 on, which all of its nodes know."""
        number = getattr(self._state, "round", None)
        return number if type(number) is int and number >= 0 else default

    def next_rendezvous(self) -> Any:
        """Join the others, if this node may. Raises what ``before`` raises, and what torch does."""
        self.before()
        self._forget_store()
        joined = self._handler.next_rendezvous()
        self._has_joined = True
        return joined

    def shutdown(self) -> bool:
        """Close the rendezvous for all nodes, unless this node has left it to them."""
        return True if self._is_left else bool(self._handler.shutdown())

    def leave(self) -> None:
        """Take this node out. The others go on, and go on sooner if they are told.

        Never raises: nodes whose heartbeats end are taken out by the others after 15 s.
        """
        self._is_left = True
        try:
            from torch.distributed.elastic.rendezvous import dynamic_rendezvous

            self._handler._stop_heartbeats()
            leave = dynamic_rendezvous._RendezvousExitOp()
            self._handler._op_executor.run(leave, time.monotonic() + _EXIT_S)
        except Exception as error:
            if is_signal(error):
                raise

    def why_needed(self, sleep: Callable[[float], object] = time.sleep) -> str:
        """Return why the job cannot go on without this node; empty if it can.

        The others may be between two attempts, so they get some time to come.
        """
        if self.hosts_store():
            return "it hosts the store of the rendezvous, and all nodes would end with it"
        least, deadline = self._handler.settings.min_nodes, time.monotonic() + _OTHERS_COME_S
        if least == self._handler.settings.max_nodes:  # no other node can make up for it
            return f"the job needs all of its {least} nodes"
        while (others := self._others()) < least:
            if time.monotonic() >= deadline:
                return f"the job needs {least} nodes, and {others} others are there"
            sleep(_POLL_S)
        # Nodes that leave in one round count themselves, so that not too many do. A node that comes
        # back is not among those that are there, so it counts nothing, however often it tries.
        leaving = int(self.store().add(f"leaving/{self.round(0)}", 1)) if self._has_joined else 1
        if others + 1 - leaving < least:
            return f"the job needs {least} nodes, and others leave it at this moment"
        return ""

    def _others(self) -> int:
        """Return how many other nodes take part or wait. Raises if the store does not answer."""
        self._handler.num_nodes_waiting()  # asks the store, unlike ``_state``
        state = self._state
        here = {*state.participants, *state.wait_list, *state.redundancy_list}
        return len(here - {self._handler._this_node})

    def publish(self, bar: Bar) -> None:
        """Write a bar into the job's store. Raises what the store raises."""
        self.store().set(f"bar/{bar.node}", encode_bar(bar))

    def bars_of(self, node: str) -> list[Bar]:
        """Return what the job's store says of a node; nothing if it does not answer.

        The value counts as far as it is sound: whoever reaches the store can also end the job.
        """
        try:
            store, key = self.store(), f"bar/{node}"
            bars = [decode_bar(bytes(store.get(key)))] if store.check([key]) else []
            return [bar for bar in bars if bar.node == node]
        except Exception as error:
            if is_signal(error):
                raise
            return []

    def job(self) -> str:
        """Return what all nodes of this job call it, and no other job; empty if they cannot agree.

        The user's ``--rdzv-id`` may be that of another job, for example of one before.
        """
        if not self.is_dynamic:
            return ""
        try:
            return bytes(self.store().compare_set("job", "", secrets.token_hex(8))).decode()
        except Exception as error:  # what the store raises; torch tells of it in a moment
            if is_signal(error):
                raise
            return ""

    def tell_saved(self, step: int) -> None:
        """Tell the other nodes from which step the job goes on. Raises what the store raises."""
        self.store().set("saved", str(step))

    def saved(self) -> int | None:
        """Return the step from which the job goes on, if a node has told. Raises as the store."""
        store = self.store()
        return whole_number(bytes(store.get("saved")).decode()) if store.check(["saved"]) else None

    def store(self) -> Any:
        """Return the part of the job's store that belongs to rankcall's agents."""
        from torch.distributed import PrefixStore

        run_id = self._handler.settings.run_id
        return PrefixStore(f"rankcall/{run_id}/", self._handler._store)

    @property
    def store_host(self) -> str:
        """The host of the store, as this node was told; empty if it is not a store on a network."""
        return str(getattr(self._handler._store, "host", ""))

    @property
    def member(self) -> str:
        """The name of this agent among those that take part."""
        return str(self._handler._this_node)

    @property
    def heartbeat_s(self) -> float:
        """How often an agent gives a sign of life."""
        return float(self._handler.settings.keep_alive_interval.total_seconds())

    @property
    def clock_tolerance_s(self) -> float:
        """By how much clocks may differ before a node that lives counts as dead.

        torch compares its last heartbeat, by its own clock, with the clock of another node.
        """
        attempts: int = self._handler.settings.keep_alive_max_attempt
        return self.heartbeat_s * max(1, attempts - 1)

    def heartbeats(self) -> dict[str, object]:
        """Return by agent what changes with each sign of life. Raises what the store raises."""
        self._handler.num_nodes_waiting()  # asks the store, unlike ``_state``
        return {str(node): at for node, at in dict(self._state.last_heartbeats).items()}

    def hosts_store(self) -> bool:
        """Return whether this process hosts the store: it listens on the store's port."""
        port = getattr(self._handler._store, "port", None)
        return isinstance(port, int) and _listens(port)

    def _forget_store(self) -> None:
        """Have the rendezvous make a new store for the workers of the next attempt.

        torch says that it does ("We create a new TCPStore for every retry", rendezvous.py), and
        keeps the first one (DynamicRendezvousHandler, 2.13). The keys of the attempt before are
        then still in it, and a new worker connects to the address of one that has ended.
        """
        for name in ("_bootstrap_store_info", "_shared_tcp_store_server"):
            if getattr(self._handler, name, None) is not None:
                setattr(self._handler, name, None)


def _listens(port: int) -> bool:
    """Return whether this process listens on a TCP port."""
    inodes = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(fields[9])
    links = []
    with contextlib.suppress(OSError):
        links = os.listdir("/proc/self/fd")
    for link in links:
        with contextlib.suppress(OSError):
            socket = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{link}"))
            if socket and socket[1] in inodes:
                return True
    return False

"""A node that held the job up leaves it, is refused, and is let in again: torch's own rendezvous.

The nodes are handlers of torch's in one process, over one store in memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rankcall.background import BackgroundCall
from rankcall.recovery import rendezvous as module
from rankcall.recovery.failures import Cause
from rankcall.recovery.policy import Limits
from rankcall.recovery.rendezvous import Rendezvous
from rankcall.recovery.supervisor import NodeBarred, Supervised, Supervisor
from rankcall.run.bars import bar_of, newest, note_bar, read_bars
from rankcall.run.recoveries import (
    END_VARIABLE,
    FILE_VARIABLE,
    NodeChecked,
    Signature,
    read_recoveries,
)

WAIT_S = 60.0
CAUSE = Cause(Signature("missing"), "unclear", (), "", 0, -1, 0, 0, 0, 0, "")


class Node:
    """One node: torch's handler, ours around it, and its supervisor."""

    def __init__(self, name: str, store: Any, run_dir: Path, least: int, most: int) -> None:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
            C10dRendezvousBackend,
        )
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
            DynamicRendezvousHandler,
            RendezvousTimeout,
        )

        handler = DynamicRendezvousHandler.from_backend(
            *("job", store, C10dRendezvousBackend(store, "job"), least, most, "localhost"),
            timeout=RendezvousTimeout(
                join=timedelta(seconds=WAIT_S), last_call=timedelta(seconds=1)
            ),
        )
        self.name, self.said = name, list[str]()
        self.rendezvous = Rendezvous(handler)
        self.supervisor = Supervisor(Supervised(run_dir, Limits()), self.said.append)
        self.rendezvous.before = lambda: self.supervisor.admit(self.rendezvous)
        self.ranks = {0: 1 << 22}

    def culprit(self, times: int) -> None:
        """Let this node's rank be killed so often, in a job of several nodes."""
        for number in range(times):
            self.supervisor.before_start(number)
            self.supervisor.started(self.ranks, 2)
            self.supervisor.failed({0: -9})
            self.supervisor._look(self._killed)

    def _killed(self, run_dir: Path, attempt: Any) -> Any:
        from rankcall.recovery.failures import cause_of

        return cause_of(run_dir, attempt)

    def close(self) -> None:
        """End the threads of torch's handler."""
        self.rendezvous._stop_heartbeats()
        self.supervisor.close()


@pytest.fixture
def nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, int, int], Node]]:
    """Return what makes nodes of one job. Each process has one host name, so it is set before."""
    from torch.distributed import HashStore

    monkeypatch.setattr(module, "_OTHERS_COME_S", 0.0)
    monkeypatch.setenv(FILE_VARIABLE, "")  # a supervisor sets it for its workers
    monkeypatch.setenv(END_VARIABLE, "")
    store, made = HashStore(), list[Node]()

    def make(name: str, least: int, most: int) -> Node:
        monkeypatch.setenv("RANKCALL_HOST", name)
        made.append(Node(name, store, tmp_path, least, most))
        return made[-1]

    yield make
    for node in made:
        node.close()


def meet(*together: Node) -> None:
    """Let nodes take part in one rendezvous."""
    calls = [BackgroundCall(node.rendezvous.next_rendezvous, node.name) for node in together]
    for call in calls:
        assert call.ended(WAIT_S)
        call.outcome()


def joins(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node pass the door, as the process of that host."""
    monkeypatch.setenv("RANKCALL_HOST", node.name)
    node.supervisor.admit(node.rendezvous)


def test_a_node_that_was_the_culprit_twice(
    nodes: Callable[[str, int, int], Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves, the other one goes on alone, and it gets in again once a person says so."""
    bad, good = nodes("node-b", 1, 2), nodes("node-a", 1, 2)
    meet(bad, good)
    bad.culprit(1)
    joins(bad, monkeypatch)  # once may be chance
    bad.culprit(1)
    with pytest.raises(NodeBarred) as barred:
        joins(bad, monkeypatch)
    assert barred.value.code == 69
    assert "node-b leaves the job, and is barred until" in bad.said[-1]
    assert bad.rendezvous.shutdown()  # torch's launcher does so when its agent has ended
    meet(good)
    assert not good.rendezvous.is_closed()
    assert good.rendezvous.round(0) == 1
    again = nodes("node-b", 1, 2)
    for _ in range(4):  # however often it tries
        with pytest.raises(NodeBarred):
            joins(again, monkeypatch)
    assert newest(read_bars(tmp_path))["node-b"].holds(bad.supervisor._blamed_ns)
    (tmp_path / "bars.jsonl").rename(tmp_path / "elsewhere")  # the node's own disk was replaced
    with pytest.raises(NodeBarred):
        joins(again, monkeypatch)  # the store knows
    note_bar(tmp_path, bar_of("node-b", "mended", 0.0, barred=False))
    joins(nodes("node-b", 1, 2), monkeypatch)


def test_the_job_keeps_what_it_needs(
    nodes: Callable[[str, int, int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two nodes that are to leave a job of three at once, one stays: the least is two."""
    three = [nodes(name, 2, 3) for name in ("node-a", "node-b", "node-c")]
    meet(*three)
    for node in three[:2]:
        node.culprit(2)
    with pytest.raises(NodeBarred):
        joins(three[0], monkeypatch)
    joins(three[1], monkeypatch)
    assert "stays: the job needs 2 nodes" in three[1].said[-1]


def test_a_job_that_needs_all_of_its_nodes(
    nodes: Callable[[str, int, int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is to leave such a job stays, without a wait for others at each restart."""
    monkeypatch.setattr(module, "_OTHERS_COME_S", WAIT_S)
    node = nodes("node-a", 2, 2)
    slept: list[float] = []
    assert node.rendezvous.why_needed(slept.append) == "the job needs all of its 2 nodes"
    assert not slept


def test_a_node_that_is_not_well(
    nodes: Callable[[str, int, int], Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves for a while, and is checked again once a person lets it in."""
    good, bad = nodes("node-a", 1, 2), nodes("node-b", 1, 2)
    meet(good)
    bad.supervisor._health_check = f"test -e {tmp_path}/mended || {{ echo the fan; exit 1; }}"
    with pytest.raises(NodeBarred):
        joins(bad, monkeypatch)
    assert bad.said[-1].startswith("node-b leaves the job, and is barred until ")
    assert "the health check ended with exit status 1: the fan" in bad.said[-1]
    (tmp_path / "mended").touch()
    with pytest.raises(NodeBarred):  # a fault that comes and goes would restart the job each time
        joins(bad, monkeypatch)
    note_bar(tmp_path, bar_of("node-b", "mended", 0.0, barred=False))
    joins(bad, monkeypatch)
    before, after = checked_in(tmp_path)
    assert before.first_failed is not None
    assert (before.first_failed.name, after.first_failed) == ("command", None)
    assert {check.name for check in after.checks} >= {"leftovers", "memory", "network", "clock"}


def checked_in(run_dir: Path) -> list[NodeChecked]:
    """Return how nodes were when they were checked, in that order."""
    return [checked for agent in read_recoveries(run_dir) for checked in agent.checks]


def test_all_nodes_know_the_step_of_the_job(
    nodes: Callable[[str, int, int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one node has the rank that tells of its checkpoints. The others hear of them."""
    first, second = nodes("node-a", 2, 2), nodes("node-b", 2, 2)
    steps = []
    for saved, since in ((1000, 7), (-1, 3), (1100, 3)):
        meet(first, second)
        for node in (first, second):
            node.supervisor.before_start(0, node.rendezvous)
        told = replace(CAUSE, saved=saved, since_saved=since, steps=since)
        heard = replace(CAUSE, saved=-1, since_saved=0, steps=since)
        found = [first.supervisor._account(told, 0), second.supervisor._account(heard, 0)]
        steps.append([failure.step for failure, _ in found])
        assert [end.lost for _, end in found] == [since, -1]
    # In the first attempt, the other node has not heard anything.
    assert steps == [[1007, 7], [1003, 1003], [1103, 1003]]
    meet(first, second)
    second.supervisor.before_start(0, second.rendezvous)
    assert second.supervisor._account(heard, 0)[0].step == 1103
    second.rendezvous.store().set("saved", "1e9")
    assert second.rendezvous.saved() is None


def test_a_store_that_does_not_answer_a_check(
    nodes: Callable[[str, int, int], Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is checked as far as that goes, and takes part."""
    node = nodes("node-a", 1, 2)
    node.supervisor._health_check = "true"

    def fail(rendezvous: object) -> Any:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(node.supervisor._links, "checks", fail)
    joins(node, monkeypatch)
    (checked,) = checked_in(tmp_path)
    assert checked.checks[-1].state == "absent"
    assert checked.checks[-1].text == "the job's store does not answer: RuntimeError"


def test_the_host_of_the_store(
    nodes: Callable[[str, int, int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that listens on the store's port hosts it, and one that is connected does not."""
    from torch.distributed import TCPStore

    host = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    assert module._listens(host.port)
    child = os.fork()
    if child == 0:  # the child has the socket as well; once it has closed it, it hosts nothing
        os.closerange(3, 1 << 10)
        os._exit(0 if not module._listens(host.port) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_signal_ends_the_agent(
    nodes: Callable[[str, int, int], Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises it where its thread is; all other errors there are not the end of a job."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    node = nodes("node-a", 1, 2)
    node.culprit(2)
    ended = SignalException("got a signal", signal.SIGTERM)
    for error in (ended, RuntimeError("the store is gone")):

        def fail(*arguments: object, error: Exception = error) -> Any:
            raise error

        calls: list[Callable[[], object]] = [
            lambda: node.supervisor.admit(node.rendezvous),
            lambda: node.supervisor._look(fail),
            node.rendezvous.leave,
            lambda: node.rendezvous.bars_of("node-a"),
            lambda: node.supervisor._keep_bar(node.rendezvous, bar_of("node-a", "", 1.0)),
        ]
        with monkeypatch.context() as patch:
            patch.setattr(node.rendezvous, "why_needed", fail)
            patch.setattr(node.rendezvous, "store", fail)
            patch.setattr(node.rendezvous._handler, "_stop_heartbeats", fail)
            for call in calls:
                if error is ended:
                    with pytest.raises(SignalException):
                        call()
                else:
                    call()


def test_another_rendezvous_lets_all_in() -> None:
    """A static rendezvous cannot lose nodes: nothing is asked, and nothing raised."""

    class Static:
        def next_rendezvous(self) -> str:
            return "joined"

    node = Rendezvous(Static())
    assert not node.is_dynamic
    assert node.next_rendezvous() == "joined"
    assert (node.nodes, node.round(default=3)) == (frozenset(), 3)

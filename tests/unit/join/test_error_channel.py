"""How rank 0 reacts to the reports of rank 1, or to its silence; the test plays rank 1."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from rankcall.c10d.client import perform
from rankcall.c10d.requests import Steps
from rankcall.errors import PeerError, UnevenInputsError
from rankcall.join import error_channel
from rankcall.join.error_channel import ErrorChannel
from rankcall.join.shared_log import SharedLog
from rankcall.process import Process
from rankcall.store import StoreLostError

T = TypeVar("T")
CLOSED = RuntimeError("Connection closed by peer")


class TwoRanks:
    """The channel of rank 0, which is at its third batch, and the log as rank 1 sees it."""

    def __init__(self) -> None:
        self.channel = ErrorChannel([0, 1], lambda: 3, lambda: 3)
        self.channel.start()
        self.log = SharedLog(self.channel._name)
        self._store: Any = dist.distributed_c10d._get_default_store()

    def do(self, steps: Steps[T]) -> T:
        """Make requests as rank 1."""
        return perform(self._store, 60, steps)

    def report(self, kind: str, **more: Any) -> None:
        """Append to the log as rank 1, without waking rank 0."""
        entry = {"rank": 1, "host": "node-b", "kind": kind, "ends": [], **more}
        self.do(self.log.append(entry, [1]))

    def report_error(self) -> None:
        """Report that rank 1 raised."""
        self.report("raised", cause="KeyError: 7", traceback="there, line 3")

    def set_process(self, **other: Any) -> None:
        """Publish that rank 1 is this process, with other facts."""
        self.do(self.log.set_process(1, replace(Process.current("node-b"), **other)))

    def answer(self) -> None:
        """Answer as rank 1."""
        self.do(self.log.answer(1, []))

    def wake(self) -> None:
        """Wake rank 0, and wait until it has read the whole log."""
        self.do(self.log.wake(0))
        wait_for(lambda: self.channel._read == self.do(self.log.length()))

    def answer_of(self, rank: int) -> list[str] | None:
        """Return the answer of a rank, or None if it has not answered."""
        return self.do(self.log.answers([rank])).get(rank)


def wait_for(condition: Callable[[], Any]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def group() -> Iterator[None]:
    """Make this process a world of one, with a TCP store as jobs have it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_ranks(group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoRanks]:
    """Return a channel whose waits for answers last a minute, so that a needless wait shows."""
    monkeypatch.setattr(error_channel, "_ANSWER_S", 60.0)
    ranks = TwoRanks()
    yield ranks
    ranks.answer()
    ranks.channel.close()


def test_a_reported_cause_needs_no_question(two_ranks: TwoRanks) -> None:
    """If the cause is in the log when connections break, the rank appends nothing and raises it."""
    two_ranks.report_error()
    cause = two_ranks.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert (cause.rank, cause.host, cause.cause) == (1, "node-b", "KeyError: 7")
    assert "there, line 3" in str(cause)
    assert two_ranks.do(two_ranks.log.length()) == 1


def test_a_cause_replaces_a_lost_connection(two_ranks: TwoRanks) -> None:
    """A report of an error outranks a report of a lost connection, in either order."""
    two_ranks.report("lost", cause="Connection closed by peer")
    two_ranks.report_error()
    two_ranks.wake()
    cause = two_ranks.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert cause.cause == "KeyError: 7"
    two_ranks.report("lost", cause="Connection closed by peer")
    two_ranks.wake()
    with pytest.raises(PeerError, match="KeyError: 7"):
        two_ranks.channel.check()


def test_a_dead_process_is_not_waited_for(two_ranks: TwoRanks) -> None:
    """A rank whose process has ended is named at once."""
    two_ranks.set_process(start=1)
    cause = two_ranks.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert cause.rank == 1
    assert "rank 1 (node-b) ended without an error report" in str(cause)
    assert "Connection closed by peer" in str(cause)


def test_a_process_that_answered_and_then_ended_is_not_the_cause(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was alive when the connection broke, so the collective failed for a reason of its own."""
    monkeypatch.setattr(error_channel, "_REPORT_S", 0.0)
    two_ranks.set_process(start=1)
    two_ranks.answer()
    assert two_ranks.channel.explain(CLOSED) is None


@pytest.mark.parametrize("elsewhere", [{"boot_id": "another boot"}, {"pid_namespace": 1}])
def test_a_silent_rank_elsewhere_is_not_called_dead(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch, elsewhere: dict[str, Any]
) -> None:
    """On another host or in another container, a rank is only known not to answer."""
    monkeypatch.setattr(error_channel, "_ANSWER_S", 0.05)
    two_ranks.set_process(start=1, **elsewhere)
    cause = two_ranks.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert "rank 1 (node-b) has not answered for 0.05 s" in str(cause)


def test_the_rank_that_left_is_the_cause(two_ranks: TwoRanks) -> None:
    """Errors that follow from a rank that left its loop do not replace it as the cause."""
    two_ranks.report("left", at=2)
    two_ranks.report_error()
    two_ranks.wake()
    with pytest.raises(UnevenInputsError, match="rank 1 left the loop after 2 batches"):
        two_ranks.channel.check()


def test_an_own_error_is_reported_after_a_lost_connection(two_ranks: TwoRanks) -> None:
    """An error here may be why another rank lost its connection."""
    two_ranks.report("lost", cause="Connection closed by peer")
    two_ranks.wake()
    two_ranks.answer()
    two_ranks.channel.publish(KeyError("here"))
    _, entry = two_ranks.do(two_ranks.log.read())
    assert (entry["rank"], entry["kind"], entry["cause"]) == (0, "raised", "KeyError: 'here'")


def test_the_store_may_end_once_the_cause_is_known(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the failed rank hosted the store, its report is still the cause."""

    def lose(*arguments: Any) -> Any:
        raise StoreLostError("the store's host is gone")

    two_ranks.report_error()
    two_ranks.wake()
    with monkeypatch.context() as patched:
        patched.setattr(error_channel, "perform", lose)
        cause = two_ranks.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert cause.cause == "KeyError: 7"


def test_connections_are_broken_until_the_training_thread_is_out(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections to a rank that answers late are broken, too."""
    broken: list[set[str]] = []
    broke_late_one = threading.Event()

    def note(far_ends: set[str], _: Any) -> int:
        broken.append(set(far_ends))
        if "late" in far_ends:
            broke_late_one.set()
        return 0

    monkeypatch.setattr(error_channel, "break_connections", note)
    monkeypatch.setattr(error_channel, "_TURNS", 1)
    two_ranks.report("raised", cause="KeyError: 7", traceback="", ends=["first"])
    two_ranks.wake()
    wait_for(lambda: broken)
    assert "first" in broken[0]
    two_ranks.do(two_ranks.log.answer(1, ["late"]))
    assert broke_late_one.wait(60)


def test_leaving_keeps_the_answer(two_ranks: TwoRanks) -> None:
    """The answer names connections on which another rank may still wait, so it stays."""
    two_ranks.report_error()
    two_ranks.wake()
    wait_for(lambda: two_ranks.answer_of(0))
    ends = two_ranks.answer_of(0)
    two_ranks.channel.close()
    assert two_ranks.answer_of(0) == ends


class StoppedStore(dist.Store):
    """A store whose host is stopped: it answers no request until ``resume`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.resume = threading.Event()

    def _block(self, *arguments: Any) -> Any:
        self.resume.wait(60)
        raise dist.DistNetworkError("resumed after the test")

    add = check = compare_set = delete_key = set = _block


def test_a_stopped_store_delays_no_rank_beyond_its_deadline(
    two_ranks: TwoRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the training thread ends after ``_STORE_S``, and the job goes on."""
    monkeypatch.setattr(error_channel, "_STORE_S", 0.05)
    monkeypatch.setattr(error_channel, "_ANSWER_S", 0.05)
    monkeypatch.setattr(error_channel, "_REPORT_S", 0.05)
    stopped = StoppedStore()
    channel = two_ranks.channel
    monkeypatch.setattr(channel, "_store", stopped)
    cause = channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert "no answer within" in str(cause)
    with pytest.raises(PeerError, match="cannot agree with the other ranks"):
        channel.leave()
    channel.publish(ValueError("ours"))
    thread = channel._thread
    channel.close()
    assert thread is not None
    assert thread.is_alive(), "the listening thread is left behind"
    stopped.resume.set()
    two_ranks.do(two_ranks.log.wake(0))
    thread.join(60)


def test_a_block_holds_no_store() -> None:
    """After the block and ``destroy_process_group``, the store's server ends, as without Join."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    ranks = TwoRanks()
    ranks.answer()
    ranks.channel.close()
    dist.destroy_process_group()
    channel = ranks.channel
    del store, ranks
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10).close()
    assert channel._thread is None

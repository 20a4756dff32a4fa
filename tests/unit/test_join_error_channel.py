"""What a rank makes of what another one says, or does not; the test plays the other rank."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from rankcall.errors import PeerError, UnevenInputs
from rankcall.join import error_channel
from rankcall.join.error_channel import ErrorChannel
from rankcall.join.presence import is_gone, own_presence

CLOSED = RuntimeError("Connection closed by peer")


class Played:
    """The channel of rank 0, which is at its third batch; the test does what rank 1 would do."""

    def __init__(self) -> None:
        self.channel = ErrorChannel([0, 1], lambda: 3)
        self.channel.start()
        self.store: Any = self.channel._store
        self.said = 0

    def say(self, kind: str, **more: Any) -> None:
        """Append to the log as rank 1, without waking rank 0."""
        entry = {"rank": 1, "host": "node-b", "kind": kind, "ends": [], **more}
        self.store.add("n", 1)
        self.store.set(f"log/{self.said}", json.dumps(entry))
        self.said += 1

    def fail(self) -> None:
        """Report that rank 1 raised."""
        self.say("raised", cause="KeyError: 7", traceback="there, line 3")

    def runs(self, **other: Any) -> None:
        """Publish where rank 1 runs."""
        self.store.set("host/1", json.dumps({**own_presence(), **other}))

    def hears(self) -> None:
        """Answer as rank 1."""
        self.store.set("answer/1", "[]")

    def ring(self) -> None:
        """Wake rank 0, and wait until it has read the whole log."""
        self.store.set("wake/0", "1")
        wait_for(lambda: self.channel._read == self.said)


def wait_for(so: Callable[[], Any]) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + 60
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """Make this process a world of one, with a store as jobs have it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def played(group: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    """Return a channel whose waits for answers last a minute, so that a needless one is seen."""
    monkeypatch.setattr(error_channel, "_ANSWER_S", 60.0)
    made = Played()
    yield made
    made.hears()
    made.channel.close()


def test_the_cause_is_read_before_anybody_is_asked(played: Played) -> None:
    """It is in the log when connections break, whether this rank has heard of it or not."""
    played.fail()
    found = played.channel.explain(CLOSED)
    assert isinstance(found, PeerError)
    assert (found.rank, found.host, found.cause) == (1, "node-b", "KeyError: 7")
    assert "there, line 3" in str(found)
    assert int(played.store.add("n", 0)) == 1, "nothing was said by this rank"


def test_a_cause_replaces_a_lost_connection(played: Played) -> None:
    """Who only lost its connection knows less than who raised."""
    played.say("lost", cause="Connection closed by peer")
    played.fail()
    played.ring()
    found = played.channel.explain(CLOSED)
    assert isinstance(found, PeerError)
    assert found.cause == "KeyError: 7"
    played.say("lost", cause="Connection closed by peer")
    played.ring()
    with pytest.raises(PeerError, match="KeyError: 7"):
        played.channel.check()


def test_a_process_that_ended_is_not_waited_for(played: Played) -> None:
    """On this host its end is seen."""
    played.runs(start=1)
    found = played.channel.explain(CLOSED)
    assert isinstance(found, PeerError)
    assert found.rank == 1
    assert "is gone without a word" in str(found)
    assert "Connection closed by peer" in str(found)


def test_a_process_that_ended_after_it_answered_is_not_gone(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was there when the connection broke: the collective failed by itself."""
    monkeypatch.setattr(error_channel, "_WORD_S", 0.0)
    played.runs(start=1)
    played.hears()
    assert played.channel.explain(CLOSED) is None


def test_a_rank_elsewhere_that_does_not_answer(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can see whether it is gone, so nobody says so."""
    monkeypatch.setattr(error_channel, "_ANSWER_S", 0.05)
    played.runs(where="another boot", host="node-b")
    found = played.channel.explain(CLOSED)
    assert isinstance(found, PeerError)
    assert "rank 1 (node-b) has not answered for 0.05 s" in str(found)


def test_a_rank_that_left_is_named_before_those_it_left_behind(played: Played) -> None:
    """What the others raise because of it comes later in the log, and is not the news."""
    played.say("left", at=2)
    played.fail()
    played.ring()
    with pytest.raises(UnevenInputs, match="rank 1 left the loop after 2 batches"):
        played.channel.check()


def test_what_fails_here_is_told_though_another_lost_its_connection(played: Played) -> None:
    """A failure here may be why it did."""
    played.say("lost", cause="Connection closed by peer")
    played.ring()
    played.hears()
    played.channel.publish(KeyError("here"))
    entry = json.loads(played.store.get("log/1"))
    assert (entry["rank"], entry["kind"], entry["cause"]) == (0, "raised", "KeyError: 'here'")


def test_the_store_may_end_once_the_cause_is_known(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that fails may host it."""

    def ended(*_: Any) -> Any:
        raise dist.DistNetworkError("the store's host is gone")

    played.fail()
    played.ring()
    with monkeypatch.context() as patched:
        patched.setattr(played.channel, "_store", type("Ended", (), {"add": ended})())
        found = played.channel.explain(CLOSED)
    assert isinstance(found, PeerError)
    assert found.cause == "KeyError: 7"


def test_connections_are_broken_until_the_training_thread_is_out(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those to a rank that answers late."""
    broken: list[set[str]] = []
    seen = threading.Event()

    def breaks(far: set[str], _: Any) -> int:
        broken.append(set(far))
        if "late" in far:
            seen.set()
        return 0

    monkeypatch.setattr(error_channel, "break_connections", breaks)
    monkeypatch.setattr(error_channel, "_TURNS", 1)
    played.say("raised", cause="KeyError: 7", traceback="", ends=["first"])
    played.ring()
    wait_for(lambda: broken)
    assert "first" in broken[0]
    played.store.set("answer/1", '["late"]')
    assert seen.wait(60)


def test_whose_process_is_gone() -> None:
    """Only a process of this boot and namespace can be looked for."""
    own = own_presence()
    assert not is_gone(own)
    assert is_gone({**own, "start": own["start"] - 1}), "another process has its id by now"
    assert is_gone({**own, "pid": 1 << 30})
    assert not is_gone({**own, "pid": 1 << 30, "where": "another boot"})
    assert not is_gone({**own, "pid": 1 << 30, "where": ""})
    assert not is_gone({**own, "pid": 1 << 30, "start": None})


def test_a_rank_that_is_out_still_says_where_its_connections_end(played: Played) -> None:
    """Another rank may be waiting on one of them."""
    played.fail()
    played.ring()
    wait_for(lambda: played.store.check(["answer/0"]))
    ends = json.loads(played.store.get("answer/0"))
    assert ends
    played.channel.close()
    assert json.loads(played.store.get("answer/0")) == ends


class Silent:
    """A store whose host is stopped: no request is ever answered."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(*arguments: Any) -> Any:
            self.release.wait(60)
            raise dist.DistNetworkError("it went on after the test")

        return request


def test_a_store_that_does_not_answer_holds_nobody_up(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the training thread ends after ``_STORE_S``: the job goes on."""
    monkeypatch.setattr(error_channel, "_STORE_S", 0.05)
    monkeypatch.setattr(error_channel, "_ANSWER_S", 0.05)
    silent = Silent()
    monkeypatch.setattr(played.channel, "_store", silent)
    cause = played.channel.explain(CLOSED)
    assert isinstance(cause, PeerError)
    assert "gave no answer" in str(cause)
    with pytest.raises(PeerError, match="cannot agree with the other ranks"):
        played.channel.leave()
    played.channel.publish(ValueError("ours"))
    thread = played.channel._thread
    played.channel.close()
    assert thread is not None
    assert thread.is_alive()  # it is left behind
    silent.release.set()
    error_channel._spent.clear()
    played.store.set("wake/0", "1")
    thread.join(60)

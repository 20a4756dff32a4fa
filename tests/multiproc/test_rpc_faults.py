"""RPC groups with workers that die, stop or lie: errors name them in time; nothing stays behind."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hosting import hosted, stop
from ranks import Result, run_ranks, try_ranks
from rpcgroup import aside, backend, blocks, come_up, hurry, metrics, names, sockets, threads
from world import wait_until

__all__ = ["backend"]  # a fixture
pytestmark = pytest.mark.multiproc
SLOW_TENSORPIPE = ["ZMQ", pytest.param("TENSORPIPE", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a folder of its own for the workers' directories."""
    monkeypatch.setenv("RANKCALL_SHM", str(tmp_path))
    return tmp_path


def die(*_: Any, **__: Any) -> None:
    """End as a machine that loses power."""
    os.kill(os.getpid(), signal.SIGKILL)


def survivors(results: list[Result], killed: int) -> list[Any]:
    """Return what the others told, in rank order; one was killed."""
    others = [result for result in results if result.rank != killed]
    for result in others:
        assert result.ok, result.error or result.stderr
    assert results[killed].exitcode == -signal.SIGKILL
    return [result.value for result in others]


# --- killed in init, in shutdown, in joining


def _killed_in_init(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 dies when the others have its name and wait for it to be ready."""
    from rankcall.errors import RpcTimeout
    from rankcall.rpc.static_group import StaticMembership

    if rank == 1:
        exchange = StaticMembership.exchange
        StaticMembership.exchange = lambda self, label, value, deadline: (  # type: ignore[method-assign]
            die() if label == "ready" else exchange(self, label, value, deadline)
        )
    hurry()
    with pytest.raises(RpcTimeout) as caught:
        come_up(rank, world_size, backend, rpc_timeout=10)
    return str(caught.value), caught.value.missing_ranks


@pytest.mark.parametrize("backend", SLOW_TENSORPIPE)
def test_a_worker_that_dies_in_init(backend: str, shm: Path) -> None:
    """Init fails on the others and names it; they leave nothing behind."""
    results = try_ranks(_killed_in_init, 3, backend, init=False)
    for message, missing in survivors(results, killed=1):
        assert "missing: 'w1' (rank 1)" in message
        assert missing == [1]
        assert f"its process {results[1].pid} has ended" in message
    assert len(list(shm.rglob("lock"))) == (backend == "ZMQ")  # the killed one's


def _killed_in_shutdown(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 dies when all have come to shutdown, before it is sure that no call is under way."""
    from rankcall import rpc
    from rankcall.errors import RpcTimeout
    from rankcall.rpc import static_group

    come_up(rank, world_size, backend)
    if rank == 1:
        static_group.wait_idle = die  # type: ignore[assignment]
    with pytest.raises(RpcTimeout) as caught:
        rpc.shutdown(timeout=6)
    return str(caught.value), caught.value.missing_ranks


def test_a_worker_that_dies_in_shutdown(backend: str) -> None:
    """Shutdown ends on the others and names it."""
    results = try_ranks(_killed_in_shutdown, 3, backend, init=False)
    for message, missing in survivors(results, killed=1):
        assert "missing: 'w1' (rank 1)" in message
        assert missing == [1]


def _killed_in_joining(rank: int, world_size: int) -> Any:
    """Rank 1 dies when it has added itself to the log and is about to introduce itself."""
    from rankcall import rpc
    from rankcall.rpc.backends.zmq.dynamic_group import DynamicGroup

    store = aside()
    if rank == 1:
        store.wait(["first"])
        DynamicGroup._introduce = lambda *_: (store.set("at it", ""), die())  # type: ignore[method-assign,assignment]
    if rank == 2:
        store.wait(["at it"])
    come_up(rank, None, "ZMQ")
    if rank == 0:
        store.set("first", "")
        store.wait(["joined"])
    else:
        assert rpc.rpc_sync("w0", pow, args=(3, 2)) == 9
        wait_until(lambda: names() == {"w0", "w2"})
        store.set("joined", "")
    rpc.shutdown(timeout=30)
    return "left"


def test_a_worker_that_dies_in_joining() -> None:
    """The next worker joins, and the members can leave."""
    results = try_ranks(_killed_in_joining, 3, init=False)
    assert survivors(results, killed=1) == ["left", "left"]


# --- the store's host


def _group_store(rank: int) -> tuple[Any, str]:
    """Have rank 0 host a store of its own; return it (for rank 0), and how to reach it."""
    from torch.distributed import TCPStore

    beside, host = aside(), None
    if rank == 0:
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        beside.set("port", str(host.port))
    return host, f"tcp://127.0.0.1:{int(beside.get('port'))}"


def _host_leaves_first(rank: int, world_size: int) -> Any:
    """Rank 0's process ends, and the store with it; the others go on, and leave when they like."""
    from rankcall import rpc

    _, method = _group_store(rank)
    beside = aside()
    come_up(rank, None, "ZMQ", init_method=method)
    beside.add("up", 1)
    wait_until(lambda: int(beside.add("up", 0)) == world_size)
    if rank == 0:
        rpc.shutdown(timeout=120)
        beside.set("pid", str(os.getpid()))
        return None
    pid = int(beside.get("pid"))
    wait_until(lambda: not Path(f"/proc/{pid}/fd/0").exists())
    peer = f"w{3 - rank}"
    assert rpc.rpc_sync(peer, pow, args=(2, 3)) == 8
    beside.add("called", 1)
    wait_until(lambda: int(beside.add("called", 0)) == 2)
    rpc.shutdown(timeout=10)
    return "left"


def test_the_stores_host_may_leave_first() -> None:
    """A dynamic group goes on without the store that it met through."""
    assert run_ranks(_host_leaves_first, 3, init=False) == [None, "left", "left"]


def _host_dies_in_init(rank: int, world_size: int, backend: str) -> Any:
    """Rank 0 is killed when the others have taken their places and wait for it."""
    from rankcall.store import StoreLostError

    host, method = _group_store(rank)
    if rank == 0:
        claims = [f"rpc/static/epoch-0/rank/{claimant}" for claimant in (1, 2)]
        wait_until(lambda: all(map(host.list_keys().count, claims)))
        die()
    with pytest.raises(StoreLostError) as caught:
        come_up(rank, world_size, backend, init_method=method, rpc_timeout=10)
    return str(caught.value)


def test_the_stores_host_dies_in_init() -> None:
    """The others get an error that the store is gone, with its address."""
    results = try_ranks(_host_dies_in_init, 3, "ZMQ", init=False)
    for message in survivors(results, killed=0):
        assert "the store at 127.0.0.1:" in message


def _host_stops(rank: int, world_size: int, backend: str, dynamic: bool) -> Any:
    """Rank 0 is stopped with the store in it; shutdown ends on the others all the same."""
    from rankcall import rpc

    _, method = _group_store(rank)
    beside = aside()
    come_up(rank, None if dynamic else world_size, backend, init_method=method)
    beside.add("up", 1)
    wait_until(lambda: int(beside.add("up", 0)) == world_size)
    if rank == 0:
        beside.set("pid", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    pid = int(beside.get("pid"))
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] == "T")
    outcome, began = "ended", time.monotonic()
    try:
        rpc.shutdown(timeout=3)
    except RuntimeError as error:
        outcome = str(error)
    assert time.monotonic() - began < 3 + 10  # with room for a busy machine
    beside.add("down", 1)
    wait_until(lambda: int(beside.add("down", 0)) == 2)
    if rank == 1:
        os.kill(pid, signal.SIGKILL)
    return outcome


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        ("ZMQ", False),
        ("ZMQ", True),
        pytest.param("TENSORPIPE", False, marks=pytest.mark.slow),
    ],
)
def test_the_stores_host_is_stopped(backend: str, dynamic: bool) -> None:
    """None of the store's own time-outs applies then; ours does."""
    results = try_ranks(_host_stops, 3, backend, dynamic, init=False)
    for outcome in survivors(results, killed=0):
        assert outcome == "ended" if dynamic else "does not answer" in outcome


def _store_answers_late(rank: int, world_size: int, port: int, pid: int) -> int:
    """The store's host is stopped during shutdown, until a request has gone unanswered."""
    from rankcall import rpc
    from rankcall.rpc import static_group
    from rankcall.store import StoreLostError

    come_up(rank, world_size, "ZMQ", init_method=f"tcp://127.0.0.1:{port}")
    unanswered = []

    def observed(*args: Any) -> Any:
        try:
            return synchronize(*args)
        except StoreLostError as lost:
            unanswered.append(lost)
            os.kill(pid, signal.SIGCONT)
            raise

    synchronize, static_group.synchronize = static_group.synchronize, observed  # type: ignore[assignment]
    if rank == 0:
        stop(pid)
    rpc.shutdown(timeout=60)
    return len(unanswered)


def test_a_store_that_answers_late() -> None:
    """Requests to a store that takes longer than a second are made again, until the deadline."""
    with hosted() as (port, pid):
        assert sum(run_ranks(_store_answers_late, 2, port, pid, init=False)) > 0


# --- a peer that is stopped


def _stopped(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 is stopped; a call to it fails, and shutdown ends."""
    from rankcall import rpc
    from rankcall.errors import RpcTimeout

    own = {"heartbeat_timeout": 6.0} if backend == "ZMQ" else {}
    come_up(rank, world_size, backend, **own)
    if rank == 1:
        time.sleep(60)  # the main thread only
    pid = rpc.rpc_sync("w1", os.getpid)
    stop(pid)
    with pytest.raises(RuntimeError) as unanswered:
        rpc.rpc_sync("w1", max, args=(1, 2), timeout=30 if backend == "ZMQ" else 1)
    with pytest.raises(RpcTimeout) as late:
        rpc.shutdown(timeout=3)
    os.kill(pid, signal.SIGKILL)
    return str(unanswered.value), str(late.value)


@pytest.mark.parametrize("backend", SLOW_TENSORPIPE)
def test_a_stopped_worker(backend: str) -> None:
    """ZMQ notices it and says that it may be stopped; both back ends end and name it."""
    results = try_ranks(_stopped, 2, backend, init=False)
    [(unanswered, late)] = survivors(results, killed=1)
    assert "missing: 'w1' (rank 1)" in late
    if backend == "ZMQ":
        pid = results[1].pid
        assert f"'w1' is gone: its process {pid} no longer answers (is it stopped?)" in unanswered


# --- memory and sizes


def _identity(value: Any) -> Any:
    return value


def _zeros(count: int) -> Any:
    import torch

    return torch.zeros(count)


def _file_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_FSIZE)[0]


def _no_room(rank: int, world_size: int) -> Any:
    """No block can be made: as where /dev/shm is full, or files may not grow."""
    import torch

    from rankcall import rpc

    come_up(rank, world_size, "ZMQ")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
    while rpc.rpc_sync(f"w{1 - rank}", _file_limit) != 1 << 16:  # the spawner has a deadline
        pass
    sent = torch.arange(1 << 20)
    assert torch.equal(rpc.rpc_sync(f"w{1 - rank}", _identity, args=(sent,)), sent)
    usage = metrics()["arena_bytes"], blocks()
    rpc.shutdown(timeout=120)
    return usage


def test_no_room_in_shared_memory() -> None:
    """The bytes go through the socket."""
    assert run_ranks(_no_room, 2, init=False) == [[0, 0]] * 2


def _too_large(rank: int, world_size: int) -> Any:
    """Rank 1 takes no more than a mebibyte; there is no shared memory."""
    import torch

    from rankcall import rpc

    limit = {"max_message_bytes": 1 << 20} if rank else {}
    come_up(rank, world_size, "ZMQ", arena_bytes=0, **limit)
    messages = []
    if rank == 0:
        for sent in (torch.zeros(1 << 20), bytes(1 << 21), torch.zeros(70_000).split(1)):
            with pytest.raises(RuntimeError) as caught:
                rpc.rpc_sync("w1", _identity, args=(sent,))
            messages.append(str(caught.value))
        assert rpc.rpc_sync("w1", _zeros, args=(1 << 20,)).numel() == 1 << 20
        assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
    rpc.shutdown(timeout=120)
    return messages


def test_what_is_too_large_is_refused_at_once() -> None:
    """By the sender, which names the worker and its limit; the connection stays."""
    tensor, message, many = run_ranks(_too_large, 2, init=False)[0]
    assert "a tensor of 4194304 bytes is more than worker 'w1' accepts" in tensor
    assert "a message of 209" in message
    assert message.endswith("more than worker 'w1' accepts: its max_message_bytes is 1048576")
    assert "to worker 'w1' has 70000 tensors; the most is 65536" in many


# --- strangers on the network


def _strangers(rank: int, world_size: int, secret: str) -> Any:
    """Rank 1 knocks at rank 0's door without a key, with wrong ones, and with the right one."""
    import socket

    import zmq

    from rankcall import rpc
    from rankcall.rpc.backends.zmq.curve_keys import derive_keys
    from rankcall.rpc.backends.zmq.worker import ZmqWorker

    os.environ.update(RANKCALL_HOST=f"node-{rank}", RANKCALL_RPC_SECRET=secret)
    doors, bind = [], ZmqWorker._bind_network
    ZmqWorker._bind_network = lambda self: (doors.append(bind(self)), doors[-1])[1]  # type: ignore[method-assign,func-returns-value]
    come_up(rank, world_size, "ZMQ", max_message_bytes=1 << 20)
    right, wrong = derive_keys(secret.encode()), derive_keys(b"another secret, as long")
    beside = aside()
    if rank == 0:
        beside.set("door", doors[0])
    else:
        door = beside.get("door").decode()
        keys = [
            None,
            (wrong.server_public, wrong.client_public, wrong.client_secret),
            (right.server_public, wrong.client_public, wrong.client_secret),
            (right.server_public, right.client_public, right.client_secret),
        ]
        with zmq.Context() as context:
            for known in keys:
                push = context.socket(zmq.DEALER)
                push.linger, push.sndtimeo = 0, 300
                if known:
                    push.curve_serverkey, push.curve_publickey, push.curve_secretkey = known
                push.connect(door)
                with suppress(zmq.Again):  # a refused one has no connection
                    for frames in ([b"garbage"], [b"", b"more"], [b"RKR2" + os.urandom(68)]):
                        push.send_multipart(frames)
                    push.send(bytes(2 << 20))  # more than is taken: the connection ends
            host, port = door.removeprefix("tcp://").rsplit(":", 1)
            for noise in (b"\xff" + bytes(8) + b"\x01\x7f", os.urandom(5000), b""):
                with socket.create_connection((host, int(port)), timeout=10) as raw:
                    raw.sendall(noise)
            wait_until(lambda: rpc.rpc_sync("w0", metrics)["refused"] >= 2)
            wait_until(lambda: rpc.rpc_sync("w0", metrics)["malformed"] >= 3)
            counts = rpc.rpc_sync("w0", metrics)
            for push in context._sockets.copy():
                push.close()
    assert rpc.rpc_sync(f"w{1 - rank}", max, args=(3, 4)) == 4
    rpc.shutdown(timeout=120)
    return None if rank == 0 else [counts["malformed"], counts["stale"], counts["strangers"]]


def test_strangers_on_the_network_are_refused() -> None:
    """Nothing that they send is read; messages with the key but a wrong form are dropped."""
    malformed, stale, strangers = run_ranks(_strangers, 2, "a secret of the tests", init=False)[1]
    # Of the one with the key: three frames each time that it connects, and it connects again.
    assert malformed >= 3
    assert stale == strangers == 0


# --- nothing stays


def _again_and_again(rank: int, world_size: int, backend: str) -> Any:
    """Groups come and go in one process; the last uses as much as the second, or soon will."""
    import torch

    from rankcall import rpc

    more = int(backend == "TENSORPIPE")  # a socket now and then

    def uses() -> list[int]:
        return [threads(), sockets()]

    def ended() -> bool:
        return threads() <= used[1][0] and sockets() <= used[1][1] + more

    used: list[list[int]] = []
    for _ in range(4):
        come_up(rank, world_size, backend)
        rpc.rpc_sync(f"w{1 - rank}", _identity, args=(torch.ones(1 << 16),))
        rpc.shutdown(timeout=120)
        used.append(uses())
    with suppress(AssertionError):  # a joined thread is listed for tens of milliseconds more
        wait_until(ended, seconds=10)
    return ended(), [*used, uses()]


def test_groups_leave_nothing_behind(backend: str, shm: Path) -> None:
    """No thread, no socket, no shared memory more with each group that a process was in."""
    for ended, used in run_ranks(_again_and_again, 2, backend, init=False):
        assert ended, used
    assert not list(shm.rglob("*"))

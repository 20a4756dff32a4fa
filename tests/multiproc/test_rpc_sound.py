"""RPC over ZMQ: no wrong data, no call that runs for a peer that was given up, no leak."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hosting import stop
from ranks import run_ranks, try_ranks
from rpcgroup import aside, backend, come_up, metrics, names, sockets
from world import wait_until

__all__ = ["backend"]  # a fixture
pytestmark = pytest.mark.multiproc

kept: list[Any] = []
runs: list[str] = []
LARGE = 1 << 18


def _full(value: float) -> Any:
    import torch

    return torch.full((LARGE,), value)


def _keep(tensor: Any) -> int:
    kept.append(tensor)
    return os.getpid()


def _kept_value() -> tuple[float, float]:
    return float(kept[-1].min()), float(kept[-1].max())


def _run(what: str) -> int:
    runs.append(what)
    return len(runs)


# --- shared memory


def _fetched_before_leaving(rank: int, world_size: int) -> Any:
    """Rank 1 fetches a tensor and leaves; then rank 2 fetches another from the same worker."""
    from rankcall import rpc

    store = aside()
    if rank:
        store.wait(["host"] if rank == 1 else ["left"])
    come_up(rank, None, "ZMQ")
    if rank == 0:
        store.set("host", "")
        store.wait(["done"])
        rpc.shutdown(timeout=120)
        return None
    tensor = rpc.rpc_sync("w0", _full, args=(float(rank),))
    if rank == 1:
        rpc.shutdown(timeout=120)
        store.set("left", "")
        store.wait(["fetched"])
        store.set("done", "")
    else:
        store.set("fetched", "")
        store.wait(["done"])
        rpc.shutdown(timeout=120)
    return float(tensor.min()), float(tensor.max())


def test_a_tensor_outlives_the_visit_that_fetched_it() -> None:
    """The sender does not use the memory again, though the receiver has left."""
    values = run_ranks(_fetched_before_leaving, 3, init=False)
    assert values == [None, [1.0, 1.0], [2.0, 2.0]]


def _stopped_and_resumed(rank: int, world_size: int) -> Any:
    """Rank 1 is stopped until it is given up; then it is resumed, and calls."""
    from rankcall import rpc

    store = aside()
    come_up(rank, world_size, "ZMQ", heartbeat_timeout=1.0)
    if rank == 0:
        pid = rpc.rpc_sync("w1", _keep, args=(_full(1.0),))
        stop(pid)
        with pytest.raises(RuntimeError, match=r"no longer answers \(is it stopped\?\)"):
            rpc.rpc_sync("w1", _kept_value)
        rpc.rpc_sync("w2", _keep, args=(_full(2.0),))
        os.kill(pid, signal.SIGCONT)
        store.set("resumed", "")
        store.wait(["called"])
        rpc.rpc_sync("w2", len, args=(_full(3.0),))  # w1 has freed its tensor meanwhile
        observed: Any = [rpc.rpc_sync("w2", _kept_value), runs]
        store.set("end", "")
    elif rank == 1:
        store.wait(["resumed"])
        value, errors = _kept_value(), []
        for number in range(3):
            with pytest.raises(RuntimeError) as caught:
                rpc.rpc_sync("w0", _run, args=(f"attempt {number}",), timeout=30)
            errors.append(str(caught.value))
        kept.clear()
        observed = [value, errors]
        store.set("called", "")
    else:
        observed = None
    store.wait(["end"])
    rpc.shutdown(graceful=False)
    return observed


def test_a_worker_that_was_given_up() -> None:
    """It keeps its tensors, harms no others, and none of its calls runs; the errors say why."""
    first, second, _ = run_ranks(_stopped_and_resumed, 3, init=False)
    assert first == [[2.0, 2.0], []]
    value, errors = second
    assert value == [1.0, 1.0]
    assert all("has given this worker up" in e or "is gone" in e for e in errors), errors


def _slow_full() -> Any:
    time.sleep(0.2)
    return _full(1.0)


def _lost_answers(rank: int, world_size: int) -> Any:
    """Rank 0's calls time out; the answers that come later are in shared memory."""
    from rankcall import rpc

    come_up(rank, world_size, "ZMQ", num_worker_threads=1)
    blocks_held = None
    if rank == 0:
        for count in range(1, 7):
            with pytest.raises(RuntimeError, match="timeout"):
                rpc.rpc_sync("w1", _slow_full, timeout=0.05)
            wait_until(lambda least=count: metrics()["late_answers"] >= least)
        blocks_held = rpc.rpc_sync("w1", metrics)["arena_bytes"] // (4 * LARGE)
    rpc.shutdown(timeout=120)
    return blocks_held


def test_the_memory_of_late_answers_is_used_again() -> None:
    """The receiver frees what it drops: six late answers take the room of one."""
    assert run_ranks(_lost_answers, 2, init=False)[0] == 1


def _add_one(tensor: Any) -> Any:
    return tensor.add_(1)


def _views(tensor: Any) -> Any:
    return tensor[:-1], tensor[1:]


def _add_one_and_keep(tensor: Any, as_array: bool) -> Any:
    kept.append(tensor.numpy() if as_array else tensor)
    return tensor.add_(1)


def _add_to_kept() -> int:
    for each in kept:
        each += 100.0
    return len(kept)


def _extremes(*tensors: Any) -> list[float]:
    return [float(extreme) for each in tensors for extreme in (each.min(), each.max())]


def _returned(rank: int, world_size: int) -> Any:
    """Rank 1 returns its argument, first without and then with another user of it."""
    from rankcall import rpc

    come_up(rank, world_size, "ZMQ")
    if rank == 1:
        rpc.shutdown(timeout=120)
        return None
    sent = _full(1.0)
    for _ in range(20):
        returned = rpc.rpc_sync("w1", _add_one, args=(sent,))
    views = rpc.rpc_sync("w1", _views, args=(sent,))
    copied = [rpc.rpc_sync("w1", metrics)["arena_bytes"]]
    copies = [rpc.rpc_sync("w1", _add_one_and_keep, args=(sent, kind)) for kind in (False, True)]
    assert rpc.rpc_sync("w1", _add_to_kept) == 2
    copied.append(rpc.rpc_sync("w1", metrics)["arena_bytes"])
    blocks = metrics()["arena_bytes"] // (4 * LARGE)
    rpc.shutdown(timeout=120)
    returned += 1.0
    views[0][1:] += 4.0  # the two share their memory, as they did
    return _extremes(sent, returned, views[1][:-1], *copies), copied[0], copied[1] > 0, blocks


def test_an_argument_that_is_returned() -> None:
    """It goes back without a copy, if nothing else on the worker could change it afterwards."""
    values, copied, has_copied, blocks = run_ranks(_returned, 2, init=False)[0]
    assert values == [1.0] * 2 + [3.0] * 2 + [5.0] * 2 + [2.0] * 4
    assert (copied, has_copied) == (0, True)
    assert blocks <= 7  # one in flight, and those of ``returned``, ``views`` and the kept ones


def _many_kept(rank: int, world_size: int) -> Any:
    """Rank 1 keeps many tensors of 64 KiB."""
    import torch

    from rankcall import rpc

    come_up(rank, world_size, "ZMQ")
    mappings = None
    if rank == 0:
        tensors = [torch.full((1 << 14,), float(i)) for i in range(400)]
        for _ in range(5):
            rpc.rpc_sync("w1", _keep, args=(tensors,))
        mappings = rpc.rpc_sync("w1", _mappings)
    rpc.shutdown(timeout=120)
    return mappings


def _mappings() -> int:
    assert all(float(t[-1]) == i for tensors in kept for i, t in enumerate(tensors))
    return Path("/proc/self/maps").read_text().count(os.environ["RANKCALL_SHM"])


def test_many_tensors_share_few_mappings(tmp_path: Path) -> None:
    """2,000 tensors of 64 KiB lie in some fifteen slabs, not in one file each."""
    mappings = run_ranks(_many_kept, 2, init=False, env={"RANKCALL_SHM": str(tmp_path)})[0]
    assert 8 <= mappings <= 25


# --- workers that come again


def _killed_and_again(rank: int, world_size: int) -> Any:
    """Each worker is on a host of its own; rank 1 is killed, and rank 2 comes in its name."""
    from rankcall import rpc
    from rankcall.process import process_start

    os.environ.update(
        RANKCALL_HOST=f"node-{min(rank, 1)}", RANKCALL_RPC_SECRET="a secret of the tests"
    )
    store = aside()
    if rank == 2:
        killed = int(store.get("killed"))
        wait_until(lambda: process_start(killed) is None)  # it removes what a dead worker left
        come_up(1, None, "ZMQ", "w1")
        outcome: Any = rpc.rpc_sync("w0", pow, args=(2, 5))
        store.set("done", "")
        rpc.shutdown(timeout=120)
        return outcome
    if rank == 1:
        store.wait(["host"])
    come_up(rank, None, "ZMQ", heartbeat_timeout=20.0)
    if rank == 1:
        assert rpc.rpc_sync("w0", pow, args=(2, 3)) == 8
        store.set("killed", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    store.set("host", "")
    store.wait(["done"])
    outcome = sorted(names())
    rpc.shutdown(timeout=120)
    return outcome


def test_a_worker_of_another_host_comes_again_at_once() -> None:
    """Long before its heartbeats are missed: no deadlock, and the new one can be called."""
    first, _, again = try_ranks(_killed_and_again, 3, init=False)
    assert again.value == 32, again.error or again.stderr
    assert first.ok, first.error or first.stderr


def _given_up(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 enters the attempt that rank 0 has given up, before rank 0 tries again."""
    from rpcgroup import hurry

    from rankcall import rpc
    from rankcall.errors import RpcTimeout
    from rankcall.rpc.static_group import StaticMembership

    hurry()
    store = aside()
    if rank == 0:
        with pytest.raises(RpcTimeout):
            come_up(rank, world_size, backend, rpc_timeout=2)
        store.set("given up", "")
        store.wait(["introduced"])
    else:
        introduce = StaticMembership.introduce

        def noted(*arguments: Any) -> Any:
            cards = introduce(*arguments)
            store.set("introduced", "")
            return cards

        StaticMembership.introduce = noted  # type: ignore[method-assign]
        store.wait(["given up"])
    come_up(rank, world_size, backend, rpc_timeout=60)
    answer = rpc.rpc_sync(f"w{1 - rank}", pow, args=(2, 3))
    rpc.shutdown(timeout=120)
    return answer


def test_attempts_to_come_up_meet(backend: str) -> None:
    """A worker that enters an attempt which another has given up begins again with that one."""
    assert run_ranks(_given_up, 2, backend, init=False) == [8, 8]


def _dies_first(rank: int, world_size: int) -> Any:
    """Rank 1 dies in init; rank 2 takes its place, as a supervisor would have it."""
    from rankcall import rpc
    from rankcall.errors import RpcTimeout
    from rankcall.process import process_start
    from rankcall.rpc.static_group import StaticMembership

    store = aside()
    if rank == 1:
        StaticMembership.introduce = lambda *_: (  # type: ignore[method-assign,assignment]
            store.set("dying", str(os.getpid())),
            os.kill(os.getpid(), signal.SIGKILL),
        )
    if rank == 2:
        dying = int(store.get("dying"))
        wait_until(lambda: process_start(dying) is None)
    own = min(rank, 1)
    for _ in range(3):
        try:
            come_up(own, 2, "ZMQ")
            break
        except RpcTimeout:
            continue
    answer = rpc.rpc_sync(f"w{1 - own}", pow, args=(2, 3))
    rpc.shutdown(timeout=120)
    return answer


def test_a_static_group_forms_after_a_death() -> None:
    """A rank of a dead process is free: the group moves on to the next epoch, and meets there."""
    first, dead, second = try_ranks(_dies_first, 3, init=False)
    assert dead.exitcode == -signal.SIGKILL
    assert (first.value, second.value) == (8, 8), (first.error, second.error)


# --- ends


def _visits(rank: int, world_size: int) -> Any:
    """Rank 1 comes and goes many times; rank 0 stays."""
    from rankcall import rpc

    store = aside()
    if rank == 0:
        come_up(0, None, "ZMQ")
        counts = []
        for visit in range(12):
            store.set(f"visit {visit}", "")
            store.wait([f"left {visit}"])
            wait_until(lambda: names() == {"w0"})
            counts.append(sockets())
        wait_until(lambda: sockets() <= counts[1])  # the last ones close on other threads
        rpc.shutdown(timeout=120)
        return None
    for visit in range(12):
        store.wait([f"visit {visit}"])
        come_up(1, None, "ZMQ")
        assert rpc.rpc_sync("w0", pow, args=(2, 3)) == 8
        rpc.shutdown(timeout=120)
        store.set(f"left {visit}", "")
    return None


def test_visits_leave_no_descriptors() -> None:
    """A worker that comes and goes costs its host nothing that stays."""
    run_ranks(_visits, 2, init=False, timeout=240)


_promised: list[Any] = []


def _later() -> Any:
    import torch

    _promised.append(torch.futures.Future())  # type: ignore[no-untyped-call]
    return _promised[-1]


_later._wrapped_async_rpc_function = _later  # type: ignore[attr-defined]  # async_execution's mark


def _completed_after_the_end(rank: int, world_size: int) -> Any:
    """Rank 1 completes a request after the end of its agent."""
    import gc

    from rankcall import rpc

    store = aside()
    come_up(rank, None, "ZMQ")
    if rank == 0:
        wait_until(lambda: names() == {"w0", "w1"})
        answer = rpc.rpc_async("w1", _later)
        with pytest.raises(RuntimeError, match="has left"):
            answer.wait()
        store.wait(["completed"])
    else:
        wait_until(lambda: _promised)
        rpc.shutdown(timeout=120)
        gc.collect()
        _promised.pop().set_result(1)
        store.set("completed", "")
        return "alive"
    rpc.shutdown(timeout=120)
    return None


def test_an_answer_after_the_end_of_the_agent() -> None:
    """It goes nowhere, and harms nothing."""
    outcomes = run_ranks(_completed_after_the_end, 2, init=False, env={"MALLOC_PERTURB_": "165"})
    assert outcomes == [None, "alive"]


def _forks(rank: int, world_size: int) -> Any:
    """Rank 0 forks a child that calls, and ends as a program does."""
    import torch

    from rankcall import rpc

    come_up(rank, world_size, "ZMQ")
    status = None
    if rank == 0:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                rpc.rpc_sync("w1", pow, args=(2, 3), timeout=5)
            except RuntimeError as error:
                os.write(write, str(error).encode()[:500])
            import atexit

            atexit._run_exitfuncs()
            os._exit(7)
        deadline, ended = time.monotonic() + 30, (0, 0)
        while not ended[0] and time.monotonic() < deadline:
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        status = os.waitstatus_to_exitcode(ended[1]), os.read(read, 500).decode()
    large = torch.ones(LARGE)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.numel, args=(large,)) == LARGE
    rpc.shutdown(timeout=120)
    return status


def test_a_forked_child_harms_nothing() -> None:
    """Its calls raise; its exit leaves the parent's agent and folder alone."""
    code, message = run_ranks(_forks, 2, init=False)[0]
    assert code == 7
    assert "RPC does not work in a forked child" in message


# --- strangers


def test_a_stranger_gets_little_memory_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection without keys that announces gigabytes is closed at once, and counted."""
    figures = run_ranks(_stranger, 1, init=False, env={"RANKCALL_SHM": str(tmp_path)})[0]
    assert figures["sent"] < 8 << 20
    assert figures["refused"] == 3
    assert figures["silent_s"] < 10


def _stranger(rank: int, world_size: int) -> Any:
    from rankcall import rpc
    from rankcall.rpc.backends.zmq.worker import ZmqWorker

    os.environ.update(RANKCALL_RPC_SECRET="a secret of the tests")
    bound: list[str] = []
    bind = ZmqWorker._bind_network
    ZmqWorker._bind_network = lambda self: (bound.append(bind(self)), bound[0])[1]  # type: ignore[method-assign,func-returns-value]
    come_up(rank, world_size, "ZMQ")
    host, port = bound[0].removeprefix("tcp://").rsplit(":", 1)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    sent = 0
    for _ in range(2):
        with socket.create_connection((host, int(port)), timeout=20) as stranger:
            stranger.sendall(greeting)
            stranger.recv(64)
            try:
                stranger.sendall(b"\x06" + struct.pack(">Q", 4 << 30))
                for _ in range(300):
                    stranger.sendall(bytes(1 << 20))
                    sent += 1 << 20
            except OSError:
                continue  # closed
    began = time.monotonic()
    with socket.create_connection((host, int(port)), timeout=20) as stranger:
        while stranger.recv(64):  # until it is closed
            pass
    silent_s = time.monotonic() - began
    wait_until(lambda: metrics()["refused"] >= 3)
    figures = {"sent": sent, "refused": metrics()["refused"], "silent_s": silent_s}
    rpc.shutdown(timeout=120)
    return figures

"""Static groups on both back ends: calls, bad input, deaths, hosts with and without keys."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lag import stopwatch
from ranks import run_ranks, try_ranks
from rpcgroup import BACKENDS, backend, blocks, come_up, hurry, metrics
from world import wait_until

__all__ = ["backend"]  # a fixture
pytestmark = pytest.mark.multiproc


# --- what works


def _identity(value: Any) -> Any:
    return value


def _tensors(rank: int, world_size: int, backend: str) -> Any:
    """Tensors of every kind and size come back as they went."""
    import torch

    from rankcall import rpc

    come_up(rank, world_size, backend)
    if rank == 0:
        ones = torch.arange(3.0)
        tensors = [
            ones,
            torch.tensor([], dtype=torch.int64),
            torch.tensor(True),
            torch.randn(5, 7).t(),
            torch.randn(100, 3)[::2, 1:],
            torch.randn(2, 3, dtype=torch.complex64),
            torch.randn(4).to(torch.bfloat16),
            torch.eye(4).to_sparse(),
            torch.randn(3, requires_grad=True),
            *(torch.randint(256, (n,), dtype=torch.uint8) for n in (65535, 65536, 65537, 5 << 20)),
            ones,
        ]
        for _ in range(3):
            back = rpc.rpc_sync("w1", _identity, args=(tensors,))
            for ours, theirs in zip(tensors, back, strict=True):
                assert ours.dtype == theirs.dtype
                assert ours.layout == theirs.layout
                assert ours.requires_grad == theirs.requires_grad
                assert torch.equal(ours.detach().to_dense(), theirs.detach().to_dense())
        before = blocks()
        for _ in range(10):
            back = rpc.rpc_sync("w1", _identity, args=(tensors,))
        assert blocks() <= 2 * before  # they are reused, once the other side has let go of them
        received = [rpc.rpc_sync("w1", torch.full, args=((1 << 17,), i)) for i in range(5)]
        assert [int(tensor[-1]) for tensor in received] == list(range(5))
    rpc.shutdown(timeout=120)
    if rank == 0:  # received tensors stay, although the sender has left
        assert [int(tensor.min()) for tensor in received] == list(range(5))
    return None


def test_tensors_come_back_as_they_went(backend: str) -> None:
    """Dense, strided, sparse and empty; in messages, in shared memory."""
    run_ranks(_tensors, 2, backend, init=False)


def _through_torch(rank: int, world_size: int, backend: str) -> Any:
    """torch's own init_rpc and shutdown take a member of ours."""
    import torch.distributed.rpc as torch_rpc

    from rankcall.rpc import BackendType

    member = BackendType[backend]
    torch_rpc.init_rpc(f"w{rank}", backend=member, rank=rank, world_size=world_size)
    remote = torch_rpc.remote(f"w{1 - rank}", pow, args=(2, 5))
    value = remote.to_here()
    del remote
    torch_rpc.shutdown()
    return value


def test_torchs_own_init_accepts_our_members(backend: str) -> None:
    """And its shutdown ends what it began; RRefs work between."""
    assert run_ranks(_through_torch, 2, backend, init=False) == [32, 32]


def _double(tensor: Any) -> Any:
    return tensor + tensor


def _profiled(rank: int, world_size: int) -> Any:
    """Rank 0 profiles one call after the other."""
    import torch
    from torch.autograd.profiler_legacy import profile

    from rankcall import rpc

    come_up(rank, world_size, "ZMQ", num_worker_threads=2)
    remote_events = []
    for _ in range(12 if rank == 0 else 0):
        with profile() as profiled:  # type: ignore[no-untyped-call]
            rpc.rpc_async("w1", _double, args=(torch.ones(3),)).wait()
        remote_events.append(
            [event.name for event in profiled.function_events if event.node_id == 1]
        )
    rpc.shutdown(timeout=120)
    return remote_events


def test_the_callees_operators_are_in_each_profile() -> None:
    """Also when the thread that serves the call has served a profiled one before."""
    remote_events = run_ranks(_profiled, 2, init=False)[0]
    assert remote_events == [["rpc_async#_double(w0 -> w1)#remote_op: aten::add"]] * 12


# --- bad input


def _raise(text: str) -> None:
    raise ValueError(text)


def _unpicklable() -> Any:
    return lambda: None


def _bad_calls(rank: int, world_size: int, backend: str) -> Any:
    """A callee that raises, an answer that does not pickle, a worker that is not there."""
    from rankcall import rpc

    come_up(rank, world_size, backend)
    messages = []
    if rank == 0:
        for function, args, kind in ((_raise, ("no",), ValueError), (_unpicklable, (), Exception)):
            with pytest.raises(kind) as caught:
                rpc.rpc_sync("w1", function, args=args)
            messages.append(str(caught.value))
        with pytest.raises(RuntimeError) as late:
            rpc.rpc_sync("w1", time.sleep, args=(1.5,), timeout=0.2)
        messages.append(str(late.value))
        with pytest.raises((RuntimeError, ValueError)):
            rpc.rpc_sync("nobody", max, args=(1, 2))
        assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
    rpc.shutdown(timeout=120)
    return messages


def test_bad_calls_are_told(backend: str) -> None:
    """By errors that name the worker; the next call works."""
    raised, unpicklable, late = run_ranks(_bad_calls, 2, backend, init=False)[0]
    assert "On WorkerInfo(id=1, name=w1)" in raised
    assert "pickle" in unpicklable.lower()
    if backend == "ZMQ":  # torch's own agent does not say where
        assert unpicklable.startswith("On worker 'w1': ")
    assert "RPC ran for more than" in late
    if backend == "ZMQ":
        assert "worker 'w1' has not answered" in late


def _bad_group(rank: int, world_size: int, backend: str, what: str) -> Any:
    """Each rank tells the error that it gets, and that another group can be made after it."""
    from rankcall import rpc

    names = {"names": "same", "ranks": f"w{rank}", "sizes": f"w{rank}"}
    claimed = 0 if what == "ranks" else rank
    hurry()
    size = world_size + rank if what == "sizes" else world_size
    message = ""
    try:
        come_up(claimed, size, backend, names[what], rpc_timeout=3)
    except RuntimeError as error:
        message = str(error)
    if what != "ranks":  # a process keeps its rank for life: dist_autograd's rule
        if message:  # else the second attempt of the other rank has met this first one
            come_up(rank, world_size, backend)
        assert rpc.rpc_sync(f"w{1 - rank}", max, args=(1, 2)) == 2
        rpc.shutdown(timeout=120)
    return message


@pytest.mark.parametrize("backend", ["ZMQ", pytest.param("TENSORPIPE", marks=pytest.mark.slow)])
def test_a_group_that_disagrees(backend: str) -> None:
    """The error names the owners of a name, rank or size, and a good group can follow."""
    names = run_ranks(_bad_group, 2, backend, "names", init=False)
    assert names == ["worker name 'same' is not unique: ranks 0 and 1 have it"] * 2
    ranks = sorted(run_ranks(_bad_group, 2, backend, "ranks", init=False))
    assert "1 of 2 workers arrived in time; missing: rank 1" in ranks[0]
    assert "rank argument 0 of worker" in ranks[1]
    assert "is not unique: worker 'w" in ranks[1]
    sizes = run_ranks(_bad_group, 2, backend, "sizes", init=False)
    assert any("world_size argument" in e and "doesn't match group size" in e for e in sizes)


def test_what_is_not_what_it_should_be() -> None:
    """Stores, options and keywords of the wrong kind; a back end that is not there."""
    from torch.distributed import HashStore

    from rankcall import rpc

    for name in BACKENDS:
        member = rpc.BackendType[name]
        options = rpc.construct_rpc_backend_options(member)
        with pytest.raises(TypeError, match=r"`store` must be a c10d::Store; got str 'x'"):
            rpc.init_backend(member, "x", "w0", 0, 1, options)
        with pytest.raises(TypeError, match=r"`rpc_backend_options` must be"):
            rpc.init_backend(member, HashStore(), "w0", 0, 1, object())
        with pytest.raises(TypeError, match="device_map'"):
            rpc.construct_rpc_backend_options(member, device_map={})
        with pytest.raises((ValueError, RuntimeError), match="num_worker_threads must be"):
            rpc.construct_rpc_backend_options(member, num_worker_threads=-1)
    with pytest.raises(ValueError, match=r"no RPC backend 'GRPC'; known: TENSORPIPE, ZMQ"):
        rpc.init_rpc("w0", "GRPC")
    with pytest.raises(TypeError, match="rpc_backend_options must be RpcBackendOptions"):
        rpc.init_rpc("w0", rpc_backend_options=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="RPC has not been initialized"):
        rpc.shutdown()


# --- workers that do not come, or die


def _alone(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 never comes."""
    if rank == 1:
        return None
    from rankcall.errors import RpcTimeout

    hurry()
    began = time.monotonic()
    with stopwatch() as took, pytest.raises(RpcTimeout) as caught:
        come_up(rank, world_size, backend, rpc_timeout=1)
    return str(caught.value), caught.value.missing_ranks, time.monotonic() - began, took[0]


def test_who_did_not_come_is_named(backend: str) -> None:
    """Init ends at its deadline and names the missing worker."""
    message, missing, waited_s, took_s = run_ranks(_alone, 2, backend, init=False)[0]
    assert "1 of 2 workers arrived in time; missing: rank 1" in message
    assert missing == [1]
    assert waited_s > 0.9
    assert took_s < 4


_ready: set[int] = set()  # on rank 0, the ranks that have called rank 1


def _note_ready(rank: int) -> None:
    _ready.add(rank)


def _dies(rank: int, world_size: int, backend: str) -> Any:
    """Rank 1 is killed in a call; shutdown ends on the other ranks and names it."""
    from rankcall import rpc
    from rankcall.errors import RpcTimeout

    come_up(rank, world_size, backend)
    if rank == 1:
        time.sleep(600)
    pid = rpc.rpc_sync("w1", os.getpid)
    call = rpc.rpc_async("w1", time.sleep, args=(600,))
    rpc.rpc_sync("w0", _note_ready, args=(rank,))
    if rank == 0:
        wait_until(lambda: _ready == {0, 2})
        os.kill(pid, signal.SIGKILL)
    with stopwatch() as lost_s, pytest.raises(RuntimeError) as lost:
        call.wait()
    with stopwatch() as late_s, pytest.raises(RpcTimeout) as late:
        rpc.shutdown(timeout=3)
    return lost_s[0], str(lost.value), str(late.value), late_s[0]


def test_a_worker_that_dies_in_a_call(backend: str, tmp_path: Path) -> None:
    """Callers get an error within seconds; shutdown ends and names the missing worker."""
    results = try_ranks(_dies, 3, backend, init=False, env={"RANKCALL_SHM": str(tmp_path)})
    for rank in (0, 2):
        assert results[rank].ok, results[rank].error
        lost_s, lost, late, late_s = results[rank].value
        assert lost_s < 5
        assert late_s < 5
        assert "workers arrived (worker 'w1' is gone" in late
        assert "missing: 'w1' (rank 1)" in late
        if backend == "ZMQ":
            assert f"worker 'w1' is gone: its process {results[1].pid} has ended" in lost


@pytest.mark.slow
def test_what_a_killed_worker_left_is_cleared_up(tmp_path: Path) -> None:
    """Its sockets and blocks are removed by the next worker that starts on the host."""
    env = {"RANKCALL_SHM": str(tmp_path)}
    results = try_ranks(_dies, 3, "ZMQ", init=False, env=env)
    left = list(tmp_path.rglob("lock"))
    assert len(left) == 1, left
    assert results[1].exitcode == -signal.SIGKILL
    run_ranks(_bad_calls, 2, "ZMQ", init=False, env=env)
    assert not list(tmp_path.rglob("*"))


# --- several hosts


def _hosts(rank: int, world_size: int, secrets: list[str], folder: str) -> Any:
    """Each rank is on a host of its own, as far as they know."""
    import torch

    from rankcall import rpc

    os.environ["RANKCALL_HOST"] = f"node-{rank}"
    secret = Path(folder) / f"secret-{rank}"
    if secrets[rank]:
        secret.touch(mode=0o600)
        secret.write_text(secrets[rank])
        os.environ["RANKCALL_RPC_SECRET_FILE"] = str(secret)
    began = time.monotonic()
    try:
        come_up(rank, world_size, "ZMQ", rpc_timeout=12, heartbeat_timeout=2.0)
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    sent = torch.randn(1 << 20)
    received = rpc.rpc_sync(f"w{1 - rank}", _identity, args=(sent,))
    figures = metrics()
    rpc.shutdown(timeout=120)
    assert torch.equal(received, sent)  # it may outlive the agent that received it
    return "ok", figures["arena_bytes"], figures["refused"]


def test_hosts_with_one_secret(tmp_path: Path) -> None:
    """Large tensors go over the encrypted connection, none through shared memory."""
    outcomes = run_ranks(_hosts, 2, ["s" * 32] * 2, str(tmp_path), init=False)
    assert outcomes == [["ok", 0, 0]] * 2


@pytest.mark.parametrize(
    "secrets",
    [
        ["", ""],
        pytest.param(["s" * 32, ""], marks=pytest.mark.slow),
        ["s" * 32, "t" * 32],
    ],
)
def test_hosts_without_one_secret(tmp_path: Path, secrets: list[str]) -> None:
    """None, only one, or two: no worker gets in, and each gets an error with the reason in time."""
    outcomes = run_ranks(_hosts, 2, secrets, str(tmp_path), init=False)
    assert any(kind == "AuthenticationError" for kind, *_ in outcomes)
    for kind, message, took_s in outcomes:
        assert kind in ("AuthenticationError", "RpcTimeout")
        assert "RANKCALL_RPC_SECRET_FILE" in message or "missing" in message
        assert took_s < 16


# --- strangers


def _garbage(rank: int, world_size: int) -> Any:
    """Rank 1 sends rank 0 messages that no worker sends; rank 0 goes on answering."""
    import socket
    import struct

    import zmq

    from rankcall import rpc

    come_up(rank, world_size, "ZMQ")
    if rank == 1:
        base = Path(os.environ["RANKCALL_SHM"]) / f"rankcall-{os.getuid()}" / "rpc"
        sockets = [str(file) for file in base.glob("*/in")]
        assert len(sockets) == 2
        for path in sockets:
            with zmq.Context() as context, context.socket(zmq.DEALER) as push:
                push.connect(f"ipc://{path}")
                push.send(b"")
                push.send(b"garbage")
                push.send_multipart([b"RKR2" + bytes(68), b"more", b"still more"])
                header = struct.Struct("<4sB3xQQQqQQiIII")  # src/rankcall/rpc/native/wire.h
                for payload_bytes in (1 << 60, 0):
                    push.send(header.pack(b"RKR2", 1, 1, 2, 3, 4, payload_bytes, 0, 0, 0, 0, 0))
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(b"\xff" + bytes(8) + b"\x01\x7f" + os.urandom(20))  # half a greeting
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(path)
                raw.sendall(os.urandom(4096))
    peer = f"w{1 - rank}"
    wait_until(lambda: rpc.rpc_sync(peer, metrics)["malformed"] >= 4)
    wait_until(lambda: rpc.rpc_sync(peer, metrics)["stale"] >= 1)
    assert rpc.rpc_sync(peer, max, args=(3, 4)) == 4
    rpc.shutdown(timeout=120)
    return "answered"


def test_garbage_is_counted_and_survived(tmp_path: Path) -> None:
    """Empty and foreign frames, sizes that lie, former lives, half a greeting, noise."""
    env = {"RANKCALL_SHM": str(tmp_path)}
    assert run_ranks(_garbage, 2, init=False, env=env) == ["answered"] * 2

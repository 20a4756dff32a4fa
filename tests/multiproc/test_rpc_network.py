"""RPC between two hosts over a line that is slow, long and loses packets, and behind CURVE."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rpcgroup import come_up, metrics
from slowline import Line, address, enter, joined
from world import wait_until

from rankcall.testing.spawn import start_ranks

pytestmark = pytest.mark.multiproc

SLOW = Line(delay_s=0.02, loss=0.001, bits_per_s=50e6)
# TCP's rate falls with the share of lost packets, and rises with the packets' size.
FAST = Line(delay_s=0.005, loss=0.001, bits_per_s=800e6, mtu=65_000)
PORT, ASIDE, WORKER = 29_400, 29_401, 29_402  # free: each host has ports of its own
HEARTBEAT_S = 10.0  # the default


def _at_host(rank: int, world_size: int, folder: str, line: Line, **options: Any) -> None:
    enter(rank, folder, line.mtu)
    os.environ.update(RANKCALL_HOST=f"node-{rank}", RANKCALL_RPC_SECRET="a secret of the tests")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the store is at host 0
    method = f"tcp://{address(0)}:{PORT}"
    options.setdefault("heartbeat_timeout", HEARTBEAT_S)
    come_up(rank, world_size, "ZMQ", init_method=method, **options)


def _aside(rank: int) -> Any:
    """Return a store beside the group's, for the two hosts to take turns by."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    return TCPStore(
        address(0),
        ASIDE,
        is_master=rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    step = 1 << 22
    return ((at, min(at + step, count)) for at in range(0, count, step))


def _content(at: int, end: int) -> Any:
    import torch

    return torch.arange(at, end) * 2_654_435_761


def _check(tensor: Any) -> int:
    """Return the tensor's size if all of it is right."""
    import torch

    for at, end in _pieces(tensor.numel()):
        assert torch.equal(tensor[at:end], _content(at, end)), at
    return int(tensor.numel())


def _large_call(rank: int, world_size: int, folder: str, line: Line, count: int) -> Any:
    """Rank 0 sends rank 1 a tensor of ``count`` numbers of 8 bytes."""
    import torch

    from rankcall import rpc

    _at_host(rank, world_size, folder, line, rpc_timeout=1200)
    figures = None
    if rank == 0:
        tensor = torch.empty(count, dtype=torch.int64)
        for at, end in _pieces(count):
            tensor[at:end] = _content(at, end)
        began = time.monotonic()
        assert rpc.rpc_sync("w1", _check, args=(tensor,)) == count
        figures = {"seconds": time.monotonic() - began, **metrics()}
        assert rpc.rpc_sync("w1", pow, args=(2, 5)) == 32
    rpc.shutdown(timeout=1200)
    return figures


def _send(folder: Path, line: Line, size: int, timeout: float) -> tuple[dict[str, Any], Any]:
    args = (str(folder), line, size // 8)
    with joined(line, folder) as relay:
        figures = run_ranks(_large_call, 2, *args, init=False, timeout=timeout)[0]
        return figures, relay.counts()


def test_calls_over_a_slow_line(tmp_path: Path) -> None:
    """Workers meet and call each other over 50 Mbit/s, 40 ms there and back, and packet loss."""
    figures, packets = _send(tmp_path, SLOW, 8 << 20, timeout=120)
    assert figures["seconds"] > 8 * (8 << 20) / SLOW.bits_per_s
    assert packets["lost"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1700, func_only=True)
@pytest.mark.parametrize(("line", "size"), [(SLOW, 128 << 20), (SLOW, 2 << 30), (FAST, 2 << 30)])
def test_a_message_that_takes_longer_than_the_heartbeat_timeout(
    line: Line, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 MiB and 2 GiB over 50 Mbit/s and 2 GiB over 800 Mbit/s arrive: heartbeats pass meanwhile.

    The sender hears nothing from the receiver but the answers to its heartbeats.
    """
    figures, packets = _send(tmp_path, line, size, timeout=1500)
    with capsys.disabled():
        print(f"\n{size >> 20} MiB in {figures['seconds']:.1f} s; packets: {packets}")
    assert figures["seconds"] > 2 * HEARTBEAT_S
    assert packets["lost"] > 0


# --- a line that is cut


def _sleep_until_cut(folder: str) -> None:
    (Path(folder) / "called").touch()
    time.sleep(60)


def _cut_off(rank: int, world_size: int, folder: str, line: Line) -> Any:
    """The line is cut while rank 0 waits for an answer."""
    from rankcall import rpc

    _at_host(rank, world_size, folder, line, heartbeat_timeout=4.0)
    if rank == 1:
        wait_until(lambda: (Path(folder) / "over").exists())
        return None  # the agent closes at the end of the process
    with pytest.raises(RuntimeError) as caught:
        rpc.rpc_sync("w1", _sleep_until_cut, args=(folder,), timeout=50)
    (Path(folder) / "over").touch()
    rpc.shutdown(graceful=False)
    return str(caught.value)


def test_a_line_that_is_cut(tmp_path: Path) -> None:
    """A worker that cannot be reached any more is given up: its heartbeats do not come."""
    with joined(SLOW, tmp_path) as relay:
        with start_ranks(_cut_off, 2, str(tmp_path), SLOW, init=False) as ranks:
            wait_until((tmp_path / "called").exists)
            relay.cut()
            assert ranks.wait(60, 30)
    assert "worker 'w1' is gone: its connection was lost" in ranks.results[0].value


# --- strangers

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
STRANGERS = 40  # of each kind


class _Stranger:
    """A connection of a program without the secret.

    It announces a frame of 4 GiB and sends what it can ("greedy"), sends nothing ("silent"), or
    sends a byte now and then ("slow").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.socket = socket.create_connection((address(0), WORKER), timeout=30)
        self.socket.setblocking(False)
        self.began = self.last = time.monotonic()
        self.closed_after = 0.0
        self.sent = 0
        announced = b"\x06" + struct.pack(">Q", 4 << 30)
        self.rest = GREETING + announced + bytes(1 << 20) if kind == "greedy" else GREETING

    def step(self) -> None:
        """Send something if there is something to send; note if the connection is closed."""
        try:
            if self.kind == "greedy" and self.sent < len(self.rest):
                self.sent += self.socket.send(self.rest[self.sent : self.sent + 65536])
            elif self.kind == "slow" and time.monotonic() > self.last + 0.2:
                self.sent += self.socket.send(self.rest[self.sent : self.sent + 1])
                self.last = time.monotonic()
            while self.socket.recv(4096):
                pass
        except BlockingIOError:
            return
        except OSError:
            pass
        self.closed_after = time.monotonic() - self.began
        self.socket.close()


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def _visited_by_strangers(rank: int, world_size: int, folder: str, line: Line) -> Any:
    """Rank 0 is a worker; rank 1 is a host with strangers."""
    from rankcall import rpc

    if rank == 0:
        _at_host(rank, 1, folder, line, port=WORKER)
        store = _aside(rank)
        wait_until(lambda: store.check(["known"]))  # the cost of the first ones is there
        before = most = _resident_kib()
        store.set("measured", "")
        while not store.check(["closed"]):
            most = max(most, _resident_kib())
            time.sleep(0.002)
        wait_until(lambda: metrics()["refused"] >= 3 + 3 * STRANGERS)
        assert rpc.rpc_sync("w0", pow, args=(2, 5)) == 32
        figures = {"kib": most - before, "refused": metrics()["refused"]}
        store.set("over", "")
        rpc.shutdown(timeout=120)
        return figures
    enter(rank, folder, line.mtu)
    store = _aside(rank)
    _visit(1)
    store.set("known", "")
    store.wait(["measured"])
    closed_after = _visit(STRANGERS)
    store.set("closed", "")
    store.wait(["over"])
    return closed_after


def _visit(count: int) -> dict[str, float]:
    """Return how long the longest connection of each kind lasted."""
    strangers = [_Stranger(kind) for _ in range(count) for kind in ("greedy", "silent", "slow")]

    def all_are_closed() -> bool:
        for stranger in strangers:
            if not stranger.closed_after:
                stranger.step()
        return all(stranger.closed_after for stranger in strangers)

    wait_until(all_are_closed, 100)
    longest: dict[str, float] = {}
    for stranger in strangers:
        longest[stranger.kind] = max(longest.get(stranger.kind, 0.0), stranger.closed_after)
    return longest


def test_strangers_get_little_memory_and_time(tmp_path: Path) -> None:
    """A connection without the secret gets at most 64 KiB and 3 s, and is counted."""
    line = Line(delay_s=0.001, loss=0.0, bits_per_s=1e9)
    args = (str(tmp_path), line)
    with joined(line, tmp_path):
        worker, closed_after = run_ranks(_visited_by_strangers, 2, *args, init=False)
    assert worker["refused"] == 3 + 3 * STRANGERS
    assert worker["kib"] <= 64 * 3 * STRANGERS
    assert max(closed_after.values()) < 3 + 20  # on a busy machine
    print(worker, closed_after)

"""RPC between two hosts over a line that is slow, long and loses packets, and behind CURVE."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from rpcgroup import come_up, metrics
from slowline import Line, address, enter, joined

pytestmark = pytest.mark.multiproc

SLOW = Line(delay_s=0.02, loss=0.001, bits_per_s=50e6)
# TCP's rate falls with the share of lost packets, and rises with the packets' size.
FAST = Line(delay_s=0.005, loss=0.001, bits_per_s=800e6, mtu=65_000)
PORT = 29_400  # free: each host has ports of its own
HEARTBEAT_S = 10.0  # the default


def _at_host(rank: int, world_size: int, folder: str, line: Line, **options: Any) -> None:
    enter(rank, folder, line.mtu)
    os.environ.update(RANKCALL_HOST=f"node-{rank}", RANKCALL_RPC_SECRET="a secret of the tests")
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # the store is at host 0
    method = f"tcp://{address(0)}:{PORT}"
    come_up(rank, world_size, "ZMQ", init_method=method, heartbeat_timeout=HEARTBEAT_S, **options)


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

    _at_host(rank, world_size, folder, line, rpc_timeout=500)
    told = None
    if rank == 0:
        tensor = torch.empty(count, dtype=torch.int64)
        for at, end in _pieces(count):
            tensor[at:end] = _content(at, end)
        began = time.monotonic()
        assert rpc.rpc_sync("w1", _check, args=(tensor,)) == count
        told = {"seconds": time.monotonic() - began, **metrics()}
        assert rpc.rpc_sync("w1", pow, args=(2, 5)) == 32
    rpc.shutdown(timeout=60)
    return told


def _send(folder: Path, line: Line, size: int, timeout: float) -> tuple[dict[str, Any], Any]:
    args = (str(folder), line, size // 8)
    with joined(line, folder) as relay:
        told = run_ranks(_large_call, 2, *args, init=False, timeout=timeout)[0]
        return told, relay.counts()


def test_calls_over_a_slow_line(tmp_path: Path) -> None:
    """Workers meet and call each other over 50 Mbit/s, 40 ms there and back, and packet loss."""
    told, packets = _send(tmp_path, SLOW, 8 << 20, timeout=120)
    assert told["seconds"] > 8 * (8 << 20) / SLOW.bits_per_s
    assert packets["lost"] > 0


@pytest.mark.slow
@pytest.mark.timeout(700, func_only=True)
@pytest.mark.parametrize(("line", "size"), [(SLOW, 128 << 20), (FAST, 2 << 30)])
def test_a_message_that_takes_longer_than_the_heartbeat_timeout(
    line: Line, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """128 MiB over 50 Mbit/s and 2 GiB over 800 Mbit/s arrive: heartbeats pass meanwhile.

    The sender hears nothing from the receiver but the answers to its heartbeats.
    """
    told, packets = _send(tmp_path, line, size, timeout=600)
    with capsys.disabled():
        print(f"\n{size >> 20} MiB in {told['seconds']:.1f} s; packets: {packets}")
    assert told["seconds"] > 2 * HEARTBEAT_S
    assert packets["lost"] > 0

"""Device maps on a real GPU: CUDA tensors go to the mapped device, and come back the same way.

Without a GPU the tests are skipped. One is enough, because both workers use it.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks
from rpcgroup import aside, backend, come_up

__all__ = ["backend"]  # a fixture
pytestmark = [pytest.mark.gpu, pytest.mark.multiproc]


def _where(tensor: Any) -> tuple[str, Any]:
    return str(tensor.device), tensor * 2


def _mapped(rank: int, world_size: int, backend: str, dynamic: bool, caller: int) -> Any:
    """One worker sends tensors that a kernel still writes; a device without a map is refused.

    Rank 1 joins a dynamic group after rank 0.
    """
    import torch

    from rankcall import rpc

    other = f"w{1 - rank}"
    last = torch.cuda.device_count() - 1
    maps = {other: {0: last}} if rank == caller else {}
    if dynamic and rank == 1:
        aside().wait(["w0 is up"])
    if dynamic and backend == "TENSORPIPE":
        torch.cuda.init()  # else torch's agent aborts the process that receives the first tensor
    come_up(rank, None if dynamic else world_size, backend, device_maps=maps)
    store = aside()
    store.set(f"w{rank} is up", "")
    store.wait(["w0 is up", "w1 is up"])
    echoed: list[Any] = []
    if rank == caller:
        for size in (7, 1 << 20):
            mill = torch.randn(512, 512, device="cuda:0")
            for _ in range(20):
                mill = mill @ mill / 50
            sent = torch.arange(size, device="cuda:0") + mill[0, 0].long() * 0
            place, back = rpc.rpc_sync(other, _where, args=(sent,))
            assert place == f"cuda:{last}"
            assert str(back.device) == "cuda:0"
            assert torch.equal(back.cpu(), 2 * torch.arange(size))
        cpu = rpc.rpc_sync(other, _where, args=(torch.ones(2),))
        echoed = [cpu[0], cpu[1].tolist()]
    else:
        with pytest.raises(RuntimeError, match=r"device map|device_map"):
            rpc.rpc_sync(other, _where, args=(torch.ones(2, device="cuda:0"),))
    store.set(f"w{rank} is done", "")
    store.wait(["w0 is done", "w1 is done"])
    rpc.shutdown(timeout=30)
    return echoed


@pytest.mark.parametrize(("dynamic", "caller"), [(False, 0), (True, 0), (True, 1)])
def test_tensors_land_where_the_maps_say(backend: str, dynamic: bool, caller: int) -> None:
    """Arguments land on the mapped device, answers on the caller's; CPU tensors stay on the CPU."""
    if (backend, dynamic, caller) == ("TENSORPIPE", True, 1):
        pytest.skip("torch's agent does not tell members the maps of the worker that joins")
    answers = run_ranks(_mapped, 2, backend, dynamic, caller, init=False, timeout=240)
    assert answers[caller] == ["cpu", [2.0, 2.0]]


def _bad_map_on_rank_0(rank: int, world_size: int, backend: str) -> str:
    """Rank 0's map names a device that rank 1 does not have."""
    import torch

    from rankcall.errors import DeviceMapError

    maps = {"w1": {0: torch.cuda.device_count()}} if rank == 0 else {}
    with pytest.raises(DeviceMapError) as caught:
        come_up(rank, world_size, backend, device_maps=maps)
    return str(caught.value)


def test_a_device_that_is_not_there(backend: str) -> None:
    """Both workers get an error that names the invalid index."""
    for message in run_ranks(_bad_map_on_rank_0, 2, backend, init=False):
        assert "Node w0 has target devices with invalid indices in its device map" in message

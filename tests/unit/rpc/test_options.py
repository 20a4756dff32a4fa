"""The options of RPC's back ends: durations as numbers or as timedelta, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rankcall import rpc
from rankcall.rpc.backends.zmq import ZmqRpcBackendOptions


@pytest.mark.parametrize("backend", ["ZMQ", "TENSORPIPE"])
def test_a_timeout_is_a_number_or_a_timedelta(backend: str) -> None:
    """Both give the same options, in seconds; 0 stands for no limit."""
    for timeout in (90, 90.0, timedelta(minutes=1.5)):
        options = rpc.construct_rpc_backend_options(rpc.BackendType[backend], timeout)
        assert options.rpc_timeout == 90
    assert rpc.construct_rpc_backend_options(rpc.BackendType[backend], 0).rpc_timeout == 0
    with pytest.raises(ValueError, match="rpc_timeout must be at least 0 seconds; got -1"):
        rpc.construct_rpc_backend_options(rpc.BackendType[backend], -1)
    with pytest.raises(TypeError, match="rpc_timeout is in seconds, or a timedelta; got '5'"):
        rpc.construct_rpc_backend_options(rpc.BackendType[backend], "5")  # type: ignore[arg-type]


def test_the_heartbeat_timeout() -> None:
    """It has bounds, and its attribute is in seconds."""
    options = ZmqRpcBackendOptions(heartbeat_timeout=timedelta(seconds=2))
    assert options.heartbeat_timeout == 2
    wrong: tuple[Any, ...] = (0, 0.01, timedelta(days=2))
    for timeout in wrong:
        with pytest.raises(ValueError, match=r"heartbeat_timeout must be from 0.1 to 86400 s"):
            ZmqRpcBackendOptions(heartbeat_timeout=timeout)

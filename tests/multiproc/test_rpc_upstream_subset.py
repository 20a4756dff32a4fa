"""A quick part of PyTorch's own RPC tests on ZMQ; `make test-upstream` has all, on both."""

from __future__ import annotations

import pytest
from rpcupstream import run_suite

pytestmark = pytest.mark.multiproc

# One of each kind: calls, nested and asynchronous, scripts, RRefs and their end, tensors, errors,
# shutdown, dist_optimizer (with dist_autograd), a module elsewhere.
TESTS = (
    "RpcTest.test_async_function_nested",
    "RpcTest.test_py_tensors_multi_async_call",
    "RpcTest.test_py_raise_in_user_func",
    "RpcTest.test_local_shutdown_with_rpc",
    "RpcTest.test_rref_leak",
    "DistOptimizerTest.test_dist_optim",
    "JitRpcTest.test_rref_is_owner",
    "RemoteModuleTest.test_forward_async",
)


def test_torchs_own_tests_pass() -> None:
    """Each of them."""
    outcomes = run_suite("ZMQ", TESTS, timeout=280)
    assert outcomes == dict.fromkeys(TESTS, "passed")


def test_a_mixed_group_is_refused_on_tensorpipe() -> None:
    """A worker without a world size cannot join a static group, as with torch's own start."""
    name = "TensorPipeAgentRpcTest.test_dynamic_and_static_init_rpc_together"
    assert run_suite("TENSORPIPE", [name], timeout=280) == {name: "passed"}

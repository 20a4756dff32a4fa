"""The addresses that workers advertise and refuse, and what is missing; the errors for them."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankcall.errors import BackendUnavailableError
from rankcall.process import Process
from rankcall.rpc.backends.zmq import addresses
from rankcall.rpc.backends.zmq.addresses import endpoints, is_loopback, own_address
from rankcall.rpc.backends.zmq.agent_module import zmq_library


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace what the kernel says about the source address for each host."""
    known = {
        "127.0.0.1": "127.0.0.1",
        "127.0.1.1": "127.0.0.1",
        "node-a": "127.0.0.1",
        "node-b": "10.0.0.5",
        "::1": "::1",
        addresses._ELSEWHERE: "10.0.0.9",
    }
    monkeypatch.setattr(addresses, "_source_address", lambda host: known.get(host, ""))
    monkeypatch.delenv("RANKCALL_RPC_HOST", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    return known


@pytest.mark.parametrize(
    ("method", "address"),
    [
        ("tcp://127.0.0.1:1", "127.0.0.1"),  # written as such: all workers are on one host
        ("tcp://[::1]:1", "::1"),
        ("tcp://127.0.1.1:1", "10.0.0.9"),  # on Debian, a host's own name resolves to this
        ("tcp://node-a:1", "10.0.0.9"),
        ("tcp://node-b:1", "10.0.0.5"),
        ("file:///shared/store", "10.0.0.9"),
    ],
)
def test_the_address_on_the_way_to_the_store(
    method: str, address: str, routes: dict[str, str]
) -> None:
    """Loopback is advertised only if the user wrote it."""
    assert own_address(None, method) == address


def test_no_route_at_all(routes: dict[str, str]) -> None:
    """Without any network, the worker is reached from its own host."""
    routes.clear()
    assert own_address(None, "tcp://node-a:1") == "127.0.0.1"


def test_addresses_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is taken as it is, in short; an address that no host has is refused."""
    assert own_address("0:0:0:0:0:0:0:1", "") == "::1"
    monkeypatch.setenv("RANKCALL_RPC_HOST", "203.0.113.7")
    assert own_address(None, "tcp://127.0.0.1:1") == "203.0.113.7"
    for wrong in ("0.0.0.0", "::", "no-such-host.invalid"):
        with pytest.raises(ValueError, match="host="):
            own_address(wrong, "")


def test_ports() -> None:
    """A port, a range, or any; IPv6 in brackets."""
    assert list(endpoints("10.0.0.5", 0)) == ["tcp://10.0.0.5:*"]
    assert list(endpoints("::1", "7-9")) == [f"tcp://[::1]:{port}" for port in (7, 8, 9)]
    for wrong in ("x", "1-", "70000", -1, "5-x"):
        with pytest.raises(ValueError, match="port must be"):
            list(endpoints("10.0.0.5", wrong))


@pytest.mark.parametrize("at", ["127.0.0.1", "127.0.1.1", "[::1]"])
def test_loopback_is_not_advertised_to_another_host(at: str) -> None:
    """The error names both workers, and says what to set where."""
    from rankcall.rpc.backends.zmq.worker import ZmqWorker

    def process(boot: str) -> Process:
        return Process(boot, 1, 2, 3)

    here: Any = SimpleNamespace(
        name="w0",
        network="tcp://10.0.0.5:1",
        dir=SimpleNamespace(host="node-a boot 1"),
        process=process("boot"),
    )
    record = {"node": {"name": "w1"}, "network": f"tcp://{at}:2", "host": "node-b other 1"}
    assert is_loopback(record["network"])  # type: ignore[arg-type]
    with pytest.raises(
        BackendUnavailableError, match=r"'w1' listens at .* RANKCALL_RPC_HOST there"
    ):
        ZmqWorker._check_way(here, record, process("other"))
    ZmqWorker._check_way(here, record, process("boot"))  # two containers on one machine


@pytest.mark.parametrize(
    ("file", "said"), [(None, "no module named zmq"), ("_zmq.py", "no extension module")]
)
def test_without_libzmq(
    file: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pyzmq, or with one that brings no libzmq, the error says what to install."""
    if file is not None:
        folder = tmp_path / "zmq/backend/cython"
        folder.mkdir(parents=True)
        (tmp_path / "zmq/__init__.py").touch()
        (folder / file).touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "zmq", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(BackendUnavailableError, match=rf"pip install 'rankcall\[rpc\]'.*{said}"):
        zmq_library()


def test_libzmq_is_the_one_that_pyzmq_loads() -> None:
    """The library is found without importing pyzmq, and is the module that pyzmq itself loads."""
    code = """
import sys
from rankcall.rpc.backends.zmq.agent_module import zmq_library
found = zmq_library()
assert "zmq" not in sys.modules
from zmq.backend.cython import _zmq
assert found == _zmq.__file__, (found, _zmq.__file__)
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)

"""The table of back ends: names, duplicates, entry points, and torch's own init_rpc beside it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankcall import registry
from rankcall.errors import BackendNotFoundError, DuplicateBackendError
from rankcall.registry import Registry
from rankcall.rpc import backend_registry
from rankcall.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
    unregister_backend,
)


def _nothing(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@pytest.fixture
def mine() -> Iterator[BackendType]:
    """A back end that gives back what it is called with."""
    yield register_backend("MINE", _nothing, _nothing)
    unregister_backend("MINE")


def test_members_are_as_an_enums(mine: BackendType) -> None:
    """By attribute, by index, in a loop; equal, hashable, and the same after a round of pickle."""
    assert BackendType.MINE == BackendType["MINE"] == mine
    assert mine in set(BackendType)
    assert list(BackendType) == [BackendType.TENSORPIPE, BackendType.ZMQ, mine]
    assert len(BackendType) == 3
    assert list(BackendType.__members__) == ["TENSORPIPE", "ZMQ", "MINE"]
    assert repr(mine) == "BackendType.MINE"
    assert mine.name == "MINE"
    assert mine.value == BackendValue(_nothing, _nothing)
    assert pickle.loads(pickle.dumps(mine)) == mine == copy.deepcopy(mine)
    assert mine != BackendType.ZMQ
    assert isinstance(mine, BackendType)
    with pytest.raises(AttributeError, match="does not change"):
        mine.name = "THEIRS"


def test_handlers_get_what_they_are_called_with(mine: BackendType) -> None:
    """Options and agent come from the two functions, as torch calls them."""
    assert construct_rpc_backend_options(mine, 7, "tcp://x:1", more=1) == (
        (7, "tcp://x:1"),
        {"more": 1},
    )
    assert construct_rpc_backend_options(mine) == ((60.0, "env://"), {})
    assert init_backend(mine, 1, store=2) == ((1,), {"store": 2})


def test_a_name_twice(mine: BackendType) -> None:
    """Refused as torch refuses it, whether registered or built in."""
    for name in ("MINE", "ZMQ"):
        with pytest.raises(RuntimeError, match=f"{name}: already registered") as caught:
            register_backend(name, _nothing, _nothing)
        assert isinstance(caught.value, DuplicateBackendError)
    assert mine.value.init_backend_handler is _nothing


def test_unknown_names_list_the_known(mine: BackendType) -> None:
    """The error is a KeyError, ValueError or AttributeError, depending on the kind of access."""
    assert not backend_registered("NONE")
    for kind in (KeyError, ValueError, BackendNotFoundError):
        with pytest.raises(kind, match=r"^there is no RPC backend 'NONE'; known: .*ZMQ, MINE$"):
            BackendType["NONE"]
    with pytest.raises(AttributeError, match="known: TENSORPIPE, ZMQ, MINE"):
        _ = BackendType.NONE
    with pytest.raises(BackendNotFoundError):
        unregister_backend("NONE")


def test_what_cannot_be_called_is_refused() -> None:
    """A handler that cannot be called is a TypeError that names it; nothing is registered."""
    with pytest.raises(TypeError, match="BROKEN: init_backend_handler must be callable; got 3"):
        register_backend("BROKEN", _nothing, 3)  # type: ignore[arg-type]
    assert not backend_registered("BROKEN")


def test_registering_leaves_torch_alone(mine: BackendType) -> None:
    """Members made before a registration stay torch's too; torch's default is what it was."""
    import torch.distributed.rpc as torch_rpc

    before = BackendType.ZMQ
    second = register_backend("SECOND", _nothing, _nothing)
    try:
        for member in (before, mine, second):
            assert isinstance(member, torch_rpc.backend_registry.BackendType)
        theirs = torch_rpc.BackendType.TENSORPIPE
        assert isinstance(theirs, torch_rpc.backend_registry.BackendType)
    finally:
        unregister_backend("SECOND")


def test_torch_may_register_too() -> None:
    """After torch has rebound its enum our members still pass for its own."""
    code = (
        "import torch.distributed.rpc as t\n"
        "from rankcall.rpc import BackendType as B\n"
        "member = B.ZMQ\n"
        "t.backend_registry.register_backend('X', lambda *a, **k: None, lambda *a, **k: None)\n"
        "assert isinstance(member, t.backend_registry.BackendType)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_entry_points_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed unloaded, loaded once, checked, and an error there reaches who asked."""
    loaded: list[str] = []

    class Point:
        def __init__(self, name: str, value: Any) -> None:
            self.name, self._value = name, value

        def load(self) -> Any:
            loaded.append(self.name)
            return self._value

    points = [Point("THEIRS", BackendValue(_nothing, _nothing)), Point("BAD", SimpleNamespace())]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    monkeypatch.setattr(backend_registry._backends, "_values", {})
    assert [member.name for member in BackendType] == ["TENSORPIPE", "ZMQ", "BAD", "THEIRS"]
    assert not loaded
    for _ in range(2):
        assert BackendType.THEIRS.value.init_backend_handler is _nothing
    assert loaded == ["THEIRS"]
    with pytest.raises(TypeError, match="BAD: construct_rpc_backend_options_handler must be"):
        _ = BackendType.BAD.value


def test_a_real_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package's metadata is enough."""
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[rankcall.test]\nTHEIRS = string:digits\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[str] = Registry("thing", "rankcall.test", lambda name, value: str(value))
    assert list(registry) == ["THEIRS"]
    assert registry.get("THEIRS") == "0123456789"
    assert EntryPoint("THEIRS", "string:digits", "rankcall.test").load() == "0123456789"


def test_a_handle_removes_its_own_registration() -> None:
    """Removing twice does not take away what came after."""
    registry: Registry[int] = Registry("number", "rankcall.none", lambda name, value: int(value))
    first = registry.register("one", 1)
    first.stop()
    registry.register("one", 2)
    first.stop()
    assert registry.get("one") == 2
    with pytest.raises(TypeError, match="non-empty string"):
        registry.register("", 1)


def test_a_value_that_is_slow_to_load_holds_nobody_up() -> None:
    """Other names are found while one is loaded: that runs code of other people."""
    loading, release = threading.Event(), threading.Event()

    def check(name: str, value: Any) -> Any:
        if name == "slow":
            loading.set()
            release.wait(60)
        return value

    values = Registry("thing", "rankcall.no-such-group", check, {"slow": "json", "quick": "csv"})
    thread = threading.Thread(target=values.get, args=("slow",))
    thread.start()
    assert loading.wait(60)
    loaded: list[Any] = []
    other_thread = threading.Thread(target=lambda: loaded.append(values.get("quick")))
    other_thread.start()
    other_thread.join(60)
    assert [module.__name__ for module in loaded] == ["csv"]
    release.set()
    thread.join(60)
    assert values.get("slow").__name__ == "json"

"""The RPC back ends by name: duplicates, entry points, and torch's own init_rpc beside it."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankcall.errors import BackendNotFoundError, DuplicateBackendError
from rankcall.rpc import backend_registry
from rankcall.rpc.backend_registry import (
    Backend,
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
def mine() -> Iterator[Backend]:
    """A back end that gives back what it is called with."""
    yield register_backend("MINE", _nothing, _nothing)
    unregister_backend("MINE")


def test_members_are_as_an_enums(mine: Backend) -> None:
    """By attribute, by index, in a loop; equal, hashable, and the same after a round of pickle."""
    assert BackendType.MINE == BackendType["MINE"] == mine
    assert mine in set(BackendType)
    assert list(BackendType) == [BackendType.TENSORPIPE, BackendType.ZMQ, mine]
    assert len(BackendType) == 3
    assert list(BackendType.__members__) == ["TENSORPIPE", "ZMQ", "MINE"]
    assert repr(mine) == "BackendType.MINE"
    assert mine.name == "MINE"
    assert mine.value == BackendValue(_nothing, _nothing)
    assert pickle.loads(pickle.dumps(mine)) is mine is copy.deepcopy(mine)
    assert mine != BackendType.ZMQ
    assert isinstance(mine, BackendType)  # type: ignore[arg-type]
    assert mine in BackendType
    assert "MINE" not in BackendType
    assert "MINE" in dir(BackendType)
    assert BackendType.MINE is mine
    assert pickle.loads(pickle.dumps(BackendType)) is BackendType is copy.deepcopy(BackendType)
    with pytest.raises(AttributeError, match="does not change"):
        mine.name = "THEIRS"


def test_handlers_get_what_they_are_called_with(mine: Backend) -> None:
    """Options and agent come from the two functions, as torch calls them."""
    assert construct_rpc_backend_options(mine, 7, "tcp://x:1", more=1) == (
        (7, "tcp://x:1"),
        {"more": 1},
    )
    assert construct_rpc_backend_options(mine) == ((60.0, "env://"), {})
    assert init_backend(mine, 1, store=2) == ((1,), {"store": 2})


def test_a_name_twice(mine: Backend) -> None:
    """Refused as torch refuses it, whether registered or built in."""
    for name in ("MINE", "ZMQ"):
        with pytest.raises(RuntimeError, match=f"{name}: already registered") as caught:
            register_backend(name, _nothing, _nothing)
        assert isinstance(caught.value, DuplicateBackendError)
    assert mine.value.init_backend_handler is _nothing


def test_unknown_names_list_the_known(mine: Backend) -> None:
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


def test_registering_leaves_torch_alone(mine: Backend) -> None:
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
    monkeypatch.setattr(backend_registry, "entry_points", lambda group: points)
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))
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
    text = "[rankcall.rpc_backends]\nTHEIRS = rankcall.rpc.backends.tensorpipe\n"
    (info / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(BackendType, "_members", dict(BackendType._members))
    assert [member.name for member in BackendType] == ["TENSORPIPE", "ZMQ", "THEIRS"]
    assert backend_registered("THEIRS")
    assert BackendType["THEIRS"].value == BackendType.TENSORPIPE.value
    with pytest.raises(DuplicateBackendError):
        register_backend("THEIRS", _nothing, _nothing)
    with pytest.raises(ValueError, match="was not registered by register_backend"):
        unregister_backend("THEIRS")


def test_a_name_can_be_registered_again_after_its_end() -> None:
    """The member from before keeps its own functions."""
    before = register_backend("AGAIN", _nothing, _nothing)
    unregister_backend("AGAIN")
    assert not backend_registered("AGAIN")
    register_backend("AGAIN", print, print)  # type: ignore[arg-type]
    try:
        assert BackendType.AGAIN.value == BackendValue(print, print)  # type: ignore[arg-type]
        assert before != BackendType.AGAIN
        assert before.value == BackendValue(_nothing, _nothing)
    finally:
        unregister_backend("AGAIN")
    with pytest.raises(TypeError, match="non-empty string"):
        register_backend("", _nothing, _nothing)


def test_a_back_end_that_is_slow_to_load_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are found and loaded while one is loaded: that runs code of other people."""
    loading, release = threading.Event(), threading.Event()
    value = BackendValue(_nothing, _nothing)

    def load() -> BackendValue:
        loading.set()
        assert release.wait(60)
        return value

    slow, quick = Backend("SLOW", load), Backend("QUICK", lambda: value)
    members = {**BackendType._members, "SLOW": slow, "QUICK": quick}
    monkeypatch.setattr(BackendType, "_members", members)
    thread = threading.Thread(target=lambda: BackendType.SLOW.value)
    thread.start()
    assert loading.wait(60)
    loaded: list[Any] = []
    other_thread = threading.Thread(target=lambda: loaded.append(BackendType.QUICK.value))
    other_thread.start()
    other_thread.join(60)
    assert loaded == [value]
    release.set()
    thread.join(60)
    assert BackendType.SLOW.value == value

"""The public names: ``docs/index.md`` has each of them once, and durations are of one kind."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rankcall

INDEX = (Path(__file__).parents[2] / "docs/index.md").read_text()
MODULES = ("errors", "hooks", "join", "rpc", "store", "testing", "trace", "watch")

# Annotated ``float`` as in torch's own functions, in records that are read, or because the unit is
# in the name.
SECONDS_ONLY = {
    "hooks.CollectiveStatus.duration",
    "rpc.TensorPipeRpcBackendOptions.rpc_timeout",
    "rpc.rpc_sync.timeout",
    "testing.Fault.seconds",
}


def public_names() -> set[str]:
    """Return what the package and its public modules export, as the page writes it."""
    top = {f"rankcall.{name}" for name in rankcall.__all__ if name not in MODULES}
    return top.union(
        f"{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(f"rankcall.{module}").__all__
        if name != "RankcallError"  # in the top level's table
    )


def test_the_index_has_every_public_name_once() -> None:
    """One line for each, and none for a name that does not exist."""
    section = INDEX.partition("## Public names")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `([\w.]+)` \|", section, re.MULTILINE)
    callbacks = {name for name in listed if name.startswith("integrations.")}
    assert sorted(listed) == sorted(public_names() | callbacks)
    modules = {name for name in rankcall.__all__ if inspect.ismodule(getattr(rankcall, name))}
    assert modules | {"errors", "testing"} == set(MODULES)


@pytest.mark.parametrize("name", sorted(re.findall(r"`(integrations\.[\w.]+)`", INDEX)))
def test_the_callbacks_exist(name: str) -> None:
    """Their modules import frameworks, so this looks at the source."""
    _, module, member = name.split(".")
    path = Path(rankcall.__file__).parent / "integrations" / f"{module}.py"
    assert re.search(rf"^(class|def) {member}\b", path.read_text(), re.MULTILINE)


def public_parameters() -> Iterator[tuple[str, str]]:
    """Yield each parameter of a public function or method with its annotation."""
    for module in MODULES:
        exported = importlib.import_module(f"rankcall.{module}")
        for name in exported.__all__:
            for function_name, function in functions_of(name, getattr(exported, name)):
                for parameter in inspect.signature(function).parameters.values():
                    where = f"{module}.{function_name}.{parameter.name}"
                    yield where, str(parameter.annotation)
    for name in ("enable", "expect", "within"):
        for parameter in inspect.signature(getattr(rankcall, name)).parameters.values():
            yield f"rankcall.{name}.{parameter.name}", str(parameter.annotation)


def functions_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return a function, or a class's constructor and public methods."""
    if inspect.isfunction(value):
        return [(name, value)]
    if not inspect.isclass(value):
        return []
    methods = {
        key: method
        for key, method in vars(value).items()
        if inspect.isfunction(method) and (key == "__init__" or not key.startswith("_"))
    }
    return [(name if key == "__init__" else f"{name}.{key}", each) for key, each in methods.items()]


def test_durations_are_seconds_or_a_timedelta() -> None:
    """A parameter that names no unit and is a time takes both, as torch's functions do."""
    found = dict(public_parameters())
    assert "Duration" in found["rankcall.expect.seconds"]  # the look finds what it looks for
    plain = {
        name
        for name, annotation in found.items()
        if re.search(r"timeout|seconds|duration|grace|hang_after|wait", name.rpartition(".")[2])
        and "float" in annotation
        and not name.endswith(("_s", "_ms"))
    }
    assert plain == SECONDS_ONLY

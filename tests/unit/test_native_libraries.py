"""The recorders of wheels: for which Python, processor and torch each is compiled."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import native_libraries
import pytest
from native_libraries import Python


def torch_for(folder: Path, version: str, machine: str) -> Path:
    """Write the files of a torch that its name is read from, as its wheels have them."""
    folder.mkdir(parents=True)
    (folder / "version.py").write_text(f"__version__ = '{version}'\ngit_version = 'c0ffee'\n")
    (folder / f"_C.cpython-312-{machine}-linux-gnu.so").touch()
    (folder / "include").mkdir()
    return folder


def test_a_python_from_a_relative_path_is_found_from_other_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes environments in other folders later; a link to it is not followed."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    python = Python.of(Path("bin/python"))
    assert python.program == tmp_path / "bin/python"


def test_the_name_of_extension_modules_is_this_pythons_own() -> None:
    """It is made of the version and the processor, so that it is known for another processor."""
    python = Python.of(Path(sys.executable))
    (suffix,) = {os.path.basename(path).partition(".")[2] for path in extension_modules()}
    assert f"{python.soabi(platform.machine())}.so" == suffix


def extension_modules() -> list[str]:
    """Return the paths of some extension modules of this Python."""
    modules = ("_ssl", "_json", "_struct", "_socket")
    files = (getattr(__import__(name), "__file__", None) for name in modules)
    return [file for file in files if file]


def test_the_processor_is_that_of_the_torch(tmp_path: Path) -> None:
    """A torch for another processor is not imported here; its library goes into a wheel for it."""
    python = Python(Path(sys.executable), Path(), "cpython-312", "cp312")
    other = {"x86_64": "aarch64"}.get(platform.machine(), "x86_64")
    here = torch_for(tmp_path / "here", "2.13.0", platform.machine())
    there = torch_for(tmp_path / "there", "2.13.0+cu130", other)
    assert [native_libraries.machine_of(torch) for torch in (here, there)] == [
        platform.machine(),
        other,
    ]
    assert [native_libraries.is_for(python, torch) for torch in (here, there)] == [True, False]


def test_a_torch_without_its_module_is_an_error(tmp_path: Path) -> None:
    """The message says where it was looked for."""
    with pytest.raises(ValueError, match=r"has no module _C") as error:
        native_libraries.machine_of(tmp_path)
    assert str(tmp_path) in str(error.value)

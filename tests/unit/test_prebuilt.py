"""The library of a wheel is loaded only if it fits this torch; else one is compiled here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from rankcall import _native, _prebuilt
from rankcall._native import NativeModule
from rankcall._prebuilt import INDEX, TorchBuild, entry, find
from rankcall.errors import CaptureUnavailableError

HERE = TorchBuild("2.13.1", "c0ffee", True)
SOABI = sysconfig.get_config_var("SOABI")
COMPILER = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""
TRIAL = """
import os, sys

def main(library):
    with open(os.environ["RANKCALL_SHM"], "a") as file:
        file.write("tried\\n")
    text = open(library).read()
    if text == "crashes":
        os.abort()
    if text != "fits":
        sys.exit("the record is wrong")
"""


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which an installation keeps its libraries."""
    folder = tmp_path / "_libraries"
    folder.mkdir()
    monkeypatch.setattr(_prebuilt, "FOLDER", folder)
    return folder


def carry(folder: Path, *builds: TorchBuild, sources: str = "s", soabi: str = SOABI) -> None:
    """Carry libraries that were compiled for some builds of torch."""
    for number in range(len(builds)):
        (folder / f"x-{number}.so").touch()
    entries = [entry(f"x-{n}.so", "x", sources, soabi, build) for n, build in enumerate(builds)]
    (folder / INDEX).write_text(json.dumps(entries))


@pytest.mark.parametrize(
    ("build", "fits"),
    [
        (HERE, "at once"),
        (replace(HERE, version="2.13.0", commit="another"), "after a trial"),
        (replace(HERE, commit="another"), "after a trial"),
        (replace(HERE, cxx11_abi=False), "never"),
        (replace(HERE, version="2.12.1"), "never"),
        (replace(HERE, version="2.1.1"), "never"),
        (replace(HERE, version="3.13.1"), "never"),
        (replace(HERE, version="2.13.1a0"), "never"),
    ],
)
def test_which_torch_fits(wheel: Path, build: TorchBuild, fits: str) -> None:
    """The same release fits, another patch release may; no other build is even tried."""
    carry(wheel, build)
    fit = find("x", "s", HERE)
    assert (fit.path is not None, fit.needs_trial) == (fits != "never", fits == "after a trial")
    assert fit.why


@pytest.mark.parametrize("version", ["2.14.0.dev20261101", "2.13.0a0", "2.13"])
def test_a_torch_that_is_no_release(wheel: Path, version: str) -> None:
    """A nightly, or a build of one's own, takes only the library that was made for it."""
    build = replace(HERE, version=version)
    carry(wheel, replace(build, commit="another"), replace(HERE, version="2.14.0"))
    assert find("x", "s", build).path is None
    carry(wheel, build)
    assert find("x", "s", build).path == wheel / "x-0.so"


def test_the_release_itself_comes_first(wheel: Path) -> None:
    """Of several libraries for one minor version, the one for this release is taken."""
    carry(wheel, replace(HERE, version="2.13.0"), HERE, replace(HERE, version="2.13.2"))
    fit = find("x", "s", HERE)
    assert (fit.path, fit.needs_trial) == (wheel / "x-1.so", False)


@pytest.mark.parametrize("text", ["", "[", "{}", "[1]", '[{"file": "x"}]', "null", "\xff"])
def test_a_damaged_index(wheel: Path, text: str) -> None:
    """It counts as one without libraries."""
    (wheel / INDEX).write_bytes(text.encode("latin-1"))
    assert find("x", "s", HERE).path is None


def test_a_library_that_is_gone(wheel: Path) -> None:
    """One that only the index has is none."""
    carry(wheel, HERE)
    (wheel / "x-0.so").unlink()
    assert find("x", "s", HERE).path is None


def test_other_sources_or_another_python(wheel: Path) -> None:
    """A library of other sources, or for another Python, is not one for this rankcall."""
    carry(wheel, HERE, sources="others")
    assert find("x", "s", HERE).path is None
    carry(wheel, HERE, soabi="cpython-27")
    assert find("x", "s", HERE).path is None
    assert "libraries are for cpython-27; this Python is" in find("x", "s", HERE).why
    (wheel / INDEX).unlink()
    assert "no compiled libraries" in find("x", "s", HERE).why


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            replace(HERE, version="2.12.1"),
            "the wheel's libraries are for torch 2.12.1; this is 2.13.1",
        ),
        (
            replace(HERE, cxx11_abi=False),
            "torch 2.13.1 has another C++ ABI here than the wheel's libraries",
        ),
    ],
)
def test_the_reason_names_what_differs(wheel: Path, build: TorchBuild, why: str) -> None:
    """If the version is the same, the message does not say that the versions differ."""
    carry(wheel, build)
    assert find("x", "s", HERE).why == why


def test_another_build_of_the_same_version(wheel: Path) -> None:
    """Two nightlies can have one name; the message does not say that a torch is not itself."""
    nightly = replace(HERE, version="2.13.1a0")
    carry(wheel, replace(nightly, commit="another"))
    assert find("x", "s", nightly).why.endswith("torch 2.13.1a0; this is another build of 2.13.1a0")


@pytest.fixture
def module(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> NativeModule:
    """Return a module with a trial, and a compiler that writes a line of text."""
    (tmp_path / "compiler").write_text(COMPILER)
    (tmp_path / "compiler").chmod(0o755)
    (tmp_path / "a_trial.py").write_text(TRIAL)
    monkeypatch.syspath_prepend(tmp_path)
    for name, value in (("CXX", "compiler"), ("RANKCALL_CACHE", "cache"), ("RANKCALL_SHM", "ran")):
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.setattr(_native, "torch_here", lambda: HERE)
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "x.cpp").write_text("")
    return NativeModule(
        *("x", sources, "x.cpp", CaptureUnavailableError), uses_torch=False, trial="a_trial"
    )


def put(wheel: Path, module: NativeModule, text: str, version: str = "2.13.0") -> Path:
    """Carry one library with this content."""
    carry(wheel, replace(HERE, version=version), sources=module.digest())
    (wheel / "x-0.so").write_text(text)
    return wheel / "x-0.so"


def trials(tmp_path: Path) -> int:
    """Return how often a trial has run."""
    return (tmp_path / "ran").read_text().count("tried") if (tmp_path / "ran").exists() else 0


def test_a_library_is_tried_once(wheel: Path, module: NativeModule, tmp_path: Path) -> None:
    """One that has passed its trial is taken from then on; nothing is compiled."""
    library = put(wheel, module, "fits")
    for _ in range(2):
        assert module.is_ready()
        chosen = module.choose()
        assert (chosen.path, chosen.is_of_wheel) == (library, True)
    assert trials(tmp_path) == 1
    assert not list((tmp_path / "cache").glob("*.so"))
    later = library.stat().st_mtime + 5
    os.utime(library, (later, later))  # another one under that name
    module.choose()
    assert trials(tmp_path) == 2


@pytest.mark.parametrize("text", ["crashes", "is wrong"])
def test_a_library_that_does_not_fit(
    wheel: Path, module: NativeModule, tmp_path: Path, text: str
) -> None:
    """A crash or a wrong record in the trial has one compiled here; the reason is kept."""
    put(wheel, module, text)
    chosen = module.choose()
    assert not chosen.is_of_wheel
    assert chosen.path.read_text() == "compiled\n"
    assert "compiled for torch 2.13.0, and does not fit 2.13.1: exit status" in chosen.why
    assert not list((tmp_path / "cache").glob("*.fits"))


def test_neither_fits_nor_compiles(
    wheel: Path, module: NativeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, the error says both."""
    put(wheel, module, "fits", version="2.12.0")
    assert _error_without_compiler(module, monkeypatch) == (
        "there is no C++ compiler (tried $CXX, c++, g++, clang++); install one; "
        "the wheel's libraries are for torch 2.12.0; this is 2.13.1"
    )


def _error_without_compiler(module: NativeModule, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CaptureUnavailableError) as caught:
        module.load()
    return str(caught.value)


def test_on_musl(wheel: Path, module: NativeModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library for glibc is not even loaded; the error says that this Python is for musl."""
    musl = SOABI.replace("linux-gnu", "linux-musl")
    put(wheel, module, "crashes", version=HERE.version)
    monkeypatch.setattr(sysconfig, "get_config_var", {"SOABI": musl}.get)
    assert _error_without_compiler(module, monkeypatch) == (
        "there is no C++ compiler (tried $CXX, c++, g++, clang++); install one; "
        f"the wheel's libraries are for {SOABI}; this Python is {musl}"
    )


def test_a_library_for_musl(wheel: Path, module: NativeModule, tmp_path: Path) -> None:
    """One that only its content tells from ours is refused, and the error names it."""
    if not shutil.which("musl-gcc"):
        pytest.skip("there is no musl-gcc")
    library = put(wheel, module, "", version=HERE.version)
    source = tmp_path / "library.c"
    source.write_text('#include <stdio.h>\nint PyInit_x(void) { return puts("called"); }\n')
    command = ["musl-gcc", "-shared", "-fPIC", str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.raises(CaptureUnavailableError, match=rf"{library} cannot be loaded: .*libc"):
        module.load_from(module.choose().path)


def test_the_release_is_not_tried(wheel: Path, module: NativeModule, tmp_path: Path) -> None:
    """The library for this very release is taken at once, also with a cache that is read-only."""
    library = put(wheel, module, "crashes", version=HERE.version)
    (tmp_path / "cache").write_text("no folder")
    assert module.choose().path == library
    assert trials(tmp_path) == 0


def test_a_library_that_cannot_be_loaded(
    wheel: Path,
    module: NativeModule,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the system's libraries are too old for it, one is compiled, and a line says so."""
    library = put(wheel, module, "no ELF file", version=HERE.version)
    loaded: list[Path] = []
    load_from = NativeModule.load_from

    def load(self: NativeModule, path: Path) -> object:
        loaded.append(path)
        return load_from(self, path) if path == library else "the module"

    monkeypatch.setattr(NativeModule, "load_from", load)
    assert module.load() == "the module"
    assert loaded == [library, module.path()]
    assert f"{library} cannot be loaded" in caplog.text


def test_a_cache_that_cannot_be_written(wheel: Path, module: NativeModule, tmp_path: Path) -> None:
    """Each process then tries the library, and takes it."""
    put(wheel, module, "fits")
    (tmp_path / "cache").write_text("no folder")
    assert module.choose().is_of_wheel
    assert module.choose().is_of_wheel
    assert trials(tmp_path) == 2

"""The wheel and the sdist contain everything that recording needs."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/rankcall"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist into a folder, fetching nothing."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=240,
        capture_output=True,
    )
    return folder


def wanted() -> set[str]:
    """Return the files of the package, without build output."""
    suffixes = (".py", ".cpp", ".h", ".typed")
    return {
        str(path.relative_to(ROOT / "src"))
        for path in SOURCES.rglob("*")
        if path.suffix in suffixes
    } | {
        "rankcall/py.typed",
        *(f"rankcall/report/html/page.{end}" for end in ("css", "html.j2", "js")),
    }


def test_the_wheel_is_whole(built: Path) -> None:
    """Python files, the C++ sources, py.typed, the boot folder, the command."""
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wanted() <= names
    assert "rankcall/_boot/sitecustomize.py" in names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]
    assert [name for name in names if name.endswith("entry_points.txt")]


def test_a_wheel_with_libraries(tmp_path: Path) -> None:
    """It is named after its Python and platform, and has the libraries and their index."""
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    (libraries / "index.json").write_text("[]")
    (libraries / "x-torch2.13.0.so").write_text("compiled")
    tag = "cp311-cp311-manylinux_2_28_x86_64"
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "RANKCALL_LIBRARIES": str(libraries), "RANKCALL_WHEEL_TAG": tag},
        check=True,
        timeout=240,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-{tag}.whl")
    files = zipfile.ZipFile(wheel)
    names = set(files.namelist())
    assert wanted() <= names
    assert files.read("rankcall/_libraries/x-torch2.13.0.so") == b"compiled"
    assert "rankcall/_libraries/index.json" in names
    (about,) = [name for name in names if name.endswith(".dist-info/WHEEL")]
    assert f"Tag: {tag}" in files.read(about).decode()
    assert "Root-Is-Purelib: false" in files.read(about).decode()


def test_the_sdist_is_whole(built: Path) -> None:
    """The same files, with the tests."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in wanted()} <= names
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "tests/conftest.py",
        "tools/hatch_build.py",
    } <= names

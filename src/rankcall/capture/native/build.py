"""Build the native recorder: one C++ file, compiled once per source, torch and Python, then cached.

The compiler runs under a file lock that dies with its holder, into a scratch file that is renamed
when whole: ranks that start together build once, and a killed build leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from rankcall.capture.native.layout_header import layout_header
from rankcall.errors import CaptureUnavailable

_SOURCES = Path(__file__).parent
_MODULE = "rankcall_recorder"
_COMPILE_SECONDS = 600


def cache_dir() -> Path:
    """Return where built recorders are kept: ``RANKCALL_CACHE``, or below the user's cache."""
    named = os.environ.get("RANKCALL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rankcall"


def library_path() -> Path:
    """Return where the recorder for this source, torch and Python is, built or not."""
    import torch

    digest = hashlib.sha256()
    for part in (layout_header(), torch.__version__, sysconfig.get_config_var("SOABI") or ""):
        digest.update(part.encode() + b"\0")
    for source in sorted([*_SOURCES.glob("*.h"), _SOURCES / "recorder.cpp"]):
        digest.update(source.read_bytes())
    return cache_dir() / f"{_MODULE}-{digest.hexdigest()[:16]}.so"


def prebuild() -> Path:
    """Build the recorder unless it is in the cache; return its path.

    Raises ``CaptureUnavailable`` saying why where there is no compiler, it fails, or the cache
    cannot be written.
    """
    return _built(library_path(), _compile)


def build_nvtx_bridge() -> Path:
    """Build what calls NVTX unless it is in the cache; return its path.

    Raises ``CaptureUnavailable`` as ``prebuild`` does, and where NVTX's headers are not installed.
    """
    source = _SOURCES / "nvtx_bridge.cpp"
    headers = _nvtx_headers()
    digest = hashlib.sha256(source.read_bytes() + (headers / "nvToolsExt.h").read_bytes())
    target = cache_dir() / f"rankcall_nvtx-{digest.hexdigest()[:16]}.so"
    flags = ["-O2", "-std=c++17", "-shared", "-fPIC", f"-I{headers.parent}", str(source)]
    return _built(target, lambda path: _run_compiler(path, [*flags, "-ldl"]))


def _nvtx_headers() -> Path:
    """Return the folder of NVTX's headers, which come with a package of NVIDIA's."""
    for entry in sys.path:
        for found in sorted(Path(entry or ".").glob("nvidia/*/include/nvtx3/nvToolsExt.h")):
            return found.parent
    raise CaptureUnavailable(
        "NVTX's headers are not installed: pip install 'rankcall[nvtx]' (it brings nvidia-nvtx)"
    )


def _built(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, made by ``build`` if it is not there; by one process at a time."""
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _lock(target.with_suffix(".lock")):
            if not target.exists():
                build(target)
    except OSError as error:
        raise CaptureUnavailable(
            f"the cache {target.parent} cannot be written ({error.strerror}): "
            "set RANKCALL_CACHE to a folder that can"
        ) from error
    return target


def load_recorder() -> ModuleType:
    """Import the recorder, building it first if need be. Raises ``CaptureUnavailable``."""
    path = str(prebuild())
    spec = importlib.util.spec_from_file_location(
        _MODULE, path, loader=ExtensionFileLoader(_MODULE, path)
    )
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        raise CaptureUnavailable(f"{path} cannot be loaded: {error}") from error
    return module


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    raise CaptureUnavailable("there is no C++ compiler (tried $CXX, c++, g++, clang++)")


def _compile(target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="layout-", dir=target.parent) as headers:
        (Path(headers) / "layout.h").write_text(layout_header())
        source = str(_SOURCES / "recorder.cpp")
        _run_compiler(target, [*_flags(headers), source, *_link_flags()])


def _run_compiler(target: Path, arguments: list[str]) -> None:
    """Compile into a scratch file that becomes ``target`` when it is whole."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
        built = Path(scratch) / "built.so"
        command = [compiler, *arguments, "-o", str(built)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CaptureUnavailable(f"the compiler {compiler} did not run: {error}") from error
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line]
            reason = (lines or done.stderr.splitlines() or ["no message"])[0]
            raise CaptureUnavailable(f"the compiler {compiler} failed: {reason.strip()}")
        built.replace(target)


def _flags(scratch: str) -> list[str]:
    import torch
    from torch.utils.cpp_extension import include_paths

    includes = [scratch, str(_SOURCES), sysconfig.get_paths()["include"]]
    return [
        "-O2",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-pthread",
        "-w",  # torch's headers warn under many compilers; ours are built with warnings in tests
        "-DUSE_DISTRIBUTED",
        "-DUSE_C10D_GLOO",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{path}" for path in includes),
        *(f"-isystem{path}" for path in include_paths()),
    ]


def _link_flags() -> list[str]:
    from torch.utils.cpp_extension import library_paths

    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return [*(f"-L{path}" for path in library_paths()), *libraries]

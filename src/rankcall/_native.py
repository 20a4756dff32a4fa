"""Build a native module: one C++ file, compiled once per source, torch and Python, then cached.

The compiler runs under a file lock, into a scratch folder: ranks that start together build once,
and a module gets its name when it is complete. An existing module is never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import ModuleType

from rankcall.errors import RankcallError
from rankcall.folders import UnsafeFolderError, check_file, make_folder

_COMPILE_SECONDS = 600  # a compiler that hangs, for example on a network drive, must end
_LOCK_SECONDS = 180.0  # a build takes less than a minute on an idle machine
_LOCK_POLL_SECONDS = 0.05  # flock has no timeout, so the lock is tried again and again
_SUPERUSER = (0,)  # may own the cache beside the user, as in an image for containers


def cache_dir() -> Path:
    """Return where built modules are kept: ``RANKCALL_CACHE``, or below the user's cache."""
    named = os.environ.get("RANKCALL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "rankcall"


@dataclass(frozen=True)
class NativeModule:
    """A native module: the folder of its sources, and the file in it that is compiled.

    ``headers`` maps the names of generated headers to the functions that return their text; they
    are written for the build. ``error`` is raised if the module cannot be built or loaded.
    """

    name: str
    sources: Path
    main: str
    error: type[RankcallError]
    headers: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    defines: tuple[str, ...] = ()
    includes: tuple[Path, ...] = ()  # of headers that are neither ours nor torch's
    uses_torch: bool = True

    def path(self) -> Path:
        """Return the path of the module for this source, torch and Python, built or not."""
        digest = hashlib.sha256()
        made = (make() for make in self.headers.values())
        for part in (*made, *self.defines, *map(str, self.includes), self._built_for()):
            digest.update(part.encode() + b"\0")
        included = (self.sources.glob(f"*.{suffix}") for suffix in ("h", "cpp"))
        for source in sorted(path for paths in included for path in paths):
            digest.update(source.read_bytes())
        return cache_dir() / f"{self.name}-{digest.hexdigest()[:16]}.so"

    def _built_for(self) -> str:
        if not self.uses_torch:
            return ""
        import torch

        # Two builds of one version, such as two nightlies, can differ in their headers.
        built = f"{torch.__version__} {torch.version.git_version}"
        return f"{built} {sysconfig.get_config_var('SOABI')}"

    def prebuild(self) -> Path:
        """Build the module unless it is in the cache, and return its path.

        Raises ``error`` if there is no compiler, if the compiler fails, or if the cache cannot be
        written or can be written by another user.
        """
        target = self.path()
        try:
            # Code in the cache is run. The superuser may have built it for all users.
            folder = Path(os.path.realpath(target.parent))
            target = folder / target.name
            make_folder(folder, _SUPERUSER)
            if _is_built(target):
                return target
            with _lock(target.with_suffix(".lock")):
                if not _is_built(target):
                    self._compile(target)
        except UnsafeFolderError as error:
            raise self.error(
                f"{error.strerror}: rankcall runs no code from there; remove it, or set "
                "RANKCALL_CACHE to a folder that only you can write"
            ) from error
        except OSError as error:
            raise self.error(
                f"the cache {target.parent} cannot be written ({error.strerror}): "
                "set RANKCALL_CACHE to a folder that can"
            ) from error
        return target

    def load(self) -> ModuleType:
        """Import the module; build it first if it is not in the cache. Raises ``error``."""
        path = str(self.prebuild())
        spec = importlib.util.spec_from_file_location(
            self.name, path, loader=ExtensionFileLoader(self.name, path)
        )
        assert spec is not None
        assert spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise self.error(f"{path} cannot be loaded: {error}") from error
        return module

    def compile_flags(self, scratch: str) -> list[str]:
        """Return the compiler's flags; ``scratch`` is where the made headers are."""
        includes = [scratch, str(self.sources), *map(str, self.includes)]
        return [
            "-O2",
            "-std=c++20",
            "-shared",
            "-fPIC",
            "-pthread",
            "-w",  # torch's headers warn; ours are built with warnings in tests
            *(f"-D{define}" for define in self.defines),
            *(f"-I{path}" for path in includes),
            *(_torch_flags() if self.uses_torch else ()),
        ]

    def _compiler(self) -> str:
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
            if name and shutil.which(name):
                return name
        raise self.error("there is no C++ compiler (tried $CXX, c++, g++, clang++)")

    def _compile(self, target: Path) -> None:
        compiler = self._compiler()
        with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
            for name, make in self.headers.items():
                (Path(scratch) / name).write_text(make())
            built = Path(scratch) / "module.so"
            command = [compiler, *self.compile_flags(scratch), str(self.sources / self.main)]
            command += ["-o", str(built), *(link_flags() if self.uses_torch else ("-ldl",))]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise self.error(f"the compiler {compiler} did not run: {error}") from error
            if done.returncode != 0:
                lines = [line for line in done.stderr.splitlines() if "error" in line]
                reason = (lines or done.stderr.splitlines() or ["no message"])[0]
                raise self.error(f"the compiler {compiler} failed: {reason.strip()}")
            built.chmod(0o755)  # the compiler leaves it to the umask
            _place(built, target)


def _torch_flags() -> list[str]:
    import torch
    from torch.utils.cpp_extension import include_paths

    return [
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        f"-I{sysconfig.get_paths()['include']}",
        *(f"-isystem{path}" for path in include_paths()),
    ]


def link_flags() -> list[str]:
    """Return the linker's flags for a module that uses torch."""
    from torch.utils.cpp_extension import library_paths

    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    return [*(f"-L{path}" for path in library_paths()), *libraries]


def _is_built(target: Path) -> bool:
    """Return whether the module is there. Raises ``UnsafeFolderError`` if others could write it."""
    try:
        check_file(target, _SUPERUSER)
    except FileNotFoundError:
        return False
    return True


def _place(built: Path, target: Path) -> None:
    """Give a new module its name unless it has been built meanwhile.

    A file that is there is never replaced or changed: a process may have mapped it.
    """
    try:
        os.link(built, target)
    except FileExistsError:
        _is_built(target)
    except OSError:  # a file system without hard links
        if not _is_built(target):
            built.rename(target)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock on a build, so that ranks that start together build once.

    If it cannot be had in time, go on without it: a lock on a network file system can outlive its
    holder. The build then is made twice, which does no harm.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(fd) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    """Take the lock if it is free; a file system without locks counts as free."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True

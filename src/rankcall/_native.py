"""Get a native module: the wheel's, if it fits, or else one that is compiled here and cached.

A module is one C++ file. It is compiled once for each source, torch and Python. The compiler runs
under a file lock, into a scratch folder: ranks that start together build once, and a module gets
its name when it is complete. An existing module is never replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import logging
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

from rankcall._prebuilt import TorchBuild, find, torch_here
from rankcall.errors import RankcallError
from rankcall.folders import UnsafeFolderError, check_file, make_folder
from rankcall.interpreter import run_function

logger = logging.getLogger("rankcall")

_COMPILE_SECONDS = 600  # a compiler that hangs, for example on a network drive, must end
_TRIAL_SECONDS = 120.0  # torch's import alone takes seconds
_LOCK_SECONDS = 180.0  # a build takes less than a minute on an idle machine
_LOCK_POLL_SECONDS = 0.05  # flock has no timeout, so the lock is tried again and again
_SUPERUSER = (0,)  # may own the cache beside the user, as in an image for containers


def cache_dir() -> Path:
    """Return where built modules are kept: ``RANKCALL_CACHE``, or below the user's cache.

    A user without a home, as in a container that runs under any number, has a folder of their own
    among the temporary files.
    """
    named = os.environ.get("RANKCALL_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(base):  # no HOME, and the user's number has no name: "~" stays
        return Path(tempfile.gettempdir()) / f"rankcall-cache-{os.geteuid()}"
    return Path(base) / "rankcall"


@dataclass(frozen=True)
class Target:
    """The torch and the Python that a library is compiled for."""

    torch: Path  # the folder of its package
    python: Path  # the folder of Python.h
    cxx11_abi: bool

    @classmethod
    def here(cls) -> Target:
        """Return those of this process."""
        import torch

        return cls(
            Path(torch.__file__).parent,
            Path(sysconfig.get_paths()["include"]),
            bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        )

    def compile_flags(self) -> list[str]:
        """Return the compiler's flags."""
        headers = self.torch / "include"
        return [
            f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}",
            f"-I{self.python}",
            f"-isystem{headers}",
            f"-isystem{headers / 'torch/csrc/api/include'}",
        ]

    def link_flags(self) -> list[str]:
        """Return the linker's flags for a module that uses torch."""
        libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        return [f"-L{self.torch / 'lib'}", *libraries]


@dataclass(frozen=True)
class Chosen:
    """The library of a native module that is loaded, and why it is that one.

    ``why`` says which torch the wheel's library is for, or why none of the wheel's is taken.
    """

    path: Path
    is_of_wheel: bool
    why: str


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
    trial: str = ""  # the module whose ``main`` tries a library; "": a wheel carries none

    def digest(self) -> str:
        """Return the digest of the module's sources."""
        digest = hashlib.sha256()
        made = (make() for make in self.headers.values())
        for part in (*made, *self.defines, *map(str, self.includes)):
            digest.update(part.encode() + b"\0")
        included = (self.sources.glob(f"*.{suffix}") for suffix in ("h", "cpp"))
        for source in sorted(path for paths in included for path in paths):
            digest.update(source.read_bytes())
        return digest.hexdigest()

    def path(self) -> Path:
        """Return where the module is that is compiled for this source, torch and Python."""
        digest = hashlib.sha256(f"{self.digest()}\0{self._built_for()}".encode())
        return cache_dir() / f"{self.name}-{digest.hexdigest()[:16]}.so"

    def choose(self) -> Chosen:
        """Return the library to load, compiled or tried if need be, and why it is that one.

        Raises ``error`` if the wheel has none that fits, and it cannot be compiled.
        """
        if not self.trial:
            return Chosen(self._compiled(), is_of_wheel=False, why="")
        torch = torch_here()
        fit = find(self.name, self.digest(), torch)
        why = fit.why
        if fit.path is not None:
            problem = self._try(fit.path, torch) if fit.needs_trial else ""
            if not problem:
                return Chosen(fit.path, is_of_wheel=True, why=why)
            why = f"{why}, and does not fit {torch.version}: {problem}"
        try:
            return Chosen(self._compiled(), is_of_wheel=False, why=why)
        except RankcallError as error:
            raise self.error(f"{error}; {why}") from error

    def is_ready(self) -> bool:
        """Return whether no library has to be compiled first."""
        if os.path.exists(self.path()):  # false also if the cache cannot be looked at
            return True
        return bool(self.trial) and find(self.name, self.digest(), torch_here()).path is not None

    def prebuild(self) -> Path:
        """Return the library to load, compiled if need be. Raises ``error``: see ``choose``."""
        return self.choose().path

    def _try(self, library: Path, torch: TorchBuild) -> str:
        """Try a library in a process of its own; return what is wrong, or an empty text.

        A library that has passed is not tried again with this torch. If that cannot be noted, each
        process tries it.
        """
        content = f"{library}\0{library.stat().st_mtime_ns}\0{torch}"
        name = hashlib.sha256(content.encode()).hexdigest()[:16]
        passed = cache_dir() / f"{self.name}-{name}.fits"
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                make_folder(Path(os.path.realpath(passed.parent)), _SUPERUSER)
                held.enter_context(_lock(passed.with_suffix(".lock")))
            with contextlib.suppress(OSError):
                if _is_built(passed):
                    return ""
            problem = _run_trial(self.trial, library)
            if not problem:
                with contextlib.suppress(OSError):
                    passed.touch(mode=0o644)
        return problem

    def _built_for(self) -> str:
        if not self.uses_torch:
            return ""
        import torch

        # Two builds of one version, such as two nightlies, can differ in their headers.
        built = f"{torch.__version__} {torch.version.git_version}"
        return f"{built} {sysconfig.get_config_var('SOABI')}"

    def _compiled(self) -> Path:
        """Compile the module unless it is in the cache, and return its path.

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
        """Import the module; compile it first if need be. Raises ``error``."""
        chosen = self.choose()
        if not chosen.is_of_wheel:
            return self.load_from(chosen.path)
        try:
            return self.load_from(chosen.path)
        except RankcallError as error:  # for example, its C library is older than ours
            logger.warning("%s; rankcall compiles it here", error)
            return self.load_from(self._compiled())

    def load_from(self, library: Path) -> ModuleType:
        """Import the module from a library. Raises ``error``."""
        path = str(library)
        spec = importlib.util.spec_from_file_location(
            self.name, path, loader=ExtensionFileLoader(self.name, path)
        )
        assert spec is not None
        assert spec.loader is not None
        try:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except ImportError as error:
            raise self.error(f"{path} cannot be loaded: {error}{_noexec(library)}") from error
        return module

    def compile_flags(self, scratch: str, target: Target | None = None) -> list[str]:
        """Return the compiler's flags; ``scratch`` is where the made headers are.

        ``target``: the torch and the Python to compile for; None: those of this process.
        """
        target = target or Target.here() if self.uses_torch else None
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
            *(target.compile_flags() if target is not None else ()),
        ]

    def _compiler(self) -> str:
        for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
            if name and shutil.which(name):
                return name
        raise self.error("there is no C++ compiler (tried $CXX, c++, g++, clang++); install one")

    def _compile(self, target: Path) -> None:
        compiler = self._compiler()
        with tempfile.TemporaryDirectory(prefix="build-", dir=target.parent) as scratch:
            for name, make in self.headers.items():
                (Path(scratch) / name).write_text(make())
            built = Path(scratch) / "module.so"
            command = [compiler, *self.compile_flags(scratch), str(self.sources / self.main)]
            libraries = Target.here().link_flags() if self.uses_torch else ["-ldl"]
            command += ["-o", str(built), *libraries]
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


def _run_trial(module: str, library: Path) -> str:
    """Return what a trial says is wrong with a library, or an empty text."""
    # The trial is no rank of the job that this process may be, and it records without being asked.
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RANKCALL") or name == "RANKCALL_SHM"
    }
    try:
        done = subprocess.run(
            run_function(module, "main", str(library)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRIAL_SECONDS,
            stdin=subprocess.DEVNULL,
            env=env,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it could not be tried ({error})"
    last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return f"exit status {done.returncode} of its trial: {last}" if done.returncode else ""


def _is_built(target: Path) -> bool:
    """Return whether the module is there. Raises ``UnsafeFolderError`` if others could write it."""
    try:
        check_file(target, _SUPERUSER)
    except FileNotFoundError:
        return False
    return True


def _noexec(library: Path) -> str:
    """Return what to do if the file system runs no code; the linker's message does not say so."""
    with contextlib.suppress(OSError):
        if os.statvfs(library).f_flag & os.ST_NOEXEC:
            return (
                ": its file system is mounted noexec, so no code there can run; "
                "set RANKCALL_CACHE to a folder on another one"
            )
    return ""


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

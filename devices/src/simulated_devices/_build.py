"""Compile the libraries for the installed torch, once, and keep them in the user's cache folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from . import _libraries
from ._errors import BuildError
from ._torch import TorchBuild

NATIVE = Path(__file__).parent / "native"
# A compilation takes one to two minutes; a lock that is held longer belongs to a compiler that hangs.
LOCK_DEADLINE_S = 900.0
COMPILE_DEADLINE_S = 600.0
FLAGS = [
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",
    "-fwrapv",
    "-fno-strict-aliasing",
    "-Wall",
    "-Wextra",
]


@dataclass(frozen=True)
class Built:
    """The libraries of one torch build, ready to be preloaded."""

    folder: Path
    preload: list[Path]
    aten: Path


def build(torch: TorchBuild) -> Built:
    """Return the libraries for this torch; compile them if the cache does not have them.

    Raises:
        BuildError: There is no compiler, it failed, or another process holds the lock for too long.
    """
    folder = cache_folder() / f"{torch.version}-{_digest(torch)}"
    built = Built(
        folder,
        [folder / library.soname for library in _libraries.libraries(torch.cuda_major)],
        folder / "libsimulated_aten.so",
    )
    if (folder / "complete").exists():
        return built
    cache_folder().mkdir(parents=True, exist_ok=True)
    with _lock(cache_folder() / "lock"):
        if (folder / "complete").exists():
            return built
        print(
            f"devices: compiling the simulated devices for torch {torch.version}, once; this takes a minute or two.",
            file=sys.stderr,
        )
        _make(torch, folder)
    return built


def cache_folder() -> Path:
    """Return the folder of all builds."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "simulated-devices"


def _digest(torch: TorchBuild) -> str:
    """Identify what a build depends on: the sources, the recipe, and the build of torch."""
    digest = hashlib.sha256(torch.identity.encode())
    digest.update(str(torch.folder).encode())  # the library of aten kernels is linked with it
    for path in [Path(__file__), Path(_libraries.__file__), *sorted(NATIVE.rglob("*.*"))]:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + LOCK_DEADLINE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(
                        f"another process has been compiling for {LOCK_DEADLINE_S:.0f} s; end it, or remove {path}."
                    ) from None
                time.sleep(0.2)
        yield


def _make(torch: TorchBuild, folder: Path) -> None:
    """Compile into a folder beside, and rename it: nobody ever sees half a build."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler was found: install one, for example with `apt-get install g++`, or set CXX.")
    # In the cache folder, so that the rename stays within one file system.
    work = Path(tempfile.mkdtemp(prefix="building-", dir=cache_folder()))
    try:
        _Recipe(torch, compiler, work).make()
        (work / "complete").touch()
        shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Recipe:
    """How the libraries of one torch are compiled and linked."""

    def __init__(self, torch: TorchBuild, compiler: str, work: Path) -> None:
        self.torch, self.compiler, self.work = torch, compiler, work
        self.jobs = max(1, min(4, int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)))
        self.defines = [
            f"-DSIMULATED_CUDA_MAJOR={torch.cuda_major}",
            f"-DSIMULATED_CUDA_VERSION={torch.cuda_version}",
            f"-DSIMULATED_NCCL_VERSION={torch.nccl_version}",
        ]

    def make(self) -> None:
        libraries = _libraries.libraries(self.torch.cuda_major)
        sources = sorted({path for library in libraries for path in self._sources(library)})
        with ThreadPoolExecutor(self.jobs) as pool:
            # The library of aten kernels takes longest, so it begins first.
            aten = pool.submit(self._aten)
            objects = dict(zip(sources, pool.map(self._compile, sources), strict=True))
            symbols = _libraries.imported_symbols(self.torch)
            for library in libraries:
                self._link(library, [objects[path] for path in self._sources(library)], symbols)
            aten.result()
            self._link_aten(objects[NATIVE / "common" / "settings.cpp"])
        for path in self.work.glob("*.o"):
            path.unlink()

    def _sources(self, library: _libraries.Library) -> list[Path]:
        found: list[Path] = []
        for name in library.sources:
            path = NATIVE / name
            found += sorted(path.glob("*.cpp")) if path.is_dir() else [path]
        return found

    def _compile(self, source: Path) -> Path:
        out = self.work / f"{source.parent.name}-{source.stem}.o"
        optimise = ["-O3"] if source.stem == "reduce" else []
        self._run(
            [
                self.compiler,
                *FLAGS,
                *optimise,
                *self.defines,
                f"-I{NATIVE}",
                "-c",
                str(source),
                "-o",
                str(out),
            ]
        )
        return out

    def _link(self, library: _libraries.Library, objects: list[Path], symbols: _libraries.Symbols) -> None:
        wanted, node = _libraries.exports(library, symbols)
        own = _libraries.defined_symbols(objects)
        public = {
            name
            for name in own
            if name.startswith(("cuda", "__cuda", "cu", "nccl", "nvml")) and not name.startswith("_Z")
        }
        stubs = self.work / f"{library.soname}.stubs.cpp"
        stubs.write_text(_libraries.stubs_source(library, wanted - own), encoding="utf-8")
        script = self.work / f"{library.soname}.map"
        script.write_text(_libraries.version_script(wanted | public, node), encoding="utf-8")
        runtime = f"libcudart.so.{self.torch.cuda_major}"
        others = [] if library.soname == runtime else [str(self.work / runtime)]
        options = [
            f"-Wl,-soname,{library.soname}",
            f"-Wl,--version-script,{script}",
            "-Wl,-rpath,$ORIGIN",
            "-Wl,-z,defs",
        ]
        inputs = [str(stubs), *map(str, objects), *others, *_static_runtime(self.compiler)]
        out = str(self.work / library.soname)
        self._run(
            [self.compiler, *FLAGS, "-w", f"-I{NATIVE}", "-shared", "-o", out, *inputs, *options, "-pthread", "-ldl"]
        )

    def _aten(self) -> Path:
        include = self.torch.folder / "include"
        out = self.work / "aten.o"
        flags = [flag for flag in FLAGS if flag not in ("-std=c++17", "-Wall", "-Wextra", "-O2")]
        headers = [f"-isystem{include}", f"-isystem{include}/torch/csrc/api/include"]
        # torch's headers ask for C++20 since 2.12, and its older ones accept it.
        self._run(
            [
                self.compiler,
                "-std=c++20",
                "-O1",
                "-w",
                *flags,
                *self.defines,
                *headers,
                f"-I{NATIVE}",
                "-c",
                str(NATIVE / "aten" / "aten.cpp"),
                "-o",
                str(out),
            ]
        )
        return out

    def _link_aten(self, settings: Path) -> None:
        # torch's libraries are in the process that loads it, so they need not be searched for.
        lib = self.torch.folder / "lib"
        runtime = self.work / f"libcudart.so.{self.torch.cuda_major}"
        objects = [str(self.work / "aten.o"), str(settings), str(runtime)]
        torch = [f"-L{lib}", "-lc10", "-ltorch_cpu", "-lc10_cuda", f"-Wl,-rpath,{lib}", "-Wl,--allow-shlib-undefined"]
        out = str(self.work / "libsimulated_aten.so")
        self._run([self.compiler, "-shared", "-o", out, *objects, *torch, "-Wl,-rpath,$ORIGIN", "-pthread"])

    def _run(self, command: list[str]) -> None:
        # The libraries may be preloaded in this process, and a compiler needs none of them.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=COMPILE_DEADLINE_S,
            )
        except FileNotFoundError as error:
            raise BuildError(f"the C++ compiler {command[0]} was not found: install one, or set CXX.") from error
        except subprocess.TimeoutExpired as error:
            raise BuildError(
                f"the compiler took longer than {COMPILE_DEADLINE_S:.0f} s for {command[-1]}; "
                "try again when the machine is less busy."
            ) from error
        if done.returncode:
            log = cache_folder() / "compiler.log"
            log.write_text(" ".join(command) + "\n" + done.stderr, encoding="utf-8")
            unknown = f"it was killed by signal {-done.returncode}" if done.returncode < 0 else "no error text"
            first = next((line for line in done.stderr.splitlines() if "error" in line), unknown)
            raise BuildError(f"the C++ compiler failed ({first.strip()}); the whole output is in {log}.")


def _static_runtime(compiler: str) -> list[str]:
    """Link the C++ runtime library in, if that is possible.

    The libraries are preloaded before everything else. With a shared libstdc++ they would pull in the
    system's, and a Python from another distribution that needs a newer one could no longer load it.
    """
    probe = subprocess.run([compiler, "-print-file-name=libstdc++.a"], capture_output=True, text=True, check=False)
    return ["-static-libstdc++", "-static-libgcc"] if "/" in probe.stdout else []

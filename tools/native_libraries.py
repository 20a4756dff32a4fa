#!/usr/bin/env python3
"""Compile the recorder for wheels: for some Pythons, with each of some builds of torch.

Only headers and libraries are read, and no code of those Pythons and torches is run except to ask
for their names. So one build of torch serves all Pythons: its headers are the same for each. And it
may be for another processor, if Debian's compiler for that one is here (``g++-aarch64-linux-gnu``).

Each Python on each processor gets a folder with a library for each torch, stripped, and the index
that ``rankcall._prebuilt`` reads. A library that needs a newer C library than torch's own wheels do
(manylinux_2_28) is an error.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankcall._native import Target
from rankcall._prebuilt import INDEX, TorchBuild, entry
from rankcall.capture.native import RECORDER

HERE = Path(__file__).resolve().parent
_COMPILE_S, _ASK_S = 900.0, 60.0
PLATFORM = "manylinux_2_28"
HERE_MACHINE = platform.machine()
_NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}  # of that platform
_ASK_PYTHON = """
import json, sys, sysconfig
print(json.dumps([sysconfig.get_paths()["include"], f"{sys.implementation.cache_tag}",
                  f"cp{sys.version_info[0]}{sys.version_info[1]}"]))
"""


@dataclass(frozen=True)
class Python:
    """A Python to compile for."""

    program: Path
    include: Path
    version: str  # cpython-311
    tag: str  # cp311

    @classmethod
    def of(cls, program: Path) -> Python:
        """Ask a Python for its names. Raises ``ValueError`` if it has no headers."""
        # Absolute, since it is also started from other folders. A link is not followed: below it,
        # a virtual environment's Python would not find its packages.
        program = program.absolute()
        asked = subprocess.run(
            [program, "-I", "-c", _ASK_PYTHON],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
        include, version, tag = json.loads(asked.stdout)
        if not (Path(include) / "Python.h").exists():
            raise ValueError(f"{program} has no headers ({include}/Python.h)")
        return cls(program, Path(include), version, tag)

    def soabi(self, machine: str) -> str:
        """Return the end of the names of extension modules for this version on a processor."""
        return f"{self.version}-{machine}-linux-gnu"


def torch_build(folder: Path) -> TorchBuild:
    """Return what identifies the torch in a folder, without importing it."""
    names = {}
    for line in ast.parse((folder / "version.py").read_text()).body:
        target = line.targets[0] if isinstance(line, ast.Assign) else None
        if isinstance(line, ast.Assign) and isinstance(target, ast.Name):
            names[target.id] = ast.literal_eval(line.value)
    # Builds of torch since 2.6 all have the new ABI of libstdc++.
    return TorchBuild(names["__version__"].partition("+")[0], names["git_version"], True)


def compile_all(python: Python, machine: str, torches: Sequence[Path], folder: Path) -> list[Path]:
    """Compile the recorder for one Python with each torch for a processor, and write the index.

    A build of torch that is in several places, for example for several Pythons, counts once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries, index, sources = [], [], RECORDER.digest()
    builds = {torch_build(torch): torch for torch in torches if machine_of(torch) == machine}
    for build, torch in builds.items():
        library = folder / f"{RECORDER.name}-torch{build.version}.so"
        compile_one(python, machine, torch, library)
        check_portable(library, machine)
        index.append(entry(library.name, RECORDER.name, sources, python.soabi(machine), build))
        libraries.append(library)
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
    return libraries


def compile_one(python: Python, machine: str, torch: Path, library: Path) -> None:
    """Compile and strip the recorder. Raises ``ValueError`` with the compiler's words."""
    # This machine's headers of Python serve: between 64-bit Linuxes, what is used does not differ.
    target = Target(torch, python.include, cxx11_abi=True)
    with tempfile.TemporaryDirectory(prefix="rankcall-native-") as scratch:
        for name, make in RECORDER.headers.items():
            (Path(scratch) / name).write_text(make())
        portable = Path(scratch) / "portable.o"
        hidden = ("-O2", "-fPIC", "-fvisibility=hidden", "-c")
        _run(_tool("gcc", machine), *hidden, HERE / "portable.c", "-o", portable)
        flags = RECORDER.compile_flags(scratch, target)
        main = RECORDER.sources / RECORDER.main
        links = (*target.link_flags(), "-ldl")
        _run(_tool("g++", machine), *flags, "-s", main, portable, "-o", library, *links)


def check_portable(library: Path, machine: str) -> None:
    """Raise ``ValueError`` if a library needs newer system libraries than torch's wheels do."""
    text = _run(_tool("objdump", machine), "-T", library)
    for name, number in re.findall(r"\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)", text):
        if tuple(map(int, number.split("."))) > _NEWEST[name]:
            raise ValueError(f"{library} needs {name}_{number}, which {PLATFORM} does not have")


def _tool(name: str, machine: str) -> str:
    """Return the name of a compiler or a tool for a processor, as Debian names it."""
    return name if machine == HERE_MACHINE else f"{machine}-linux-gnu-{name}"


def _run(*command: str | Path) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, timeout=_COMPILE_S, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def torch_folder(place: Path) -> Path:
    """Return the folder of torch's package in an environment or a site-packages."""
    for folder in (place, place / "torch", *place.glob("lib/python3.*/site-packages/torch")):
        if (folder / "version.py").exists() and (folder / "include").is_dir():
            return folder.absolute()
    raise ValueError(f"no torch with headers in {place}")


def is_for(python: Python, torch: Path) -> bool:
    """Return whether a Python of this machine can import the torch in a folder."""
    return (torch / f"_C.{python.soabi(HERE_MACHINE)}.so").exists()


def machine_of(torch: Path) -> str:
    """Return the processor that the torch in a folder is for; its extension module names it."""
    for module in torch.glob("_C.cpython-*-linux-gnu.so"):
        return module.name.split("-")[2]
    raise ValueError(f"{torch} has no module _C for CPython on Linux")


def pythons_here() -> list[Python]:
    """Return this Python and those of other versions on PATH, as far as they have headers."""
    found: dict[str, Python] = {}
    for program in (sys.executable, *(shutil.which(f"python3.{minor}") for minor in range(10, 15))):
        try:
            python = Python.of(Path(program or ""))
        except (OSError, ValueError, subprocess.SubprocessError):
            continue
        found.setdefault(python.tag, python)
    return [found[tag] for tag in sorted(found)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose Pythons and torches."""
    parser.add_argument(
        "--python",
        type=Path,
        action="append",
        help="a Python to make a wheel for; without it, this one and those on PATH with headers",
    )
    parser.add_argument(
        "--torch",
        type=Path,
        action="append",
        help="an environment with a torch, of any Python and processor, to compile for; without "
        "it, this one's",
    )


def chosen(arguments: argparse.Namespace) -> tuple[list[Python], list[Path]]:
    """Return the Pythons and the torches of some arguments."""
    pythons = [Python.of(program) for program in arguments.python or ()] or pythons_here()
    places = arguments.torch or [Path(sys.prefix)]
    return pythons, [torch_folder(place) for place in places]


def main() -> None:
    """Compile for the Pythons and torches that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="a folder for all Pythons")
    add_arguments(parser)
    arguments = parser.parse_args()
    pythons, torches = chosen(arguments)
    for python in pythons:
        for machine in sorted(set(map(machine_of, torches))):
            folder = arguments.output / f"{python.tag}-{machine}"
            for library in compile_all(python, machine, torches, folder):
                print(f"{library}: {library.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()

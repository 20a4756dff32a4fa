"""Which libraries are replaced, from which sources, and what each must export.

A library must define every symbol that torch's libraries import from it, under the version node that
they ask for, or torch does not load. What the sources do not define becomes a generated function that
returns an error and is named once on stderr.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ._errors import BuildError
from ._torch import TorchBuild

# Exported by libcudart for the other libraries of this package (native/runtime/bridge.h).
BRIDGE = "simulated_*"


@dataclass(frozen=True)
class Library:
    """One replaced library.

    Attributes:
        soname: The name by which torch's libraries ask for it.
        sources: Folders and files below native/ that it is compiled from.
        imports: What its symbols look like where torch imports them without a version node.
        error: What a function returns that is not simulated.
        named_at_run_time: Its functions are also looked up by name, so those names are exported, too.
    """

    soname: str
    sources: tuple[str, ...]
    imports: str = "(?!)"
    error: int = 801
    named_at_run_time: bool = False


def libraries(cuda_major: int) -> list[Library]:
    """Return the libraries in the order in which they are linked and preloaded."""
    return [
        Library(f"libcudart.so.{cuda_major}", ("common", "runtime")),
        Library("libnccl.so.2", ("common/settings.cpp", "nccl"), "nccl", error=5),  # ncclInvalidUsage
        # cuFile and the C++ names of torch itself begin alike.
        Library(
            "libcuda.so.1",
            ("common/settings.cpp", "driver"),
            "cu[A-Z](?!le)(?!leBuf)",
            named_at_run_time=True,
        ),
        Library("libnvidia-ml.so.1", ("common", "nvml"), "nvml", error=3, named_at_run_time=True),
        Library(f"libcublasLt.so.{cuda_major}", ("common/settings.cpp", "blas/cublaslt.cpp"), error=15),
        Library(
            f"libcublas.so.{cuda_major}", ("common/settings.cpp", "blas/cublas.cpp"), error=15
        ),  # CUBLAS_STATUS_NOT_SUPPORTED
    ]


@dataclass(frozen=True)
class Symbols:
    """What torch's libraries import: names by version node, and names without one."""

    by_node: dict[str, set[str]]
    plain: set[str]
    looked_up: set[str]


def imported_symbols(torch: TorchBuild) -> Symbols:
    """Read the imports of all of torch's libraries."""
    by_node: dict[str, set[str]] = {}
    plain: set[str] = set()
    for path in torch.libraries:
        for name in _nm("-D", "--undefined-only", str(path)):
            symbol, _, node = name.replace("@@", "@").partition("@")
            if node:
                by_node.setdefault(node, set()).add(symbol)
            else:
                plain.add(symbol)
    # c10 asks for the driver's and NVML's functions by name; the names lie in it as text.
    content = (torch.folder / "lib" / "libc10_cuda.so").read_bytes()
    looked_up = {match.decode() for match in re.findall(rb"\0((?:cu[A-Z]|nvml)[A-Za-z0-9_]+)(?=\0)", content)}
    return Symbols(by_node, plain, looked_up)


def exports(library: Library, symbols: Symbols) -> tuple[set[str], str | None]:
    """Return what the library must export, and the version node under which, if any."""
    versioned = symbols.by_node.get(library.soname, set())
    pattern = re.compile(library.imports)
    wanted = versioned | {name for name in symbols.plain if pattern.match(name)}
    if library.named_at_run_time:
        wanted |= {name for name in symbols.looked_up if pattern.match(name)}
    return wanted, library.soname if versioned else None


def defined_symbols(objects: Iterable[Path]) -> set[str]:
    """Return the names of all functions and variables that compiled sources define."""
    return {name for path in objects for name in _nm("--defined-only", "--extern-only", str(path))}


def stubs_source(library: Library, missing: Iterable[str]) -> str:
    """Return the source of functions that return an error and say so once."""
    lines = [
        '#include "common/settings.h"',
        "static int not_simulated(const char* name) {",
        f'  simulated::say_once(name, "%s is not simulated and fails ({library.soname})", name);',
        f"  return {library.error};",
        "}",
    ]
    lines += [
        f'extern "C" __attribute__((visibility("default"))) int {name}() {{ return not_simulated("{name}"); }}'
        for name in sorted(missing)
    ]
    return "\n".join(lines) + "\n"


def version_script(exported: Iterable[str], node: str | None) -> str:
    """Return a linker script that exports these names only.

    What a library brings for others than torch (``cudaHostGetDevicePointer``, the bridge) is exported
    under the same node: a program that is linked with the real library asks for it there.
    """
    names = "".join(f"    {name};\n" for name in sorted(exported))
    return f"{node or ''} {{\n  global:\n{names}    {BRIDGE};\n  local: *;\n}};\n"


def _nm(*arguments: str) -> list[str]:
    try:
        done = subprocess.run(["nm", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise BuildError("nm is missing: install binutils, for example with `apt-get install g++`.") from error
    return [line.split()[-1] for line in done.stdout.splitlines() if line.strip() and not line.endswith(":")]

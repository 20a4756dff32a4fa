"""Build a program with a sanitizer and run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

SANITIZERS = ("thread", "address,undefined")
RACE_REPORT = re.compile(r"^WARNING: ThreadSanitizer: (.*?)^SUMMARY", re.MULTILINE | re.DOTALL)
_ACCESS = re.compile(r"^  (?:Previous )?(?:atomic )?(?:read|write) of size", re.MULTILINE | re.I)


def run_sanitized(
    source: Path, includes: Sequence[Path], sanitizer: str, folder: Path, standard: str
) -> str:
    """Return the program's output; skip the test if the compiler or the kernel cannot do it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    program = folder / source.stem
    command = [compiler, f"-std={standard}", "-O1", "-g", "-pthread", f"-fsanitize={sanitizer}"]
    command += ["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    command += ["-Wno-missing-field-initializers"]
    # GCC's sanitizer does not model fences. Only readers need them; these programs have none.
    command += ["-Wno-tsan"] if sanitizer == "thread" and "clang" not in compiler else []
    command += [*(f"-I{include}" for include in includes), str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    if "cannot find" in built.stderr or "unrecognized" in built.stderr:
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}")
    assert built.returncode == 0, built.stderr
    done = subprocess.run(
        [str(program), str(folder)], capture_output=True, text=True, timeout=400, check=False
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_module(build: str, flag: str, folder: Path) -> dict[str, str]:
    """Build a native module with a sanitizer; return the environment to use it in.

    Args:
        build: A Python program that builds it.
        flag: The compiler's option.
        folder: Where the module goes. Other processes build into a cache of their own.
    """
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here")
    wrapper = folder / "c++"
    options = f"-g1 -O1 -fno-omit-frame-pointer {flag} -fno-sanitize-recover=all"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler} "$@" {options}\n')
    wrapper.chmod(0o700)
    env = {**os.environ, "CXX": str(wrapper), "RANKCALL_CACHE": str(folder / "cache")}
    subprocess.run([sys.executable, "-c", build], env=env, check=True, timeout=4000)
    return env


def run_to_end(
    program: Path, env: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python program; skip the test if the kernel cannot run the sanitizer."""
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    return done


def runtime_library(name: str) -> str:
    """Return the path of a library of the compiler's, to be preloaded; skips if it has none."""
    compiler = shutil.which("c++") or "c++"
    library = subprocess.run(
        [compiler, f"-print-file-name=lib{name}.so"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"this compiler has no lib{name}.so")
    return str(Path(library).resolve())


def races_in(library: str, report: str) -> bool:
    """Return whether the innermost frames of all accesses in a race report are in a library.

    ``library`` is a part of the library's file name.
    """
    innermost = []
    for stack in _ACCESS.split(report)[1:]:
        frames = re.findall(r"^    #\d+ (.*)$", stack.split("\n\n")[0], re.MULTILINE)
        innermost.append(next((frame for frame in frames if "libtsan" not in frame), ""))
    return bool(innermost) and all(library in frame for frame in innermost)

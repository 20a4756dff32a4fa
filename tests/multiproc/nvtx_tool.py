"""Build the tool that listens to NVTX (tests/native/nvtx_collector.cpp), and read what it heard."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[1] / "native/nvtx_collector.cpp"


def built(folder: Path) -> Path:
    """Compile the tool; skips where NVTX's headers or a compiler are missing."""
    from rankcall.capture.native import nvtx_headers
    from rankcall.errors import CaptureUnavailableError

    try:
        headers = nvtx_headers()
    except CaptureUnavailableError as error:
        pytest.skip(str(error))
    if not shutil.which("c++"):
        pytest.skip("there is no C++ compiler")
    library = folder / "collector.so"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run(["c++", *flags, str(SOURCE), "-o", str(library)], check=True, timeout=60)
    return library


@dataclass
class Heard:
    """The marks that one process sent."""

    domains: list[str] = field(default_factory=list)
    marks: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # thread, description
    begun: dict[int, str] = field(default_factory=dict)  # by range, in order
    ended: list[int] = field(default_factory=list)
    between: int = 0  # ranges that began with no mark since the one before


def heard(prefix: Path) -> dict[int, Heard]:
    """Return what the tool wrote, by process."""
    processes: dict[int, Heard] = defaultdict(Heard)
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        process, marked = processes[int(path.suffix[1:])], False
        for line in path.read_text().splitlines():
            kind, thread, text = line.split(" ", 2)
            if kind == "D":
                process.domains.append(text)
            elif kind == "M":
                process.marks.append((int(thread), json.loads(text)))
                marked = True
            elif kind == "B":
                number, _, name = text.partition(" ")
                process.begun[int(number)] = name
                process.between += not marked
                marked = False
            else:
                process.ended.append(int(text))
    return processes

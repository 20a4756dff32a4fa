"""The environment in which a program finds simulated devices instead of real ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ._build import build
from ._errors import DevicesError
from ._torch import find_torch

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


def environment(
    gpus: int = 2,
    memory: str | int = "8GiB",
    *,
    faults: str | os.PathLike[str] | None = None,
    aten: bool = True,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return an environment for ``subprocess``; the libraries are compiled first if need be.

    Args:
        gpus: How many devices the machine has, 0 to 64.
        memory: The memory of each device, in bytes or as a text such as ``"8GiB"``.
        faults: The folder in which faults are ordered while the program runs (see ``FaultFolder``). It is
            made if it does not exist.
        aten: Compute torch's operations on the devices with the CPU's kernels. Without, they leave their
            outputs as they were, which is enough for tests of communication and loads faster.
        base: The environment to start from, by default this process's.

    Raises:
        TorchError: The installed torch cannot run on simulated devices.
        BuildError: The libraries cannot be compiled.
    """
    if not 0 <= gpus <= 64:
        raise DevicesError(f"the number of GPUs must be from 0 to 64, and {gpus} is not.")
    size = parse_size(memory)
    built = build(find_torch())
    result = dict(os.environ if base is None else base)
    own = [str(path) for path in built.preload]
    others = [path for path in result.get("LD_PRELOAD", "").split(":") if path and "simulated-devices" not in path]
    # Whoever preloads a library of his own wants to stand in front of CUDA: to count its calls, for example.
    result["LD_PRELOAD"] = ":".join([*others, *own])
    result["SIMULATED_DEVICES"] = str(gpus)
    result["SIMULATED_DEVICES_MEMORY"] = str(size)
    if aten:
        result["SIMULATED_DEVICES_ATEN"] = str(built.aten)
    else:
        result.pop("SIMULATED_DEVICES_ATEN", None)
    if faults is not None:
        Path(faults).mkdir(parents=True, exist_ok=True)
        result["SIMULATED_DEVICES_FAULTS"] = str(Path(faults).absolute())
    return result


def parse_size(text: str | int) -> int:
    """Return a number of bytes.

    Raises:
        DevicesError: The text is no positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None or not float(match.group(1)):
        raise DevicesError(f"{text!r} is no size: write, for example, 8GiB or 512MiB.")
    return int(float(match.group(1)) * unit)

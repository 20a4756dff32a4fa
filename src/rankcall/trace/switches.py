"""The settings of a trace: the arguments of ``enable``, or the variables that jobs set instead."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

# The variables of the collective monitor, so that the files of a job that used it stay as they are.
MODE_VARIABLE = "TORCH_DISTRIBUTED_TRACING"
PRINT_VARIABLE = "TORCH_DISTRIBUTED_TRACING_PRINT"
_YES = ("true", "1", "t", "y", "yes")


class Mode(str, Enum):
    """Which ops are described."""

    ALL = "ALL"
    CROSSNODE = "CROSSNODE"
    NONE = "NONE"


def mode_of(given: str | Mode | None) -> Mode:
    """Return the mode of a name, in any case; for None the variable's, or else ``CROSSNODE``."""
    where, text = "mode", given
    if given is None:
        where, text = MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or Mode.CROSSNODE
    name = text.value if isinstance(text, Mode) else str(text).strip().upper()
    if name not in Mode.__members__:
        names = ", ".join(Mode.__members__)
        raise ValueError(f"{where} must be one of {names} (in any case); got {text!r}")
    return Mode(name)


@dataclass(frozen=True)
class Switches:
    """The settings of one call of ``enable``."""

    mode: Mode
    print_: bool
    gpu_serial: str
    vm_id: str


def settle(mode: str | Mode | None, print_: bool | None) -> Switches:
    """Return the settings; arguments win over variables.

    Raises ``ValueError`` for an unknown mode; the message names the argument or the variable.
    """
    if print_ is not None and not isinstance(print_, bool):
        raise TypeError(f"print_ must be True, False or None; got {print_!r}")
    variable = os.environ.get(PRINT_VARIABLE, "").strip().lower()
    return Switches(
        mode=mode_of(mode),
        print_=variable in _YES if print_ is None else print_,
        gpu_serial=os.environ.get("GPU_SERIAL") or "unknown",
        vm_id=os.environ.get("VM_ID") or "unknown",
    )

"""What is traced and what a description says of this process: arguments first, then variables."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

MODE_VARIABLE = "TORCH_DISTRIBUTED_TRACING"
PRINT_VARIABLE = "TORCH_DISTRIBUTED_TRACING_PRINT"
_YES = ("true", "1", "t", "y", "yes")


class Mode(str, Enum):
    """Which ops are described."""

    ALL = "ALL"
    CROSSNODE = "CROSSNODE"
    NONE = "NONE"


@dataclass(frozen=True)
class Switches:
    """The switches of one ``enable``, settled."""

    mode: Mode
    print_: bool
    gpu_serial: str
    vm_id: str


def settle(mode: str | Mode | None, print_: bool | None) -> Switches:
    """Return the switches; arguments win over variables.

    Raises ``ValueError`` where a mode is not one of the three, saying where it came from.
    """
    if print_ is not None and not isinstance(print_, bool):
        raise TypeError(f"print_ must be True, False or None; got {print_!r}")
    said = os.environ.get(PRINT_VARIABLE, "").strip().lower()
    return Switches(
        mode=mode_of(mode),
        print_=said in _YES if print_ is None else print_,
        gpu_serial=os.environ.get("GPU_SERIAL") or "unknown",
        vm_id=os.environ.get("VM_ID") or "unknown",
    )


def mode_of(given: str | Mode | None) -> Mode:
    """Return a mode by its name, in any case; None: as the variable says, or ``CROSSNODE``."""
    where, text = "mode", given
    if given is None:
        where, text = MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or Mode.CROSSNODE
    name = text.value if isinstance(text, Mode) else str(text).strip().upper()
    if name not in Mode.__members__:
        names = ", ".join(Mode.__members__)
        raise ValueError(f"{where} must be one of {names} (in any case); got {text!r}")
    return Mode(name)

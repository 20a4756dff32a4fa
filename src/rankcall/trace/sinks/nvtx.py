"""NVTX: a mark as an op is issued, and a range until it has ended, in the domain ``rankcall``."""

from __future__ import annotations

import ctypes

from rankcall.capture.marks import Functions
from rankcall.errors import CaptureUnavailable
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.base import Origin, logger

_DOMAIN = b"rankcall"


class Nvtx:
    """Marks every op on the thread that issues it, DDP's and compiled code's as well.

    The mark's message is the description as JSON, with null times; the range bears the op's name.
    Needs ``nvidia-nvtx`` (the extra ``rankcall[nvtx]``), and a C++ compiler once. Without a tool
    that listens (``NVTX_INJECTION64_PATH``, as Nsight Systems sets it) it does nothing.
    """

    def functions(self) -> Functions | None:
        """Return the C functions to call at issue; None where no tool listens.

        Raises ``CaptureUnavailable`` where the bridge to NVTX cannot be built.
        """
        from rankcall.capture.native.build import nvtx_bridge

        path = nvtx_bridge().prebuild()
        try:
            bridge = ctypes.CDLL(str(path))
        except OSError as error:
            raise CaptureUnavailable(f"{path} cannot be loaded: {error}") from error
        if not bridge.rankcall_nvtx_open(_DOMAIN):
            logger.info("no tool listens to NVTX: there will be no marks")
            return None
        names = ("mark", "begin", "end")
        each = (getattr(bridge, f"rankcall_nvtx_{name}") for name in names)
        return Functions(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in each))

    def open(self, origin: Origin) -> None:
        """Do nothing: marks are made at issue."""

    def write(self, descriptions: Descriptions) -> None:
        """Do nothing: marks are made at issue."""

    def close(self) -> None:
        """Do nothing."""

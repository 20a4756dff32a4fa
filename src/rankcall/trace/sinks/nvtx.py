"""NVTX: a mark when an op is issued, in the domain ``rankcall``; on the CPU, a range, too."""

from __future__ import annotations

import ctypes

from rankcall.capture.marks import Functions
from rankcall.errors import CaptureUnavailableError
from rankcall.trace.descriptions import Descriptions
from rankcall.trace.sinks.guard import logger
from rankcall.trace.sinks.protocols import Origin

_DOMAIN = b"rankcall"


class Nvtx:
    """Marks every op on the thread that issues it, also the ops of DDP and of compiled code.

    The mark's message is the description as JSON, with null times. On CPU back ends, a range over
    the op has its name. On a device, the profiler shows the kernel, and its end is not known here
    at the time.
    This sink needs ``nvidia-nvtx`` (the extra ``rankcall[nvtx]``), and a C++ compiler at its first
    use. If no tool listens, it does nothing; Nsight Systems sets ``NVTX_INJECTION64_PATH``.
    """

    sink_name = "nvtx"

    def functions(self) -> Functions | None:
        """Return the C functions to call at issue, or None if no tool listens.

        Raises ``CaptureUnavailableError`` if the bridge to NVTX cannot be built or loaded.
        """
        from rankcall.capture.native import nvtx_bridge

        path = nvtx_bridge().prebuild()
        try:
            bridge = ctypes.CDLL(str(path))
        except OSError as error:
            raise CaptureUnavailableError(f"{path} cannot be loaded: {error}") from error
        if not bridge.rankcall_nvtx_open(_DOMAIN):
            logger.info("no tool listens to NVTX: there will be no marks")
            return None
        functions = [getattr(bridge, f"rankcall_nvtx_{name}") for name in ("mark", "begin", "end")]
        addresses = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions]
        return Functions(*addresses)

    def open(self, origin: Origin) -> None:
        """Do nothing: marks are made at issue."""

    def write(self, descriptions: Descriptions) -> None:
        """Do nothing: marks are made at issue."""

    def close(self) -> None:
        """Do nothing."""

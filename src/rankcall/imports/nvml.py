"""What NVML says of this node's devices: which are lost, and which had errors of their memory.

NVML keeps no history of Xids; the kernel's log has them (``imports/node.py``). A driver in trouble
may answer never, so it is asked in a process of its own, and that it does not answer is said.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import subprocess
from typing import Any

from rankcall.interpreter import run_function
from rankcall.printable import clean

__all__ = ["ask_devices"]

_LIBRARY = "libnvidia-ml.so.1"
_ANSWER_S = 15.0  # a new process, and some ms for each device
_END_S = 2.0  # after SIGKILL; a process that sleeps in the driver is left behind
_MOST_DEVICES, _MOST_TEXT = 64, 120  # characters of NVML's own words
_SUCCESS, _UNCORRECTED, _SINCE_LOADED = 0, 1, 0
# NVML's TIMEOUT, IRQ_ISSUE, GPU_IS_LOST, RESET_REQUIRED, LIB_RM_VERSION_MISMATCH and UNKNOWN. Other
# numbers say that there is no driver, or that the caller may not ask.
_TROUBLE = frozenset({10, 11, 15, 16, 18, 999})


def ask_devices() -> tuple[list[str], str]:
    """Return a line for each device in trouble, and why that is not known; empty if it is."""
    if _load() is None:
        return [], ""  # a node without NVIDIA's devices
    try:
        process = subprocess.Popen(
            run_function(__name__, print_trouble.__name__),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        return [], f"what NVML says of the devices: {error.strerror}"
    try:
        answer, _ = process.communicate(timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return [], f"what NVML says of the devices: it has not answered for {_ANSWER_S:g} s"
    finally:
        if process.stdout is not None:
            process.stdout.close()
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    try:
        lines = json.loads(answer)
    except ValueError:
        return [], f"what NVML says of the devices: its process ended with {process.returncode}"
    return [clean(str(line)) for line in lines], ""


def print_trouble() -> None:
    """Print what NVML says of the devices that are in trouble, as JSON."""
    nvml = _load()
    print(json.dumps(_trouble(nvml) if nvml is not None else []))


def _load() -> Any | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def _trouble(nvml: Any) -> list[str]:
    nvml.nvmlErrorString.restype = ctypes.c_char_p
    status = nvml.nvmlInit_v2()
    if status != _SUCCESS:
        words = _words_of_trouble(nvml, status)
        return [f"no device can be asked: {words}"] if words else []
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    lines = []
    for number in range(min(count.value, _MOST_DEVICES)):
        trouble = _trouble_of(nvml, number)
        if trouble:
            lines.append(f"device {number}: {trouble}")
    return lines


def _trouble_of(nvml: Any, number: int) -> str:
    device, errors = ctypes.c_void_p(), ctypes.c_ulonglong()
    status = nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device))
    if status != _SUCCESS:
        return _words_of_trouble(nvml, status)
    status = nvml.nvmlDeviceGetTotalEccErrors(
        device, _UNCORRECTED, _SINCE_LOADED, ctypes.byref(errors)
    )
    if status != _SUCCESS or not errors.value:  # many devices cannot count them
        return ""
    what = "error" if errors.value == 1 else "errors"
    return f"{errors.value:,} uncorrectable {what} of its memory since the driver was loaded"


def _words_of_trouble(nvml: Any, status: int) -> str:
    if status not in _TROUBLE:
        return ""
    text: bytes = nvml.nvmlErrorString(status) or b"?"
    return f"{text.decode(errors='replace')[:_MOST_TEXT]} (NVML error {status})"

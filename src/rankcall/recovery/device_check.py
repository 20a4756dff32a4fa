"""Ask each device of this node for a sign of life: a program of its own, which ``health`` starts.

A device that is not well often answers no call at all, and a thread that waits for it cannot be
ended. So this is run as a script, without rankcall and torch, and is killed at a deadline. It calls
NVIDIA's driver itself, which takes far less time than to import torch.

It prints a line of JSON before it asks a device, and one after; a device that keeps it waiting is
the last one that was begun.
"""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

_CUDA, _NVML = "libcuda.so.1", "libnvidia-ml.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
# NVML's TIMEOUT, IRQ_ISSUE, GPU_IS_LOST, RESET_REQUIRED and UNKNOWN. Others say what the caller may
# not ask, for example about a device that is cut into parts.
_LOST = frozenset({10, 11, 15, 16, 999})
_WORDS = 1024  # of four bytes, which the small op writes on the device
_PATTERN = 0x52414E4B


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class NotWell(Exception):
    """A call of the driver has failed; says which, and how."""


def main() -> None:
    """Ask all devices that this process may use, and print what each says."""
    cuda = _library(_CUDA)
    if cuda is None:
        _say(state="absent", text="this node has no CUDA driver")
        return
    nvml = _library(_NVML)
    if nvml is not None and nvml.nvmlInit_v2() != 0:
        nvml = None
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        _say(**_without_devices(nvml))
        return
    try:
        _check(cuda, code, "cuInit")
        count = ctypes.c_int()
        _check(cuda, cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    except NotWell as error:
        _say(state="failed", text=str(error))
        return
    for number in range(count.value):
        _say(device=number, state="begun")
        try:
            _ask(cuda, nvml, number)
        except NotWell as error:
            _say(device=number, state="failed", text=str(error))
        else:
            _say(device=number, state="well")


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _without_devices(nvml: Any) -> dict[str, str]:
    """Return what it means that CUDA finds no device: all may have dropped out."""
    count = ctypes.c_uint()
    if nvml is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    if count.value:
        text = f"CUDA finds none of the {count.value} devices that the driver knows"
        return {"state": "failed", "text": text}
    return {"state": "absent", "text": "this node has no device"}


def _ask(cuda: Any, nvml: Any, number: int) -> None:
    """Read a device's state, write its memory and read it back. Raises ``NotWell``."""
    device = ctypes.c_int()
    _check(cuda, cuda.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    if nvml is not None:
        address = ctypes.create_string_buffer(64)
        _check(cuda, cuda.cuDeviceGetPCIBusId(address, 64, device), "cuDeviceGetPCIBusId")
        _ask_nvml(nvml, address)
    context = ctypes.c_void_p()
    _check(cuda, cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate")
    try:
        _write_and_read(cuda)
    finally:
        cuda.cuCtxDestroy_v2(context)


def _ask_nvml(nvml: Any, address: Any) -> None:
    handle, memory = ctypes.c_void_p(), _Memory()
    code = nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle))
    if code == 0:
        code = nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    if code in _LOST:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        words = nvml.nvmlErrorString(code) or b""
        raise NotWell(f"NVML: {words.decode(errors='replace')} ({code})")


def _write_and_read(cuda: Any) -> None:
    memory, words = ctypes.c_uint64(), (ctypes.c_uint32 * _WORDS)()
    size = ctypes.c_size_t(ctypes.sizeof(words))
    _check(cuda, cuda.cuMemAlloc_v2(ctypes.byref(memory), size), "cuMemAlloc")
    written = cuda.cuMemsetD32_v2(memory, ctypes.c_uint32(_PATTERN), ctypes.c_size_t(_WORDS))
    _check(cuda, written, "cuMemsetD32")
    _check(cuda, cuda.cuMemcpyDtoH_v2(words, memory, size), "cuMemcpyDtoH")
    if any(word != _PATTERN for word in words):
        raise NotWell("its memory does not keep what was written to it")


def _check(cuda: Any, code: int, call: str) -> None:
    if code == 0:
        return
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    raise NotWell(f"{call}: {(name.value or b'').decode(errors='replace')} ({code})")


if __name__ == "__main__":
    main()

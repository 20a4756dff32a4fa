"""Errors: of single calls, sticky ones, and calls that are not simulated."""

from __future__ import annotations

from runtime import RUNTIME
from simulated_devices.testing import Jobs


def test_names_and_texts(jobs: Jobs) -> None:
    jobs.run(
        1,
        RUNTIME
        + """
assert rt.cudaGetErrorName(2) == b"cudaErrorMemoryAllocation" and rt.cudaGetErrorString(2) == b"out of memory"
assert rt.cudaGetErrorName(123456) == b"unrecognized error code"
""",
    )


def test_bad_devices_and_handles(jobs: Jobs) -> None:
    """A device that does not exist and a handle that is no stream are refused, and do not harm the device."""
    jobs.run(
        1,
        RUNTIME
        + """
assert rt.cudaSetDevice(99) == 101 and rt.cudaSetDevice(-1) == 101
assert rt.cudaStreamSynchronize(c_void_p(12345678)) == 400
ok(rt.cudaDeviceSynchronize())
""",
    )


def test_device_asserts_are_sticky(jobs: Jobs) -> None:
    """An index out of bounds ends the kernel later, and every call fails from then on, until the process ends."""
    jobs.run(
        1,
        RUNTIME
        + """
table, index = torch.ones(4, 2, device="cuda"), torch.tensor([7], device="cuda")
out = torch.nn.functional.embedding(index, table)       # returns: the kernel fails, not the call
for attempt in range(2):
    try: torch.cuda.synchronize()
    except RuntimeError as error: assert "device-side assert triggered" in str(error), error
    else: raise AssertionError("no error")
assert rt.cudaGetLastError() == 710 and rt.cudaGetLastError() == 710
p = c_void_p(); assert rt.cudaMalloc(byref(p), c_size_t(1)) == 710
ok(rt.cudaSetDevice(1)); malloc(16)                      # another device's context is not touched
os._exit(0)
""",
    )


def test_wrong_arguments_raise_at_once(jobs: Jobs) -> None:
    """Shapes and devices that do not fit are errors of the call, also while the stream is busy."""
    jobs.run(
        1,
        RUNTIME
        + """
a, b = torch.ones(2, 3, device="cuda"), torch.ones(4, device="cuda")
def raises(function, text):
    try: function()
    except RuntimeError as error: assert text in str(error), error
    else: raise AssertionError("no error")
gate = None
for busy in (False, True):
    if busy: gate = Gate(c_void_p(torch.cuda.current_stream().cuda_stream))
    raises(lambda: a.add_(b), "must match the size" if not busy else "broadcast")
    raises(lambda: a + torch.ones(2, 3), "Expected all tensors to be on the same device")
    if not busy: raises(lambda: a @ b, "size mismatch")
gate.open(); torch.cuda.synchronize()
""",
    )


def test_what_is_not_simulated_is_named_once(jobs: Jobs) -> None:
    """A function without a simulation returns cudaErrorNotSupported, and stderr names it once."""
    (rank,) = jobs.run(
        1,
        RUNTIME
        + """
assert rt.cudaGraphAddNode() == NOT_SUPPORTED and rt.cudaGraphAddNode() == NOT_SUPPORTED
""",
    )
    assert rank.output.count("cudaGraphAddNode is not simulated") == 1


def test_visible_devices(jobs: Jobs) -> None:
    """CUDA_VISIBLE_DEVICES chooses devices, up to the first entry that is none."""
    for value, count in (("1,0", 2), ("", 0), ("0,99,1", 1)):
        jobs.run(
            1,
            RUNTIME + f"n = c_int(-1); rt.cudaGetDeviceCount(byref(n)); assert n.value == {count}, n",
            CUDA_VISIBLE_DEVICES=value,
        )

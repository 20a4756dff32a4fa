"""Allocation, copies, pools, pinned memory and access between devices, against CUDA's documentation."""

from __future__ import annotations

import subprocess
import sys

from runtime import RUNTIME
from simulated_devices import environment
from simulated_devices.testing import Jobs


def test_out_of_memory_at_the_simulated_size(jobs: Jobs) -> None:
    """An allocation beyond the device's memory fails with cudaErrorMemoryAllocation, which is not sticky."""
    jobs.run(
        1,
        RUNTIME
        + """
free, total = c_size_t(), c_size_t()
ok(rt.cudaMemGetInfo(byref(free), byref(total))); assert total.value == 2 << 30
half = malloc(1 << 30); p = c_void_p()
ok(rt.cudaMemGetInfo(byref(free), byref(total))); assert free.value == 1 << 30
assert rt.cudaMalloc(byref(p), c_size_t((1 << 30) + 1)) == OOM and not p.value
assert rt.cudaPeekAtLastError() == OOM and rt.cudaGetLastError() == OOM and rt.cudaGetLastError() == SUCCESS
ok(rt.cudaFree(half)); whole = malloc(2 << 30); ok(rt.cudaFree(whole))
try: torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as error: assert "GPU 0 has a total capacity of 2.00 GiB" in str(error), error
else: raise AssertionError("no error")
""",
    )


def test_fragments_do_not_matter(jobs: Jobs) -> None:
    """Free memory can be allocated in one piece wherever its pages lie, as with a device's page tables."""
    jobs.run(
        1,
        RUNTIME
        + """
pieces = [malloc(128 << 20) for _ in range(16)]
for p in pieces[::2]: ok(rt.cudaFree(p))
large = malloc(1 << 30)
rt.cudaMemset(large, 7, c_size_t(1 << 20)); back = (ctypes.c_ubyte * 4)(); ok(rt.cudaMemcpy(back, large, c_size_t(4), 2)); assert list(back) == [7] * 4
""",
    )


def test_freeing_waits_for_the_device(jobs: Jobs) -> None:
    """cudaFree returns when no work of the device can still use the memory; a bad pointer is refused."""
    jobs.run(
        1,
        RUNTIME
        + """
p, s, freed = malloc(4096), stream(NON_BLOCKING), []
gate = Gate(s)
thread = threading.Thread(target=lambda: (ok(rt.cudaFree(p)), freed.append(1))); thread.start()
gate.reached.wait(); assert not freed
gate.open(); thread.join(30); assert freed
assert rt.cudaFree(p) == INVALID and rt.cudaFree(None) == SUCCESS
""",
    )


def test_copies(jobs: Jobs) -> None:
    """From pageable memory the source may change at once; to pageable memory the call waits; pinned does not."""
    jobs.run(
        1,
        RUNTIME
        + """
s, d = stream(NON_BLOCKING), malloc(16)
source = (ctypes.c_char * 16)(*b"0123456789abcdef")
gate = Gate(s)
ok(rt.cudaMemcpyAsync(d, source, c_size_t(16), 1, s))          # staged: returns before it is copied
source[0] = b"X"
pinned = c_void_p(); ok(rt.cudaHostAlloc(byref(pinned), c_size_t(16), 0))
ok(rt.cudaMemcpyAsync(pinned, d, c_size_t(16), 2, s))          # does not wait
assert rt.cudaStreamQuery(s) == NOT_READY
back, ended = (ctypes.c_char * 16)(), []
thread = threading.Thread(target=lambda: (ok(rt.cudaMemcpyAsync(back, d, c_size_t(16), 2, s)), ended.append(1))); thread.start()
assert not ended
gate.open(); thread.join(30)
assert ended and bytes(back) == b"0123456789abcdef" == ctypes.string_at(pinned.value, 16)
ok(rt.cudaFreeHost(pinned))
""",
    )


def test_kinds_of_pointers(jobs: Jobs) -> None:
    """cudaPointerGetAttributes tells device memory, pinned memory, registered memory and all other apart."""
    jobs.run(
        1,
        RUNTIME
        + """
class Attributes(ctypes.Structure): _fields_ = [("type", c_int), ("device", c_int), ("d", c_void_p), ("h", c_void_p), ("reserved", ctypes.c_long * 8)]
def kind(p): a = Attributes(); ok(rt.cudaPointerGetAttributes(byref(a), p)); return a.type, a.device
ok(rt.cudaSetDevice(1)); p = malloc(4096); ok(rt.cudaSetDevice(0))
assert kind(p) == (2, 1) and kind(c_void_p(p.value + 100)) == (2, 1)
mine = ctypes.create_string_buffer(8192)
assert kind(mine) == (0, -2)
ok(rt.cudaHostRegister(mine, c_size_t(8192), 0)); assert kind(mine)[0] == 1
assert rt.cudaHostRegister(mine, c_size_t(8192), 0) == 712
ok(rt.cudaHostUnregister(mine)); assert rt.cudaHostUnregister(mine) == 713
x = torch.ones(3).pin_memory(); assert x.is_pinned() and kind(c_void_p(x.data_ptr()))[0] == 1
""",
    )


def test_pools(jobs: Jobs) -> None:
    """Stream-ordered memory: freed in the order of the stream, counted by the pool, with torch's backend for it."""
    jobs.run(
        1,
        RUNTIME
        + """
USED, USED_HIGH, THRESHOLD = 7, 8, 4
pool = c_void_p(); ok(rt.cudaDeviceGetDefaultMemPool(byref(pool), 0))
def attribute(n): v = c_uint64(); ok(rt.cudaMemPoolGetAttribute(pool, n, byref(v))); return v.value
s, p = stream(NON_BLOCKING), c_void_p()
ok(rt.cudaMallocAsync(byref(p), c_size_t(1 << 20), s)); assert attribute(USED) == 1 << 20
gate = Gate(s); ok(rt.cudaFreeAsync(p, s)); assert attribute(USED) == 1 << 20
gate.open(); ok(rt.cudaStreamSynchronize(s)); assert attribute(USED) == 0 and attribute(USED_HIGH) == 1 << 20
ok(rt.cudaMemPoolSetAttribute(pool, USED_HIGH, byref(c_uint64(0)))); assert attribute(USED_HIGH) == 0
assert rt.cudaMemPoolSetAttribute(pool, USED_HIGH, byref(c_uint64(5))) == INVALID
ok(rt.cudaMemPoolSetAttribute(pool, THRESHOLD, byref(c_uint64(99)))); assert attribute(THRESHOLD) == 99
""",
    )


def test_torchs_allocator_on_pools() -> None:
    """torch's allocator of stream-ordered memory works on the pools."""
    code = "import torch; x = torch.ones(1000, device='cuda'); print((x + x).sum().item(), torch.cuda.get_allocator_backend())"
    variables = environment() | {
        "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync",
        "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["2000.0", "cudaMallocAsync"]


def test_peer_access(jobs: Jobs) -> None:
    """Devices can reach each other's memory; enabling twice and disabling what is not enabled are errors."""
    jobs.run(
        1,
        RUNTIME
        + """
v = c_int(); ok(rt.cudaDeviceCanAccessPeer(byref(v), 0, 1)); assert v.value == 1
ok(rt.cudaDeviceCanAccessPeer(byref(v), 0, 0)); assert v.value == 0
ok(rt.cudaDeviceEnablePeerAccess(1, 0)); assert rt.cudaDeviceEnablePeerAccess(1, 0) == 704
ok(rt.cudaDeviceDisablePeerAccess(1)); assert rt.cudaDeviceDisablePeerAccess(1) == 705
assert rt.cudaDeviceEnablePeerAccess(0, 0) == 101 and rt.cudaDeviceEnablePeerAccess(77, 0) == 101
rt.cudaGetLastError()                              # torch would report the last one
x = torch.arange(5.0, device="cuda:0"); y = x.to("cuda:1"); same(y, [0, 1, 2, 3, 4]); assert y.device.index == 1
""",
    )


def test_memory_of_another_process(jobs: Jobs) -> None:
    """An IPC handle opens the same memory in another process, and not in the one that made it."""
    jobs.run(
        2,
        RUNTIME
        + """
class Handle(ctypes.Structure): _fields_ = [("bytes", ctypes.c_char * 64)]
ok(rt.cudaSetDevice(rank)); handle, p = Handle(), c_void_p()
path, reply = os.environ["JOB"] + "/handle", os.environ["JOB"] + "/reply"
rt.cudaIpcOpenMemHandle.argtypes = [c_void_p, Handle, c_uint]
if rank == 0:
    mine = malloc(4096); ok(rt.cudaMemset(mine, 5, c_size_t(4096)))
    ok(rt.cudaIpcGetMemHandle(byref(handle), mine)); assert rt.cudaIpcOpenMemHandle(byref(p), handle, 1) != 0
    with open(path + ".part", "wb") as f: f.write(bytes(handle))
    os.rename(path + ".part", path)
    wait_until(lambda: os.path.exists(reply))
    back = (ctypes.c_ubyte * 4)(); ok(rt.cudaMemcpy(back, mine, c_size_t(4), 2)); assert list(back) == [9] * 4
else:
    wait_until(lambda: os.path.exists(path))
    ctypes.memmove(byref(handle), open(path, "rb").read(), 64)
    ok(rt.cudaIpcOpenMemHandle(byref(p), handle, 1))
    back = (ctypes.c_ubyte * 4)(); ok(rt.cudaMemcpy(back, p, c_size_t(4), 2)); assert list(back) == [5] * 4
    ok(rt.cudaMemset(p, 9, c_size_t(4096))); ok(rt.cudaIpcCloseMemHandle(p)); open(reply, "w").close()
""",
    )

"""Parts of torch that need more of CUDA than training does: shared tensors, RPC, segments that grow, compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from simulated_devices import environment


def run(tmp_path: Path, code: str, timeout: float = 100, **variables: str) -> str:
    """Run a program in a Python of its own, because it starts processes or sets what torch reads at its import."""
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, "-W", "ignore", str(tmp_path / "program.py")]
    done = subprocess.run(
        command, env=environment(gpus=2) | variables, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tensors_of_another_process(tmp_path: Path) -> None:
    """torch.multiprocessing shares memory of a device, and orders its use by events of two processes."""
    output = run(
        tmp_path,
        """
import torch, torch.multiprocessing as mp
def child(tensors, results):
    x = tensors.get(); x.add_(1); torch.cuda.synchronize(); results.put(x.sum().item()); del x
if __name__ == "__main__":
    mp.set_start_method("spawn"); tensors, results = mp.Queue(), mp.Queue()
    process = mp.Process(target=child, args=(tensors, results)); process.start()
    x = torch.zeros(10, device="cuda"); tensors.put(x); print(results.get(timeout=60), x.sum().item()); process.join()
""",
    )
    assert output.split() == ["10.0", "10.0"]


def test_rpc_with_a_device_map(tmp_path: Path) -> None:
    """TensorPipe moves a tensor from one device to another, as its device map says."""
    output = run(
        tmp_path,
        f"""
import os, torch, torch.distributed.rpc as rpc, torch.multiprocessing as mp
def where(x): return x.device.index, (x * 2).sum().item()
def run(rank):
    options = rpc.TensorPipeRpcBackendOptions(init_method="file://{tmp_path}/rpc", rpc_timeout=40)
    if rank == 0: options.set_device_map("w1", {{0: 1}})
    rpc.init_rpc(f"w{{rank}}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0: print(rpc.rpc_sync("w1", where, args=(torch.ones(3, device="cuda:0"),)), flush=True)
    rpc.shutdown()
if __name__ == "__main__": mp.spawn(run, nprocs=2)
""",
    )
    assert output.strip() == "(1, 6.0)"


def test_expandable_segments(tmp_path: Path) -> None:
    """torch's expandable segments map and unmap memory, and run out of it at the simulated size."""
    setting = "expandable_segments:True"
    output = run(
        tmp_path,
        """
import torch
x = torch.ones(1000, device="cuda"); y = torch.ones(100 << 20, device="cuda"); print((x + y[:1000]).sum().item())
free, total = torch.cuda.mem_get_info(); print(free <= total - (400 << 20)); del y
torch.cuda.empty_cache(); print(torch.cuda.mem_get_info()[0] > total - (64 << 20))
try: torch.empty(9 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError: print("out of memory")
""",
        PYTORCH_CUDA_ALLOC_CONF=setting,
        PYTORCH_ALLOC_CONF=setting,
    )
    assert output.splitlines() == ["2000.0", "True", "True", "out of memory"]


def test_compilation_without_code_generation(tmp_path: Path) -> None:
    """torch.compile traces on simulated devices; a back end that runs torch's own operations gives right numbers."""
    output = run(
        tmp_path,
        """
import torch
layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).cuda(); x = torch.randn(3, 4, device="cuda")
compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
out = compiled(x); out.sum().backward(); print(torch.allclose(out, layer(x)), layer[0].weight.grad.shape)
""",
    )
    assert output.strip() == "True torch.Size([4, 4])"


def test_a_process_that_counted_devices_can_fork_ranks(tmp_path: Path) -> None:
    """torch counts devices through NVML, which does not use CUDA: a fork may be the first to do so."""
    output = run(
        tmp_path,
        """
import os, torch
print(torch.cuda.device_count(), flush=True)
pid = os.fork()
if pid == 0:
    print(torch.ones(2, device="cuda").sum().item(), flush=True); os._exit(0)
print(os.waitpid(pid, 0)[1])
""",
    )
    assert output.splitlines() == ["2", "2.0", "0"]


def test_waiting_for_a_device_with_the_gil(tmp_path: Path) -> None:
    """A storage's copy_ waits for its stream with the GIL, while queued operations hold Python's last tensors.

    Letting go of a tensor that Python has had takes the GIL, and it is the stream's thread that lets go.
    """
    output = run(
        tmp_path,
        """
import torch
y = torch.ones(1024, device="cuda")
for _ in range(20):
    for _ in range(5): y = y * 1
    target = torch.UntypedStorage(y.untyped_storage().nbytes()); target.copy_(y.untyped_storage(), non_blocking=False)
print(torch.tensor([], dtype=torch.float32).set_(target).sum().item())
""",
        SIMULATED_DEVICES_KERNEL_US="2000",
    )
    assert output.strip() == "1024.0"

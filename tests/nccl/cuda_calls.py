"""Count the calls that each thread of a rank makes of CUDA's runtime and of NCCL.

``compile_counter`` makes the library that counts; ``PRELUDE`` is how a rank reads it.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("cuda_calls.c")
# Whatever torch's libraries take from CUDA's runtime and from NCCL.
_FUNCTION = re.compile(r"\bU ((?:cuda|nccl)[A-Z]\w+)")

PRELUDE = """
import ctypes, collections
counter = ctypes.CDLL(next(p for p in os.environ["LD_PRELOAD"].split(":") if "cuda_calls" in p))
counter.calls_name.restype = ctypes.c_char_p
NAMES = [counter.calls_name(number).decode() for number in range(counter.calls_functions())]
def calls():
    "Return how often each thread has called each function, by the thread's id."
    found = collections.defaultdict(collections.Counter)
    for thread in range(counter.calls_threads()):
        counted = {name: counter.calls_of(thread, at) for at, name in enumerate(NAMES)}
        found[counter.calls_tid(thread)].update({k: v for k, v in counted.items() if v})
    return found
def called_since(before, tid=None):
    "Return how often one thread, by default this one, has called each function since then."
    tid = tid or threading.get_native_id()
    return calls()[tid] - before[tid]
def rankcalls_threads():
    "Return the ids of rankcall's own threads, in Python and native."
    ours = {thread.native_id for thread in threading.enumerate() if "rankcall" in thread.name}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as comm:
            if comm.read().startswith("rankcall"): ours.add(int(task))
    return ours
"""


def can_count() -> bool:
    """Tell whether the counter can be compiled here."""
    return platform.machine() == "x86_64" and shutil.which("cc") is not None


def compile_counter(folder: Path) -> Path:
    """Compile the counter for the installed torch; return the library."""
    torch = find_spec("torch")
    assert torch
    assert torch.origin
    names: set[str] = set()
    for library in ("libc10_cuda.so", "libtorch_cuda.so"):
        path = Path(torch.origin).parent / "lib" / library
        imported = subprocess.check_output(["nm", "-D", "--undefined-only", str(path)], text=True)
        names.update(_FUNCTION.findall(imported))
    assert {"cudaEventRecord", "cudaStreamWaitEvent", "ncclAllReduce"} <= names
    lines = [f"X({number}, {name})\n" for number, name in enumerate(sorted(names))]
    (folder / "names.h").write_text("".join(lines))
    counter = folder / "libcuda_calls.so"
    command = ["cc", "-O2", "-shared", "-fPIC", "-Wall", "-Werror", "-I", str(folder)]
    subprocess.run([*command, "-o", str(counter), str(SOURCE), "-ldl"], check=True, timeout=120)
    return counter

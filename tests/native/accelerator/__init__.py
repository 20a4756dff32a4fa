"""A simulated accelerator with two devices, and two c10d back ends on it like NCCL's.

No test machine has a GPU, so each claim about devices is tested here. ``install()`` makes torch
know the device "sim" in this process; call it in a subprocess, because it cannot be
undone. The C++ side is in ``device.h`` (streams, events, clock, capture, the log of calls) and
``backend.h`` (the back ends and their watchdog).

Streams are numbers: 0 is a device's default stream, 1 to 32 its pool, higher numbers are streams
that ``torch.Stream`` made. Each stream is a timeline that ends at the moment when all its work is
done. ``freeze()`` stops the clock, so that nothing completes before ``advance()`` says so.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rankcall._native import NativeModule
from rankcall.errors import CaptureUnavailableError

MODULE = NativeModule(
    "rankcall_test_accelerator",
    Path(__file__).parent,
    "accelerator.cpp",
    CaptureUnavailableError,
    defines=("USE_DISTRIBUTED", "USE_C10D_GLOO"),
)

# "silent" is "own", but its status cannot be read, as with the Flight Recorder switched off.
BACKENDS = ("own", "caller", "silent")
DEVICE = "sim"
DEVICES = 2
POOL = 32  # streams in each device's pool

# Calls that ask the device how far it is. Each of them, by any thread, invalidates a capture that
# is under way (CUDA's default capture mode).
QUERIES = (
    "queryEvent",
    "queryStream",
    "isCompleted",
    "getDuration",
    "elapsedTime",
    "synchronizeEvent",
    "synchronizeStream",
    "synchronizeDevice",
)

_native: Any = None


class Stream(NamedTuple):
    """One stream of one device."""

    device: int
    number: int


class Call(NamedTuple):
    """How often a thread made one kind of call, outside or during a capture."""

    name: str
    thread: int
    thread_name: str
    during_capture: bool
    count: int


class Dependency(NamedTuple):
    """One stream waits for what another one has been given so far.

    ``reason`` is "event" (``Event.wait`` and everything that torch builds on it), "wait"
    (``Work.wait``), "input" (a back end's stream waits for its caller's) or "communicator" (an op
    waits for the one before it). ``stuck``: the awaited work will never end.
    """

    waiter: Stream
    awaited: Stream
    reason: str
    at_ns: int
    thread: int
    stuck: bool


def install() -> None:
    """Build the accelerator if need be, register it with torch, and its back ends with c10d.

    The back ends are called "own", "caller" and "silent", and report themselves as "nccl". Their
    status is read through ``torch._C._distributed_c10d._dump_nccl_trace_json``, as NCCL's is:
    ``_dump_fr_trace_json`` reads another recorder, in which NCCL writes nothing.
    """
    global _native
    if _native is not None:
        return
    import torch
    import torch.distributed as dist

    _native = MODULE.load()
    for name in BACKENDS:
        dist.Backend.register_backend(name, _creator(name), devices=[DEVICE])
    torch.utils.rename_privateuse1_backend(DEVICE)
    torch._register_device_module(DEVICE, _device_module())
    c10d: Any = torch._C._distributed_c10d
    c10d._dump_nccl_trace_json = _native.dump_trace_json


def _device_module() -> ModuleType:
    """Return the module that torch imports as ``torch.sim``."""
    import torch

    module: Any = ModuleType(f"torch.{DEVICE}")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.device_count = torch.accelerator.device_count
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    made: ModuleType = module
    return made


def _creator(name: str) -> Any:
    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return _native.Backend(rank, size, name == "caller", name != "silent")

    return create


def start(rank: int = 0, world_size: int = 2, meeting: str = "") -> None:
    """Initialise ``torch.distributed`` in this process, as one rank.

    ``meeting``: the file by which it meets the other ranks, over Gloo. Without it, there are none.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    install()
    backend, store = (
        ("gloo", dist.FileStore(meeting, world_size)) if meeting else ("fake", FakeStore())
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def new_group(backend: str, ranks: list[int] | None = None, op_ms: float = 1.0) -> Any:
    """Return a new group with one of the back ends; each of its ops takes ``op_ms``.

    torch takes its back end for NCCL, so that, as with NCCL, a group knows its sequence number.
    """
    import torch
    import torch.distributed as dist

    group = dist.new_group(ranks, backend=backend)
    kind = dist.ProcessGroup.BackendType.NCCL
    group._register_backend(torch.device(DEVICE), kind, backend_of(group))
    group._set_default_backend(kind)
    backend_of(group).op_ms = op_ms
    return group


def backend_of(group: Any) -> Any:
    """Return the group's back end: ``uid``, ``op_ms``, ``stream(device)``, ``outstanding()``."""
    import torch

    return group._get_backend(torch.device(DEVICE))


def own_stream(group: Any, device: int = 0) -> Stream:
    """Return the stream on which a group's back end runs its ops, unless on the caller's."""
    return Stream(device, backend_of(group).stream(device))


# --- the log ---


def calls() -> list[Call]:
    """Return the calls made since ``clear_log()``."""
    return [Call(*row) for row in _native.calls()]


def counts(*, by_others: bool = False) -> Counter[str]:
    """Return how many calls of each kind were made, by all threads or by all but the caller's."""
    total: Counter[str] = Counter()
    for call in calls():
        if not (by_others and call.thread == threading.get_native_id()):
            total[call.name] += call.count
    return total


def count(*names: str, by_others: bool = False) -> int:
    """Return how many calls of these kinds were made; see ``counts``."""
    made = counts(by_others=by_others)
    return sum(made[name] for name in names)


def dependencies() -> list[Dependency]:
    """Return which stream waits for which, in the order in which that came about."""
    return [
        Dependency(Stream(*waiter), Stream(*awaited), *rest)
        for waiter, awaited, *rest in _native.dependencies()
    ]


def contexts() -> set[int]:
    """Return the devices that were current to a thread while it made a call."""
    devices: set[int] = _native.contexts()
    return devices


def reset() -> None:
    """Forget all work, the clock's state, a capture, planned failures, and the log."""
    _native.reset()


def clear_log() -> None:
    """Forget the calls, dependencies and contexts."""
    _native.clear_log()


# --- the clock and the streams ---


def freeze(on: bool = True) -> None:
    """Stop the device's clock, or let it go on from the time at which it stopped."""
    _native.freeze(on)


def advance(milliseconds: float) -> None:
    """Move the device's clock."""
    _native.advance(milliseconds)


def put(stream: Stream, milliseconds: float) -> None:
    """Put work on a stream."""
    _native.put(*stream, milliseconds)


def hang(stream: Stream) -> None:
    """Put work on a stream that never ends."""
    _native.hang(*stream)


def busy_ms(stream: Stream) -> float:
    """Return for how long a stream still has work."""
    milliseconds: float = _native.busy_ms(*stream)
    return milliseconds


def stuck(device: int = 0) -> set[int]:
    """Return the streams of a device that will never be done."""
    return {number for number in range(256) if _native.is_stuck(device, number)}


def fail_events(on: bool = True) -> None:
    """Have the creation of timing events raise, as on a device that has an error."""
    _native.fail_events(on)


# --- capture into a graph ---


class Capture:
    """A capture: ``invalidated_by`` says how many calls would have made CUDA reject it."""

    invalidated_by = 0


@contextmanager
def capture(stream: Stream) -> Iterator[Capture]:
    """Capture what this thread puts on the stream, and on streams that wait for it."""
    captured = Capture()
    _native.begin_capture(*stream)
    try:
        yield captured
    finally:
        captured.invalidated_by = _native.end_capture()


def replay() -> int:
    """Put the last capture's work on its streams; return how many pieces of work it has."""
    pieces: int = _native.replay()
    return pieces


# --- the back ends' watchdog ---


def tick() -> None:
    """Have the watchdog look once at all outstanding ops and update the groups' status."""
    _native.tick()


def watchdog(on: bool) -> None:
    """Start or stop a thread that ticks ten times a second."""
    _native.watchdog(on)


def status(group: Any) -> dict[str, int]:
    """Return the last enqueued, started and completed number that a group's back end reports."""
    dumped = json.loads(_native.dump_trace_json(includeCollectives=False))
    fields = dumped["pg_status"].get(str(backend_of(group).uid), {})
    return {
        name.removeprefix("last_").removesuffix("_collective"): int(value)
        for name, value in fields.items()
    }

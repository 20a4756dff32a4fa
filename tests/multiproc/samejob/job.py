"""What a program of the same-job test works with, and how it tells what it saw."""

from __future__ import annotations

import hashlib
import re
import struct
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.multiprocessing.reductions import StorageWeakRef

from samejob.modes import Mode

Thing = TypeVar("Thing")
TIMEOUT = timedelta(seconds=30)  # of process groups; far below the deadline of a run


class Job:
    """One rank's view of the program it runs.

    ``saw`` writes down a result, ``attempt`` a call's result or its error, ``watch`` names an
    object that must not outlive the program, and ``middle`` is the place where recording is
    switched on late or off early.
    """

    def __init__(
        self, rank: int, world_size: int, folder: Path, port: int, mode: Mode, mode_name: str
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.folder = folder
        self.port = port
        self.mode = mode
        self.mode_name = mode_name
        self.backend = "gloo" if torch.get_default_device().type == "cpu" else "nccl"
        self.seen: dict[str, Any] = {}
        self._watched: list[tuple[str, Callable[[], bool]]] = []

    def init(self) -> None:
        """Make the default process group over a file store."""
        store = dist.FileStore(str(self.folder / "store"), self.world_size)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.world_size, timeout=TIMEOUT
        )
        self.watch("file store", store)
        self.watch_default_group()

    def watch_default_group(self) -> None:
        """Watch the default group and its store."""
        self.watch("default group", dist.group.WORLD)
        self.watch("default store", c10d._get_default_store())

    def middle(self, times: int = 1) -> None:
        """Switch recording, if this run does that in the middle of the program."""
        self.mode.toggle(times)

    def saw(self, name: str, value: Any) -> None:
        """Write down a result under a name of its own."""
        if name in self.seen:
            raise ValueError(f"there are two results named {name!r}")
        self.seen[name] = plain(value)

    def attempt(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Write down what a call, and the wait for the Work that it returned, gave or raised."""
        try:
            value = call(*args, **kwargs)
            if isinstance(value, dist.Work):
                value = ["Work", value.wait()]
        except Exception as error:
            self.saw(name, error)
        else:
            self.saw(name, value)

    def watch(self, name: str, thing: Thing) -> Thing:
        """Have the run fail if ``thing`` is alive after the program."""
        if isinstance(thing, torch.Tensor):
            storage = StorageWeakRef(thing.untyped_storage())
            self._watched.append((f"memory of {name}", lambda: not storage.expired()))
        reference = weakref.ref(thing)
        self._watched.append((name, lambda: reference() is not None))
        return thing

    def announce(self, event: str) -> None:
        """Tell the other ranks of an event, without torch.distributed."""
        (self.folder / f"event {event}").touch()

    def await_event(self, event: str) -> None:
        """Wait until a rank has announced an event. Raises ``TimeoutError`` after a minute."""
        deadline = time.monotonic() + 60
        while not (self.folder / f"event {event}").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank} waited a minute for {event!r}")
            time.sleep(0.002)

    def alive(self) -> list[str]:
        """Return the names of watched objects that are still alive."""
        return sorted(name for name, is_alive in self._watched if is_alive())


def plain(value: Any) -> Any:
    """Return a value as JSON that is equal exactly if the value is, bit for bit.

    Raises:
        TypeError: a result of this type cannot be compared.
    """
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if isinstance(value, BaseException):
        return {"error": f"{type(value).__module__}.{type(value).__qualname__}", "text": str(value)}
    if isinstance(value, bool | int | str | None):
        return value
    if isinstance(value, float):
        return {"float": struct.pack(">d", value).hex()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    raise TypeError(f"a result of type {type(value).__qualname__} cannot be compared")


def _plain_tensor(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach()
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.contiguous()
    content = tensor.view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)
    return {
        "tensor": str(tensor.dtype),
        "shape": list(tensor.shape),
        "sha256": hashlib.sha256(content.cpu().numpy().tobytes()).hexdigest(),
    }


# What differs between two runs of the same program without recording, and its stand-in.
_VARIES = [
    (re.compile(r"0x[0-9a-fA-F]+"), "ADDRESS"),
    (re.compile(r"\[([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+(?: \d+)? "), r"[\1TIME "),
    (re.compile(r"([WEIF])\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "), r"\1TIME "),
    # How Gloo notices that the peer has closed the connection is a matter of chance.
    (
        re.compile(
            r"(?:\[[^\]]*/gloo/transport/tcp[^\]]*\] )?"
            r"(?:Read error|Connection closed|Write error|writev)[^\n]*"
            r"(?:by peer|Broken pipe)[^\n]*"
        ),
        "PEER GONE",
    ),
    (re.compile(r"(\[?(?:127\.0\.0\.1|localhost|::1|::ffff:127\.0\.0\.1)\]?):\d+"), r"\1:PORT"),
    (re.compile(r"\b(pid:?|process) \d+"), r"\1 PID"),
    # torch looks up the name of each TCPStore's peer; a busy resolver may have no answer.
    (
        re.compile(
            r"^\[W[^\]]*\] \[c10d\] The hostname of the client socket cannot be retrieved\."
            r" err=-3\n",
            re.MULTILINE,
        ),
        "",
    ),
    # monitored_barrier gives Gloo the time that is left, which is 49 or 50 of 50 ms.
    (re.compile(r"Timed out waiting \d+ms"), "Timed out waiting TIME"),
]


def normalised(text: str, folder: Path) -> str:
    """Return a text without what differs between two runs of the same program."""
    text = text.replace(str(folder), "FOLDER")
    for pattern, stand_in in _VARIES:
        text = pattern.sub(stand_in, text)
    return text

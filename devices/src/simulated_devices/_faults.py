"""Order faults while a job runs, by a file in a folder that its devices follow."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ._errors import DevicesError

KINDS = {
    "stall": "the device does not start its NCCL operations, or with scope=all nothing at all",
    "slow": "everything takes the device a factor longer",
    "link": "no byte passes between two ranks",
    "xid": "the driver reports an Xid; after 79 the device is lost",
    "ecc": "an uncorrectable ECC error (Xid 48)",
    "oom": "the device has only so many bytes of memory left",
    "network": "NCCL reports an asynchronous network error",
    "init": "the making of communicators hangs",
}


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: One of ``KINDS``.
        rank: The rank it strikes, as in ``RANK``; None for all.
        device: The device it strikes; None for all that the rank uses.
        peer: Of a link, the rank at its other end.
        from_op: Strikes NCCL operations from this number on. A device's first has number 1, a group of
            operations counts as one.
        factor: Of a slow device.
        code: Of an Xid.
        bytes: Of an out of memory, what may be allocated in all.
        scope: Of a stall, ``nccl`` or ``all``.
    """

    kind: str
    rank: int | None = None
    device: int | None = None
    peer: int | None = None
    from_op: int | None = None
    factor: float | None = None
    code: int | None = None
    bytes: int | None = None
    scope: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise DevicesError(f"there is no fault {self.kind!r}; there are {', '.join(KINDS)}.")
        if self.kind == "slow" and not (self.factor and self.factor > 1):
            raise DevicesError("a slow device needs a factor above 1.")
        if self.kind == "xid" and self.code is None:
            raise DevicesError("an Xid needs a code, for example 79.")
        if self.scope not in (None, "nccl", "all"):
            raise DevicesError(f"the scope of a stall is nccl or all, not {self.scope!r}.")

    def line(self, identity: int) -> str:
        """Return the fault as it stands in the file."""
        names = ("rank", "device", "peer", "from_op", "factor", "code", "bytes", "scope")
        values = {name: getattr(self, name) for name in names}
        if self.kind == "oom" and self.bytes is None:
            values["bytes"] = 0
        return " ".join(
            [
                str(identity),
                self.kind,
                *(f"{name}={value}" for name, value in values.items() if value is not None),
            ]
        )


class FaultFolder:
    """The folder named by ``SIMULATED_DEVICES_FAULTS``. Several processes may order faults in it."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def order(self, fault: Fault) -> int:
        """Order a fault, and return the number by which it can be lifted. It strikes within 0.2 s."""
        with self._changing() as lines:
            identity = 1 + max((int(line.split()[0]) for line in lines), default=0)
            lines.append(fault.line(identity))
        return identity

    def lift(self, identity: int | None = None) -> None:
        """Lift one fault, or all.

        A device that has failed stays failed for the processes that saw it, as on real hardware.

        Raises:
            DevicesError: No fault has that number.
        """
        with self._changing() as lines:
            kept = [line for line in lines if identity is not None and line.split()[0] != str(identity)]
            if identity is not None and len(kept) == len(lines):
                raise DevicesError(
                    f"no fault has the number {identity}; `devices fault --at {self.folder} list` shows all."
                )
            lines[:] = kept

    def ordered(self) -> list[str]:
        """Return the lines of all faults that are ordered now."""
        try:
            return (self.folder / "faults").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[str]]:
        # The lock is a file of its own, because the other one is replaced.
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lines = self.ordered()
            yield lines
            descriptor, name = tempfile.mkstemp(dir=self.folder, prefix="faults.")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in lines)
            os.replace(name, self.folder / "faults")

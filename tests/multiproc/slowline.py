"""Two hosts on this machine, joined by a line with a delay, loss and a limited rate.

Each host is a network namespace with a TUN device, and a process moves IP packets between the two
devices. So TCP sees late and lost packets as it does on a real line. Many kernels do not have
``tc netem``, which would do the same.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import socket
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankcall.testing.spawn import fork_server

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 1, 0x1000
_QUEUE_S = 0.05  # the line's buffer; packets that come to a full one are dropped
_AT_ONCE = 32  # packets that are read before the ones that are due are written


def address(host: int) -> str:
    """Return the address of a host, 0 or 1."""
    return f"10.77.0.{host + 1}"


@dataclass(frozen=True)
class Line:
    """The delay, the loss and the rate of the line, in each direction."""

    delay_s: float
    loss: float  # the share of packets that are dropped
    bits_per_s: float
    mtu: int = 1500


class Relay:
    """The process that moves the packets, as the test sees it."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def counts(self) -> dict[str, int]:
        """Return how many packets were passed on and lost."""
        return self._ask("count")

    def cut(self) -> None:
        """Lose all packets from now on."""
        self._ask("cut")

    def _ask(self, what: str) -> dict[str, int]:
        self._pipe.send(what)
        assert self._pipe.poll(60), "the relay does not answer"
        return dict(self._pipe.recv())


@contextmanager
def joined(line: Line, folder: Path) -> Iterator[Relay]:
    """Have a line between two hosts that ``enter`` makes; skip the test if that is not allowed."""
    if os.geteuid() != 0 or not os.path.exists("/dev/net/tun") or shutil.which("ip") is None:
        pytest.skip("network namespaces need root, /dev/net/tun and the command ip")
    context = fork_server()
    mine, theirs = context.Pipe()
    args = (line, str(folder / "line"), theirs)
    process = context.Process(target=_relay, args=args, daemon=True)
    process.start()
    try:
        assert mine.poll(60), "no relay"
        assert mine.recv() == "ready"
        yield Relay(mine)
    finally:
        process.kill()
        process.join(20)
        process.close()
        mine.close()
        theirs.close()


def enter(host: int, folder: str, mtu: int) -> None:
    """Move this thread, and those that it starts, to a host of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace")
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"line", _IFF_TUN | _IFF_NO_PI))
    for words in (
        "link set lo up",
        f"addr add {address(host)}/24 dev line",
        f"link set line mtu {mtu} up",
    ):
        subprocess.run(["ip", *words.split()], check=True, timeout=30)
    with socket.socket(socket.AF_UNIX) as relay:
        relay.settimeout(60)
        relay.connect(f"{folder}/line")
        socket.send_fds(relay, [b"%d" % host], [tun])
        assert relay.recv(1) == b"+"  # both hosts are there
    os.close(tun)


def _relay(line: Line, path: str, pipe: Any) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        server.settimeout(60)
        pipe.send("ready")
        connections = [server.accept()[0] for _ in range(2)]
    devices = [0, 0]
    for connection in connections:
        host, fds, *_ = socket.recv_fds(connection, 1, 1)
        devices[int(host)] = fds[0]
        os.set_blocking(fds[0], False)
    for connection in connections:
        connection.sendall(b"+")
    ways = [_Way(line, *devices), _Way(line, *reversed(devices))]
    while True:
        now = time.monotonic()
        due = min(way.write_due(now) for way in ways)
        readable, *_ = select.select([*devices, pipe], [], [], max(0.0, min(due - now, 1.0)))
        for way in ways:
            if way.source in readable:
                way.read()
        if pipe in readable:
            if pipe.recv() == "cut":
                for way in ways:
                    way.is_cut = True
            pipe.send({key: sum(way.counts[key] for way in ways) for key in ways[0].counts})


class _Way:
    """One direction of the line."""

    def __init__(self, line: Line, source: int, target: int) -> None:
        self.line, self.source, self.target = line, source, target
        self.counts = {"passed": 0, "lost": 0, "overflowed": 0}
        self._packets: deque[tuple[float, bytes]] = deque()  # with the time when each is due
        self.is_cut = False
        self._busy_until = 0.0
        self._choose = random.Random(source)

    def read(self) -> None:
        """Take packets from the host at this end."""
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.source, 1 << 16)
            except BlockingIOError:
                return
            now = time.monotonic()
            sent = max(self._busy_until, now) + 8 * len(packet) / self.line.bits_per_s
            if self.is_cut or self._choose.random() < self.line.loss:
                self.counts["lost"] += 1
            elif sent - now > _QUEUE_S + 8 * self.line.mtu / self.line.bits_per_s:
                self.counts["overflowed"] += 1
            else:
                self._busy_until = sent
                self._packets.append((sent + self.line.delay_s, packet))

    def write_due(self, now: float) -> float:
        """Give the other host the packets that are due; return when the next one is."""
        while self._packets and self._packets[0][0] <= now:
            try:
                os.write(self.target, self._packets.popleft()[1])
                self.counts["passed"] += 1
            except OSError:  # the host is gone
                continue
        return self._packets[0][0] if self._packets else now + 1.0

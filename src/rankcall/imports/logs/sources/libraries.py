"""Messages of the libraries below torch that move the data: NCCL, RCCL and HCCL."""

from __future__ import annotations

import re

from rankcall.imports.logs.blame import blame_of
from rankcall.imports.logs.facts import DeviceFault, Fact, Member, Trouble
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import Message, Source
from rankcall.ranks import MAX_RANKS

__all__ = ["SOURCES"]

_NCCL_HEAD = r"(?<![\w.-])([\w.-]{1,253}):(\d{1,10}):\d{1,10} \[\d{1,3}\] "
_NCCL_INIT = re.compile(
    _NCCL_HEAD
    + r"N?R?CCL INFO .{0,200}?rank (\d{1,7}) nranks (\d{1,7}) .{0,300}?Init (?:START|COMPLETE)"
)
_NCCL_WARN = re.compile(_NCCL_HEAD + r"(?:\S{1,200}:\d{1,6} )?(?:N|R)CCL WARN (.{1,1000})")
_PEER = re.compile(r"(?:remote peer|peer|to|from) ([\w.-]{1,253}(?:<\d{1,6}>)?)\s*$")


def _member(line: Line, match: re.Match[str]) -> Fact | None:
    rank, size = int(match[3]), int(match[4])
    return Member(line, match[1], int(match[2]), rank, size) if rank < size <= MAX_RANKS else None


def _nccl_warn(line: Line, match: re.Match[str]) -> Fact | None:
    what = match[3].strip()
    if blame_of(what) == "own":
        return DeviceFault(line, what, match[1], int(match[2]))
    peer = _PEER.search(what)
    return Trouble(line, match[1], int(match[2]), peer[1] if peer else "")


_HCCL = re.compile(r"\b(E[IJ]\d{4})\b:? ?(.{0,300})")
_HCCL_OWN = ("EI0001", "EI0007", "EI0011")  # environment, resources: this process could not do it


def _hccl(line: Line, match: re.Match[str]) -> Fact:
    what = f"{match[1]} {match[2]}".strip()
    return DeviceFault(line, what) if match[1] in _HCCL_OWN else Trouble(line)


SOURCES: tuple[Source, ...] = (
    Source(
        "NCCL, RCCL",
        "`host:pid:tid [device]`; `Init START` ties the pid to a rank of the communicator",
        (
            Message(
                "a process is a rank of a communicator",
                ("Init START", "Init COMPLETE"),
                _NCCL_INIT,
                _member,
                "node-c:306305:306607 [3] NCCL INFO comm 0x55a51f00 rank 3 nranks 8 cudaDev 3 "
                "nvmlDev 3 busId c1000 commId 0x4d5e - Init START",
                "NCCL 2.14 and newer, with NCCL_DEBUG=INFO",
            ),
            Message(
                "a warning: the own device, or the connection to another rank",
                ("CCL WARN",),
                _NCCL_WARN,
                _nccl_warn,
                "node-c:306305:306615 [3] include/alloc.h:178 NCCL WARN Cuda failure 'out of "
                "memory'",
                "NCCL 2.4 and newer, with NCCL_DEBUG=WARN",
            ),
        ),
    ),
    Source(
        "HCCL",
        "none that tells the rank",
        (
            Message(
                "an error of the collective library or of its links",
                ("EI00", "EJ00"),
                _HCCL,
                _hccl,
                "EI0002: Notify wait timeout, remote rank did not answer within 1836 s",
                "CANN 7 and newer",
            ),
        ),
    ),
)

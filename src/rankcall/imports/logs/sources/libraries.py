"""Messages of the libraries below torch that move the data: NCCL, RCCL, HCCL and oneCCL."""

from __future__ import annotations

import re
from collections.abc import Hashable

from rankcall.imports.logs.blame import blame_of
from rankcall.imports.logs.facts import DeviceFault, Enqueued, Fact, Member, Trouble
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.reading import Repeated
from rankcall.imports.logs.sources.message import (
    Message,
    Source,
    any_of,
    failed,
    op_name,
    waited,
)
from rankcall.ranks import MAX_RANKS

__all__ = ["SOURCES"]

_NCCL_HEAD = r"(?<![\w.-])([\w.-]{1,253}):(\d{1,10}):\d{1,10} \[(\d{1,3})\] "
_NCCL_INIT = re.compile(
    _NCCL_HEAD
    + r"N?R?CCL INFO .{0,200}?rank (\d{1,7}) nranks (\d{1,7}) .{0,300}?Init (?:START|COMPLETE)"
)
_POINTER, _NAME = (
    re.compile(r"\bcomm (0x[\da-f]{1,16})\b"),
    re.compile(r"\bcommId (0x[\da-f]{1,16})\b"),
)
_ENQUEUED = re.compile(
    _NCCL_HEAD
    + r"(?:\d{1,20} )?N?R?CCL INFO (\w{3,20}): opCount ([\da-f]{1,16}) sendbuff \S{3,20} "
    r"recvbuff \S{3,20} (count \d{1,20} datatype \d{1,3} op \d{1,20} root \d{1,7}) "
    r"comm (0x[\da-f]{1,16}) \[nranks=(\d{1,7})\] stream \S{3,20}"
    r"(?: task \d{1,9} globalrank (\d{1,7}))?"
)
_NCCL_WARN = re.compile(_NCCL_HEAD + r"(?:\S{1,200}:\d{1,6} )?(?:N|R)CCL WARN (.{1,1000})")
_PEER = re.compile(
    r"(?:peer|to|from) (?:([\w.:%-]{1,253}<\d{1,6}>)|([\w.-]{1,253})(?=\s*$| with status))"
    r"|remote GIDs? ?([\da-fA-F:.]{3,45})"
)
_OWN_REDUCTION = re.compile(r"\bop (?:[5-9]|\d{2,20})\b")  # NCCL has five
_FAR = 300  # bytes of a host and its process
# It begins with words without a choice, so that the search for them is fast.
_REPEATED = re.compile(rb"CCL INFO (\w{3,20}): opCount [^\n]{60,220}? comm (0x[\da-f]{1,16}) ")
# NCCL warns of what makes it slower, too, and goes on.
_ADVISORY = re.compile(
    r"Missing \"|Failed to open(?: lib|$)|[Pp]lugin"
    r"|NET/OFI .{0,80}(?:initialization failed|provider)"
    r"|NUMA auto balancing|lead to (?:low|variability)|not recommended|[Dd]eprecated"
)


def _member(line: Line, match: re.Match[str]) -> Fact | None:
    rank, size = int(match[4]), int(match[5])
    if not rank < size <= MAX_RANKS:
        return None
    pointer, name = (pattern.search(match[0]) for pattern in (_POINTER, _NAME))
    return Member(
        line,
        match[1],
        int(match[2]),
        rank,
        size,
        pointer[1] if pointer else "",
        name[1] if name else "",
    )


def _enqueued(line: Line, match: re.Match[str]) -> Fact | None:
    size = int(match[8])
    if not 1 < size <= MAX_RANKS:
        return None
    return Enqueued(
        line,
        match[1],
        int(match[2]),
        int(match[3]),
        match[7],
        size,
        int(match[5], 16),
        op_name(match[4]),
        # A reduction that the program has made has a number of its own in each process.
        _OWN_REDUCTION.sub("op custom", match[6]),
        int(match[9] or -1),
    )


def _of_communicator(block: bytes, match: re.Match[bytes]) -> Hashable:
    """Return what identifies the process and the communicator of a line that enqueues an op.

    Sends and receives are kept apart, so that others do not push all of them out. A log has
    millions of such lines, so this looks at few of their bytes: those between the two spaces before
    ``[3] NCCL``, which are ``host:pid:tid``.
    """
    end = block.rfind(b" ", 0, match.start() - 2)
    begin = max(block.rfind(b" ", 0, end) + 1, block.rfind(b"\n", 0, end) + 1, end - _FAR)
    return block[begin:end], match[2], match[1] in (b"Send", b"Recv")


def _nccl_warn(line: Line, match: re.Match[str]) -> Fact | None:
    what = match[4].strip()
    if blame_of(what) == "own":
        return DeviceFault(line, what, match[1], int(match[2]))
    if _ADVISORY.search(what):
        return None
    peer = _PEER.search(what)
    return Trouble(line, match[1], int(match[2]), peer[peer.lastindex or 0] if peer else "")


_HCCL = re.compile(
    r"\b(E[IJ]\d{4})\b:? ?(?:\[PID: (\d{1,10})\] ?)?(?:\d{4}-[\d:.-]{1,30} ?)?(.{0,1000})"
)
# What this process could not do itself: its settings, its memory, its network port, its device.
_HCCL_OWN = ("EI0001", "EI0007", "EI0011", "EI0012", "EJ0001", "EJ0002", "EJ0003")
_HCCL_WAITS = ("EI0002", "EI0006")
_HCCL_PEER = re.compile(
    r"remote rank: ?\[(\d{1,7})\]"
    r"|remoteUser[rR]ank\[(\d{1,7})\](?:-remote_?[iI]p_?[aA]ddr\[([\w.:]{1,45}))?"
)
_END_OF_LINK = r"([\d.a-f:]{3,45})\((\d{1,7})\) {1,9}\| {1,9}\d{1,10} {1,9}\| {1,9}"
_HCCL_LINK = re.compile(
    rf"(?:HCCL\((\d{{1,10}}),.{{0,200}})?\| {{1,9}}{_END_OF_LINK}{_END_OF_LINK}"
    r"(?:client|server) {1,9}\| {0,9}time out"
)
_CORE = re.compile(
    r"(?:\[PID: (\d{1,10})\].{0,120})?there is an (?:exception of )?"
    r"((?:fftsplus )?(?:aivec|aicore|aivector) error(?: exception)?, core id is \d{1,4})"
)
_NPU_RANK = re.compile(r"\(PID:(\d{1,10}), Device:\d{1,4}, RankID:(\d{1,7})\)")


def _hccl(line: Line, match: re.Match[str]) -> Fact:
    what, pid = f"{match[1]} {match[3]}".strip(), int(match[2] or -1)
    if match[1] in _HCCL_OWN:
        return DeviceFault(line, what, pid=pid)
    peer = _HCCL_PEER.search(match[3])
    named = _rank_of_group(peer[3] or "", peer[1] or peer[2]) if peer else ""
    return Trouble(line, pid=pid, peer=named, has_waited=match[1] in _HCCL_WAITS)


def _core(line: Line, match: re.Match[str]) -> Fact:
    return DeviceFault(line, match[2], pid=int(match[1] or -1))


def _hccl_link(line: Line, match: re.Match[str]) -> Fact:
    own, peer = _rank_of_group(match[4], match[5]), _rank_of_group(match[2], match[3])
    return Trouble(line, own, int(match[1] or -1), peer)


def _rank_of_group(address: str, rank: str) -> str:
    """Name a process by its rank in its communicator, which may not be that in the job."""
    return f"{address} (rank {rank} of its group)" if address else f"rank {rank} of its group"


def _npu_rank(line: Line, match: re.Match[str]) -> Fact | None:
    rank = int(match[2])
    return Member(line, line.writer.host, int(match[1]), rank, 0) if rank < MAX_RANKS else None


_LIBFABRIC = re.compile(
    r"libfabric:(\d{1,10}):.{0,200}?<warn> err: \d{1,6}, message: .{0,300}? My host id: "
    r"(\S{1,253}) Peer EFA addr: \S{1,200} Peer host id: (\S{1,253})"
)


def _libfabric(line: Line, match: re.Match[str]) -> Fact:
    return Trouble(line, match[2], int(match[1]), match[3])


_ONECCL = re.compile(r"\((\d{1,10})\) \|CCL_ERROR\| (.{1,400})")
_LEVEL_ZERO = re.compile(
    r"(?:UR_RESULT_ERROR|ZE_RESULT_ERROR|PI_ERROR)_(DEVICE_LOST|OUT_OF_(?:DEVICE_MEMORY|RESOURCES))"
)


def _oneccl(line: Line, match: re.Match[str]) -> Fact:
    device = _LEVEL_ZERO.search(match[2])
    if device:
        return DeviceFault(line, device[0], pid=int(match[1]))
    return Trouble(line, pid=int(match[1]))


def _level_zero(line: Line, match: re.Match[str]) -> Fact | None:
    return None if "|CCL_ERROR|" in line.text else DeviceFault(line, match[0])


SOURCES: tuple[Source, ...] = (
    Source(
        "NCCL, RCCL",
        "`host:pid:tid [device]`; `Init START` ties the pid to a rank of the communicator",
        (
            Message(
                "a process is a rank of a communicator",
                (" - Init ",),
                _NCCL_INIT,
                _member,
                "node-c:306305:306607 [3] NCCL INFO comm 0x55a51f00 rank 3 nranks 8 cudaDev 3 "
                "nvmlDev 3 busId c1000 commId 0x4d5e - Init START",
                "NCCL 2.14 and newer, with NCCL_DEBUG=INFO",
            ),
            Message(
                "what a process enqueues next; the newest such lines of each process are read",
                (" opCount ",),
                _ENQUEUED,
                _enqueued,
                "node-c:45012:45012 [2] NCCL INFO AllGather: opCount 28c sendbuff 0x7f1fd894af00 "
                "recvbuff 0x7f1ed1c00100 count 59205120 datatype 0 op 0 root 0 comm 0x559c24b55610 "
                "[nranks=4] stream 0x559c248a3630",
                "NVIDIA/nccl#147, ROCm/rccl#429: with NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL",
                repeated=Repeated(_REPEATED, _of_communicator),
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
        "`HCCL(pid,name):`; `(PID:1292363, Device:1, RankID:1)` of torch_npu ties a pid to a rank",
        (
            Message(
                "an error of the collective library or of its links",
                ("EI00", "EJ00"),
                _HCCL,
                _hccl,
                "[rank1]: EI0009: [PID: 2225827] 2026-03-14-20:59:48.119.066 Transport init error. "
                "Reason: [Create][DestLink]Create Dest error! createLink para:rank[1]-"
                "localUserrank[1]-localIpAddr[172.16.0.114], dst_rank[0]-remoteUserrank[0]-"
                "remote_ip_addr[172.16.0.115]",
                "CANN 7 and newer",
            ),
            Message(
                "a wait for another rank took too long",
                ("fftsplus task timeout",),
                any_of("fftsplus task timeout"),
                waited,
                "[rank5]: EI9999  The error from device(chipId:5, dieId:0), serial number is 3, "
                "hccl fftsplus task timeout occurred during task execution, stream_id:7, sq_id:7, "
                "task_id:5990, stuck notify num:1, timeout:1836.",
                "CANN 7 and newer",
            ),
            Message(
                "a core of the process's own device met an exception",
                ("error exception, core id", "exception of fftsplus"),
                _CORE,
                _core,
                "EZ9999: [PID: 14897] 2025-07-23-10:35:42.381.401 The error from device(chipId:7, "
                "dieId:0), serial number is 2, there is an aivec error exception, core id is 5, "
                "error code = 0",
                "CANN 7 and newer",
            ),
            Message(
                "an error of CANN that another line explains",
                ("9999: Inner Error",),
                any_of("9999: Inner Error"),
                failed,
                "EI9999: Inner Error!",
                "CANN 7 and newer",
            ),
            Message(
                "a row of the table of links that were not made in time",
                ("time out |",),
                _HCCL_LINK,
                _hccl_link,
                "[ERROR] HCCL(669593,python3):2026-03-14-18:13:19.031.756 [hccl_socket_manager.cc:"
                "599] [673943]   |  192.7.3.198(1)   |  16666  |   192.7.2.199(0)   |  0  |  "
                "server  | time out |   DISABLE  |",
                "CANN 7 and newer",
            ),
            Message(
                "which rank a process is",
                ("RankID:",),
                _NPU_RANK,
                _npu_rank,
                "[ERROR] 2026-03-14-18:07:20 (PID:1292363, Device:1, RankID:1) ERR01100 OPS call "
                "acl api failed.",
                "torch_npu 2.1 and newer",
            ),
        ),
    ),
    Source(
        "AWS Neuron",
        "`pid:tid [device]`; no rank",
        (
            Message(
                "a warning of its collective library",
                ("CCOM WARN",),
                any_of("CCOM WARN"),
                waited,
                "2023-Aug-01 16:14:43.0210 4711:4932 [31] bootstrap.cc:89 CCOM WARN Timeout "
                "waiting for incoming connection (waited 120 sec)",
                "Neuron 2",
            ),
        ),
    ),
    Source(
        "UCX",
        "`[node:pid:tid]`; no rank",
        (
            Message(
                "an error of a connection",
                ("UCX  ERROR",),
                any_of("UCX  ERROR"),
                waited,
                "[1714550400.123456] [node-1:4711 :0]  ib_mlx5_log.c:179  UCX  ERROR Transport "
                "retry count exceeded on mlx5_0:1/IB (synd 0x15 vend 0x81 hw_synd 0/0)",
                "UCX 1.8 and newer",
            ),
        ),
    ),
    Source(
        "libfabric",
        "`libfabric:pid:`; no rank",
        (
            Message(
                "EFA: a request to another host failed",
                (" Peer host id: ",),
                _LIBFABRIC,
                _libfabric,
                "libfabric:451707:1708520807::efa:cq:efa_rdm_txe_handle_error():737<warn> err: 5, "
                "message: Invalid address My EFA addr: fi_addr_efa://[fe80::1]:0:1072483550 My "
                "host id: i-0db7083f Peer EFA addr: fi_addr_efa://[fe80::2]:0:947699476 Peer host "
                "id: i-0ce6d3d5 (7)",
                "aws/aws-ofi-nccl#346",
            ),
        ),
    ),
    Source(
        "oneCCL, Level Zero",
        "`(pid) |CCL_ERROR|`; no rank",
        (
            Message(
                "an error of the collective library",
                ("|CCL_ERROR|",),
                _ONECCL,
                _oneccl,
                "2026:03:14-14:34:47:(19220) |CCL_ERROR| comm_selector.cpp:57 create_comm_impl: "
                "condition ccl::global_data::get().ze_data failed",
                "oneCCL 2021 and newer",
            ),
            Message(
                "a thread of the library did not start",
                ("oneCCL: failed to start",),
                any_of("oneCCL: failed to start worker"),
                failed,
                "oneCCL: failed to start worker #0",
                "intel/intel-xpu-backend-for-triton#7710",
            ),
            Message(
                "a device is lost or has no memory left",
                (
                    "ERROR_DEVICE_LOST",
                    "ERROR_OUT_OF_",
                ),
                _LEVEL_ZERO,
                _level_zero,
                "RuntimeError: level_zero backend failed with error: 20 "
                "(UR_RESULT_ERROR_DEVICE_LOST)",
                "torch 2.4 and newer on XPU",
            ),
        ),
    ),
)

"""Messages of torch itself: its NCCL watchdogs, Gloo, the stores, and the checks of DETAIL mode."""

from __future__ import annotations

import re

from rankcall.imports.logs.blame import blame_of
from rankcall.imports.logs.facts import (
    Aborting,
    BarrierFailed,
    BarrierReached,
    DeviceFault,
    Fact,
    Fatal,
    Fingerprint,
    Fragment,
    GroupName,
    Lagging,
    Mismatch,
    ModelsDiffer,
    Outside,
    Progress,
    StoreBarrier,
    StoreMet,
    StoreWait,
    Timeout,
    Trouble,
)
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import (
    Message,
    Source,
    aborting,
    any_of,
    failed,
    op_name,
    ranks_in,
    trouble,
    waited,
)
from rankcall.ranks import MAX_RANKS
from rankcall.whole_numbers import whole_number

__all__ = ["SOURCES", "of_no_row"]

_COMMON = (
    *("RuntimeError: ", "ValueError: ", "AssertionError: ", "KeyError: ", "TypeError: "),
    *("OSError: ", "AcceleratorError: ", "SignalException: "),
    *("torch.distributed.Dist", ".api.Rendezvous"),
)
_TRACEBACK, _REPORT, _STACK = 300, 40, 60  # lines of messages that have several
_WORK = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\((.{0,2000}?)\) ran for (\d{1,15}) mill"
)
# ProcessGroupNCCL2, which is "nccl" in torch 2.15. It does not say which collective that was.
_NCCL2_WORK = re.compile(
    r"\[TC\]\[rank=(\d{1,7})\]\[name=[^\]]{0,200}\] Operation timed out after (\d{1,15}) ms"
)
_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut)=(\w{1,40})")
_IN_GROUP = re.compile(r"\[Rank (\d{1,7})\] $")
_GROUP = re.compile(
    r"\[PG (?:ID )?(\d{1,9})(?: PG GUID ([^\s()\]]{1,200}))? ?(?:\(([^()]{0,200})\))? ?"
    r"Rank (\d{1,7})\]"
)
_NUMBER = r"(-?\d{1,18})"
# torch 2.14 writes the name of an op behind some of the numbers: ``last started work: -1 ()``.
_NAMED_NUMBER = rf"{_NUMBER}(?: \([^()]{{0,80}}\))?"
_STATE = re.compile(
    rf"[Ll]ast enqueued (?:NCCL )?work: {_NAMED_NUMBER}(?:, last started [^:,]*: {_NAMED_NUMBER})?"
    rf", last completed (?:NCCL )?work: {_NUMBER}"
)
_FAILED = re.compile(
    rf"(?:watchdog at work|watchdog at work sequence id|Timeout at NCCL work): {_NUMBER}"
)
_TERMINATED = re.compile(
    r"(?:\[Rank (\d{1,7})\] NCCL )?watchdog thread terminated with exception: (.{1,400})"
)


def _timeout(line: Line, match: re.Match[str]) -> Fact:
    fields = dict(_FIELD.findall(match[1]))
    rank = _IN_GROUP.search(line.text, 0, match.start())
    sizes = [fields[name] for name in ("NumelIn", "NumelOut") if name in fields]
    return Timeout(
        line,
        whole_number(fields.get("SeqNum")) or 0,
        op_name(fields.get("OpType", "")),
        tuple(whole_number(size) or 0 for size in sizes),
        int(match[2]) / 1e3,
        int(rank[1]) if rank and int(rank[1]) < MAX_RANKS else -1,
    )


def _nccl2_timeout(line: Line, match: re.Match[str]) -> Fact:
    rank = int(match[1])
    return Timeout(line, 0, "", (), int(match[2]) / 1e3, rank if rank < MAX_RANKS else -1)


def _progress(line: Line, match: re.Match[str]) -> Fact | None:
    group = _GROUP.search(line.text)
    if group is None:
        return None
    failed = _FAILED.search(line.text)
    name = GroupName(group[2] or group[1], group[3] or "", int(group[4]))
    return Progress(
        line,
        name,
        int(failed[1]) if failed else -1,
        int(match[1]),
        int(match[match.lastindex or 3]),
    )


def _terminated(line: Line, match: re.Match[str]) -> Fact | None:
    what, number = match[2].strip(), int(match[1] or -1)
    if "Watchdog caught collective operation timeout" in what or _WORK.search(line.text):
        return None  # the time-out's own message says more
    if blame_of(what) != "own":
        return Trouble(line)
    return DeviceFault(line, what, in_group=number if number < MAX_RANKS else -1)


_LAGGING = re.compile(
    r"\[([\d, ]{1,8000})\] (finished|joined but didn't finish) collective #(\d{1,18})"
)
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]{1,8000})\] are the lagging ranks")


def _lagging(line: Line, match: re.Match[str]) -> Fact | None:
    if match[2] == "finished" and "didn't join" not in line.text:
        return None
    return Lagging(line, ranks_in(match[1]), match[2] != "finished")


def _never_joined(line: Line, match: re.Match[str]) -> Fact:
    return Lagging(line, ranks_in(match[1]), joined=False)


_FINGERPRINT = r"(?:CollectiveFingerPrint\()?(.{0,6000}?)"
_MISMATCH = re.compile(
    rf"Detected mismatch between collectives on ranks\. Rank (\d{{1,7}}) is running collective: "
    rf"{_FINGERPRINT}, ?but Rank (\d{{1,7}}) is running collective: {_FINGERPRINT}"
    r"(?:Collectives differ|$)"
)


def _mismatch(line: Line, match: re.Match[str]) -> Fact:
    own, other = _fingerprint(match[2]), _fingerprint(match[4])
    return Mismatch(line, int(match[1]), own, int(match[3]), other)


def _fingerprint(text: str) -> Fingerprint:
    seq = re.search(r"SequenceNumber=(\d{1,18})", text)
    op = re.search(r"OpType=(\w{1,40})", text) or re.match(r"\s*([A-Z_]{1,40})\b", text)
    shape = re.search(r"TensorShape=\[([\d, ]{0,4000})\]", text)
    dtype = re.search(r"TensorDtypes=(\w{1,40})", text)
    return Fingerprint(
        int(seq[1]) if seq else -1,
        op_name(op[1]) if op else "",
        f"[{shape[1]}]" if shape else "",
        dtype[1] if dtype else "",
    )


_ORDER = re.compile(
    r"Forward order differs across ranks: rank (\d{1,7}) is all-gathering (.{1,2000}?) while rank "
    r"(\d{1,7}) is all-gathering (.{1,2000})"
)


def _order(line: Line, match: re.Match[str]) -> Fact:
    """FSDP compares the first collectives of all ranks; each of them writes what two have."""
    own, other = (
        Fingerprint(-1, "all_gather", text.strip()[:200], "") for text in match.group(2, 4)
    )
    return Mismatch(line, int(match[1]), own, int(match[3]), other, by_rank=False)


_MODELS = re.compile(
    r"\[(\d{1,7})\]: params\[\d{1,9}\] in this process with (\w{1,20} \[[\d, ]{0,400}\]) "
    r"appears not to match \w{1,20} of the same param in process (\d{1,7})"
)
_PARAMETERS = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d{1,7}) has (\d{1,9}) params, while rank "
    r"(\d{1,7}) has inconsistent (\d{1,9}) params"
)


def _models(line: Line, match: re.Match[str]) -> Fact:
    rank, other = int(match[1]), int(match[3])
    return ModelsDiffer(line, rank, other, f"a parameter with {match[2]}", writer=rank)


def _parameters(line: Line, match: re.Match[str]) -> Fact:
    writer, what = int(match[1]), f"{match[4]} parameters, not {match[2]}"
    return ModelsDiffer(line, int(match[3]), writer, what, writer)


_BARRIER_FAILED = re.compile(
    r"\[Rank (\d{1,7})\]: Ranks? ((?:\d{1,7}, ?)*\d{1,7}) failed to pass monitoredBarrier in "
    r"(\d{1,12}) ms"
)
_BARRIER_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_STORE_BARRIER = re.compile(
    r"store based barrier on rank:? (\d{1,7}).{0,80}?key: ?(\S{1,200}).{0,40}?"
    r"world_size=(\d{1,7}), (?:num_workers_joined|worker_count)=(\d{1,7})"
)


_STORE_WAIT = re.compile(r"Waiting in store based barrier .{0,80}?key: ?([^\s,]{1,200})")
_STORE_MET = re.compile(r"Completed store-based barrier for key: ?(\S{1,200}) with \d{1,7} nodes")


def _store_wait(line: Line, match: re.Match[str]) -> Fact:
    return StoreWait(line, match[1])


def _store_met(line: Line, match: re.Match[str]) -> Fact:
    return StoreMet(line, match[1])


def _barrier_failed(line: Line, match: re.Match[str]) -> Fact | None:
    missing = ranks_in(match[2])
    return BarrierFailed(line, int(match[1]), missing, int(match[3]) / 1e3) if missing else None


def _barrier_reached(line: Line, match: re.Match[str]) -> Fact:
    return BarrierReached(line, int(match[1]))


def _store_barrier(line: Line, match: re.Match[str]) -> Fact:
    return StoreBarrier(line, int(match[1]), match[2].rstrip(","), int(match[3]), int(match[4]))


_CLOSED = (
    "onnection closed by peer",
    "onnection reset by peer",
    "onnection was likely closed",
    "Broken pipe",
    "Timed out waiting",
    "Some NCCL operations have failed",
    "remote process exited or there was a network error",
)
_NO_ANSWER = re.compile(
    r"client socket has timed out after \S{1,20} while trying to connect to \(([\w.:-]{1,253}), "
    r"(\d{1,5})\)"
)
_CLIENTS = re.compile(r"seconds waiting for clients\. +\d{1,7}/\d{1,7} +clients joined")


def _no_answer(line: Line, match: re.Match[str]) -> Fact:
    return Trouble(line, peer=f"{match[1]}:{match[2]}")


# torch writes the level, and the file that logs it, before each of its messages.
_ERROR = re.compile(
    r"^\[[EF](?:\d{3,4} \S{1,30})? ?(?:\d{1,10} )?[\w/]{1,200}\.(?:cpp|hpp|h|cc|cu):\d"
)
_CRASHED = re.compile(
    r"^Fatal Python error: ((?:Segmentation fault|Bus error|Illegal instruction"
    r"|Floating[- ]point exception).{0,80})"
)
_ALLOCATOR = (
    "double free ",
    *("(): invalid ", "(): corrupted "),  # free() and others
    "stack smashing detected",
)


_DAMAGED = re.compile(
    r"(\w{0,40}\(\): (?:invalid|corrupted) .{0,80}|double free .{1,80}|stack smashing detected)"
)


def _own_crash(line: Line, match: re.Match[str]) -> Fact:
    return Fatal(line, match[match.lastindex or 0].strip(), "own")


_CPP = re.compile(r"(?:^\s*|Unhandled exception: \S{1,100} )what\(\): +(.{1,1000})")


def _cpp(line: Line, match: re.Match[str]) -> Fact | None:
    blame = blame_of(match[1])
    return Fatal(line, match[1].strip(), blame) if blame != "victim" else Trouble(line)


# Without its frames, an exception may be of any program. These words are of devices and of ranks. A
# name before it may be that of a host, in a log too short to learn it from.
_EXCEPTION = re.compile(
    r"^(?:[\w.@-]{1,120}: )?(torch\.[\w.]{1,200}|[\w.]{0,200}(?:Error|Exception))"
    r"(?:: (.{1,1000}))?$"
)
_OF_DEVICES_OR_RANKS = re.compile(
    r"\b(?:NCCL|CUDA|cuDNN|cuda[A-Z]\w+|CUBLAS\w*|HIP|MIOpen|XPU|NPU|HCCL)\b|[Gg]loo|c10d|TCPStore"
    r"|[Pp]rocess group|torch\.distributed|rendezvous|[Dd]istributed package|DataLoader worker"
    r"|connect\(\) timed out|^Address already in use$|ACL stream"
)


def of_no_row(line: Line) -> Fact | None:
    """Read an error that torch logs, or an exception of devices or of ranks, that no row has."""
    if _ERROR.match(line.text):
        return Fragment(line)
    match = _EXCEPTION.match(line.text)
    if match is None:
        return None
    kind, message = match[1], match[2] or ""
    if kind.endswith("SignalException"):
        return Outside(line, message)
    of_a_job = kind.startswith("torch.") or (line.writer.by_torch and bool(message))
    return Fragment(line) if of_a_job or _OF_DEVICES_OR_RANKS.search(message) else None


_ASSERT = re.compile(
    r"(?:block: \[[\d,]{1,40}\], thread|global id: \[[\d,]{1,40}\], local id): \[[\d,]{1,40}\],? "
    r"(Assertion .{1,400} failed)|(: Assertion .{1,400} failed\.)$"
)


def _assert(line: Line, match: re.Match[str]) -> Fact:
    # An assertion of a library on the host may fail because another process is gone.
    return DeviceFault(line, f"device-side assert: {match[1]}") if match[1] else Aborting(line)


SOURCES: tuple[Source, ...] = (
    Source(
        "torch, NCCL",
        "`[rank3]:` is the rank in the job; `[Rank 3]` and `[PG … Rank 3]` within a group",
        (
            Message(
                "a watchdog ended a collective that took too long",
                ("Watchdog caught",),
                _WORK,
                _timeout,
                "[rank14]:[E311 07:15:29.307629539 ProcessGroupNCCL.cpp:607] [Rank 14] Watchdog "
                "caught collective operation timeout: WorkNCCL(SeqNum=2070, OpType=REDUCE, "
                "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600036 milliseconds before "
                "timing out.",
                "torch 1.10 to 2.14; without `SeqNum` and sizes before 2.1",
            ),
            Message(
                "the same, from the back end that is NCCL's since torch 2.15",
                ("Operation timed out after",),
                _NCCL2_WORK,
                _nccl2_timeout,
                "[rank0]:[E1126 11:13:11.663319700 WorkNCCL.cpp:372] [TC][rank=0][name=0] "
                "Operation timed out after 8000 ms",
                "torch 2.15; it does not say which collective",
            ),
            Message(
                "how far a rank had come in a group",
                ("ast enqueued", "last completed"),
                _STATE,
                _progress,
                "[rank6]:[E311 07:15:35.239719866 ProcessGroupNCCL.cpp:1709] [PG 0 (default_pg) "
                "Rank 6] Timeout at NCCL work: 2070, last enqueued NCCL work: 2082, last completed "
                "NCCL work: 2069.",
                "torch 2.3 to 2.14, in five wordings",
            ),
            Message(
                "a watchdog thread ended by an exception, for example of its device",
                ("watchdog thread terminated",),
                _TERMINATED,
                _terminated,
                "[rank19]:[E808 10:31:07.406255799 ProcessGroupNCCL.cpp:1895] [PG ID 1 PG GUID 1 "
                "Rank 19] Process group watchdog thread terminated with exception: CUDA error: "
                "unspecified launch failure",
                "torch 2.3 to 2.14; `[Rank 19] NCCL watchdog` in pytorch/pytorch#105287",
            ),
            Message(
                "the line that issued a collective which timed out",
                ("Stack trace of the failed collective",),
                None,
                None,
                "[rank0]:[E515 18:36:47.343377708 ProcessGroupNCCL.cpp:1937] Stack trace of the "
                "failed collective: ",
                "torch 2.5 to 2.14, with Flight Recorder on",
                _STACK,
            ),
            Message(
                "TORCH_NCCL_DESYNC_DEBUG: the ranks that are behind",
                (" collective #",),
                _LAGGING,
                _lagging,
                "\t     [7] finished collective #182, but didn't join collective #183 (count from "
                "1)",
                "torch 2.1 to 2.14",
            ),
            Message(
                "the same, if they never joined a collective",
                ("lagging",),
                _NEVER_JOINED,
                _never_joined,
                "\t - To our best knowledge, ranks [3, 5] are the lagging ranks that caused this "
                "timeout. They never joined any collectives",
                "torch 2.1 to 2.14",
                _REPORT,
            ),
        ),
    ),
    Source(
        "torch, Gloo, stores and checks",
        "`[rank3]:` as above; numbers in the messages are those within the group",
        (
            Message(
                "DETAIL mode: two ranks call something different",
                ("Detected mismatch between",),
                _MISMATCH,
                _mismatch,
                "[rank3]: RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is "
                "running collective: CollectiveFingerPrint(SequenceNumber=2, OpType=ALLREDUCE, "
                "TensorShape=[8], TensorDtypes=Float, TensorDeviceTypes=TensorOptions()), but Rank "
                "2 is running collective: CollectiveFingerPrint(SequenceNumber=2, "
                "OpType=BROADCAST)",
                "torch 1.9 to 2.15",
            ),
            Message(
                "FSDP in DETAIL mode: ranks gather other parameters",
                ("Forward order differs",),
                _ORDER,
                _order,
                "[rank0]: RuntimeError: Forward order differs across ranks: rank 0 is "
                "all-gathering 3 parameters while rank 1 is all-gathering 2 parameters",
                "torch 1.12 to 2.15",
            ),
            Message(
                "DDP: a parameter of a rank has another shape than on rank 0",
                ("appears not to match",),
                _MODELS,
                _models,
                "[rank1]: RuntimeError: [1]: params[0] in this process with sizes [11, 10] appears "
                "not to match sizes of the same param in process 0.",
                "torch 1.8 to 2.15",
            ),
            Message(
                "DDP: a rank has another number of parameters",
                ("expects same model across all ranks",),
                _PARAMETERS,
                _parameters,
                "[rank0]: RuntimeError: DDP expects same model across all ranks, but Rank 0 has 10 "
                "params, while rank 1 has inconsistent 8 params.",
                "torch 1.11 to 2.15",
            ),
            Message(
                "monitored barrier: the ranks that did not come",
                ("failed to pass monitoredBarrier",),
                _BARRIER_FAILED,
                _barrier_failed,
                "[rank0]: RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in "
                "30000 ms",
                "torch 1.9 to 2.15",
            ),
            Message(
                "monitored barrier: a rank that came",
                ("reached monitoredBarrier",),
                _BARRIER_REACHED,
                _barrier_reached,
                "[rank1]: RuntimeError: Rank 1 successfully reached monitoredBarrier, but received "
                "errors while waiting for send/recv from rank 0. Please check rank 0 logs for "
                "faulty rank.",
                "torch 1.9 to 2.15",
            ),
            Message(
                "a rank waits until a group is complete, which is said once all have come",
                ("store based barrier",),
                _STORE_WAIT,
                _store_wait,
                "Waiting in store based barrier to initialize process group for rank: 3, key: "
                "store_based_barrier_key:1 (world_size=8, worker_count=3, timeout=0:30:00)",
                "torch 1.8 to 2.15, NVIDIA-NeMo/Speech#5819",
            ),
            Message(
                "the group is complete: a wait for it was no failure",
                ("store-based barrier",),
                _STORE_MET,
                _store_met,
                "INFO:torch.distributed.distributed_c10d:Rank 3: Completed store-based barrier for "
                "key:store_based_barrier_key:1 with 8 nodes.",
                "torch 1.8 to 2.15",
            ),
            Message(
                "a group was not complete in time",
                ("store based barrier",),
                _STORE_BARRIER,
                _store_barrier,
                "[rank0]: RuntimeError: Timed out initializing process group in store based "
                "barrier on rank 0, for key: store_based_barrier_key:1 (world_size=4, "
                "num_workers_joined=3, timeout=0:30:00 error=None)",
                "torch 1.8 to 2.15",
            ),
            Message(
                "a connection to another rank or to the store broke",
                _CLOSED,
                any_of(*_CLOSED),
                trouble,
                "[rank6]:[W314 09:02:42.476575918 TCPStore.cpp:125] [c10d] recvValue failed on "
                "SocketImpl(fd=101, addr=[node-a]:50402, remote=[node-a]:40027): Failed to recv, "
                "got 0 bytes. Connection was likely closed. Did the remote server shutdown or "
                "crash?",
                "torch 1.8 to 2.15",
            ),
            Message(
                "the port of the store is taken, or its address is of no interface",
                ("server socket has failed to listen",),
                any_of("server socket has failed to listen"),
                failed,
                "[E socket.cpp:462] [c10d] The server socket has failed to listen on any local "
                "network address.",
                "torch 1.11 to 2.15",
            ),
            Message(
                "the host of the store does not answer",
                ("client socket has timed out",),
                _NO_ANSWER,
                _no_answer,
                "[E socket.cpp:922] [c10d] The client socket has timed out after 60000ms while "
                "trying to connect to (10.0.0.1, 29500).",
                "torch 1.11 to 2.15",
            ),
            Message(
                "not all processes came to the store in time",
                ("seconds waiting for clients", "clients joined"),
                _CLIENTS,
                waited,
                "torch.distributed.DistStoreError: Timed out after 1801 seconds waiting for "
                "clients. 1/3 clients joined.",
                "torch 2.2 to 2.15",
            ),
            Message(
                "torch logs an error that has no row of its own",
                (
                    "]:[E",
                    "]:[F",
                    "[E ProcessGroup",
                ),
                None,
                None,
                "[rank1]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 1] Heartbeat monitor timed out! "
                "Process will be terminated after dumping debug info. workMetaList_.size()=103",
                "torch 1.8 to 2.15",
            ),
            Message(
                "the interpreter crashed",
                ("Fatal Python error: ",),
                _CRASHED,
                _own_crash,
                "Fatal Python error: Segmentation fault",
                "Python 3, with faulthandler",
            ),
            Message(
                "the interpreter aborts",
                ("Fatal Python error: Aborted",),
                any_of("Fatal Python error: Aborted"),
                aborting,
                "Fatal Python error: Aborted",
                "Python 3, with faulthandler",
            ),
            Message(
                "an assertion failed, on a device or in a library",
                ("Assertion ",),
                _ASSERT,
                _assert,
                "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward: block: [0,0,0], "
                "thread: [3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
                "torch 1.0 to 2.15",
            ),
            Message(
                "the C library found the memory of a process damaged",
                _ALLOCATOR,
                _DAMAGED,
                _own_crash,
                "double free or corruption (!prev)",
                "glibc 2",
            ),
            Message(
                "what a C++ exception says that ends a process",
                ("what():",),
                _CPP,
                _cpp,
                "  what():  CUDA error: an illegal memory access was encountered",
                "the C++ runtime",
            ),
            Message(
                "a process ends by an exception of C++",
                ("terminate called after throwing",),
                any_of("terminate called after throwing"),
                aborting,
                "terminate called after throwing an instance of 'c10::DistBackendError'",
                "the C++ runtime",
            ),
            Message(
                "an exception, with its traceback",
                ("Traceback (most recent call last)",),
                None,
                None,
                "[rank2]: Traceback (most recent call last):",
                "Python; torch 2.3 and newer put the rank before each line",
                _TRACEBACK,
            ),
            Message(
                "an exception whose traceback was cut off",
                _COMMON,
                None,
                None,
                "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:"
                "1275, internal error, NCCL version 2.14.3",
                "torch 1.0 to 2.15; newer ones put the rank before it",
            ),
        ),
    ),
)

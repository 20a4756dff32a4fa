"""The table of messages that rankcall knows: who writes them, their words, and the fact in them.

The reader searches logs for the markers of this table, ``facts_of`` makes facts of its patterns,
and docs/log-messages.md is written from it (``python tools/log_messages.py``). Each row has one
line as it was seen: the line is the example in the documentation and a test.

To add a message, add a row to its source. ``markers`` are words that only this message contains; a
row whose message can be split over lines by a terminal has several, one for each part. Its
``pattern`` covers the whole message, so that an incomplete one is told from one of another form.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankcall.imports.logs.blame import OWN_SIGNALS, blame_of
from rankcall.imports.logs.facts import (
    Aborting,
    AttemptEnded,
    BarrierFailed,
    BarrierReached,
    DeviceFault,
    Fact,
    Fatal,
    Fingerprint,
    Fragment,
    GroupName,
    Killed,
    Lagging,
    LauncherExit,
    Member,
    Mismatch,
    ModelsDiffer,
    Outside,
    Progress,
    Restarted,
    SpawnedExit,
    StoreBarrier,
    Timeout,
    Trouble,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.reading import Marker
from rankcall.ranks import MAX_RANKS
from rankcall.record import op_of_variant
from rankcall.whole_numbers import whole_number

__all__ = ["SOURCES", "Message", "Source", "facts_of", "is_incomplete", "markers"]

_MOST_RANKS = 1 << 13  # of one message; a line is too short for many more
_TRACEBACK, _SUMMARY, _REPORT, _STACK = 300, 2000, 40, 60  # lines of messages that have several

Reading = Callable[[Line, "re.Match[str]"], Fact | None]


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes:
        meaning: What has happened, for the documentation.
        markers: Words of the message; a line of interest contains one of them.
        pattern: The whole message. None: it has several lines, which ``job`` puts together.
        read: Makes the fact. None as for ``pattern``.
        example: A line as it was seen.
        seen_in: Where: a version, or a public issue.
        follow: How many lines after the marker belong to the message.
    """

    meaning: str
    markers: tuple[str, ...]
    pattern: re.Pattern[str] | None
    read: Reading | None
    example: str
    seen_in: str
    follow: int = 0


@dataclass(frozen=True)
class Source:
    """A program that writes such messages. ``prefix`` says what stands before them."""

    name: str
    prefix: str
    messages: tuple[Message, ...]


@functools.lru_cache(maxsize=256)
def op_name(op_type: str) -> str:
    """Return our name of an op that torch writes as ``ALLREDUCE`` or ``_ALLGATHER_BASE``."""
    if not op_type:
        return ""
    known = op_of_variant(op_type.lower())
    return known if known != "unknown" else op_type.lower()


def ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks in ``4, 5`` or ``0-3,7``; nothing if they cannot be real."""
    ranks: set[int] = set()
    for part in text.replace(" ", "").split(","):
        first, _, last = part.partition("-")
        begin = whole_number(first, most=MAX_RANKS - 1)
        end = whole_number(last, most=MAX_RANKS - 1) if last else begin
        if begin is None or end is None or end < begin:
            return ()
        if end - begin + len(ranks) > _MOST_RANKS:
            return ()
        ranks.update(range(begin, end + 1))
    return tuple(sorted(ranks))


# torch's NCCL process group

_WORK = re.compile(
    r"Watchdog caught collective operation timeout: Work\w+\((.{0,2000}?)\) ran for (\d{1,15}) mill"
)
_FIELD = re.compile(r"(SeqNum|OpType|NumelIn|NumelOut)=(\w{1,40})")
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
_TERMINATED = re.compile(r"watchdog thread terminated with exception: (.{1,400})")
_ASYNC = re.compile(r"(?:NCCL error|nccl2? ?error|ncclAsyncErr\w*)[^:]{0,80}: (.{1,400})")


def _timeout(line: Line, match: re.Match[str]) -> Fact:
    fields = dict(_FIELD.findall(match[1]))
    sizes = [fields[name] for name in ("NumelIn", "NumelOut") if name in fields]
    return Timeout(
        line,
        whole_number(fields.get("SeqNum")) or 0,
        op_name(fields.get("OpType", "")),
        tuple(whole_number(size) or 0 for size in sizes),
        int(match[2]) / 1e3,
    )


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
    what = match[1].strip()
    if "Watchdog caught collective operation timeout" in what or _WORK.search(line.text):
        return None  # the time-out's own message says more
    blame = blame_of(what)
    return DeviceFault(line, what) if blame == "own" else Trouble(line)


# A web server also writes "Connection reset by peer". These words, or a rank before the line, show
# that a line is about the ranks of a job.
_OF_RANKS = re.compile(
    r"c10d|[Gg]loo|TCPStore|ProcessGroup|[NRH]CCL|Dist\w*Error|torch|\brank\b|RayTask|[Aa]ctor"
)


def _trouble(line: Line, match: re.Match[str]) -> Fact | None:
    return Trouble(line) if line.writer.rank >= 0 or _OF_RANKS.search(line.text) else None


# torch: checks of TORCH_DISTRIBUTED_DEBUG and of the store

_FINGERPRINT = r"(?:CollectiveFingerPrint\()?(.{0,6000}?)"
_MISMATCH = re.compile(
    rf"Detected mismatch between collectives on ranks\. Rank (\d{{1,7}}) is running collective: "
    rf"{_FINGERPRINT}, ?but Rank (\d{{1,7}}) is running collective: {_FINGERPRINT}"
    r"(?:Collectives differ|$)"
)
_MODELS = re.compile(
    r"\[(\d{1,7})\]: params\[\d{1,9}\] in this process with (\w{1,20} \[[\d, ]{0,400}\]) "
    r"appears not to match \w{1,20} of the same param in process (\d{1,7})"
)
_PARAMETERS = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d{1,7}) has (\d{1,9}) params, while rank "
    r"(\d{1,7}) has inconsistent (\d{1,9}) params"
)
_BARRIER_FAILED = re.compile(
    r"\[Rank (\d{1,7})\]: Ranks? ((?:\d{1,7}, ?)*\d{1,7}) failed to pass monitoredBarrier in "
    r"(\d{1,12}) ms"
)
_BARRIER_REACHED = re.compile(r"Rank (\d{1,7}) successfully reached monitoredBarrier")
_STORE_BARRIER = re.compile(
    r"store based barrier on rank:? (\d{1,7}).{0,80}?key: ?(\S{1,200}).{0,40}?"
    r"world_size=(\d{1,7}), (?:num_workers_joined|worker_count)=(\d{1,7})"
)
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]{1,8000})\] are the lagging ranks")
_LAGGING = re.compile(
    r"\[([\d, ]{1,8000})\] (finished|joined but didn't finish) collective #(\d{1,18})"
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


def _models(line: Line, match: re.Match[str]) -> Fact:
    return ModelsDiffer(line, int(match[1]), int(match[3]), f"a parameter with {match[2]}")


def _parameters(line: Line, match: re.Match[str]) -> Fact:
    return ModelsDiffer(
        line, int(match[3]), int(match[1]), f"{match[4]} parameters, not {match[2]}"
    )


def _barrier_failed(line: Line, match: re.Match[str]) -> Fact | None:
    missing = ranks_in(match[2])
    return BarrierFailed(line, int(match[1]), missing, int(match[3]) / 1e3) if missing else None


def _barrier_reached(line: Line, match: re.Match[str]) -> Fact:
    return BarrierReached(line, int(match[1]))


def _store_barrier(line: Line, match: re.Match[str]) -> Fact:
    return StoreBarrier(line, int(match[1]), match[2].rstrip(","), int(match[3]), int(match[4]))


def _never_joined(line: Line, match: re.Match[str]) -> Fact:
    return Lagging(line, ranks_in(match[1]), joined=False)


def _lagging(line: Line, match: re.Match[str]) -> Fact | None:
    if match[2] == "finished" and "didn't join" not in line.text:
        return None
    return Lagging(line, ranks_in(match[1]), match[2] != "finished")


# Launchers

_MPI_EXIT = re.compile(r"process rank (\d{1,7}) .{0,300}?exited on signal (\d{1,2})")
_SRUN_EXIT = re.compile(
    r"srun: error: \S{1,200}: tasks? ([\d,\-]{1,400}): "
    r"(Killed|Segmentation fault|Bus error|Aborted|Terminated|Out Of Memory"
    r"|Exited with exit code \d{1,3})"
)
_ATTEMPT = re.compile(
    r"(?:^|(\d{1,9}) \S{0,120}\.py:\d+\] ?|:)failed \(exitcode: (-?\d{1,10})\) "
    r"local_rank: (\d{1,7})(?: \(pid: (\d{1,10})\))?"
)
_CLOSING = re.compile(
    r"(?:Sending process (\d{1,9}) closing signal|Closing process (\d{1,9}) via signal) SIG"
    r"|Unable to shutdown process (\d{1,9}) via|Killing subprocess (\d{1,10})"
)
# The command stands before these words. It is looked at afterwards: a pattern for both would try
# every beginning with every end.
_DEEPSPEED_EXIT = re.compile(r" exits with return code = (-?\d{1,10})")
_COMMAND = 4000  # characters of it
_LOCAL_RANK = re.compile(r"--local[_-]rank[= ](\d{1,7})")
_DEATH_SIGNAL = re.compile(r"Received (\w{1,20}) death signal, shutting down workers")
_SLURM_END = re.compile(
    r"(?:slurmstepd|srun|slurmd)\S*: (?:error: )?\*{0,3} ?"
    r"((?:STEP|JOB|step|job) \S{1,60} ON \S{1,200} CANCELLED AT \S{1,40}(?: DUE TO [A-Z ]{1,60})?"
    r"|.{0,80}DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAIL\w*))"
)
_SLURM_OOM = re.compile(
    r"slurmstepd\S*: error: (?:Detected (\d{1,7}) oom[-_]kill event|.{0,80}oom-kill)"
)
_SIGNALS = {
    "Killed": 9,
    "Out Of Memory": 9,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
    "Terminated": 15,
}


def _mpi_exit(line: Line, match: re.Match[str]) -> Fact:
    return LauncherExit(line, (int(match[1]),), int(match[2]), is_first=True)


def _srun_exit(line: Line, match: re.Match[str]) -> Fact | None:
    tasks = ranks_in(match[1])
    if not tasks:
        return None
    # srun says "Out Of Memory" only of the task that the kernel's OOM killer ended.
    is_own = match[2] == "Out Of Memory"
    return LauncherExit(line, tasks, _SIGNALS.get(match[2], 0), is_first=is_own)


def _killed(line: Line, match: re.Match[str]) -> Fact:
    return Killed(line, int(match[match.lastindex or 1]))


def _attempt_ended(line: Line, match: re.Match[str]) -> Fact:
    return AttemptEnded(line, match[1] or "", int(match[3]), int(match[4] or -1), int(match[2]))


def _deepspeed_exit(line: Line, match: re.Match[str]) -> Fact:
    command = line.text[max(0, match.start() - _COMMAND) : match.start()].replace("', '", " ")
    local_rank = _LOCAL_RANK.search(command)
    return WorkerExit(line, int(local_rank[1]) if local_rank else -1, -1, int(match[1]))


def _restarted(line: Line, match: re.Match[str]) -> Fact:
    return Restarted(line)


def _outside(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, " ".join(match[0].split()))


_SPAWNED = re.compile(
    r"process (\d{1,7}) terminated with (?:signal SIG(\w{1,10})|exit code (\d{1,5}))"
    r"|-- Process (\d{1,7}) terminated with the following error"
)


def _spawned_exit(line: Line, match: re.Match[str]) -> Fact:
    numbers = {name.removeprefix("SIG"): number for number, name in OWN_SIGNALS.items()}
    return SpawnedExit(line, int(match[1] or match[4]), numbers.get(match[2] or "", -1))


# NCCL and its relatives, the kernel, and frameworks

_NCCL_HEAD = r"(?<![\w.-])([\w.-]{1,253}):(\d{1,10}):\d{1,10} \[\d{1,3}\] "
_NCCL_INIT = re.compile(
    _NCCL_HEAD
    + r"N?R?CCL INFO .{0,200}?rank (\d{1,7}) nranks (\d{1,7}) .{0,300}?Init (?:START|COMPLETE)"
)
_NCCL_WARN = re.compile(_NCCL_HEAD + r"(?:\S{1,200}:\d{1,6} )?(?:N|R)CCL WARN (.{1,1000})")
_PEER = re.compile(r"(?:remote peer|peer|to|from) ([\w.-]{1,253}(?:<\d{1,6}>)?)\s*$")
_HCCL = re.compile(r"\b(E[IJ]\d{4})\b:? ?(.{0,300})")
_HCCL_OWN = ("EI0001", "EI0007", "EI0011")  # environment, resources: this process could not do it
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9A-Fa-f:.]{4,20})\): (\d{1,4}), (.{0,300})")
_XID_PID = re.compile(r"pid='?(\d{1,10})")
_OOM = re.compile(
    r"(?:Out of memory|Memory cgroup out of memory): Killed process (\d{1,10}) \(([^)]{1,64})\)"
    r"|oom-kill:.{0,300}?task=([\w./-]{1,64}),pid=(\d{1,10})"
)
_CPP = re.compile(r"^\s*what\(\): +(.{1,1000})")
_SIGNAL_TEXT = re.compile(r"(?:\*\*\* |Fatal Python error: |Caught signal )(.{1,200})")
_VLLM_RANK = re.compile(r"\brank (\d{1,7}) in world size (\d{1,7}) is assigned as ")
_SGLANG_SIZE = re.compile(r"server_args=ServerArgs\(")
_TP_SIZE = re.compile(r"\btp_size=(\d{1,7})\b")
_OTHER_SIZE = re.compile(r"\b(?:pp|dp)_size=(?:[2-9]|1\d)")
_SGLANG_FATAL = re.compile(r"Scheduler hit an exception|TokenizerManager hit an exception")
_VLLM_FATAL = re.compile(
    r"(WorkerProc (?:failed to start|hit an exception)"
    r"|EngineCore (?:failed to start|encountered a fatal))"
)
_EVICTED = re.compile(
    r"(The node (?:was low on resource: \S+|had condition: \[\w+\])|Evicted pod|OOMKilled"
    r"|Back-?[Oo]ff restarting failed container|NodeNotReady|Preempted by)"
)
_RAY_DIED = re.compile(
    r"(?:The actor (?:is dead because|died)|A worker died or was killed"
    r"|(?:Raylet|raylet) .{0,60}(?:killed|dead)"
    r"|Task was killed due to the node running low on memory)"
    r"(.{0,300})"
)


def _member(line: Line, match: re.Match[str]) -> Fact | None:
    rank, size = int(match[3]), int(match[4])
    return Member(line, match[1], int(match[2]), rank, size) if rank < size <= MAX_RANKS else None


def _nccl_warn(line: Line, match: re.Match[str]) -> Fact | None:
    what = match[3].strip()
    if blame_of(what) == "own":
        return DeviceFault(line, what, match[1], int(match[2]))
    peer = _PEER.search(what)
    return Trouble(line, match[1], int(match[2]), peer[1] if peer else "")


def _hccl(line: Line, match: re.Match[str]) -> Fact:
    what = f"{match[1]} {match[2]}".strip()
    return DeviceFault(line, what) if match[1] in _HCCL_OWN else Trouble(line)


def _xid(line: Line, match: re.Match[str]) -> Fact:
    pid = _XID_PID.search(match[3])
    what = f"Xid {match[2]} on {match[1]}: {match[3].strip()}"
    return DeviceFault(line, what, line.writer.host, int(pid[1]) if pid else -1)


def _oom(line: Line, match: re.Match[str]) -> Fact:
    pid, name = match[1] or match[4], match[2] or match[3]
    return Fatal(
        line,
        f"the kernel killed {name} (pid {pid}) because memory ran out",
        "own",
        line.writer.host,
        int(pid),
    )


def _slurm_oom(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, "Slurm's cgroup ran out of memory, and the kernel killed a process in it")


def _cpp(line: Line, match: re.Match[str]) -> Fact | None:
    blame = blame_of(match[1])
    return Fatal(line, match[1].strip(), blame) if blame != "victim" else Trouble(line)


def _aborting(line: Line, match: re.Match[str]) -> Fact:
    return Aborting(line)


def _vllm_rank(line: Line, match: re.Match[str]) -> Fact | None:
    rank, size = int(match[1]), int(match[2])
    return Member(line, line.writer.host, -1, rank, size) if rank < size <= MAX_RANKS else None


def _sglang_size(line: Line, match: re.Match[str]) -> Fact | None:
    sizes = _TP_SIZE.search(line.text, match.end())
    # With another kind of parallelism, the number in ``TP3`` is not the rank.
    if sizes is None or _OTHER_SIZE.search(line.text, match.end()):
        return None
    size = int(sizes[1])
    return Member(line, line.writer.host, -1, 0, size) if 0 < size <= MAX_RANKS else None


def _several(*markers: str) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


_CLOSED = (
    "onnection closed by peer",
    "onnection reset by peer",
    "onnection was likely closed",
    "Broken pipe",
    "Timed out waiting",
    "Some NCCL operations have failed",
    "remote process exited or there was a network error",
)

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
                "torch 2.3 to 2.14",
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
                _several(*_CLOSED),
                _trouble,
                "[rank6]:[W314 09:02:42.476575918 TCPStore.cpp:125] [c10d] recvValue failed on "
                "SocketImpl(fd=101, addr=[node-a]:50402, remote=[node-a]:40027): Failed to recv, "
                "got 0 bytes. Connection was likely closed. Did the remote server shutdown or "
                "crash?",
                "torch 1.8 to 2.15",
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
                _several("terminate called after throwing"),
                _aborting,
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
        ),
    ),
    Source(
        "torchrun",
        "`[default3]:` counts the ranks of a node, so it is not used as a rank",
        (
            Message(
                "the report of all failures",
                ("Failures:", "Root Cause (first observed"),
                None,
                None,
                "Root Cause (first observed failure):",
                "torch 1.9 to 2.15",
                _SUMMARY,
            ),
            Message(
                "a worker has failed, and the attempt ends",
                ("failed (exitcode: ",),
                _ATTEMPT,
                _attempt_ended,
                "E1122 18:59:08.232000 6005 torch/distributed/elastic/multiprocessing/api.py:1002] "
                "failed (exitcode: 1) local_rank: 2 (pid: 6011) of binary: /venv/bin/python",
                "torch 1.9 to 2.15",
            ),
            Message(
                "workers are started again",
                ("will restart worker group",),
                _several("will restart worker group"),
                _restarted,
                "[default] Worker group FAILED. 3/3 attempts left; will restart worker group",
                "torch 1.9 to 2.15",
            ),
            Message(
                "torchrun ends a worker because another one had failed",
                (" signal SIG", "Unable to shutdown process"),
                _CLOSING,
                _killed,
                "W0330 12:13:49.389000 12432 torch/distributed/elastic/multiprocessing/api.py:900] "
                "Sending process 12453 closing signal SIGTERM",
                "torch 1.9 to 2.15",
            ),
            Message(
                "torchrun itself was told to end",
                ("death signal",),
                _DEATH_SIGNAL,
                _outside,
                "W0330 12:13:49.388000 12432 torch/distributed/elastic/agent/server/api.py:723] "
                "Received 15 death signal, shutting down workers",
                "torch 1.10 to 2.15",
            ),
        ),
    ),
    Source(
        "torch.multiprocessing",
        "none; the number of a process is its index among those that were spawned",
        (
            Message(
                "how a spawned process ended",
                ("terminated with signal", "terminated with exit code"),
                _SPAWNED,
                _spawned_exit,
                "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
                "signal SIGKILL",
                "torch 1.5 to 2.15",
            ),
            Message(
                "the error of a spawned process follows",
                ("terminated with the following error",),
                _SPAWNED,
                _spawned_exit,
                "-- Process 2 terminated with the following error:",
                "torch 1.0 to 2.15",
            ),
        ),
    ),
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
    Source(
        "DeepSpeed's launcher, pdsh",
        "pdsh's `host:`; the launcher's own lines have no rank",
        (
            Message(
                "how a worker ended",
                ("exits with return code",),
                _DEEPSPEED_EXIT,
                _deepspeed_exit,
                "[2026-08-08 10:31:12,620] [ERROR] [launch.py:325:sigkill_handler] "
                "['/srv/venv/bin/python', '-u', 'train.py', '--local_rank=7'] exits with return "
                "code = -6",
                "DeepSpeed 0.8 and newer",
            ),
            Message(
                "the launcher ends the others",
                ("Killing subprocess",),
                _CLOSING,
                _killed,
                "[2026-08-08 10:31:12,455] [INFO] [launch.py:319:sigkill_handler] Killing "
                "subprocess 70213",
                "DeepSpeed 0.6 and newer",
            ),
        ),
    ),
    Source(
        "Slurm, mpirun",
        "`12:` of `srun --label` and `[1,3]<stderr>:` are tasks, which may be launchers",
        (
            Message(
                "mpirun: the process that ended first",
                ("exited on signal",),
                _MPI_EXIT,
                _mpi_exit,
                "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 "
                "(Killed).",
                "Open MPI 2 and newer",
            ),
            Message(
                "srun: how tasks ended",
                ("srun: error:",),
                _SRUN_EXIT,
                _srun_exit,
                "srun: error: node-3: task 7: Segmentation fault",
                "Slurm 17 and newer",
            ),
            Message(
                "Slurm ended the job: time limit, pre-emption, a person",
                ("CANCELLED AT", "DUE TO "),
                _SLURM_END,
                _outside,
                "slurmstepd: error: *** STEP 812.0 ON node-3 CANCELLED AT 2026-03-14T09:02:36 DUE "
                "TO TIME LIMIT ***",
                "Slurm 17 and newer",
            ),
            Message(
                "memory of the job's cgroup ran out",
                ("oom_kill event", "oom-kill event", "oom-kill"),
                _SLURM_OOM,
                _slurm_oom,
                "slurmstepd: error: Detected 1 oom_kill event in StepId=812.0. Some of the step "
                "tasks have been OOM Killed.",
                "Slurm 20 and newer",
            ),
        ),
    ),
    Source(
        "the kernel, kubelet",
        "none; the host is the collector's",
        (
            Message(
                "the kernel killed a process because memory ran out",
                ("ut of memory: Killed process", "oom-kill:"),
                _OOM,
                _oom,
                "Mar 14 09:02:36 node-a kernel: Out of memory: Killed process 4711 (python) "
                "total-vm:91234kB, anon-rss:81234kB",
                "Linux 4.19 and newer",
            ),
            Message(
                "a device reports an error",
                ("NVRM: Xid",),
                _XID,
                _xid,
                "Mar 14 09:02:36 node-a kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=4711, GPU has "
                "fallen off the bus.",
                "NVIDIA's driver 450 and newer",
            ),
            Message(
                "the pod was evicted or restarted",
                ("was low on resource", "Evicted pod", "OOMKilled", "NodeNotReady", "Preempted by"),
                _EVICTED,
                _outside,
                "The node was low on resource: memory. Threshold quantity: 100Mi.",
                "Kubernetes 1.20 and newer",
            ),
        ),
    ),
    Source(
        "vLLM, SGLang, Ray",
        "`(Worker_TP12 pid=114)`, and Ray's `(name pid=…, ip=…)`; `rank 8 in world size 16` ties "
        "them to ranks",
        (
            Message(
                "a worker's rank",
                ("in world size",),
                _VLLM_RANK,
                _vllm_rank,
                "(EngineCore pid=88) INFO 03-14 09:02:18 [parallel_state.py:1408] rank 8 in world "
                "size 16 is assigned as DP rank 0, PP rank 0, TP rank 8, EP rank N/A",
                "vLLM 0.9 and newer",
            ),
            Message(
                "a worker ended; its traceback follows",
                ("WorkerProc failed to start", "WorkerProc hit an exception"),
                _VLLM_FATAL,
                _aborting,
                "(Worker_TP12 pid=114) ERROR 03-14 09:02:36 [multiproc_executor.py:898] WorkerProc "
                "failed to start.",
                "vLLM 0.8 and newer",
            ),
            Message(
                "SGLang: how many workers there are",
                ("server_args=ServerArgs(",),
                _SGLANG_SIZE,
                _sglang_size,
                "[2026-03-14 09:02:18] server_args=ServerArgs(model_path='m', tp_size=8, mem=0.9)",
                "SGLang 0.4 and newer",
            ),
            Message(
                "SGLang: a worker ended; its traceback follows",
                ("Scheduler hit an exception",),
                _SGLANG_FATAL,
                _aborting,
                "[2026-03-14 09:02:36 TP3] Scheduler hit an exception: Traceback (most recent call "
                "last):",
                "SGLang 0.4 and newer",
            ),
            Message(
                "Ray says that an actor or a worker is gone",
                ("The actor is dead", "The actor died", "A worker died or was killed"),
                _RAY_DIED,
                _trouble,
                "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this "
                "task.",
                "Ray 2",
            ),
        ),
    ),
)

_MESSAGES = tuple(message for source in SOURCES for message in source.messages)
_READERS = tuple(
    (words, message)
    for message in _MESSAGES
    if message.pattern is not None
    for words in message.markers
)


# Markers that no program but torch writes: a line with one tells of a failure even if the rest of
# the message is cut off.
_FRAGMENTS = (
    "Watchdog caught",
    "watchdog thread terminated",
    "Detected mismatch between",
    "failed to pass monitoredBarrier",
    "store based barrier",
)


@functools.cache
def markers() -> tuple[Marker, ...]:
    """Return what the reader searches for."""
    follow_of: dict[str, int] = {}
    for message in _MESSAGES:
        for words in message.markers:
            follow_of[words] = max(follow_of.get(words, 0), message.follow)
    return tuple(Marker(words, follow) for words, follow in follow_of.items())


def facts_of(line: Line) -> list[Fact]:
    """Return the facts in a line; an empty list if it has none of the messages above."""
    facts: list[Fact] = []
    done: set[int] = set()
    for words, message in _READERS:
        if words not in line.text or id(message) in done:
            continue
        done.add(id(message))
        assert message.pattern is not None  # by _READERS
        assert message.read is not None
        match = message.pattern.search(line.text)
        fact = message.read(line, match) if match else None
        if fact is not None:
            facts.append(fact)
        elif match is None and words in _FRAGMENTS:
            facts.append(Fragment(line))
    return facts


def is_incomplete(text: str) -> bool:
    """Whether a line has a marker of a message and not the whole message: it may go on below."""
    patterns = [
        message.pattern
        for words, message in _READERS
        if words in text and message.pattern is not None
    ]
    return bool(patterns) and not any(pattern.search(text) for pattern in patterns)


def lines_of(source: Source) -> Sequence[str]:
    """Return the example of each message of a source."""
    return [message.example for message in source.messages]

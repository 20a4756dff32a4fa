"""Messages of frameworks that run models on many ranks: vLLM, SGLang, TGI, Ray."""

from __future__ import annotations

import re

from rankcall.imports.logs.blame import OWN_SIGNALS
from rankcall.imports.logs.facts import (
    Aborting,
    DeviceFault,
    Fact,
    Fatal,
    Fragment,
    Gone,
    LauncherExit,
    Member,
    Outside,
    Stall,
    Stalled,
    Trouble,
    WorkerExit,
)
from rankcall.imports.logs.prefixes import Line
from rankcall.imports.logs.sources.message import (
    Message,
    Source,
    aborting,
    any_of,
    failed,
    outside,
    ranks_in,
    trouble,
    waited,
)
from rankcall.ranks import MAX_RANKS

__all__ = ["SOURCES"]

_VLLM_RANK = re.compile(r"\brank (\d{1,7}) in world size (\d{1,7}) is assigned as ")
_VLLM_FATAL = re.compile(
    r"(WorkerProc (?:failed to start|hit an exception)"
    r"|EngineCore (?:failed to start|encountered a fatal))"
)


def _vllm_rank(line: Line, match: re.Match[str]) -> Fact | None:
    rank, size = int(match[1]), int(match[2])
    return Member(line, line.writer.host, -1, rank, size) if rank < size <= MAX_RANKS else None


_VLLM_DIED = re.compile(r"Worker \S{1,80} pid (\d{1,10}) died, exit code: (-?\d{1,5})")


def _vllm_died(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, int(match[1]), int(match[2]))


_VLLM_PROC = re.compile(
    r"Worker proc \S{1,80} died unexpectedly(?: \(exit code: (-?\d{1,5}|None)\))?, shutting down"
)


def _vllm_proc(line: Line, match: re.Match[str]) -> Fact:
    if match[1] is None or match[1] in ("0", "None"):
        return Aborting(line)
    return WorkerExit(line, -1, -1, int(match[1]))


_CUSTOM_ALL_REDUCE = re.compile(
    r"Failed: (?:Cuda error )?(\S{0,200}\bcustom_all_reduce\.cuh:\d{1,5} '[^']{1,200}')"
)


def _custom_all_reduce(line: Line, match: re.Match[str]) -> Fact:
    return DeviceFault(line, match[1])


# text-generation-inference's launcher writes this of each shard that ends by itself, in order.
_SHARD_EXIT = re.compile(
    r"Shard process was signaled to shutdown with signal (\d{1,2}) rank=(\d{1,7})"
)


def _shard_exit(line: Line, match: re.Match[str]) -> Fact | None:
    signal, rank = int(match[1]), int(match[2])
    if rank >= MAX_RANKS:
        return None
    return LauncherExit(line, (rank,), signal, is_first=False, in_order=True)


_SGLANG_SIZE = re.compile(r"server_args=ServerArgs\(")
_TP_SIZE = re.compile(r"\btp_size=(\d{1,7})\b")
_SGLANG_FATAL = re.compile(r"Scheduler hit an exception|TokenizerManager hit an exception")


def _sglang_size(line: Line, match: re.Match[str]) -> Fact | None:
    sizes = _TP_SIZE.search(line.text, match.end())
    size = int(sizes[1]) if sizes else 0
    return Member(line, line.writer.host, -1, 0, size) if 0 < size <= MAX_RANKS else None


_SGLANG_CHILD = re.compile(
    r"Child process unexpectedly failed with (?:an )?exit ?code ?=? ?(-?\d{1,5})"
    r"(?:\. pid=(\d{1,10}))?"
)
_SIGNALLED = re.compile(
    r"\*\*\* SIG([A-Z]{2,6}) (?:received at time=\d{1,12}"
    r"|\(@0x[\da-f]{1,16}\) received by PID (\d{1,10}) )"
)
_NUMBERS = {name.removeprefix("SIG"): number for number, name in OWN_SIGNALS.items()}


def _sglang_child(line: Line, match: re.Match[str]) -> Fact:
    return WorkerExit(line, -1, int(match[2] or -1), int(match[1]))


def _signalled(line: Line, match: re.Match[str]) -> Fact:
    if match[1] not in _NUMBERS:  # an abort follows many things, and SIGTERM comes from a launcher
        return Fragment(line)
    pid = int(match[2] or line.writer.pid)
    return Fatal(line, f"SIG{match[1]}", "own", line.writer.host, pid)


# torch's compiler tries other kernels, and writes its error without the name of the module.
_TRITON = re.compile(r"(?:^|\s)(triton\.runtime\.\w{1,40}\.OutOfResources: .{1,200})")
_MOONCAKE = re.compile(r"Process failed for slice \(.{0,400}?peer_nic: ([\w.:-]{1,253})@")


def _mooncake(line: Line, match: re.Match[str]) -> Fact:
    return Trouble(line, peer=match[1])


_RAY_GONE = (
    *("The worker died unexpectedly", "local raylet died"),
    "mistakenly been marked as dead",
)
_RAY_DIED = re.compile(
    r"(?:The actor (?:is dead because|died)|A worker died or was killed"
    r"|(?:Raylet|raylet) .{0,60}(?:killed|dead)"
    r"|Task was killed due to the node running low on memory)"
    r"(.{0,600})"
)


_RAY_PROCESS = re.compile(r"Worker IP address: ([\w.:-]{1,100}) .{0,80}?Worker PID: (\d{1,10})")


def _ray_died(line: Line, match: re.Match[str]) -> Fact | None:
    process = _RAY_PROCESS.search(match[1])
    return Gone(line, "Ray", process[1], int(process[2])) if process else trouble(line, match)


_RAY_LOW = re.compile(r"Task was killed due to the node running low on memory")
_RAY_NODE = re.compile(
    r"node with node id: \w{1,80} and address: ([\w.:-]{1,100}) .{0,200}?has been marked dead"
)


def _ray_node(line: Line, match: re.Match[str]) -> Fact:
    return Outside(line, f"Ray lost the node {match[1]}")


_NVSHMEM_PEER = re.compile(
    r"nvshmem.{0,300}?: Call to (?:recv from|send to) ([\w.:%-]{1,253}<\d{1,6}>) failed"
)
_NVSHMEM = re.compile(
    r"nvshmem initialization failed|aborting due to error in nvshmem"
    r"|NVSHMEM API called before NVSHMEM initialization"
    r"|nvshmem\S{0,400}:\d{1,6}: non-zero status: -?\d{1,6}"
)


def _nvshmem_peer(line: Line, match: re.Match[str]) -> Fact:
    return Trouble(line, peer=match[1])


_NAN = re.compile(
    r"Rank (\d{1,7})(?:, node ([\w.-]{1,253}), device \d{1,3}, iteration -?\d{1,12})?: "
    r"((?:Unexpected result .{0,200})?found NaN in local grad norm.{0,100})"
)


def _nan(line: Line, match: re.Match[str]) -> Fact | None:
    rank = int(match[1])
    return Fatal(line, match[3], "own", match[2] or "", rank=rank) if rank < MAX_RANKS else None


_RAY_MEMORY = re.compile(
    r"(\d{1,7}) Workers \(tasks / actors\) killed due to memory pressure \(OOM\)"
    r"(?:.{0,200}?IP: ([\w.:]{3,45})\))?"
)


def _ray_memory(line: Line, match: re.Match[str]) -> Fact | None:
    if match[1] == "0":
        return None
    where = f" on {match[2]}" if match[2] else ""
    return Outside(line, f"Ray killed {match[1]} of its workers{where}, because memory ran out")


_RANKS = 1024  # lines of a list that has one for each rank
_STALL = re.compile(
    r"One or more tensors were submitted to be reduced(?:.{0,200}? for more than (\d{1,9}) sec)?"
)
_STALLED = re.compile(r"(?:Stalled ops: ?)?([^\s\[\]]{1,400}) \[missing ranks: ([\d, ]{1,8000})")


def _stall(line: Line, match: re.Match[str]) -> Fact:
    return Stall(line, float(match[1] or 0))


def _stalled(line: Line, match: re.Match[str]) -> Fact | None:
    ranks = ranks_in(match[2])
    return Stalled(line, ranks, (match[1],)) if ranks else None


SOURCES: tuple[Source, ...] = (
    Source(
        "vLLM, SGLang, Ray",
        "`(Worker_TP12 pid=114)` and `[… TP12]` are ranks of the job, if their names have no other "
        "kind of parallelism; Ray's `(name pid=…, ip=…)`",
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
                ("WorkerProc ", "EngineCore failed to start", "EngineCore encountered a fatal"),
                _VLLM_FATAL,
                aborting,
                "(Worker_TP12 pid=114) ERROR 03-14 09:02:36 [multiproc_executor.py:898] WorkerProc "
                "failed to start.",
                "vLLM 0.8 and newer",
            ),
            Message(
                "vLLM: a worker is gone",
                ("Worker proc ", "died unexpectedly"),
                _VLLM_PROC,
                _vllm_proc,
                "(EngineCore pid=3677484) ERROR 09-10 09:37:41 [multiproc_executor.py:314] Worker "
                "proc VllmWorker-0 died unexpectedly (exit code: None), shutting down executor.",
                "vLLM 0.8 and newer; the code in vllm-project/vllm#56180",
            ),
            Message(
                "vLLM: its own all-reduce failed on a device",
                ("custom_all_reduce.cuh:",),
                _CUSTOM_ALL_REDUCE,
                _custom_all_reduce,
                "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:164 'invalid argument'",
                "vllm-project/vllm#56180, ai-dynamo/dynamo#787",
            ),
            Message(
                "vLLM: the engine ended; its reason stands above",
                ("EngineDeadError", " initialization failed", "Got fatal signal from worker"),
                any_of("EngineDeadError", "core initialization failed", "Got fatal signal from"),
                aborting,
                "CRITICAL 04-16 11:53:49 [core_client.py:359] Got fatal signal from worker "
                "processes, shutting down. See stack trace above for root cause issue.",
                "vLLM 0.8 and newer",
            ),
            Message(
                "SGLang: a scheduler ended",
                ("Received sigquit from a child", "scheduler is dead"),
                any_of("Received sigquit from a child", "scheduler is dead"),
                aborting,
                "[2026-03-14 09:02:41] Received sigquit from a child process. It usually means the "
                "child failed.",
                "SGLang 0.4 and newer",
            ),
            Message(
                "vLLM: how a worker ended",
                ("died, exit code: ",),
                _VLLM_DIED,
                _vllm_died,
                "ERROR 03-21 10:02:11 multiproc_worker_utils.py:124] Worker VllmWorkerProcess pid "
                "4121 died, exit code: -15",
                "vLLM 0.4 to 0.9",
            ),
            Message(
                "SGLang: a forward pass takes too long",
                ("Watchdog timeout (self.",),
                any_of("Watchdog timeout (self."),
                waited,
                "[2026-03-14 09:02:36 TP0] Watchdog timeout (self.watchdog_timeout=300)",
                "SGLang 0.4 and newer",
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
                aborting,
                "[2026-03-14 09:02:36 TP3] Scheduler hit an exception: Traceback (most recent call "
                "last):",
                "SGLang 0.4 and newer",
            ),
            Message(
                "SGLang: a child process ended",
                ("unexpectedly failed",),
                _SGLANG_CHILD,
                _sglang_child,
                "[2026-03-14 09:02:41] Child process unexpectedly failed with exitcode=-9. "
                "pid=1021",
                "SGLang 0.4 and newer",
            ),
            Message(
                "a kernel of Triton needs more than the device has",
                (".OutOfResources: ",),
                _TRITON,
                failed,
                "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: "
                "66560, Hardware limit: 65536. Reducing block sizes or `num_stages` may help.",
                "Triton 2 and newer, vllm-project/vllm#12498",
            ),
            Message(
                "Mooncake: a transfer to another process failed",
                ("Process failed for slice",),
                _MOONCAKE,
                _mooncake,
                "E0724 03:14:20.710896 104002 worker_pool.cpp:289] Worker: Process failed for "
                "slice (opcode: 1, source_addr: 0x7f61fc000000, length: 8192, local_nic: "
                "mlx5_bond_2, peer_nic: 10.0.2.98:15992@mlx5_bond_1, retry_cnt: 0): local "
                "protection error",
                "sgl-project/sglang#8324",
            ),
            Message(
                "a signal ended a process",
                ("*** SIG",),
                _SIGNALLED,
                _signalled,
                "(RayTrainWorker pid=991, ip=10.1.2.3) *** SIGSEGV received at time=1731572112 on "
                "cpu 33 ***",
                "Ray 2, and other programs with the handler of Abseil or of glog",
            ),
            Message(
                "Ray kills workers because the node's memory runs out",
                ("killed due to memory pressure",),
                _RAY_MEMORY,
                _ray_memory,
                "(raylet) [2026-03-14 07:23:59,445 E 395 395] (raylet) node_manager.cc:3049: 10 "
                "Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed "
                "due to other reasons at node (ID: e5d9, IP: 10.0.62.231) over the last time "
                "period.",
                "Ray 2.2 and newer",
            ),
            Message(
                "Ray ended a task because the node's memory runs out",
                ("Task was killed due to the node",),
                _RAY_LOW,
                outside,
                "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on "
                "memory.",
                "Ray 2.2 and newer",
            ),
            Message(
                "an exception of a task, which Ray writes without its beginning",
                ("ray.exceptions.RayTaskError(", "out of memory. Tried"),
                any_of("ray.exceptions.RayTaskError(", "out of memory. Tried"),
                failed,
                "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Worker.step() (pid=4711, "
                "ip=10.0.0.4)",
                "Ray 2",
            ),
            Message(
                "Ray lost a node",
                ("has been marked dead",),
                _RAY_NODE,
                _ray_node,
                "(raylet) The node with node id: 5a1f and address: 10.0.3.4 and node name: "
                "10.0.3.4 "
                "has been marked dead because the detector has missed too many heartbeats from it.",
                "Ray 2",
            ),
            Message(
                "Ray: a worker or the raylet of a node is gone",
                _RAY_GONE,
                any_of(*_RAY_GONE),
                aborting,
                "ray.exceptions.LocalRayletDiedError: The task's local raylet died. Check "
                "raylet.out for more information.",
                "Ray 2",
            ),
            Message(
                "Ray says that an actor or a worker is gone",
                ("The actor ", "A worker died or was killed"),
                _RAY_DIED,
                _ray_died,
                "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this "
                "task.",
                "Ray 2",
            ),
        ),
    ),
    Source(
        "text-generation-inference",
        "`rank=2` at the end of its launcher's lines is a shard, which is a rank",
        (
            Message(
                "a signal ended a shard; its launcher tells of each as it ends",
                ("Shard process was signaled",),
                _SHARD_EXIT,
                _shard_exit,
                "2024-03-06T17:53:31.052444Z ERROR shard-manager: text_generation_launcher: Shard "
                "process was signaled to shutdown with signal 4 rank=0",
                "huggingface/text-generation-inference#1627",
            ),
            Message(
                "a shard failed, and the launcher ends",
                ("Error: Shard",),
                any_of("Error: ShardCannotStart", "Error: ShardFailed"),
                failed,
                "Error: ShardCannotStart",
                "huggingface/text-generation-inference#1627",
            ),
        ),
    ),
    Source(
        "DeepEP, NVSHMEM",
        "none",
        (
            Message(
                "a rank waited for what others should have sent",
                ("DeepEP error: ",),
                any_of("DeepEP error: "),
                waited,
                "RuntimeError: DeepEP error: CPU recv timeout",
                "sgl-project/sglang#6701",
            ),
            Message(
                "NVSHMEM: a connection to another process broke",
                ("socketProgressOpt: Call",),
                _NVSHMEM_PEER,
                _nvshmem_peer,
                "nvshmem/src/modules/bootstrap/uid/ncclSocket/ncclsocket_socket.cpp:"
                "socketProgressOpt:39: socketProgressOpt: Call to recv from 10.4.0.17<38229> "
                "failed : Broken pipe",
                "deepseek-ai/DeepEP#223",
            ),
            Message(
                "NVSHMEM: it could not start, or an operation of it failed",
                (" initialization failed", "non-zero status", "NVSHMEM API"),
                _NVSHMEM,
                failed,
                "nvshmem/src/host/init/init.cu:989: non-zero status: 7 nvshmem detect topo failed",
                "deepseek-ai/DeepEP#55, #150, sgl-project/sglang#7888",
            ),
        ),
    ),
    Source(
        "JAX",
        "none",
        (
            Message(
                "a process ends because of another one",
                ("coordination service",),
                any_of(
                    "JAX distributed service detected fatal errors",
                    "Polled an error from coordination service",
                ),
                waited,
                "E0929 17:42:48.594192 1044529 coordination_service_agent.cc:332] Polled an error "
                "from coordination service (this can be an error from this or another task).",
                "jax-ml/jax#39095",
            ),
        ),
    ),
    Source(
        "SageMaker",
        "none",
        (
            Message(
                "a node's script failed",
                ("Reporting training FAILURE",),
                any_of("Reporting training FAILURE"),
                failed,
                "2026-03-14 09:02:36,123 sagemaker-training-toolkit ERROR    Reporting training "
                "FAILURE",
                "sagemaker-training-toolkit 4",
            ),
        ),
    ),
    Source(
        "Megatron, Horovod",
        "none; Megatron's messages have the rank in the job",
        (
            Message(
                "Megatron: the gradient of a rank is not a number",
                ("found NaN in local grad norm",),
                _NAN,
                _nan,
                "AssertionError: Rank 11: found NaN in local grad norm in backward pass before "
                "data-parallel communication collective. Device: 3, node: node-1",
                "Megatron-Core 0.5 and newer",
            ),
            Message(
                "Horovod: some ranks wait for others",
                ("One or more tensors were submitted to be reduced",),
                _STALL,
                _stall,
                "[1,0]<stderr>:[2026-04-02 11:02:07.1: W horovod/common/stall_inspector.cc:107] "
                "One or more tensors were submitted to be reduced, gathered or broadcasted by "
                "subset of ranks and are waiting for remainder of ranks for more than 60 seconds.",
                "Horovod 0.18 and newer, horovod/horovod#100",
            ),
            Message(
                "Horovod: for which ranks, in the lines below",
                ("Missing ranks:",),
                None,
                None,
                "[1,0]<stderr>:Missing ranks:",
                "Horovod 0.18 and newer",
                _RANKS,
            ),
            Message(
                "the same, in a line for each op",
                (" [missing ranks: ",),
                _STALLED,
                _stalled,
                "[1,0]<stderr>:[2026-04-02 11:02:07.1: W horovod/common/operations.cc:588] "
                "HorovodBroadcast_dense_1_bias_0 [missing ranks: 1, 3]",
                "horovod/horovod#1012",
            ),
        ),
    ),
)
